//! Limits of all waiting connections, by kind: their number, their time, and TLS or not.
//!
//! | connections | TLS | number | time |
//! |---|---|---|---|
//! | in a handshake, at any listener | always | `HANDSHAKES` | `handshake_slots.rs` |
//! | of a migration, at its destination or relay | by its options | `CHANNELS` | `handshake-timeout` |
//! | that received an outcome | as their migration | `CONFIRMATIONS` | `CONFIRMATION` |
//! | callers of `serve`, `hotlift-bench --serve` and an agent | by the options; an agent: always | `CALLERS` | `HELLO` |
//! | of this host's QEMUs, redirected to its agent | never: the agent adds it | `REDIRECTED` | `SILENCE` |
//! | between two listeners | as at the first listener | `QUEUED` | the migration's |
//! | that may be a QEMU's preempt channel | as their migration | `CANDIDATES` | the migration's |
//! | of a file server, before the name of a file | by the options | `VISITORS` | `OPENING` |
//! | that read a file | by the options | `READERS`, `READERS_OF_ONE` of one host | `READER_IDLE` without a request |
//! | that read an agent's metrics | never: on loopback | 1 | `METRICS` |
//!
//! A client of a monitor does not wait: it is served or refused immediately (`hotlift-qmp/src/server/clients.rs`).

use std::time::Duration;

/// Limits of waiting connections.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Number of waiting connections. A further one replaces the oldest.
    pub most: usize,
    /// Time that each may wait; [`Duration::MAX`] is no limit.
    pub max_wait: Duration,
}

/// Limit of concurrent handshakes. Further connections wait in the listener's queue, at no cost to this process.
pub(super) const HANDSHAKES: usize = 64;

/// Limit of a migration's unclassified connections, and of those kept for the next one. A source sends first bytes as soon as
/// it connects, so a further connection replaces the oldest silent one.
pub const CHANNELS: usize = 64;

/// Returns the limits of a migration's unclassified connections, with the time `max_wait` for each.
pub const fn channels(max_wait: Duration) -> Limits {
    let most = CHANNELS;
    Limits { most, max_wait }
}

/// Time for a peer to confirm an outcome.
const CONFIRMATION: Duration = Duration::from_secs(5);

/// Limits of connections that received an outcome and have not confirmed it.
pub const CONFIRMATIONS: Limits = Limits {
    most: 64,
    max_wait: CONFIRMATION,
};

/// Time for a caller to send its hello.
const HELLO: Duration = Duration::from_secs(10);

/// Limits of callers before their hello. A client sends it immediately.
pub(crate) const CALLERS: Limits = Limits {
    most: 64,
    max_wait: HELLO,
};

/// Time without a byte after which a local client counts as one that waits for the server to send first, as an NBD client
/// does: it then waits this much longer, once for each disk. A migration that is slower is passed through unread.
pub const SILENCE: Duration = Duration::from_secs(1);

/// Limits of an agent's unclassified connections: of migrations, and of libvirt's copies of disks.
pub const REDIRECTED: Limits = Limits {
    most: 1024,
    max_wait: SILENCE,
};

/// Limit of connections that wait for a migration to accept them: the most channels, a main channel, and some of the next
/// migration.
pub(super) const QUEUED: usize = 320;

/// Limits of possible preempt channels, for the whole migration. A QEMU makes one.
pub const CANDIDATES: Limits = Limits {
    most: 64,
    max_wait: Duration::MAX,
};

/// Time for a client to name a file.
const OPENING: Duration = Duration::from_secs(10);

/// Limits of a file server's connections before the name of a file.
pub const VISITORS: Limits = Limits {
    most: 256,
    max_wait: OPENING,
};

/// Limit of concurrent connections that read files: 32 visitors with all of theirs, which bounds buffers to 1 GiB.
pub const READERS: usize = 256;

/// The same for one visitor. A restore has one connection for each thread, five at most. A new one replaces none that
/// is reading.
pub const READERS_OF_ONE: usize = 8;

/// Idle time after which a reading connection is closed in favor of a new one. Its client reconnects when needed.
pub const READER_IDLE: Duration = Duration::from_secs(10);

/// Time for a metrics client, from its connection to its last byte. The next client waits until then.
pub const METRICS: Duration = Duration::from_secs(2);
