//! Callbacks of the relay's caller: progress out, QEMU's state in.

use std::time::Duration;

use hotlift_wire::settle::GuestActivity;

use crate::handover::QemuGuestState;

/// Ownership of the guest, as the source reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    /// The source has released it permanently: the destination may run it.
    Released,
    /// The source has taken it back.
    Kept,
    /// Not known yet.
    Unknown,
}

/// Type of [`Hooks::has_taken`].
pub type HasTaken<'a> = &'a (dyn Fn(Option<&str>) -> QemuGuestState + Sync);

/// Callbacks of the relay: progress out, QEMU's state in.
#[derive(Default, Clone, Copy)]
pub struct Hooks<'a> {
    /// Called once with the source's properties, before the connection to the destination.
    pub on_source: Option<&'a (dyn Fn(&SourceStream) + Sync)>,
    /// Receives progress reports, twice a second.
    pub on_progress: Option<&'a (dyn Fn(&RelayProgress) + Sync)>,
    /// Polled every few milliseconds, once all is loaded. With it the source may be silent in its set-up without limit; the
    /// caller can cancel. Without it, a source that closes its main channel has released the guest. A cancel at that moment
    /// looks the same.
    pub ownership: Option<&'a (dyn Fn() -> Ownership + Sync)>,
    /// Called once, before the first byte that allows the destination to run the guest. A caller that could end the destination
    /// by accident must prevent this here.
    pub on_commit: Option<&'a (dyn Fn() + Sync)>,
    /// Called after the order to run the guest: a QEMU confirms on the stream that it has the guest, but not that it runs. The
    /// argument is the guest's former run state (`RunState`) from the stream. Without this hook only the stream decides.
    pub has_taken: Option<HasTaken<'a>>,
    /// Called once the destination has confirmed that it has the guest, with the guest's state there.
    pub on_run: Option<&'a (dyn Fn(GuestActivity) + Sync)>,
}

/// Properties of a connected source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceStream {
    /// Count of its multifd channels; 0 for pages on the main channel, and for a stream that is passed through unread.
    pub channels: u8,
    /// Method of a QEMU's packets; "none" without channels, for a relay, and if no page has come in time.
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
