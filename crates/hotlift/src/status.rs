//! States and events of a migration, as QMP names them.

/// State of a migration; QEMU's names (`MigrationStatus`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Not started.
    #[default]
    None,
    /// Connecting and sending the list of RAM blocks.
    Setup,
    /// Sending rounds while the guest runs.
    Active,
    /// The guest is paused until [`crate::Control::proceed`], with `pause-before-switchover`.
    PreSwitchover,
    /// The guest is paused; the rest of its state is being sent.
    Device,
    /// The guest runs at the destination, and receives its pages on request.
    PostcopyActive,
    /// As `PostcopyActive`, with the connection lost: see [`crate::Control::resume`] and [`crate::Control::recover`].
    PostcopyPaused,
    /// Another connection replaces the one that was lost.
    PostcopyRecover,
    /// The guest runs on the destination.
    Completed,
    /// It failed; the guest is given back to the source.
    Failed,
    /// A cancel was requested.
    Cancelling,
    /// It was cancelled; the guest runs on the source.
    Cancelled,
}

impl Status {
    /// All states.
    pub const ALL: [Self; 12] = [
        Self::None,
        Self::Setup,
        Self::Active,
        Self::PreSwitchover,
        Self::Device,
        Self::PostcopyActive,
        Self::PostcopyPaused,
        Self::PostcopyRecover,
        Self::Completed,
        Self::Failed,
        Self::Cancelling,
        Self::Cancelled,
    ];

    /// Returns QEMU's name of the state.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Setup => "setup",
            Self::Active => "active",
            Self::PreSwitchover => "pre-switchover",
            Self::Device => "device",
            Self::PostcopyActive => "postcopy-active",
            Self::PostcopyPaused => "postcopy-paused",
            Self::PostcopyRecover => "postcopy-recover",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Event of a migration, as it happens; QMP has the same events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigrationEvent {
    /// The state has changed (`MIGRATION`).
    Status(Status),
    /// The dirty log was read for the n-th time; 1 is its start, when all pages count as dirty (`MIGRATION_PASS`).
    Pass(u64),
    /// The guest was stopped for the switchover (`STOP`).
    Stopped,
    /// The guest was resumed at the source, or started at the destination (`RESUME`).
    Resumed,
}
