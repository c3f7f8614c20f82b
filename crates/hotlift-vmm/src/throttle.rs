//! Taking time away from vCPUs, for auto-converge.
//!
//! As in QEMU a vCPU runs for a slice of 10 ms and then sleeps for so long that its share of the time is
//! what is left to it: 10 ms at 50 %, 990 ms at 99 %. A thread of its own ends the slices: what a vCPU
//! does between two exits has no end that it could wait for.

use std::io;
use std::sync::Mutex;
use std::thread::JoinHandle;

use crate::control::Control;
use hotlift_mem::lock;

/// Ends the slices of a guest's vCPUs while there are any.
#[derive(Default)]
pub(crate) struct Throttle(Mutex<Option<JoinHandle<()>>>);

impl Throttle {
    /// Takes `percent` of their time (up to 99) from the vCPUs that `control` commands; 0 ends it.
    /// `spawn` starts a thread that runs [`Control::end_slices`]. False if it cannot be started.
    pub fn set(
        &self,
        percent: u8,
        control: &Control,
        spawn: impl FnOnce() -> io::Result<JoinHandle<()>>,
    ) -> bool {
        let mut thread = lock(&self.0);
        control.throttle(percent);
        match (percent, thread.take()) {
            (0, Some(ended)) => {
                // It does nothing that could panic.
                let _ = ended.join();
            }
            (0, None) => {}
            (_, Some(running)) => *thread = Some(running),
            (_, None) => *thread = spawn().ok(),
        }
        let can = percent == 0 || thread.is_some();
        if !can {
            control.throttle(0);
        }
        can
    }
}
