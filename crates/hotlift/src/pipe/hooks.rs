//! Callbacks of the relay's caller. They report progress to the caller, and return QEMU's state to the relay.

use std::time::Duration;

use hotlift_wire::settle::GuestActivity;

use crate::handover::QemuGuestState;

/// Ownership of the guest, as QEMU at the source reports it over QMP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    /// The source has permanently released the guest: the destination may run it.
    Released,
    /// The source has resumed the guest, or keeps it.
    Kept,
    /// The source has not decided yet.
    Unknown,
}

/// Type of [`Hooks::has_taken`].
pub type HasTaken<'a> = &'a (dyn Fn(Option<&str>) -> QemuGuestState + Sync);

/// Callbacks of the relay's caller.
#[derive(Default, Clone, Copy)]
pub struct Hooks<'a> {
    /// Called once with the source's properties, before the relay connects to the destination.
    pub on_source: Option<&'a (dyn Fn(&SourceStream) + Sync)>,
    /// Called with the progress, twice a second.
    pub on_progress: Option<&'a (dyn Fn(&RelayProgress) + Sync)>,
    /// Returns the ownership of the guest. Polled every few milliseconds once the destination has loaded everything.
    ///
    /// With this hook, the source's set-up has no silence timeout, because the caller can cancel. Without this hook, a source
    /// that closes its main channel counts as having released the guest; a cancel at that moment looks the same.
    pub ownership: Option<&'a (dyn Fn() -> Ownership + Sync)>,
    /// Called once, before the first byte that allows the destination to run the guest. A caller that could stop the
    /// destination by accident must prevent this from now on.
    pub on_commit: Option<&'a (dyn Fn() + Sync)>,
    /// Returns the state of the guest at the destination, after the relay has told a QEMU to run it. QEMU's stream confirms
    /// only that QEMU has the guest, not that the guest runs. The argument is the guest's run state at the source (`RunState`),
    /// from the stream. Without this hook only the stream decides.
    pub has_taken: Option<HasTaken<'a>>,
    /// Called once the destination has confirmed that it has the guest. The argument is the guest's state at the destination.
    pub on_run: Option<&'a (dyn Fn(GuestActivity) + Sync)>,
}

/// Properties of a connected source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceStream {
    /// Count of the source's multifd channels; 0 if its pages are on the main channel, or if the stream is passed through
    /// unread.
    pub channels: u8,
    /// Compression method of a QEMU's packets. "none" in three cases: without channels, for a relay, and if no page arrived in
    /// time.
    pub method: &'static str,
}

/// Progress snapshot of a relay.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RelayProgress {
    /// Time since the source's first connection.
    pub elapsed: Duration,
    /// Bytes read from all incoming channels.
    pub received_bytes: u64,
    /// Bytes written to all outgoing channels.
    pub sent_bytes: u64,
    /// Pages forwarded with their content.
    pub normal_pages: u64,
    /// Pages forwarded as zero.
    pub zero_pages: u64,
    /// Count of barriers so far.
    pub barriers: u64,
    /// Bytes of the VM's RAM blocks; 0 before they are known.
    pub total_bytes: u64,
}
