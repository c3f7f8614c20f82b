//! A VMM with one vCPU that migrates its running guest to another process of the same program.
//!
//! ```text
//! example-vmm receive unix:/tmp/vm     waits for the guest, and runs it
//! example-vmm send unix:/tmp/vm        runs a guest, and migrates it there
//! ```
//!
//! Memory comes from vm-memory, the vCPU from kvm-ioctls. The example implements [`hotlift::guest::Guest`] for them,
//! which is all that the engine needs.

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{env, thread};

use hotlift::guest::{DeviceState, Guest, GuestError};
use hotlift::{Address, Control, Options};
use hotlift_mem::{DirtyBitmap, RamBlock, ram_blocks_of};
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const RAM_BYTES: usize = 64 << 20;
const PROGRAM_AT: u64 = 0x1000;
const COUNTER_AT: u64 = 0x2000;
/// Guest program in real mode: `inc dword [0x2000]; out 0x10, al; jmp` to the start. After each count, `out` exits to
/// this VMM.
const PROGRAM: [u8; 9] = [0x66, 0xff, 0x06, 0x00, 0x20, 0xe6, 0x10, 0xeb, 0xf7];

struct Vmm {
    memory: GuestMemoryMmap,
    ram: Vec<Arc<RamBlock>>,
    vm: VmFd,
    vcpu: Mutex<VcpuFd>,
    runs: Mutex<bool>,
    resumed: Condvar,
    /// True if no program was written to the memory: at a destination, all pages are still zero.
    is_fresh: bool,
}

