//! States and events of a migration, as QMP names them.

/// Status of a migration, with QEMU's names (`MigrationStatus`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The migration has not started.
    #[default]
    None,
    /// The source connects, and sends the list of RAM blocks.
    Setup,
    /// The source sends rounds of dirty pages while the guest runs.
    Active,
    /// With `pause-before-switchover`: the guest is paused until [`crate::Control::proceed`] is called.
    PreSwitchover,
    /// The guest is paused; its last pages and its devices are being sent.
    Device,
    /// The guest runs at the destination, and its missing pages follow.
    PostcopyActive,
    /// The guest runs at the destination, but the connection was lost. [`crate::Control::resume`] and
    /// [`crate::Control::recover`] replace it.
    PostcopyPaused,
    /// A new connection is replacing the lost connection of a postcopy.
    PostcopyRecover,
    /// The guest runs at the destination, and the migration is finished.
    Completed,
    /// The migration has failed; the source keeps its guest.
    Failed,
    /// A cancel was requested, and the migration is ending.
    Cancelling,
    /// The migration was cancelled; the guest runs at the source.
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

    /// Returns QEMU's name of the status.
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

/// Event of a migration. QMP has an event of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigrationEvent {
    /// The status has changed (`MIGRATION`).
    Status(Status),
    /// The dirty log was synced for the n-th time (`MIGRATION_PASS`). 1 is the start of the log, when all pages are dirty.
    Pass(u64),
    /// The guest was stopped for the switchover (`STOP`). In a relay: the stream shows that the source has stopped its guest.
    Stopped,
    /// The guest was resumed at the source, or started at the destination (`RESUME`).
    Resumed,
}
