//! A real virtual machine: KVM, 1 to 8 vCPUs in 64-bit mode, a program of ours, no firmware and no
//! device but a serial port.
//!
//! vCPU 0 enters the program by PVH in 32-bit mode and builds the page tables; then the others start in
//! its mode. From then on each is paced by a port on which it sleeps until its next tick.
//!
//! | file | what |
//! |---|---|
//! | `program` | the program in RAM, and where its vCPUs' counters are |
//! | `vm` | memory slot, vCPUs, what KVM can do here |
//! | `vcpu` | a vCPU's thread, its exits, how it is stopped |
//! | `state` | a vCPU's state as a device |
//! | `dirty_log` | pages written |

mod dirty_log;
pub(crate) mod error;
mod program;
mod state;
mod vcpu;
mod vm;

use std::os::unix::thread::JoinHandleExt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use hotlift::guest::{DeviceState, Guest, GuestError};
use hotlift_mem::{DirtyBitmap, RamBlock, lock};
use kvm_ioctls::VmFd;

use crate::builtin::{BuiltinGuest, CreateError};
use crate::bytes::to_usize;
use crate::control::Want;
use crate::device::{self, DeviceError};
use crate::fill::{self, FillError, FillSettings, Filled};
use crate::layout::{Layout, RAM_BLOCK};
use crate::life::Life;
use crate::settings::{GuestKind, GuestSettings, Program};
use crate::throttle::Throttle;
use crate::verify::{self, Verified, VerifyError};
use crate::workload::Position;
use dirty_log::DirtyLog;
use program::Head;
use state::{Model, VCPU, VCPU_VERSION, VcpuState};
use vcpu::{Shared, Vcpu, send_kick};

pub use error::KvmError;
pub use program::ELF;
pub use vm::{host_tsc_khz, usable};

/// The KVM guest.
pub struct KvmGuest {
    // Dropped in this order: the vCPUs and the VM before the RAM that they map.
    threads: Vec<JoinHandle<()>>,
    vcpus: Vec<Arc<Vcpu>>,
    vm: VmFd,
    blocks: Vec<Arc<RamBlock>>,
    shared: Arc<Shared>,
    model: Model,
    head: Head,
    dirty_log: DirtyLog,
    life: Mutex<Life>,
    /// Held by who starts, pauses or resumes, so that each finds done what it waits for.
    commands: Mutex<()>,
    uuid: [u8; 16],
    throttle: Throttle,
}

impl KvmGuest {
    /// A guest that has not run, with its threads parked.
    ///
    /// # Errors
    /// [`CreateError`] if the settings do not fit together, or KVM, memory or a thread cannot be had.
    pub fn new(settings: &GuestSettings) -> Result<Self, CreateError> {
        let program = Program::new(settings)?;
        let ram = RamBlock::new(RAM_BLOCK, to_usize(settings.ram_bytes), settings.backing)?;
        let (vm, fds, model) = vm::create(settings.vcpus)?;
        let dirty_log = DirtyLog::new(&vm, ram.pages())?;
        vm::map(&vm, &ram, false)?;
        // Made before its threads: if one of them cannot be started, dropping it ends the others.
        let mut guest = Self {
            threads: Vec::new(),
            vcpus: (0..)
                .zip(fds)
                .map(|(index, fd)| Arc::new(Vcpu::new(index, fd)))
                .collect(),
            vm,
            blocks: vec![Arc::new(ram)],
            shared: Arc::new(Shared::new()),
            model,
            head: Head::read(),
            dirty_log,
            life: Mutex::new(Life::new(program)),
            commands: Mutex::new(()),
            uuid: settings.uuid,
            throttle: Throttle::default(),
        };
        for (index, vcpu) in guest.vcpus.iter().enumerate() {
            let (vcpu, shared) = (Arc::clone(vcpu), Arc::clone(&guest.shared));
            let thread = std::thread::Builder::new()
                .name(format!("vcpu-{index}"))
                .spawn(move || vcpu.run(&shared))
                .map_err(CreateError::Thread)?;
            guest.threads.push(thread);
        }
        Ok(guest)
    }

    /// True if fetching the dirty log and clearing it are two steps here.
    pub fn clears_dirty_log_by_range(&self) -> bool {
        self.dirty_log.is_manual()
    }

    fn ram_block(&self) -> &RamBlock {
        &self.blocks[0]
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        lock(&self.life)
    }

