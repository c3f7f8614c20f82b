//! Throttle of vCPUs, for auto-converge.
//!
//! As in QEMU, a vCPU runs for a slice of 10 ms and then sleeps for the throttled share of the time: 10 ms at 50 %, 990 ms at
//! 99 %. A separate thread ends the slices: the time between two exits of a vCPU is unlimited.

use std::io;
use std::sync::Mutex;
use std::thread::JoinHandle;

use crate::control::Control;
use hotlift_mem::lock;

/// Thread that ends the slices of a guest's vCPUs, if throttled.
#[derive(Default)]
pub(crate) struct Throttle(Mutex<Option<JoinHandle<()>>>);

impl Throttle {
    /// Takes `percent` of their time (up to 99) from the vCPUs of `control`; 0 ends it. `spawn` starts a thread that runs
    /// [`Control::end_slices`]. Returns false if that fails.
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
                // The thread cannot panic.
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