impl Vmm {
    fn new(program: Option<&[u8]>) -> Result<Self, Box<dyn Error>> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM_BYTES)])?;
        if let Some(program) = program {
            memory.write_slice(program, GuestAddress(PROGRAM_AT))?;
        }
        let ram = ram_blocks_of(&memory)?.into_iter().map(Arc::new).collect();
        let vm = Kvm::new()?.create_vm()?;
        let vcpu = vm.create_vcpu(0)?;
        // The code segment of a reset vCPU is at the end of the address space. The program starts at segment 0 instead.
        let mut segments = vcpu.get_sregs()?;
        (segments.cs.base, segments.cs.selector) = (0, 0);
        vcpu.set_sregs(&segments)?;
        vcpu.set_regs(&registers(PROGRAM_AT))?;
        let vmm = Self {
            memory,
            ram,
            vm,
            vcpu: Mutex::new(vcpu),
            runs: Mutex::new(false),
            resumed: Condvar::new(),
            is_fresh: program.is_none(),
        };
        vmm.map(0)?;
        Ok(vmm)
    }

    /// Registers the guest's memory with KVM. `flags` are those of `KVM_SET_USER_MEMORY_REGION`.
    fn map(&self, flags: u32) -> Result<(), GuestError> {
        let address = self.memory.get_host_address(GuestAddress(0));
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags,
            guest_phys_addr: 0,
            memory_size: RAM_BYTES as u64,
            userspace_addr: address.map_err(failed("find its memory"))? as u64,
        };
        // SAFETY: the mapping is RAM_BYTES long, and `memory` keeps it mapped as long as the VM exists.
        unsafe { self.vm.set_user_memory_region(region) }.map_err(failed("map its memory"))
    }

    /// Runs the vCPU on the calling thread, and waits while the guest is paused.
    fn run_vcpu(&self) -> Result<(), kvm_ioctls::Error> {
        loop {
            let mut vcpu = lock(&self.vcpu);
            if *lock(&self.runs) {
                vcpu.run()?;
                continue;
            }
            drop(vcpu);
            let paused = self.resumed.wait_while(lock(&self.runs), |runs| !*runs);
            drop(paused.unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn count(&self) -> Result<u32, vm_memory::GuestMemoryError> {
        self.memory.read_obj(GuestAddress(COUNTER_AT))
    }

    /// Waits until the guest's counter has increased by `steps`, and returns the counter.
    fn watch(&self, steps: u32) -> Result<u32, Box<dyn Error>> {
        let before = self.count()?;
        while self.count()? < before + steps {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(self.count()?)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Guest for Vmm {
    fn machine(&self) -> &str {
        "example-vmm"
    }

    fn uuid(&self) -> [u8; 16] {
        [0; 16]
    }

    fn ram(&self) -> &[Arc<RamBlock>] {
        &self.ram
    }

    fn ram_is_fresh(&self) -> bool {
        self.is_fresh
    }

    fn start_dirty_log(&self) -> Result<(), GuestError> {
        self.map(KVM_MEM_LOG_DIRTY_PAGES)
    }

    fn stop_dirty_log(&self) -> Result<(), GuestError> {
        self.map(0)
    }

    fn sync_dirty_log(&self, _block: usize, into: &DirtyBitmap) -> Result<u64, GuestError> {
        let log = self.vm.get_dirty_log(0, RAM_BYTES);
        Ok(into.or_words(0, &log.map_err(failed("fetch its dirty log"))?))
    }

    /// Does nothing, because [`Guest::sync_dirty_log`] has already cleared the fetched dirty log.
    fn clear_dirty_log(&self, _: usize, _: usize, _: usize) -> Result<(), GuestError> {
        Ok(())
    }

    fn pause(&self) -> Result<(), GuestError> {
        *lock(&self.runs) = false;
        // While the guest runs, the vCPU's thread holds this lock.
        let mut vcpu = lock(&self.vcpu);
        // KVM completes an I/O exit only at the next entry, and only then advances past the instruction.
        vcpu.set_kvm_immediate_exit(1);
        let _ = vcpu.run();
        vcpu.set_kvm_immediate_exit(0);
        Ok(())
    }

    fn resume(&self) -> Result<(), GuestError> {
        *lock(&self.runs) = true;
        self.resumed.notify_all();
        Ok(())
    }

    /// Saves the vCPU, the guest's only device. The program uses no register except the instruction pointer.
    fn save_devices(&self) -> Result<Vec<DeviceState>, GuestError> {
        let regs = lock(&self.vcpu).get_regs();
        Ok(vec![DeviceState {
            idstr: "cpu".to_owned(),
            instance_id: 0,
            version_id: 1,
            payload: regs
                .map_err(failed("read its registers"))?
                .rip
                .to_le_bytes()
                .to_vec(),
        }])
    }

    fn load_devices(&self, devices: Vec<DeviceState>) -> Result<(), GuestError> {
        let rip = match devices.as_slice() {
            [cpu] if cpu.idstr == "cpu" => cpu.payload.as_slice().try_into(),
            _ => {
                return Err(GuestError::new(
                    "load its devices",
                    "they are not this VMM's",
                ));
            }
        };
        let rip = u64::from_le_bytes(rip.map_err(failed("load its vCPU"))?);
        lock(&self.vcpu)
            .set_regs(&registers(rip))
            .map_err(failed("set its registers"))
    }
}

fn registers(rip: u64) -> kvm_regs {
    kvm_regs {
        rip,
        rflags: 2,
        ..kvm_regs::default()
    }
}

/// Returns a function for `map_err` that makes an error of the engine from a failed `action`.
fn failed<E: Error + Send + Sync + 'static>(action: &'static str) -> impl FnOnce(E) -> GuestError {
    move |error| GuestError::new(action, error)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [role, address] = arguments.as_slice() else {
        return Err("usage: example-vmm send|receive ADDRESS".into());
    };
    let address: Address = address.parse()?;
    let sends = role == "send";
    let vmm = Arc::new(Vmm::new(sends.then_some(&PROGRAM))?);
    let vcpu = Arc::clone(&vmm);
    thread::spawn(move || vcpu.run_vcpu());
    let (options, control) = (Options::default(), Control::new());
    if sends {
        vmm.resume()?;
        vmm.watch(1000)?;
        let report = hotlift::migrate(&*vmm, &address, &options, &control, &|_| ())?;
        println!(
            "moved at count {}, downtime {:.1} ms",
            vmm.count()?,
            report.downtime_ms
        );
    } else {
        let listener = address.listen()?;
        println!("waiting");
        hotlift::receive(&*vmm, listener, &options, &control)?;
        println!("received, count {} and more", vmm.watch(1000)?);
    }
    Ok(())
}
