//! Throttles vCPUs, for auto-converge (slows the guest while it dirties pages too fast).
//!
//! As in QEMU, a vCPU runs for a slice of 10 ms, and then sleeps for the throttled share of the time: 10 ms at 50 %,
//! 990 ms at 99 %. A separate thread ends the slices, because a vCPU may run without exit for an unlimited time.

use std::io;
use std::sync::Mutex;
use std::thread::JoinHandle;

use crate::control::Control;
use hotlift_mem::lock;

/// The thread that ends the time slices of a guest's vCPUs; exists only while the guest is throttled.
#[derive(Default)]
pub(crate) struct Throttle(Mutex<Option<JoinHandle<()>>>);

impl Throttle {
    /// Makes the vCPUs of `control` sleep for `percent` of the time, from 1 to 99; 0 ends the throttle. `spawn` starts
    /// a thread that runs [`Control::end_slices`]. Returns false if the thread cannot be started.
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
                // This thread cannot panic.
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
