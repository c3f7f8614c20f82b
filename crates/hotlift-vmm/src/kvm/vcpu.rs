//! A vCPU: its thread, its exits, and its stop.
//!
//! To stop a vCPU, the stopping thread sets `immediate_exit` in the structure shared with KVM, and then sends a signal.
//! The byte stops a vCPU thread that is about to enter the guest. The signal stops a vCPU thread inside the guest. The
//! vCPU thread leaves its loop on EINTR only. KVM finishes a started port access before it returns EINTR, so the
//! registers of a stopped vCPU are always between two instructions.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::time::{Duration, Instant};

use hotlift_mem::lock;
use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use super::error::KvmError;
use super::program::{
    Entry, READY_PORT, SERIAL_EMPTY, SERIAL_PORT, SERIAL_STATUS, SLEEP_HERE, SLEEP_PORT,
    STOLEN_PORT,
};
use super::state::MAX_LINE;
use crate::machine::Common;

/// Maximum number of serial lines kept in memory; older lines are dropped.
const MAX_LINES: usize = 1000;

/// Timeout for vCPU 0 to build the page tables. vCPU 0 needs milliseconds; on an emulating hypervisor, some hundred
/// milliseconds.
const BOOT_LIMIT: Duration = Duration::from_secs(20);

/// RFLAGS with interrupts disabled: only the bit that is always set.
const FLAGS: u64 = 2;

/// One vCPU of a KVM guest.
pub(super) struct Vcpu {
    index: u8,
    /// State of the vCPU. Its thread holds the lock while it runs, so that no other thread reads changing registers.
    core: Mutex<Core>,
    immediate_exit: ImmediateExit,
}

pub(super) struct Core {
    pub fd: VcpuFd,
    /// Incomplete line on the serial port.
    pub line: Vec<u8>,
    /// Time for which the vCPU was not run, not yet reported to the guest.
    pub stolen: Duration,
}

/// The `immediate_exit` byte of a vCPU's `kvm_run`.
struct ImmediateExit(*mut u8);

// SAFETY: the byte is accessed only atomically, and KVM reads it as one byte.
unsafe impl Send for ImmediateExit {}
// SAFETY: as above.
unsafe impl Sync for ImmediateExit {}

impl ImmediateExit {
    fn set(&self, value: u8) {
        // SAFETY: the pointer is into the mapping of the `VcpuFd` in the same `Vcpu`, which is never replaced. No other
        // code in this process writes the byte.
        unsafe { AtomicU8::from_ptr(self.0) }.store(value, Ordering::SeqCst);
    }
}

/// State that the vCPUs of a guest share.
pub(super) struct Shared {
    pub common: Arc<Common>,
    pub lines: Mutex<VecDeque<String>>,
}

/// Reason why a vCPU left the guest.
enum Stop {
    /// Another thread requested a stop.
    Kicked,
    /// The vCPU has built the page tables. The other vCPUs may start at this address.
    Ready(u64),
}

impl Vcpu {
    pub fn new(index: u8, mut fd: VcpuFd) -> Self {
        let immediate_exit = ImmediateExit(&raw mut fd.get_kvm_run().immediate_exit);
        Self {
            index,
            core: Mutex::new(Core {
                fd,
                line: Vec::new(),
                stolen: Duration::ZERO,
            }),
            immediate_exit,
        }
    }

