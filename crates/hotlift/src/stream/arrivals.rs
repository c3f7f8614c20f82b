//! The connections of one migration, as they arrive: a main channel and multifd channels, in any order.
//!
//! All that have not said yet what they are are watched at once: a source writes to main only after all its
//! connections are made, and one that is silent must not keep the others waiting. Which channels there are to be, and
//! when all have come, is the matter of whoever waits.

use std::time::{Duration, Instant};

use hotlift_net::admission::{BROKEN, Head};
use hotlift_net::transport::{Host, Stream};
use hotlift_wire::handshake::VERSION;
use hotlift_wire::multifd::InitialPacket;
use rustix::event::PollFlags;

use crate::error::{Channel, MigrationError};
use crate::stream::door::Door;
use crate::stream::graceful_close;
use crate::stream::strangers::Strangers;

/// Whether a multifd channel with this opening may join those that have come.
pub(crate) type Check<'a> =
    &'a dyn Fn(&InitialPacket, &[(InitialPacket, Stream)]) -> Result<(), MigrationError>;

/// Connections that have arrived.
pub(crate) struct Arrivals<'a> {
    pub door: Door<'a>,
    strangers: Strangers,
    /// The main channel, until it is taken, and when it was accepted.
    pub main: Option<(Stream, Instant)>,
    main_came: bool,
    /// In the order of their arrival.
    pub multifd: Vec<(InitialPacket, Stream)>,
    /// The channel that made this side refuse the source.
    refused: Option<Stream>,
    /// The source has shown that it is a Hotlift.
    pub is_hotlift: bool,
    /// When the first was accepted.
    pub since: Option<Instant>,
    /// Whose they are: the first that has said what it is decides, also when main is taken.
    host: Option<Host>,
    /// Multifd channels that there are to be; `None` if the source decides it.
    channels: Option<u8>,
}

impl<'a> Arrivals<'a> {
    /// Those of a migration with so many multifd channels, if that is known: then connections that have said what they
    /// are are watched.
    pub(crate) fn new(door: Door<'a>, channels: Option<u8>, strangers: &Strangers) -> Self {
        Self {
            door,
            strangers: strangers.clone(),
            main: None,
            main_came: false,
            multifd: Vec::new(),
            refused: None,
            is_hotlift: false,
            since: None,
            host: None,
            channels,
        }
    }

    /// Waits for up to `wait` for something to happen, and takes it in.
    ///
    /// # Errors
    /// What `check` says of a channel; [`MigrationError::Mismatch`] for a Hotlift of another version;
    /// [`MigrationError::Closed`] if a connection that is watched has ended.
    pub(crate) fn step(&mut self, wait: Duration, check: Check<'_>) -> Result<(), MigrationError> {
        let watched = named(self.main.as_ref(), &self.multifd).filter(|_| self.channels.is_some());
        let streams: Vec<_> = watched.map(|stream| (stream, PollFlags::RDHUP)).collect();
        let (arrivals, ended) = self
            .door
            .step(wait, &streams, None)
            .map_err(MigrationError::opening)?;
        if ended && self.waits_for_channels() {
            // Before what has come is looked at: it may be the main channel of the next migration.
            self.strangers
                .turn_away("a main channel without a migration");
            (self.main, self.main_came, self.since) = (None, false, None);
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
                // One of them was left by a migration that failed before.
                Head::Main | Head::Resumed if self.main_came => {
                    self.strangers.turn_away("a second main channel");
                }
                Head::Main | Head::Resumed => {
                    self.main_came = true;
                    self.host.get_or_insert_with(|| arrival.stream.host());
                    self.main = Some((arrival.stream, arrival.since));
                }
                Head::OtherVersion(version) => {
                    // Taken off, so that what is said to it does not end in a reset.
                    arrival.take_opening();
                    self.is_hotlift = true;
                    self.refused = Some(arrival.stream);
                    return Err(MigrationError::other_version(
                        version.into(),
                        VERSION.into(),
                    ));
                }
                Head::Channel(packet) if arrival.take_opening() => {
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
                // No token is that of a migration without a name yet.
                _ => self.strangers.turn_away(BROKEN),
            }
        }
        Ok(())
    }

    /// Whether `stream` is of the host that the others are of. If not, it is to be dropped, and counts as turned away.
    pub(crate) fn admits(&self, stream: &Stream) -> bool {
        let is_theirs = self.is_of_their_host(stream);
        if !is_theirs {
            self.strangers
                .turn_away("a connection from another host than the others");
        }
        is_theirs
    }

    /// The same, by everything that tells where `main` came from: of connections that say nothing of themselves.
    pub(crate) fn admits_beside(&self, main: &Stream, stream: &Stream) -> bool {
        if !self.admits(stream) {
            return false;
        }
        let is_beside = stream.is_from_where(main);
        if !is_beside {
            let why = "a connection from elsewhere than the main channel";
            self.strangers.turn_away(why);
        }
        is_beside
    }

    /// Whether `stream` may be one of the migration, by the host that it is of.
    pub(crate) fn is_of_their_host(&self, stream: &Stream) -> bool {
        let host = self.host.as_ref();
        host.is_none_or(|host| host.is_at_the_end_of(stream))
    }

    /// Names those of `channels` multifd channels that have not come.
    pub(crate) fn missing(&self, channels: u8) -> String {
        let has_come = |id: &u8| self.multifd.iter().any(|(packet, _)| packet.id == *id);
        let missing: Vec<_> = (0..channels)
            .filter(|id| !has_come(id))
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

    /// Whether there are to be multifd channels, and none has come.
    pub(crate) fn waits_for_channels(&self) -> bool {
        self.multifd.is_empty() && self.channels.is_some_and(|channels| channels > 0)
    }

    /// Tells a Hotlift, on whatever it has opened, why it is refused. A QEMU would not understand.
    pub(crate) fn refuse(&self, error: &MigrationError) {
        if self.is_hotlift {
            let named = named(self.main.as_ref(), &self.multifd);
            let streams: Vec<_> = named.chain(&self.refused).collect();
            graceful_close::refuse(&streams, error);
        }
    }
}

/// All that have said what they are.
fn named<'s>(
    main: Option<&'s (Stream, Instant)>,
    multifd: &'s [(InitialPacket, Stream)],
) -> impl Iterator<Item = &'s Stream> {
    let main = main.map(|(stream, _)| stream);
    main.into_iter()
        .chain(multifd.iter().map(|(_, stream)| stream))
}

/// A channel of another migration, or another source.
pub(crate) fn stray(packet: &InitialPacket, what: &str) -> MigrationError {
    MigrationError::opened_with(Channel::Multifd(packet.id), what)
}
