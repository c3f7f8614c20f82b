//! Limits of all pending connections, by kind: their number, their time, and if TLS is required.
//!
//! | connections | TLS | number | time |
//! |---|---|---|---|
//! | in a handshake, at any listener | always | `HANDSHAKES` | `handshake_slots.rs` |
//! | of a migration, at its destination or relay | by its options | `CHANNELS` | `handshake-timeout` |
//! | that received the outcome of a migration | as their migration | `CONFIRMATIONS` | `CONFIRMATION` |
//! | clients of `serve`, `hotlift-bench --serve` and an agent | by the options; an agent: always | `CALLERS` | `HELLO` |
//! | of this host's QEMUs, redirected to the agent of this host | never: the agent adds it | `REDIRECTED` | `SILENCE` |
//! | in the queue between two listeners | as at the first listener | `QUEUED` | the migration's |
//! | that may be the preempt channel of a QEMU | as their migration | `CANDIDATES` | the migration's |
//! | of a file server, before the name of a file | by the options | `VISITORS` | `OPENING` |
//! | that read a file | by the options | `READERS`; `READERS_OF_ONE` for each client | `READER_IDLE` without a request |
//! | that read an agent's metrics | never: on loopback | 1 | `METRICS` |
//!
//! A client of a monitor does not wait: it is served or refused immediately (`hotlift-qmp/src/server/clients.rs`).

use std::time::Duration;

/// Limits of one kind of pending connections.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of pending connections. One more replaces the oldest.
    pub most: usize,
    /// Maximum time for which each connection may be pending; [`Duration::MAX`] means no limit.
    pub max_wait: Duration,
}

/// Maximum number of concurrent handshakes. More connections wait in the accept queue of the kernel, at no cost to this
/// process.
pub(super) const HANDSHAKES: usize = 64;

/// Maximum number of a migration's unclassified connections, and of connections kept for the next migration. A source sends its
/// first bytes as soon as it connects. So one more connection replaces the oldest silent one.
pub const CHANNELS: usize = 64;

/// Returns the limits of a migration's unclassified connections, each of which may be pending for `max_wait`.
pub const fn channels(max_wait: Duration) -> Limits {
    let most = CHANNELS;
    Limits { most, max_wait }
}

/// Maximum time until a peer confirms that the outcome of a migration has arrived.
const CONFIRMATION: Duration = Duration::from_secs(5);

/// Limits of connections that received the outcome of a migration, until the peer confirms this.
pub const CONFIRMATIONS: Limits = Limits {
    most: 64,
    max_wait: CONFIRMATION,
};

/// Maximum time for a client to send its hello.
const HELLO: Duration = Duration::from_secs(10);

/// Limits of clients that have not sent their hello. A client sends its hello as soon as it connects.
pub(crate) const CALLERS: Limits = Limits {
    most: 64,
    max_wait: HELLO,
};

/// Time without a byte from a local client, after which the agent assumes that the client waits for the server to send first.
/// An NBD client does so, and waits this long once for each disk. A migration whose first byte comes later is forwarded unread.
pub const SILENCE: Duration = Duration::from_secs(1);

/// Limits of an agent's unclassified connections: those of migrations, and of libvirt's copies of disks.
pub const REDIRECTED: Limits = Limits {
    most: 1024,
    max_wait: SILENCE,
};

/// Maximum number of connections that wait in a queue for a migration. The number suffices for the maximum number of channels,
/// a main channel, and some connections of the next migration.
pub(super) const QUEUED: usize = 320;

/// Limits of connections that may be a preempt channel, during the whole migration. A QEMU opens only one such connection.
pub const CANDIDATES: Limits = Limits {
    most: 64,
    max_wait: Duration::MAX,
};

/// Maximum time for a client to send the name of a file.
const OPENING: Duration = Duration::from_secs(10);

/// Limits of a file server's connections that have not sent the name of a file.
pub const VISITORS: Limits = Limits {
    most: 256,
    max_wait: OPENING,
};

/// Maximum number of concurrent connections that read files: 32 clients with 8 connections each. This also limits the buffers
/// to 1 GiB.
pub const READERS: usize = 256;

/// Maximum number of connections that read files for one client. A restore opens one for each of its threads, at most five. A
/// new connection does not replace one that is reading.
pub const READERS_OF_ONE: usize = 8;

/// Time without a request after which a connection may be closed for a new one. The client reconnects before its next request.
pub const READER_IDLE: Duration = Duration::from_secs(10);

/// Maximum time of a connection that reads metrics, from connect to the last byte. The next client waits during this time.
pub const METRICS: Duration = Duration::from_secs(2);
