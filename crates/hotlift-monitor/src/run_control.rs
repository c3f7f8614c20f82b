//! Run control of a guest, which both the operator (`stop`, `cont`) and the migration stop and continue.
//!
//! The guest runs if neither the operator nor the migration has stopped it. If the operator has stopped it, it is also stopped
//! at the destination, as in QEMU: the section of the device `globalstate` contains its run state.

use std::sync::{Arc, Mutex, MutexGuard};

use hotlift::guest::{Announcer, DeviceState, Guest, GuestError};
use hotlift_mem::{DirtyBitmap, RamBlock, lock};

/// Run state of the guest, with QEMU's names (`RunState`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// The guest has not arrived.
    InMigrate,
    Running,
    /// The operator has stopped the guest.
    Paused,
    /// The migration has stopped the guest.
    FinishMigrate,
    /// The guest runs on another host.
    PostMigrate,
}

impl RunState {
    /// All states.
    pub const ALL: [Self; 5] = [
        Self::InMigrate,
        Self::Running,
        Self::Paused,
        Self::FinishMigrate,
        Self::PostMigrate,
    ];

    /// Returns QEMU's name of the state.
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

/// Name of the device whose section contains the run state.
const GLOBALSTATE: &str = "globalstate";

/// Maximum length of a run state's name in this section, in bytes (QEMU's `GlobalState`).
const NAME: usize = 100;

/// The guest, and a record of who has stopped it: the operator, the migration, or both.
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
    /// Creates the run control of a guest that is not stopped.
    pub fn new(guest: Arc<dyn Guest>) -> Self {
        Self {
            guest,
            stopped_by: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, StoppedBy> {
        lock(&self.stopped_by)
    }

    /// Returns true if the operator has stopped the guest.
    pub fn is_stopped_by_operator(&self) -> bool {
        self.lock().operator
    }

    /// Executes the operator's `stop`. If the guest has not arrived yet, it will not run on arrival.
    pub fn stop(&self, has_arrived: bool) -> Result<(), GuestError> {
        let mut stopped_by = self.lock();
        if has_arrived {
            self.guest.pause()?;
        }
        stopped_by.operator = true;
        Ok(())
    }

    /// Executes the operator's `cont`. The guest continues unless the migration has stopped it.
    pub fn cont(&self, has_arrived: bool) -> Result<(), GuestError> {
        let mut stopped_by = self.lock();
        if has_arrived && !stopped_by.migration {
            self.guest.resume()?;
        }
        stopped_by.operator = false;
        Ok(())
    }

    /// Leaves the guest stopped after a migration until the operator's `cont`: only the operator can decide if the guest may
    /// run.
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
        // The section is sent only for a stopped guest: a destination without a monitor does not know this section.
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

/// Returns the section for a stopped guest. It contains the length of the state's name including its NUL, and the name.
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
