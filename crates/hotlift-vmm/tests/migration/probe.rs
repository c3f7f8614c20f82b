//! A wrapper of a built-in guest that records calls, and fails if a test demands it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hotlift::guest::{Announcer, DeviceState, Guest, GuestError};
use hotlift_mem::{DirtyBitmap, RamBlock};
use hotlift_vmm::BuiltinGuest;

/// Far longer than a running guest takes for a few writes.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Fetches the dirty log in place of the guest; the number counts from 1 in each migration.
pub type Sync = Box<
    dyn Fn(&dyn BuiltinGuest, u64, &DirtyBitmap) -> Result<u64, GuestError>
        + Send
        + std::marker::Sync,
>;

/// Reaction of a [`Probe`] to a command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Obeys {
    #[default]
    Yes,
    /// It refuses.
    No,
    /// It panics, as a guest or Hotlift with a bug does.
    Panics,
}

impl Obeys {
    fn check(self, what: &'static str) -> Result<(), GuestError> {
        match self {
            Self::Yes => Ok(()),
            Self::No => Err(GuestError::new(what, "it was configured to fail")),
            Self::Panics => panic!("{what}: it was configured to panic"),
        }
    }
}

/// Deviations of a [`Probe`] from its guest.
#[derive(Default)]
pub struct Quirks {
    pub machine: Option<&'static str>,
    pub uuid: Option<[u8; 16]>,
    pub ram: Option<Vec<Arc<RamBlock>>>,
    pub sync: Option<Sync>,
    pub load: Obeys,
    pub resume: Obeys,
    pub save: Obeys,
    pub cannot_throttle: bool,
    pub announced: Option<Sender<()>>,
}

/// A guest, its run state, and its quirks.
pub struct Probe {
    pub guest: Box<dyn BuiltinGuest>,
    pub quirks: Quirks,
    runs: AtomicBool,
    syncs: AtomicU64,
    throttles: Mutex<Vec<u8>>,
}

impl Probe {
    pub fn new(guest: Box<dyn BuiltinGuest>, quirks: Quirks) -> Self {
        Self {
            guest,
            quirks,
            runs: AtomicBool::new(false),
            syncs: AtomicU64::new(0),
            throttles: Mutex::default(),
        }
    }

    pub fn start(&self) {
        self.guest.start().unwrap();
        self.runs.store(true, Ordering::SeqCst);
    }

    /// Returns true if the last command was to run.
    pub fn runs(&self) -> bool {
        self.runs.load(Ordering::SeqCst)
    }

    /// Returns the requested throttles, one per call.
    pub fn throttles(&self) -> Vec<u8> {
        self.throttles.lock().unwrap().clone()
    }

    /// Waits until it has written `more` times.
    pub fn let_write(&self, more: u64) -> Result<(), String> {
        let_write(&*self.guest, more)
    }

    /// Pauses it, checks its memory, resumes it.
    pub fn check(&self) -> Result<(), String> {
        let text = |error: &dyn std::error::Error| format!("{error}, since {:?}", error.source());
        self.pause().map_err(|error| text(&error))?;
        self.guest.verify().map_err(|error| text(&error))?;
        self.resume().map_err(|error| text(&error))
    }
}

/// Waits until `guest` has written `more` times.
pub fn let_write(guest: &dyn BuiltinGuest, more: u64) -> Result<(), String> {
    let (goal, start) = (guest.writes() + more, Instant::now());
    while guest.writes() < goal {
        guest.health().map_err(|error| error.to_string())?;
        if start.elapsed() > TIMEOUT {
            return Err("it does not write".to_owned());
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Makes a migration with a downtime limit of 0 take exactly three rounds, each with pages to send: the dirty pages after the
/// second are reported only when the guest is paused.
pub fn three_rounds() -> Sync {
    Box::new(|guest, number, into| {
        if number < 3 {
            let_write(guest, 5).map_err(|reason| GuestError::new("write", reason))?;
        }
        match number {
            2 => Ok(0),
            _ => guest.sync_dirty_log(0, into),
        }
    })
}

/// Ensures that the first round leaves pages to send, more than fit a downtime limit of some ms, even if the guest gets little
/// CPU time.
pub fn busy_first_round() -> Sync {
    Box::new(|guest, number, into| {
        if number == 1 {
            let_write(guest, 64).map_err(|reason| GuestError::new("write", reason))?;
        }
        guest.sync_dirty_log(0, into)
    })
}

impl Guest for Probe {
    fn machine(&self) -> &str {
        self.quirks.machine.unwrap_or(self.guest.machine())
    }

    fn uuid(&self) -> [u8; 16] {
        self.quirks.uuid.unwrap_or(self.guest.uuid())
    }

    fn ram(&self) -> &[Arc<RamBlock>] {
        self.quirks.ram.as_deref().unwrap_or(self.guest.ram())
    }

    fn ram_is_fresh(&self) -> bool {
        self.guest.ram_is_fresh()
    }

    fn start_dirty_log(&self) -> Result<(), GuestError> {
        self.syncs.store(0, Ordering::SeqCst);
        self.guest.start_dirty_log()
    }

    fn stop_dirty_log(&self) -> Result<(), GuestError> {
        self.guest.stop_dirty_log()
    }

    fn sync_dirty_log(&self, block: usize, into: &DirtyBitmap) -> Result<u64, GuestError> {
        let number = self.syncs.fetch_add(1, Ordering::SeqCst) + 1;
        match &self.quirks.sync {
            Some(sync) => sync(&*self.guest, number, into),
            None => self.guest.sync_dirty_log(block, into),
        }
    }

    fn clear_dirty_log(&self, block: usize, first: usize, pages: usize) -> Result<(), GuestError> {
        self.guest.clear_dirty_log(block, first, pages)
    }

    fn pause(&self) -> Result<(), GuestError> {
        self.runs.store(false, Ordering::SeqCst);
        self.guest.pause()
    }

    fn resume(&self) -> Result<(), GuestError> {
        self.quirks.resume.check("resume")?;
        self.guest.resume()?;
        self.runs.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn throttle(&self, percent: u8) -> bool {
        self.throttles.lock().unwrap().push(percent);
        !self.quirks.cannot_throttle && self.guest.throttle(percent)
    }

    fn vcpu_threads(&self) -> Vec<u32> {
        self.guest.vcpu_threads()
    }

    fn announcer(&self) -> Option<Announcer> {
        let announced = self.quirks.announced.clone()?;
        Some(Box::new(move || {
            let _ = announced.send(());
        }))
    }

    fn save_devices(&self) -> Result<Vec<DeviceState>, GuestError> {
        self.quirks.save.check("save its devices")?;
        self.guest.save_devices()
    }

    fn load_devices(&self, devices: Vec<DeviceState>) -> Result<(), GuestError> {
        self.quirks.load.check("load its devices")?;
        self.guest.load_devices(devices)
    }
}
