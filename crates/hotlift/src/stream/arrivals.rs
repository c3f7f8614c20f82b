//! Collects the connections of one migration as they arrive: a main channel and multifd channels, in any order.
//!
//! All pending connections are watched concurrently. A source writes to main only after it has made all connections, so a
//! silent connection must not block the others. The caller determines which channels to expect, and when all have arrived.

use std::time::{Duration, Instant};

use hotlift_net::admission::{BROKEN, ConnectionClass};
use hotlift_net::transport::{Host, Stream};
use hotlift_wire::handshake::VERSION;
use hotlift_wire::multifd::InitialPacket;
use rustix::event::PollFlags;

use crate::error::{Channel, MigrationError};
use crate::stream::accept_loop::AcceptLoop;
use crate::stream::graceful_close;
use crate::stream::rejections::Rejections;

/// Callback that checks a new multifd channel: its opening packet, against the channels that have arrived before.
pub(crate) type Check<'a> =
    &'a dyn Fn(&InitialPacket, &[(InitialPacket, Stream)]) -> Result<(), MigrationError>;

/// Connections of one migration that have arrived so far.
pub(crate) struct Arrivals<'a> {
    pub accept_loop: AcceptLoop<'a>,
    rejections: Rejections,
    /// The main channel, and the time when it was accepted. `None` before it arrives, and after the caller has taken it.
    pub main: Option<(Stream, Instant)>,
    main_arrived: bool,
    /// Multifd channels in the order of their arrival.
    pub multifd: Vec<(InitialPacket, Stream)>,
    /// The channel whose opening packet caused the rejection of the source.
    refused: Option<Stream>,
    /// True if the source has identified itself as a Hotlift.
    pub is_hotlift: bool,
    /// Time at which the first connection was accepted; `None` before.
    pub since: Option<Instant>,
    /// Host of the first identified connection. All later connections must be from this host.
    host: Option<Host>,
    /// Count of expected multifd channels; `None` if the source decides the count.
    channels: Option<u8>,
}

impl<'a> Arrivals<'a> {
    /// Creates the empty set for a migration with `channels` multifd channels. If `channels` is known, also watches identified
    /// connections for their end.
    pub(crate) fn new(
        accept_loop: AcceptLoop<'a>,
        channels: Option<u8>,
        rejections: &Rejections,
    ) -> Self {
        Self {
            accept_loop,
            rejections: rejections.clone(),
            main: None,
            main_arrived: false,
            multifd: Vec::new(),
            refused: None,
            is_hotlift: false,
            since: None,
            host: None,
            channels,
        }
    }

    /// Waits, for at most `wait`, for an event, and processes it.
    ///
    /// # Errors
    /// The errors:
    ///
    /// - the error of `check`
    /// - [`MigrationError::Mismatch`] for a Hotlift of another version
    /// - [`MigrationError::Closed`] if a watched connection has ended
    pub(crate) fn step(&mut self, wait: Duration, check: Check<'_>) -> Result<(), MigrationError> {
        let watched = named(self.main.as_ref(), &self.multifd).filter(|_| self.channels.is_some());
        let streams: Vec<_> = watched.map(|stream| (stream, PollFlags::RDHUP)).collect();
        let (arrivals, ended) = self
            .accept_loop
            .step(wait, &streams, None)
            .map_err(MigrationError::opening)?;
        if ended && self.waits_for_channels() {
            // Must come before the new arrivals: one of them may be the main channel of the next migration.
            self.rejections.reject("a main channel without a migration");
            (self.main, self.main_arrived, self.since) = (None, false, None);
            self.host = None;
        } else if ended {
            return Err(MigrationError::main_closed());
        }
        for arrival in arrivals {
            if !self.admits(&arrival.stream) {
                continue;
            }
            self.since.get_or_insert(arrival.since);
            match arrival.head() {
                // One of the two main channels is left over from a failed migration.
                ConnectionClass::Main | ConnectionClass::Resumed if self.main_arrived => {
                    self.rejections.reject("a second main channel");
                }
                ConnectionClass::Main | ConnectionClass::Resumed => {
                    self.main_arrived = true;
                    self.host.get_or_insert_with(|| arrival.stream.host());
                    self.main = Some((arrival.stream, arrival.since));
                }
                ConnectionClass::OtherVersion(version) => {
                    // An unread opening would cause a reset, which loses the reply.
                    arrival.take_opening();
                    self.is_hotlift = true;
                    self.refused = Some(arrival.stream);
                    return Err(MigrationError::other_version(
                        version.into(),
                        VERSION.into(),
                    ));
                }
                ConnectionClass::Channel(packet) if arrival.take_opening() => {
                    if self.multifd.is_empty() {
                        self.is_hotlift = packet.hello.is_some();
                    }
                    if let Err(error) = check(&packet, &self.multifd) {
                        self.refused = Some(arrival.stream);
                        return Err(error);
                    }
                    self.host.get_or_insert_with(|| arrival.stream.host());
                    self.multifd.push((packet, arrival.stream));
                }
                // No token is possible before the migration has an id.
                _ => self.rejections.reject(BROKEN),
            }
        }
        Ok(())
    }

