//! The one table of the connections that wait at a door of Hotlift: how many, each for how long, and with TLS or not.
//!
//! | connections | TLS | number | time |
//! |---|---|---|---|
//! | in a handshake, at any door | always | `HANDSHAKES` | `places.rs` |
//! | of a migration, at its destination or relay | as its options say | `CHANNELS` | `handshake-timeout` |
//! | that were told an outcome | as their migration | `CONFIRMATIONS` | `CONFIRMATION` |
//! | callers of `serve`, `hotlift-bench --serve` and an agent | as the options say; an agent: always | `CALLERS` | `HELLO` |
//! | of this host's QEMUs, redirected to its agent | never: the agent adds it | `REDIRECTED` | `SILENCE` |
//! | from one door to the next | as at the first door | `QUEUED` | the migration's |
//! | that may be a QEMU's preempt channel | as their migration | `CANDIDATES` | the migration's |
//! | of a file server, before the name of a file | as the options say | `VISITORS` | `OPENING` |
//! | that read a file | as the options say | `READERS`, `READERS_OF_ONE` of one host | `READER_IDLE` unused |
//! | that read an agent's metrics | never: on loopback | 1 | `METRICS` |
//!
//! A client of a monitor waits for nothing: it is served or refused at once (`hotlift-qmp/src/server/clients.rs`).

use std::time::Duration;

/// Limits of connections that wait.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections that may wait. The one that has waited for longest leaves for one more.
    pub most: usize,
    /// How long each may wait; [`Duration::MAX`] is no limit.
    pub patience: Duration,
}

/// Handshakes at once. Others wait in the listener's queue, where they cost this process nothing.
pub(super) const HANDSHAKES: usize = 64;

/// Connections of a migration that have not sent enough to be classified, and of the next one that are kept for it. A source
/// sends first bytes as soon as a connection is made, so that the one that has been silent for longest is the one to go.
pub const CHANNELS: usize = 64;

/// The limits of the former, with this time for each.
pub const fn channels(patience: Duration) -> Limits {
    let most = CHANNELS;
    Limits { most, patience }
}

/// Time to confirm an outcome.
const CONFIRMATION: Duration = Duration::from_secs(5);

/// Connections that were told an outcome and have not confirmed it.
pub const CONFIRMATIONS: Limits = Limits {
    most: 64,
    patience: CONFIRMATION,
};

/// Time of a caller to send its hello.
const HELLO: Duration = Duration::from_secs(10);

/// Callers that have not sent their hello. A client sends it at once.
pub(crate) const CALLERS: Limits = Limits {
    most: 64,
    patience: HELLO,
};

/// How long a client of this host may send nothing before it counts as one that waits for the server. A migration that is
/// slower is passed through; an NBD client waits that much longer for its server, once for each disk.
pub const SILENCE: Duration = Duration::from_secs(1);

/// Connections that an agent cannot tell apart yet: of migrations, and of libvirt's copies of disks.
pub const REDIRECTED: Limits = Limits {
    most: 1024,
    patience: SILENCE,
};

/// Connections that were handed to a migration that has not accepted them: the most channels, a main channel, and some of
/// the next migration.
pub(super) const QUEUED: usize = 320;

/// Connections that may be a preempt channel, for as long as the migration takes. A QEMU makes one.
pub const CANDIDATES: Limits = Limits {
    most: 64,
    patience: Duration::MAX,
};

/// Time to name a file.
const OPENING: Duration = Duration::from_secs(10);

/// Connections of a file server that have not named a file.
pub const VISITORS: Limits = Limits {
    most: 256,
    patience: OPENING,
};

/// Connections that read files at once: 32 visitors with all of theirs, which 1 GiB of buffers bounds.
pub const READERS: usize = 256;

/// The same of one visitor. A restore has as many as threads, five at most; of several on one host those that read continue.
pub const READERS_OF_ONE: usize = 8;

/// A connection on which nothing was read for so long gives its place to one without: its client makes another when it needs
/// one.
pub const READER_IDLE: Duration = Duration::from_secs(10);

/// Time of a client of the metrics, from its connection to its last byte: the next one waits in the meantime.
pub const METRICS: Duration = Duration::from_secs(2);