    /// Waits until the vCPU is stopped, and returns its locked state.
    pub fn core(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    /// Sets the stop byte of the vCPU. Afterwards the caller must send the signal to its thread.
    pub fn stop_soon(&self) {
        self.immediate_exit.set(1);
    }

    /// Runs the vCPU on the calling thread, until the thread must end.
    pub fn run(&self, shared: &Shared) {
        shared.common.control.started(self.index);
        while let Some(_running) = shared.common.control.park(|| self.immediate_exit.set(0)) {
            match self.run_until_stopped(&mut self.core(), shared) {
                Ok(Stop::Kicked) => {}
                // A guest that was migrated back reports readiness again.
                Ok(Stop::Ready(_)) => {}
                Err(reason) => {
                    let reason = format!("vCPU {}: {reason}", self.index);
                    lock(&shared.common.death).get_or_insert(reason);
                    return;
                }
            }
        }
    }

    /// Runs vCPU 0 on the calling thread until its page tables are complete. Returns the start address of the other vCPUs.
    pub fn boot(&self, entry: &Entry, shared: &Shared) -> Result<u64, String> {
        let mut core = self.core();
        set_entry(&core.fd, entry).map_err(|error| error.to_string())?;
        self.immediate_exit.set(0);
        // SAFETY: no conditions.
        let thread = unsafe { libc::pthread_self() };
        let (done, watch) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("boot-watch".into())
                .spawn_scoped(scope, move || {
                    if watch.recv_timeout(BOOT_LIMIT)
                        == Err(std::sync::mpsc::RecvTimeoutError::Timeout)
                    {
                        self.stop_soon();
                        send_kick(thread);
                    }
                })
                .map_err(|error| error.to_string())?;
            let start = Instant::now();
            let stop = self.run_until_stopped(&mut core, shared);
            drop(done);
            match stop? {
                Stop::Ready(address) => Ok(address),
                Stop::Kicked => Err(format!(
                    "no sign of life {:?} after its start",
                    start.elapsed()
                )),
            }
        })
    }

    /// Makes this vCPU start at `address` in the CPU mode of vCPU `first`.
    pub fn start_as(&self, first: &VcpuFd, address: u64) -> Result<(), KvmError> {
        let fd = &self.core().fd;
        let sregs = first
            .get_sregs()
            .map_err(KvmError::of("read a vCPU's system registers"))?;
        fd.set_sregs(&sregs)
            .map_err(KvmError::of("set a vCPU's system registers"))?;
        let regs = kvm_regs {
            rip: address,
            rdi: u64::from(self.index),
            rflags: FLAGS,
            ..Default::default()
        };
        fd.set_regs(&regs)
            .map_err(KvmError::of("set a vCPU's registers"))
    }

    fn run_until_stopped(&self, core: &mut Core, shared: &Shared) -> Result<Stop, String> {
        let Core { fd, line, stolen } = core;
        let mut slice = shared.common.control.slice();
        loop {
            // A signal just before the vCPU enters the guest is lost. The vCPU then runs for one more slice.
            if shared.common.control.slice() != slice {
                slice = shared.common.control.slice();
                *stolen += shared.common.control.sleep_off();
            }
            match fd.run() {
                Err(error) if error.errno() == libc::EINTR => {
                    if self.must_stop() {
                        return Ok(Stop::Kicked);
                    }
                }
                Err(error) if error.errno() == libc::EAGAIN => {}
                Err(error) => return Err(format!("KVM cannot run it: {error}")),
                Ok(VcpuExit::IoOut(SERIAL_PORT, bytes)) => {
                    for &byte in bytes {
                        put(line, byte, shared);
                    }
                }
                Ok(VcpuExit::IoOut(SLEEP_PORT, &[a, b, c, d])) => {
                    let time = u32::from_le_bytes([a, b, c, d]);
                    shared
                        .common
                        .control
                        .sleep(Duration::from_micros(u64::from(time)));
                }
                Ok(VcpuExit::IoOut(READY_PORT, &[a, b, c, d])) => {
                    let address = u64::from(u32::from_le_bytes([a, b, c, d]));
                    return Ok(Stop::Ready(address));
                }
                Ok(VcpuExit::IoOut(..)) => {}
                Ok(VcpuExit::IoIn(SERIAL_STATUS, bytes)) => bytes.fill(SERIAL_EMPTY),
                Ok(VcpuExit::IoIn(SLEEP_PORT, bytes)) if bytes.len() == 4 => {
                    bytes.copy_from_slice(&SLEEP_HERE.to_le_bytes());
                }
                Ok(VcpuExit::IoIn(STOLEN_PORT, bytes)) if bytes.len() == 4 => {
                    let time = u32::try_from(std::mem::take(stolen).as_micros());
                    bytes.copy_from_slice(&time.unwrap_or(u32::MAX).to_le_bytes());
                }
                Ok(VcpuExit::IoIn(_, bytes)) => bytes.fill(0xff),
                Ok(VcpuExit::Intr) => {}
                Ok(exit) => {
                    let what = match exit {
                        VcpuExit::Shutdown => "triple fault".to_owned(),
                        VcpuExit::InternalError => "KVM cannot emulate an instruction".to_owned(),
                        VcpuExit::Hlt => "it halted".to_owned(),
                        other => format!("unexpected exit {other:?}"),
                    };
                    let rip = fd.get_regs().map_or(0, |regs| regs.rip);
                    return Err(format!("{what} at rip {rip:#x}"));
                }
            }
        }
    }

    fn must_stop(&self) -> bool {
        // SAFETY: see `ImmediateExit::set`.
        unsafe { AtomicU8::from_ptr(self.immediate_exit.0) }.load(Ordering::SeqCst) != 0
    }
}

/// Sets the registers for a PVH start (Xen's public/arch-x86/hvm/start_info.h): 32-bit protected mode, no paging, flat
/// segments. ebx points to the boot information.
fn set_entry(fd: &VcpuFd, entry: &Entry) -> Result<(), KvmError> {
    let flat = |kind: u8, selector: u16| kvm_segment {
        limit: 0xffff_ffff,
        type_: kind,
        selector,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    let data = flat(0x3, 0x10);
    let task = kvm_segment {
        limit: 0x67,
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    let had = fd
        .get_sregs()
        .map_err(KvmError::of("read a vCPU's system registers"))?;
    let sregs = kvm_sregs {
        cs: flat(0xb, 0x08),
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        tr: task,
        cr0: 0x11, // PE, ET
        cr4: 0,
        efer: 0,
        ..had
    };
    fd.set_sregs(&sregs)
        .map_err(KvmError::of("set a vCPU's system registers"))?;
    let regs = kvm_regs {
        rip: entry.rip,
        rbx: entry.start_info,
        rflags: FLAGS,
        ..Default::default()
    };
    fd.set_regs(&regs)
        .map_err(KvmError::of("set a vCPU's registers"))
}

/// Handles one byte that the guest sent to the serial port.
fn put(line: &mut Vec<u8>, byte: u8, shared: &Shared) {
    if byte != b'\n' {
        line.push(byte);
        if line.len() < MAX_LINE {
            return;
        }
    }
    let text = String::from_utf8_lossy(line).into_owned();
    line.clear();
    let mut lines = lock(&shared.lines);
    if lines.len() == MAX_LINES {
        lines.pop_front();
    }
    lines.push_back(text);
}

/// Sends the signal that interrupts `thread` in KVM_RUN.
pub(super) fn send_kick(thread: libc::pthread_t) {
    static HANDLER: Once = Once::new();
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    // The handler is empty, because only the interruption of the system call is needed. The signal is a real-time
    // signal, because other code in a VMM's process rarely uses one.
    HANDLER.call_once(|| {
        register_signal_handler(SIGRTMIN(), nothing).expect("SIGRTMIN can always be handled");
    });
    // SAFETY: `thread` is the calling thread, or a thread that is not joined yet.
    unsafe { libc::pthread_kill(thread, SIGRTMIN()) };
}

impl Shared {
    pub fn new(common: &Arc<Common>) -> Self {
        Self {
            common: Arc::clone(common),
            lines: Mutex::default(),
        }
    }
}
