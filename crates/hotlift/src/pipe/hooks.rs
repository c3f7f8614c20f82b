//! What the caller of a relay wants to know, and knows better.

use std::time::Duration;

use hotlift_wire::settle::Doing;

use crate::handover::Taken;

/// Who owns the guest, as the source tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    /// The source has released it for good: the destination may run it.
    Released,
    /// The source has taken it back.
    Kept,
    /// Not known yet.
    Unknown,
}

/// See [`Hooks::has_taken`].
pub type HasTaken<'a> = &'a (dyn Fn(Option<&str>) -> Taken + Sync);

/// What the caller wants to know, and knows better.
#[derive(Default, Clone, Copy)]
pub struct Hooks<'a> {
    /// Told once what the source has, before the other side is connected to.
    pub on_source: Option<&'a (dyn Fn(&SourceStream) + Sync)>,
    /// Takes reports, twice a second.
    pub on_progress: Option<&'a (dyn Fn(&RelayProgress) + Sync)>,
    /// Asked every few milliseconds, once all is loaded. With it the source may be silent in its set-up for as long as
    /// it likes; whoever knows better cancels. Without it the source has released the guest when it
    /// closes its main channel, which a cancel in that moment looks like, too.
    pub ownership: Option<&'a (dyn Fn() -> Ownership + Sync)>,
    /// Called once, before the first byte goes out at which the destination may run the guest. Whoever
    /// could end the destination by accident makes sure here that it no longer does.
    pub on_commit: Option<&'a (dyn Fn() + Sync)>,
    /// Asked after the destination was told to run the guest: a QEMU says on the stream that it has the guest, and does not
    /// say whether it runs it. The argument is the run state (`RunState`) of the guest before, as the stream has it.
    /// Without this hook only the stream tells.
    pub has_taken: Option<HasTaken<'a>>,
    /// Called once the destination's word has come that it has the guest, with what the guest does there.
    pub on_taken: Option<&'a (dyn Fn(Doing) + Sync)>,
}

/// What a source that has connected has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceStream {
    /// Its multifd channels; 0 for pages on the main channel, and for a stream that is passed through unread.
    pub channels: u8,
    /// The method of a QEMU's packets; "none" without channels, of a relay, and where no page has come in time.
    pub method: &'static str,
}

/// A moment of a relay.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RelayProgress {
    /// Since the source's first connection.
    pub elapsed: Duration,
    /// Bytes read from all incoming channels.
    pub received_bytes: u64,
    /// Bytes written to all outgoing channels.
    pub sent_bytes: u64,
    /// Pages passed on with their content.
    pub normal_pages: u64,
    /// Pages passed on as zero.
    pub zero_pages: u64,
    /// Barriers so far.
    pub barriers: u64,
    /// Bytes of the VM's RAM blocks; 0 before they are known.
    pub total_bytes: u64,
}