    fn command(&self) -> MutexGuard<'_, ()> {
        lock(&self.commands)
    }

    fn stop(&self, want: Want) {
        self.shared.want(want, &self.vcpus);
        for thread in &self.threads {
            send_kick(thread.as_pthread_t());
        }
    }

    fn check_block(&self, block: usize, action: &'static str) -> Result<(), GuestError> {
        if block == 0 {
            Ok(())
        } else {
            Err(GuestError::new(action, format!("no RAM block {block}")))
        }
    }

    /// How far a vCPU has come, from its registers, and whether its memory agrees.
    fn position(&self, index: u8, vcpu: &Vcpu) -> Result<Position, VerifyError> {
        let regs = vcpu
            .core()
            .fd
            .get_regs()
            .map_err(|error| GuestError::new("read a vCPU's registers", error))?;
        let block = self.head.block(index);
        let errors = vm::peek(self.ram_block(), block + program::ERRORS);
        if errors > 0 {
            return Err(VerifyError::Guest {
                vcpu: index,
                errors,
            });
        }
        let expected = if regs.rip == self.head.published {
            regs.r15
        } else {
            regs.r10
        };
        let got = vm::peek(self.ram_block(), block + program::PUBLISHED);
        if got != expected {
            return Err(VerifyError::Published {
                vcpu: index,
                expected,
                got,
            });
        }
        let stores = (1u8..)
            .zip(self.head.stored)
            .find(|&(_, rip)| rip == regs.rip);
        Ok(Position {
            writes: regs.r15,
            stores: stores.map_or(0, |(stores, _)| stores),
        })
    }
}

