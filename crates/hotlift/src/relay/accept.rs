//! Accepts a source's connections and puts them into their places.
//!
//! A QEMU never says how many multifd channels it has. It does connect all of them before it writes
//! its first multifd flush on main (QEMU 9 and later before its first byte), so that once that was read,
//! the channels are those that have connected. A relay says the number in each channel's opening.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use hotlift_wire::handshake::VERSION;
use hotlift_wire::multifd::{Hello, InitialPacket};

use super::session::Call;
use super::{Incoming, RelaySettings, closed};
use crate::control::Control;
use crate::door::{Arrival, BROKEN, Door, Kind};
use crate::error::{Channel, MigrationError};
use crate::stream::main_recv::Waiting;
use crate::transport::{Listener, Stream, wait_readable};

/// How often a wait for connections looks whether it was called off.
const TICK: Duration = Duration::from_millis(100);

/// How long the last channel of a source may be behind its first multifd flush on main, before which it was
/// connected: on one host nothing but this process's own delay.
const SETTLE: Duration = Duration::from_millis(50);

/// The same on a network, where the last segment of a handshake may be lost: TCP sends it again after
/// 200 ms at the earliest.
const SETTLE_TCP: Duration = Duration::from_secs(1);

/// How long a connection that has said nothing may turn out to be a channel of a source that does not say how
/// many it has. The opening of a channel is sent as soon as it is made.
const NEWCOMER: Duration = Duration::from_secs(2);

/// Connections that are looked at for a late channel at most.
const KNOCKS: usize = 256;

/// Connections that have arrived.
pub(super) struct Arrivals<'a> {
    door: Door<'a>,
    control: Control,
    main: Option<Stream>,
    /// Main has come; it may have been taken.
    main_came: bool,
    multifd: Vec<(InitialPacket, Stream)>,
    max_channels: u8,
    /// When the first was accepted.
    pub since: Instant,
}

/// The multifd channels of a source.
pub(super) struct Channels {
    /// By channel id.
    pub streams: Vec<Stream>,
    pub uuid: [u8; 16],
    /// What a relay has said of itself.
    pub hello: Option<Hello>,
}

impl<'a> Arrivals<'a> {
    pub(super) fn new(incoming: Incoming<'a>, settings: &RelaySettings, control: &Control) -> Self {
        let (listener, made) = match incoming {
            Incoming::Listener(listener) => (Some(listener), Vec::new()),
            Incoming::Connections(streams) => (None, streams),
            // Played by then: its connections are made.
            Incoming::File { .. } => (None, Vec::new()),
        };
        let patience = settings.outgoing.handshake_timeout;
        Self {
            door: Door::new(listener, made, settings.incoming_token, patience, control),
            control: control.clone(),
            main: None,
            main_came: false,
            multifd: Vec::new(),
            max_channels: settings.outgoing.max_channels,
            since: Instant::now(),
        }
    }

    /// Waits for the main channel: for the first connection as long as it takes, then for `timeout`.
    pub(super) fn main(
        &mut self,
        timeout: Duration,
        call: &Call<'_>,
    ) -> Result<Stream, MigrationError> {
        let mut deadline = None;
        loop {
            if let Some(main) = self.main.take() {
                return Ok(main);
            }
            self.step(TICK, call)?;
            if self.main.is_none() && self.door.is_empty() && self.door.listener().is_none() {
                return Err(closed());
            }
            if self.multifd.is_empty() && self.main.is_none() {
                // Whoever is here only may be a source.
                deadline = None;
                continue;
            }
            if Instant::now() > *deadline.get_or_insert_with(|| Instant::now() + timeout) {
                return Err(MigrationError::Timeout {
                    waiting_for: "the source's main channel (a stream that begins with \"QEVM\")"
                        .to_owned(),
                    waited: timeout,
                });
            }
        }
    }

    /// The multifd channels, once the source has written the first multifd flush on main. `expected` is false
    /// if it may have none.
    pub(super) fn channels(
        &mut self,
        main: &Stream,
        expected: bool,
        timeout: Duration,
        call: &Call<'_>,
    ) -> Result<Option<Channels>, MigrationError> {
        let deadline = Instant::now() + timeout;
        let mut quiet_since = Instant::now();
        loop {
            let before = self.multifd.len();
            self.step(SETTLE / 5, call)?;
            if self.multifd.len() != before {
                quiet_since = Instant::now();
            }
            let listener = self.door.listener();
            let settle = match listener {
                None => Duration::ZERO,
                Some(listener) if listener.is_local() => SETTLE,
                Some(_) => SETTLE_TCP,
            };
            let newcomer = match listener {
                None => !self.door.is_empty(),
                Some(_) => self.door.has_newcomer(NEWCOMER),
            };
            let settled = quiet_since.elapsed() >= settle && !newcomer;
            if self.is_complete(settled, expected) {
                return self.take_channels(main);
            }
            let source_has_gone = settled && main.is_hung_up();
            if !newcomer && (source_has_gone || listener.is_none()) {
                return Err(closed());
            }
            if Instant::now() > deadline {
                return Err(MigrationError::Timeout {
                    waiting_for: format!(
                        "the rest of the source's multifd channels ({} have come)",
                        self.multifd.len()
                    ),
                    waited: timeout,
                });
            }
        }
    }

    fn is_complete(&self, settled: bool, expected: bool) -> bool {
        let count = self.multifd.len();
        let said = self.multifd.first().and_then(|(packet, _)| packet.hello);
        match said {
            Some(hello) => count >= usize::from(hello.channels),
            // Ids count from 0, so that a gap shows one that is missing. (There may be more than one
            // with an id: stale ones.)
            None => {
                let highest = self.multifd.iter().map(|(packet, _)| packet.id).max();
                settled && highest.map_or(!expected, |highest| usize::from(highest) < count)
            }
        }
    }

