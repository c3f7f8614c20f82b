//! A built-in guest with vCPUs of either kind: its RAM, its phases and its commands.

use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use hotlift::guest::{DeviceState, Guest, GuestError};
use hotlift_mem::{DirtyBitmap, RamBlock, lock};

use crate::builtin::{BuiltinGuest, CreateError};
use crate::bytes::to_usize;
use crate::control::{Control, VcpuGoal};
use crate::device::{self, DeviceError};
use crate::fill::{self, FillError, FillSettings, Filled};
use crate::layout::{Layout, RAM_BLOCK};
use crate::life::Life;
use crate::settings::{GuestKind, GuestSettings, Program};
use crate::throttle::Throttle;
use crate::verify::{self, Verified, VerifyError};
use crate::workload::Position;

/// State that a guest shares with its vCPUs.
pub(crate) struct Common {
    pub control: Control,
    pub life: Mutex<Life>,
    /// Reason why the first vCPU failed; `None` while no vCPU has failed.
    pub death: Mutex<Option<String>>,
}

/// The vCPUs of one kind of guest. Each vCPU has its own thread.
pub(crate) trait Vcpus: Sized + Send + Sync {
    const KIND: GuestKind;
    /// Name and version of a vCPU's device section.
    const SECTION: (&'static str, u32);

    fn new(vcpus: u8, ram: &Arc<RamBlock>, common: &Arc<Common>) -> Result<Self, CreateError>;

    /// Returns the function that the thread of vCPU `index` runs.
    fn thread(&self, index: u8) -> Box<dyn FnOnce() + Send>;

    /// Sets the requested state of all vCPUs: run, pause or stop.
    fn want(&self, want: VcpuGoal);

    /// Returns a function that interrupts the busy threads among `threads`.
    fn kick(threads: &[JoinHandle<()>]) -> impl Fn() + Send + 'static;

    fn start_dirty_log(&self, ram: &RamBlock) -> Result<(), GuestError>;

    fn stop_dirty_log(&self, ram: &RamBlock) -> Result<(), GuestError>;

    fn sync_dirty_log(&self, ram: &RamBlock, into: &DirtyBitmap) -> Result<u64, GuestError>;

    fn clear_dirty_log(&self, ram: &RamBlock, first: usize, pages: usize)
    -> Result<(), GuestError>;

    /// Prepares vCPUs that have never run for their start.
    fn boot(&self, ram: &RamBlock, program: &Program) -> Result<(), GuestError>;

    /// Returns the states of all vCPUs, which must be paused.
    fn save(&self) -> Result<Vec<DeviceState>, GuestError>;

    /// Loads the states of all vCPUs. Decodes every state before loading the first.
    fn load(&self, states: Vec<&[u8]>) -> Result<(), DeviceError>;

    /// Returns the progress of each vCPU; all must be paused.
    fn positions(&self, ram: &RamBlock) -> Result<Vec<Position>, VerifyError>;

    fn writes(&self, ram: &RamBlock) -> u64;

    fn serial(&self) -> Vec<String>;
}

/// A built-in guest with its vCPUs.
pub(crate) struct Machine<V: Vcpus> {
    // Fields are dropped in this order: the vCPUs before the RAM that they map.
    threads: Vec<JoinHandle<()>>,
    vcpus: V,
    blocks: Vec<Arc<RamBlock>>,
    common: Arc<Common>,
    /// Lock for start, pause and resume: each command begins after the previous one has finished.
    commands: Mutex<()>,
    uuid: [u8; 16],
    throttle: Throttle,
}

impl<V: Vcpus> Machine<V> {
    /// Returns a guest that has not run. Its vCPU threads are parked.
    ///
    /// # Errors
    /// [`CreateError`] if the settings do not fit together, or if KVM, memory or a thread is unavailable.
    pub fn new(settings: &GuestSettings) -> Result<Self, CreateError> {
        let program = Program::new(settings)?;
        let ram = RamBlock::new(RAM_BLOCK, to_usize(settings.ram_bytes), settings.backing)?;
        let ram = Arc::new(ram);
        let common = Arc::new(Common {
            control: Control::new(),
            life: Mutex::new(Life::new(program)),
            death: Mutex::new(None),
        });
        // Created before its threads: if a thread cannot be started, the drop ends those already started.
        let mut guest = Self {
            threads: Vec::new(),
            vcpus: V::new(settings.vcpus, &ram, &common)?,
            blocks: vec![ram],
            common,
            commands: Mutex::new(()),
            uuid: settings.uuid,
            throttle: Throttle::default(),
        };
        for index in 0..settings.vcpus {
            let thread = std::thread::Builder::new()
                .name(format!("vcpu-{index}"))
                .spawn(guest.vcpus.thread(index))
                .map_err(CreateError::Thread)?;
            guest.threads.push(thread);
        }
        Ok(guest)
    }

    fn ram_block(&self) -> &RamBlock {
        &self.blocks[0]
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        lock(&self.common.life)
    }

