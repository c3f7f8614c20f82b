//! Run control: a guest is stopped and continued by its operator (`stop`, `cont`) and by its migration alike.
//!
//! It runs when neither keeps it from running. A guest that its operator has stopped arrives stopped, as
//! QEMU's do, and in QEMU's way: the run state travels as the device `globalstate`.

use std::sync::{Arc, Mutex, MutexGuard};

use hotlift::guest::{Announcer, DeviceState, Guest, GuestError};
use hotlift_mem::{DirtyBitmap, RamBlock, lock};

/// Whether the guest runs; QEMU's names (`RunState`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// It has not arrived.
    InMigrate,
    Running,
    /// Its operator has stopped it.
    Paused,
    /// Its migration has.
    FinishMigrate,
    /// It runs elsewhere.
    PostMigrate,
}

impl RunState {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::InMigrate,
        Self::Running,
        Self::Paused,
        Self::FinishMigrate,
        Self::PostMigrate,
    ];

    /// QEMU's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::InMigrate => "inmigrate",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::FinishMigrate => "finish-migrate",
            Self::PostMigrate => "postmigrate",
        }
    }
}

/// Name of the device section.
const GLOBALSTATE: &str = "globalstate";

/// Longest name of a run state in it (`RunState` of QEMU's `GlobalState`).
const NAME: usize = 100;

/// The guest, and who keeps it from running.
pub struct RunControl {
    guest: Arc<dyn Guest>,
    stopped_by: Mutex<StoppedBy>,
}

#[derive(Default)]
struct StoppedBy {
    operator: bool,
    migration: bool,
}

impl RunControl {
    /// One that nobody has stopped.
    pub fn new(guest: Arc<dyn Guest>) -> Self {
        Self {
            guest,
            stopped_by: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, StoppedBy> {
        lock(&self.stopped_by)
    }

    /// Whether the operator wants it stopped.
    pub fn is_stopped_by_operator(&self) -> bool {
        self.lock().operator
    }

    /// The operator's `stop`. A guest that has not arrived yet will not run when it does.
    pub fn stop(&self, has_arrived: bool) -> Result<(), GuestError> {
        let mut stopped_by = self.lock();
        if has_arrived {
            self.guest.pause()?;
        }
        stopped_by.operator = true;
        Ok(())
    }

    /// The operator's `cont`.
    pub fn cont(&self, has_arrived: bool) -> Result<(), GuestError> {
        let mut stopped_by = self.lock();
        if has_arrived && !stopped_by.migration {
            self.guest.resume()?;
        }
        stopped_by.operator = false;
        Ok(())
    }

    /// A migration has left it stopped, and nobody but the operator can know whether it may run.
    pub fn leave_to_operator(&self) {
        *self.lock() = StoppedBy {
            operator: true,
            migration: false,
        };
    }
}

impl Guest for RunControl {
    fn machine(&self) -> &str {
        self.guest.machine()
    }

    fn uuid(&self) -> [u8; 16] {
        self.guest.uuid()
    }

    fn ram(&self) -> &[Arc<RamBlock>] {
        self.guest.ram()
    }

    fn ram_is_fresh(&self) -> bool {
        self.guest.ram_is_fresh()
    }

    fn start_dirty_log(&self) -> Result<(), GuestError> {
        self.guest.start_dirty_log()
    }

    fn stop_dirty_log(&self) -> Result<(), GuestError> {
        self.guest.stop_dirty_log()
    }

    fn sync_dirty_log(&self, block: usize, into: &DirtyBitmap) -> Result<u64, GuestError> {
        self.guest.sync_dirty_log(block, into)
    }

    fn clear_dirty_log(
        &self,
        block: usize,
        first_page: usize,
        pages: usize,
    ) -> Result<(), GuestError> {
        self.guest.clear_dirty_log(block, first_page, pages)
    }

    fn pause(&self) -> Result<(), GuestError> {
        let mut stopped_by = self.lock();
        self.guest.pause()?;
        stopped_by.migration = true;
        Ok(())
    }

    fn resume(&self) -> Result<(), GuestError> {
        let mut stopped_by = self.lock();
        if !stopped_by.operator {
            self.guest.resume()?;
        }
        stopped_by.migration = false;
        Ok(())
    }

    fn throttle(&self, percent: u8) -> bool {
        self.guest.throttle(percent)
    }

    fn vcpu_threads(&self) -> Vec<u32> {
        self.guest.vcpu_threads()
    }

    fn announcer(&self) -> Option<Announcer> {
        self.guest.announcer()
    }

    fn save_devices(&self) -> Result<Vec<DeviceState>, GuestError> {
        let mut devices = self.guest.save_devices()?;
        // Left out where it says nothing: a destination without a monitor does not know it.
        if self.lock().operator {
            devices.push(stopped());
        }
        Ok(devices)
    }

    fn load_devices(&self, mut devices: Vec<DeviceState>) -> Result<(), GuestError> {
        let state = devices
            .iter()
            .position(|device| device.idstr == GLOBALSTATE)
            .map(|index| devices.remove(index));
        self.guest.load_devices(devices)?;
        match state {
            None => Ok(()),
            Some(state) if state == stopped() => {
                self.lock().operator = true;
                Ok(())
            }
            Some(state) => Err(GuestError::new(
                "load its run state",
                format!("version {} of it is not understood", state.version_id),
            )),
        }
    }
}

/// The section of a stopped guest: the length of the name and its end, then the name.
fn stopped() -> DeviceState {
    let name = b"paused\0";
    let mut payload = vec![0, 0, 0, 7];
    payload.extend_from_slice(name);
    payload.resize(4 + NAME, 0);
    DeviceState {
        idstr: GLOBALSTATE.to_owned(),
        instance_id: 0,
        version_id: 1,
        payload,
    }
}