    fn take_channels(&mut self, main: &Stream) -> Result<Option<Channels>, MigrationError> {
        let mut arrived = std::mem::take(&mut self.multifd);
        if self.door.listener().is_some() {
            drop_stale(&mut arrived, main)?;
        }
        arrived.sort_by_key(|(packet, _)| packet.id);
        let Some((first, _)) = arrived.first() else {
            return Ok(None);
        };
        let (uuid, hello) = (first.uuid, first.hello);
        for (expected, (packet, _)) in arrived.iter().enumerate() {
            if usize::from(packet.id) != expected || packet.uuid != uuid || packet.hello != hello {
                return Err(MigrationError::opened_with(
                    Channel::Multifd(packet.id),
                    "a second channel with this id, or one of another VM",
                ));
            }
        }
        Ok(Some(Channels {
            streams: arrived.into_iter().map(|(_, stream)| stream).collect(),
            uuid,
            hello,
        }))
    }

    /// Waits for up to `wait` for something to happen, and takes it in.
    fn step(&mut self, wait: Duration, call: &Call<'_>) -> Result<(), MigrationError> {
        call.check()?;
        let (arrivals, _) = self
            .door
            .step(wait, &[], None)
            .map_err(MigrationError::opening)?;
        for arrival in arrivals {
            match arrival.kind {
                Kind::Main if self.main_came => {
                    // One that has gone was left by a migration which failed before.
                    self.control.turn_away("a second main channel");
                }
                Kind::Main => {
                    self.main_came = true;
                    self.since = arrival.since;
                    self.main = Some(arrival.stream);
                }
                Kind::OtherVersion(version) => {
                    return Err(MigrationError::other_version(
                        version.into(),
                        VERSION.into(),
                    ));
                }
                Kind::Channel(_) if !arrival.take_opening() => self.control.turn_away(BROKEN),
                Kind::Channel(packet) => {
                    self.check_number(&packet)?;
                    self.multifd.push((packet, arrival.stream));
                }
            }
        }
        Ok(())
    }

    /// Whether there may be as many channels as this one says.
    fn check_number(&self, packet: &InitialPacket) -> Result<(), MigrationError> {
        // Ids count from 0, and a relay says how many there will be.
        let said = packet.hello.map_or(0, |hello| hello.channels);
        if packet.id >= self.max_channels || said > self.max_channels {
            return Err(MigrationError::opened_with(
                Channel::Multifd(packet.id),
                &format!(
                    "more multifd channels than max-channels={} lets in (raise --max-channels), ",
                    self.max_channels
                ),
            ));
        }
        Ok(())
    }

    /// A further connection whose first bytes are nobody's business, within [`TICK`].
    pub(super) fn another(&mut self) -> Result<Option<Stream>, MigrationError> {
        if let Some(stream) = self.door.take_any() {
            return Ok(Some(stream));
        }
        match self.door.listener() {
            Some(listener) => listener.accept(TICK).map_err(MigrationError::opening),
            None => {
                std::thread::sleep(TICK);
                Ok(None)
            }
        }
    }

    /// True if another multifd channel of the VM waits to be accepted, behind the `count` that came: one
    /// whose connection was not there yet when they were counted.
    pub(super) fn late_channel(&mut self, uuid: Option<[u8; 16]>, count: usize) -> bool {
        for _ in 0..KNOCKS {
            let Ok((arrivals, _)) = self.door.step(Duration::ZERO, &[], None) else {
                return false;
            };
            let is_late = |arrival: &Arrival| match arrival.kind {
                Kind::Channel(packet) => {
                    usize::from(packet.id) == count && uuid.is_none_or(|uuid| uuid == packet.uuid)
                }
                Kind::Main | Kind::OtherVersion(_) => false,
            };
            if arrivals.iter().any(is_late) {
                return true;
            }
            self.door.keep(arrivals);
            let waits = |listener: &Listener| wait_readable(listener.as_fd(), Duration::ZERO);
            if !matches!(self.door.listener().map(waits), Some(Ok(true))) {
                return false;
            }
        }
        false
    }

    /// The door, to be watched while the migration is under way.
    pub(super) fn into_door(self) -> Door<'a> {
        self.door
    }

    /// True if multifd channels have arrived.
    pub(super) fn has_channels(&self) -> bool {
        !self.multifd.is_empty()
    }
}

/// Drops channels that a migration which failed before has left in the queue: closed already, while
/// another with their id is not. One that is closed and has no such other may be this source's own, with
/// pages in it that must not be missed. If all are closed and `main` is, too, the source takes no answers
/// and has sent everything.
fn drop_stale(
    arrived: &mut Vec<(InitialPacket, Stream)>,
    main: &Stream,
) -> Result<(), MigrationError> {
    let (closed, live): (Vec<_>, Vec<_>) = std::mem::take(arrived)
        .into_iter()
        .partition(|(_, stream)| stream.is_hung_up());
    if live.is_empty() && main.is_hung_up() {
        *arrived = closed;
        return Ok(());
    }
    *arrived = live;
    let has_live = |id| arrived.iter().any(|(packet, _)| packet.id == id);
    match closed.iter().find(|(packet, _)| !has_live(packet.id)) {
        Some((packet, _)) => Err(MigrationError::opened_with(
            Channel::Multifd(packet.id),
            "a channel that is closed already",
        )),
        None => Ok(()),
    }
}