    /// Returns true if `stream` is from the migration's host, or if that host is not known yet. If false, counts a rejection,
    /// and the caller must drop `stream`.
    pub(crate) fn admits(&self, stream: &Stream) -> bool {
        let is_theirs = self.is_of_their_host(stream);
        if !is_theirs {
            self.rejections
                .reject("a connection from another host than the others");
        }
        is_theirs
    }

    /// Returns true if `stream` is from the migration's host and from the same origin as `main`. If false, counts a rejection,
    /// and the caller must drop `stream`.
    pub(crate) fn admits_with(&self, main: &Stream, stream: &Stream) -> bool {
        if !self.admits(stream) {
            return false;
        }
        let is_beside = stream.has_same_peer_host(main);
        if !is_beside {
            let why = "a connection from another host than the main channel";
            self.rejections.reject(why);
        }
        is_beside
    }

    /// Returns true if `stream` is from the host of the migration, or if that host is not known yet.
    pub(crate) fn is_of_their_host(&self, stream: &Stream) -> bool {
        let host = self.host.as_ref();
        host.is_none_or(|host| host.is_at_the_end_of(stream))
    }

    /// Returns a text that lists the missing channels, of `channels` expected multifd channels.
    pub(crate) fn missing(&self, channels: u8) -> String {
        let has_arrived = |id: &u8| self.multifd.iter().any(|(packet, _)| packet.id == *id);
        let missing: Vec<_> = (0..channels)
            .filter(|id| !has_arrived(id))
            .map(|id| id.to_string())
            .collect();
        match missing.split_last() {
            None => "no multifd channel".to_owned(),
            Some((id, [])) => format!("multifd channel {id} of {channels}"),
            Some((last, others)) => {
                let others = others.join(", ");
                format!("multifd channels {others} and {last} of {channels}")
            }
        }
    }

    /// Returns true if multifd channels are expected and none has arrived.
    pub(crate) fn waits_for_channels(&self) -> bool {
        self.multifd.is_empty() && self.channels.is_some_and(|channels| channels > 0)
    }

    /// Sends a Hotlift source the reason of its rejection, on all connections. Sends nothing to a QEMU, which would not
    /// understand it.
    pub(crate) fn refuse(&self, error: &MigrationError) {
        if self.is_hotlift {
            let named = named(self.main.as_ref(), &self.multifd);
            let streams: Vec<_> = named.chain(&self.refused).collect();
            graceful_close::refuse(&streams, error);
        }
    }
}

/// Iterates over all identified connections.
fn named<'s>(
    main: Option<&'s (Stream, Instant)>,
    multifd: &'s [(InitialPacket, Stream)],
) -> impl Iterator<Item = &'s Stream> {
    let main = main.map(|(stream, _)| stream);
    main.into_iter()
        .chain(multifd.iter().map(|(_, stream)| stream))
}

/// Returns the error for a channel that belongs to another migration or to another source.
pub(crate) fn stray(packet: &InitialPacket, what: &str) -> MigrationError {
    MigrationError::opened_with(Channel::Multifd(packet.id), what)
}