impl Drop for KvmGuest {
    fn drop(&mut self) {
        self.throttle(0);
        self.stop(Want::Stop);
        for thread in self.threads.drain(..) {
            // A panic of it is one that was printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

impl Guest for KvmGuest {
    fn machine(&self) -> &str {
        GuestKind::Kvm.machine()
    }

    fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    fn ram(&self) -> &[Arc<RamBlock>] {
        &self.blocks
    }

    fn ram_is_fresh(&self) -> bool {
        self.life().ram_is_fresh()
    }

    fn start_dirty_log(&self) -> Result<(), GuestError> {
        vm::map(&self.vm, self.ram_block(), true)
            .map_err(|error| GuestError::new("start its dirty log", error))?;
        self.dirty_log.started(self.ram_block());
        Ok(())
    }

    fn stop_dirty_log(&self) -> Result<(), GuestError> {
        vm::map(&self.vm, self.ram_block(), false)
            .map_err(|error| GuestError::new("stop its dirty log", error))
    }

    fn sync_dirty_log(&self, block: usize, into: &DirtyBitmap) -> Result<u64, GuestError> {
        self.check_block(block, "fetch its dirty log")?;
        self.dirty_log
            .sync(&self.vm, self.ram_block(), into)
            .map_err(|error| GuestError::new("fetch its dirty log", error))
    }

    fn clear_dirty_log(&self, block: usize, first: usize, pages: usize) -> Result<(), GuestError> {
        self.check_block(block, "clear its dirty log")?;
        self.dirty_log
            .clear(&self.vm, self.ram_block(), first, pages)
            .map_err(|error| GuestError::new("clear its dirty log", error))
    }

    fn pause(&self) -> Result<(), GuestError> {
        let _command = self.command();
        self.stop(Want::Pause);
        self.shared.control.wait_until_parked();
        self.life().paused();
        self.health()
    }

    fn resume(&self) -> Result<(), GuestError> {
        let _command = self.command();
        self.life().resume()?;
        self.shared.want(Want::Run, &self.vcpus);
        Ok(())
    }

    fn vcpu_threads(&self) -> Vec<u32> {
        self.shared.control.threads(self.vcpus.len())
    }

    fn throttle(&self, percent: u8) -> bool {
        let shared = Arc::clone(&self.shared);
        // They are joined after the thread that kicks them.
        let vcpus: Vec<_> = self
            .threads
            .iter()
            .map(JoinHandleExt::as_pthread_t)
            .collect();
        self.throttle.set(percent, &self.shared.control, || {
            let kick = move || vcpus.iter().for_each(|vcpu| send_kick(*vcpu));
            std::thread::Builder::new()
                .name("vcpu-throttle".to_owned())
                .spawn(move || shared.control.end_slices(kick))
        })
    }

    fn save_devices(&self) -> Result<Vec<DeviceState>, GuestError> {
        self.health()?;
        let life = self.life();
        life.check_paused("save its devices")?;
        let mut devices = vec![device::save_guest(&life.program, &life.digest)];
        for (instance, vcpu) in (0u32..).zip(&self.vcpus) {
            let core = vcpu.core();
            let state = VcpuState::save(&core.fd, &self.model, &core.line)
                .map_err(|error| GuestError::new("save its devices", error))?;
            devices.push(state.device(instance));
        }
        Ok(devices)
    }

    fn load_devices(&self, devices: Vec<DeviceState>) -> Result<(), GuestError> {
        let mut life = self.life();
        life.check_fresh("load its devices")?;
        let load = || -> Result<_, DeviceError> {
            let vcpus = life.program.layout.vcpus();
            let (guest, payloads) = device::sort(&devices, VCPU, VCPU_VERSION, vcpus)?;
            let (program, digest) = device::load_guest(guest, &life.program.layout)?;
            // All is parsed before anything is loaded.
            let states = payloads
                .into_iter()
                .map(|payload| VcpuState::parse(payload, &self.model))
                .collect::<Result<Vec<_>, _>>()?;
            for ((index, vcpu), state) in (0u8..).zip(&self.vcpus).zip(states) {
                let mut core = vcpu.core();
                state.load(&core.fd, index, &self.model)?;
                core.line = state.serial;
            }
            Ok((program, digest))
        };
        let (program, digest) =
            load().map_err(|error| GuestError::new("load its devices", error))?;
        life.loaded(program, digest);
        Ok(())
    }
}

impl BuiltinGuest for KvmGuest {
    fn kind(&self) -> GuestKind {
        GuestKind::Kvm
    }

    fn layout(&self) -> Layout {
        self.life().program.layout
    }

    fn rate(&self) -> u64 {
        self.life().program.rate()
    }

    fn fill(&self, settings: &FillSettings) -> Result<Filled, FillError> {
        let mut life = self.life();
        life.begin_fill()?;
        let filled = fill::fill(self.ram_block(), &life.program.layout, settings)?;
        life.digest.clone_from(&filled.digest);
        Ok(filled)
    }

    fn start(&self) -> Result<(), GuestError> {
        let _command = self.command();
        let program = {
            let life = self.life();
            life.check_fresh("start")?;
            life.program
        };
        let failed =
            |reason: Box<dyn std::error::Error + Send + Sync>| GuestError::new("start", reason);
        let (first, others) = self
            .vcpus
            .split_first()
            .ok_or_else(|| failed("no vCPU".into()))?;
        let tsc_khz = vm::tsc_khz(&first.core().fd);
        let entry = program::load(self.ram_block(), &program, tsc_khz)
            .map_err(|error| failed(error.into()))?;
        let address = first
            .boot(&entry, &self.shared)
            .map_err(|reason| failed(reason.into()))?;
        if address != self.head.vcpu_main {
            return Err(failed(
                format!("its vCPUs want to start at {address:#x}").into(),
            ));
        }
        for vcpu in others {
            let first = first.core();
            vcpu.start_as(&first.fd, address)
                .map_err(|error| failed(error.into()))?;
        }
        self.life().start()?;
        self.shared.want(Want::Run, &self.vcpus);
        Ok(())
    }

    fn verify(&self) -> Result<Verified, VerifyError> {
        self.health()?;
        let (program, digest) = {
            let life = self.life();
            life.check_paused("be verified")?;
            (life.program, life.digest.clone())
        };
        let positions = (0u8..)
            .zip(&self.vcpus)
            .map(|(index, vcpu)| self.position(index, vcpu))
            .collect::<Result<Vec<_>, _>>()?;
        verify::verify(self.ram_block(), &program, &positions, &digest)
    }

    fn writes(&self) -> u64 {
        (0u8..)
            .zip(&self.vcpus)
            .map(|(index, _)| {
                vm::peek(
                    self.ram_block(),
                    self.head.block(index) + program::PUBLISHED,
                )
            })
            .sum()
    }

    fn throttled_time(&self) -> Duration {
        self.shared.control.slept()
    }

    fn health(&self) -> Result<(), GuestError> {
        match &*lock(&self.shared.death) {
            None => Ok(()),
            Some(reason) => Err(GuestError::new("go on running", reason.clone())),
        }
    }

    fn serial(&self) -> Vec<String> {
        let mut lines = lock(&self.shared.lines);
        lines.drain(..).collect()
    }
}
