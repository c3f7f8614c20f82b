//! A real virtual machine: KVM, 1 to 8 vCPUs in 64-bit mode, the guest program, no firmware, a serial port as the only
//! device.
//!
//! vCPU 0 enters the program by PVH in 32-bit mode and builds the page tables. Then the other vCPUs start in its mode.
//! From then on, every vCPU sleeps at an I/O port until its next tick (the interval of its writes).
//!
//! | file | subject |
//! |---|---|
//! | `program` | the program in RAM, and the location of its vCPUs' counters |
//! | `vm` | memory slot, vCPUs, checks of KVM's capabilities |
//! | `vcpu` | a vCPU's thread, exits and stop |
//! | `state` | a vCPU's state as a device |
//! | `dirty_log` | pages written |

mod dirty_log;
pub(crate) mod error;
mod program;
mod state;
mod vcpu;
mod vm;

use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::thread::JoinHandle;

use hotlift::guest::{DeviceState, GuestError};
use hotlift_mem::{DirtyBitmap, RamBlock, lock};
use kvm_ioctls::VmFd;

use crate::builtin::CreateError;
use crate::control::VcpuGoal;
use crate::device::DeviceError;
use crate::machine::{Common, Vcpus};
use crate::settings::{GuestKind, Program};
use crate::verify::VerifyError;
use crate::workload::Position;
use dirty_log::DirtyLog;
use program::Head;
use state::{Model, VCPU, VCPU_VERSION, VcpuState};
use vcpu::{Shared, Vcpu, send_kick};

pub use error::KvmError;
pub use program::ELF;
pub use vm::{host_tsc_khz, usable};

/// The vCPUs of a KVM guest, with their VM.
pub(crate) struct KvmVcpus {
    vcpus: Vec<Arc<Vcpu>>,
    vm: VmFd,
    shared: Arc<Shared>,
    model: Model,
    head: Head,
    dirty_log: DirtyLog,
}

impl KvmVcpus {
    /// Returns each vCPU with its number.
    fn numbered(&self) -> impl Iterator<Item = (u8, &Arc<Vcpu>)> {
        (0u8..).zip(&self.vcpus)
    }

    /// Returns a vCPU's progress, computed from its registers. Fails if the vCPU's block in memory differs.
    fn position(&self, ram: &RamBlock, index: u8, vcpu: &Vcpu) -> Result<Position, VerifyError> {
        let regs = vcpu
            .core()
            .fd
            .get_regs()
            .map_err(|error| GuestError::new("read a vCPU's registers", error))?;
        let block = self.head.block(index);
        let errors = vm::peek(ram, block + program::ERRORS);
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
        let got = vm::peek(ram, block + program::PUBLISHED);
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

impl Vcpus for KvmVcpus {
    const KIND: GuestKind = GuestKind::Kvm;
    const SECTION: (&'static str, u32) = (VCPU, VCPU_VERSION);

    fn new(vcpus: u8, ram: &Arc<RamBlock>, common: &Arc<Common>) -> Result<Self, CreateError> {
        let (vm, fds, model) = vm::create(vcpus)?;
        let dirty_log = DirtyLog::new(&vm, ram.pages())?;
        vm::map(&vm, ram, false)?;
        Ok(Self {
            vcpus: (0..)
                .zip(fds)
                .map(|(index, fd)| Arc::new(Vcpu::new(index, fd)))
                .collect(),
            vm,
            shared: Arc::new(Shared::new(common)),
            model,
            head: Head::read(),
            dirty_log,
        })
    }

    fn thread(&self, index: u8) -> Box<dyn FnOnce() + Send> {
        let vcpu = Arc::clone(&self.vcpus[usize::from(index)]);
        let shared = Arc::clone(&self.shared);
        Box::new(move || vcpu.run(&shared))
    }

    fn want(&self, want: VcpuGoal) {
        self.shared.common.control.want(want, || {
            if want != VcpuGoal::Run {
                self.vcpus.iter().for_each(|vcpu| vcpu.stop_soon());
            }
        });
    }

    fn kick(threads: &[JoinHandle<()>]) -> impl Fn() + Send + 'static {
        let threads: Vec<_> = threads.iter().map(JoinHandleExt::as_pthread_t).collect();
        move || threads.iter().for_each(|thread| send_kick(*thread))
    }

    fn start_dirty_log(&self, ram: &RamBlock) -> Result<(), GuestError> {
        vm::map(&self.vm, ram, true)
            .map_err(|error| GuestError::new("start its dirty log", error))?;
        self.dirty_log.started(ram);
        Ok(())
    }

    fn stop_dirty_log(&self, ram: &RamBlock) -> Result<(), GuestError> {
        vm::map(&self.vm, ram, false).map_err(|error| GuestError::new("stop its dirty log", error))
    }

    fn sync_dirty_log(&self, ram: &RamBlock, into: &DirtyBitmap) -> Result<u64, GuestError> {
        let fetched = self.dirty_log.sync(&self.vm, ram, into);
        fetched.map_err(|error| GuestError::new("fetch its dirty log", error))
    }

    fn clear_dirty_log(
        &self,
        ram: &RamBlock,
        first: usize,
        pages: usize,
    ) -> Result<(), GuestError> {
        let cleared = self.dirty_log.clear(&self.vm, ram, first, pages);
        cleared.map_err(|error| GuestError::new("clear its dirty log", error))
    }

    fn boot(&self, ram: &RamBlock, program: &Program) -> Result<(), GuestError> {
        let failed =
            |reason: Box<dyn std::error::Error + Send + Sync>| GuestError::new("start", reason);
        let (first, others) = self
            .vcpus
            .split_first()
            .ok_or_else(|| failed("no vCPU".into()))?;
        let tsc_khz = vm::tsc_khz(&first.core().fd);
        let entry = program::load(ram, program, tsc_khz).map_err(|error| failed(error.into()))?;
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
        Ok(())
    }

    fn save(&self) -> Result<Vec<DeviceState>, GuestError> {
        let save = |(instance, vcpu): (u8, &Arc<Vcpu>)| {
            let core = vcpu.core();
            let state = VcpuState::save(&core.fd, &self.model, &core.line)
                .map_err(|error| GuestError::new("save its devices", error))?;
            Ok(state.device(instance.into()))
        };
        self.numbered().map(save).collect()
    }

    fn load(&self, states: Vec<&[u8]>) -> Result<(), DeviceError> {
        let states = states
            .into_iter()
            .map(|state| VcpuState::parse(state, &self.model))
            .collect::<Result<Vec<_>, _>>()?;
        for ((index, vcpu), state) in self.numbered().zip(states) {
            let mut core = vcpu.core();
            state.load(&core.fd, index, &self.model)?;
            core.line = state.serial;
        }
        Ok(())
    }

    fn positions(&self, ram: &RamBlock) -> Result<Vec<Position>, VerifyError> {
        let position = |(index, vcpu): (u8, &Arc<Vcpu>)| self.position(ram, index, vcpu);
        self.numbered().map(position).collect()
    }

    fn writes(&self, ram: &RamBlock) -> u64 {
        let published = |index| self.head.block(index) + program::PUBLISHED;
        let writes = self
            .numbered()
            .map(|(index, _)| vm::peek(ram, published(index)));
        writes.sum()
    }

    fn serial(&self) -> Vec<String> {
        lock(&self.shared.lines).drain(..).collect()
    }
}