    fn stop(&self, want: VcpuGoal) {
        self.vcpus.want(want);
        V::kick(&self.threads)();
    }

    fn check_block(&self, block: usize, action: &'static str) -> Result<(), GuestError> {
        if block == 0 {
            Ok(())
        } else {
            Err(GuestError::new(action, format!("no RAM block {block}")))
        }
    }
}

impl<V: Vcpus> Drop for Machine<V> {
    fn drop(&mut self) {
        self.throttle(0);
        self.stop(VcpuGoal::Stop);
        for thread in self.threads.drain(..) {
            // A panic of the thread was already printed or recorded.
            let _ = thread.join();
        }
    }
}

impl<V: Vcpus> Guest for Machine<V> {
    fn machine(&self) -> &str {
        V::KIND.machine()
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
        self.vcpus.start_dirty_log(self.ram_block())
    }

    fn stop_dirty_log(&self) -> Result<(), GuestError> {
        self.vcpus.stop_dirty_log(self.ram_block())
    }

    fn sync_dirty_log(&self, block: usize, into: &DirtyBitmap) -> Result<u64, GuestError> {
        self.check_block(block, "fetch its dirty log")?;
        self.vcpus.sync_dirty_log(self.ram_block(), into)
    }

    fn clear_dirty_log(&self, block: usize, first: usize, pages: usize) -> Result<(), GuestError> {
        self.check_block(block, "clear its dirty log")?;
        self.vcpus.clear_dirty_log(self.ram_block(), first, pages)
    }

    fn pause(&self) -> Result<(), GuestError> {
        let _command = lock(&self.commands);
        self.stop(VcpuGoal::Pause);
        // `life` must not be locked here, because a vCPU that starts to run may need this lock.
        self.common.control.wait_until_parked();
        self.life().paused();
        self.health()
    }

    fn resume(&self) -> Result<(), GuestError> {
        let _command = lock(&self.commands);
        self.life().resume()?;
        self.vcpus.want(VcpuGoal::Run);
        Ok(())
    }

    fn vcpu_threads(&self) -> Vec<u32> {
        self.common.control.threads(self.threads.len())
    }

    fn throttle(&self, percent: u8) -> bool {
        let common = Arc::clone(&self.common);
        // The thread IDs in `kick` stay valid, because the thread that kicks is joined before the vCPU threads.
        let kick = V::kick(&self.threads);
        self.throttle.set(percent, &self.common.control, || {
            std::thread::Builder::new()
                .name("vcpu-throttle".to_owned())
                .spawn(move || common.control.end_slices(kick))
        })
    }

    fn save_devices(&self) -> Result<Vec<DeviceState>, GuestError> {
        self.health()?;
        let life = self.life();
        life.check_paused("save its devices")?;
        let mut devices = vec![device::save_guest(&life.program, &life.digest)];
        devices.extend(self.vcpus.save()?);
        Ok(devices)
    }

    fn load_devices(&self, devices: Vec<DeviceState>) -> Result<(), GuestError> {
        let mut life = self.life();
        life.check_fresh("load its devices")?;
        let load = || -> Result<_, DeviceError> {
            let (name, version) = V::SECTION;
            let vcpus = life.program.layout.vcpus();
            let (guest, states) = device::sort(&devices, name, version, vcpus)?;
            let (program, digest) = device::load_guest(guest, &life.program.layout)?;
            self.vcpus.load(states)?;
            Ok((program, digest))
        };
        let (program, digest) =
            load().map_err(|error| GuestError::new("load its devices", error))?;
        life.loaded(program, digest);
        Ok(())
    }
}

impl<V: Vcpus> BuiltinGuest for Machine<V> {
    fn kind(&self) -> GuestKind {
        V::KIND
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
        let _command = lock(&self.commands);
        let program = {
            let life = self.life();
            life.check_fresh("start")?;
            life.program
        };
        self.vcpus.boot(self.ram_block(), &program)?;
        self.life().start()?;
        self.vcpus.want(VcpuGoal::Run);
        Ok(())
    }

    fn verify(&self) -> Result<Verified, VerifyError> {
        self.health()?;
        let (program, digest) = {
            let life = self.life();
            life.check_paused("be verified")?;
            (life.program, life.digest.clone())
        };
        let positions = self.vcpus.positions(self.ram_block())?;
        verify::verify(self.ram_block(), &program, &positions, &digest)
    }

    fn writes(&self) -> u64 {
        self.vcpus.writes(self.ram_block())
    }

    fn throttled_time(&self) -> Duration {
        self.common.control.slept()
    }

    fn health(&self) -> Result<(), GuestError> {
        match &*lock(&self.common.death) {
            None => Ok(()),
            Some(reason) => Err(GuestError::new("continue", reason.clone())),
        }
    }

    fn serial(&self) -> Vec<String> {
        self.vcpus.serial()
    }
}
