//! Accepts a source's connections and tells them apart by their first bytes.
//!
//! A QEMU never says how many multifd channels it has. It does connect all of them before it writes
//! its first mark on main (QEMU 9 and later before its first byte), so that once that mark was read,
//! the channels are those that have connected. A relay says the number in each channel's opening.

use std::io::Read;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use hotlift_wire::main_channel::FILE_HEADER;
use hotlift_wire::multifd::{Hello, INITIAL_PACKET_LEN, InitialPacket, MAGIC};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::session::Call;
use super::{Incoming, closed};
use crate::error::{Channel, MigrationError};
use crate::transport::{Listener, Stream};

/// How often a wait for connections looks whether it was called off.
const TICK: Duration = Duration::from_millis(100);

/// Between two looks at a connection that has sent a part of its first bytes.
const HALF_SAID: Duration = Duration::from_millis(2);

/// How long the last channel of a source may be behind its first mark on main, before which it was
/// connected: on one host nothing but this process's own delay.
const SETTLE: Duration = Duration::from_millis(50);

/// The same on a network, where the last segment of a handshake may be lost: TCP sends it again after
/// 200 ms at the earliest.
const SETTLE_TCP: Duration = Duration::from_secs(1);

/// Connections that have arrived.
pub(super) struct Arrivals<'a> {
    listener: Option<&'a Listener>,
    /// Connections that have not said what they are.
    unnamed: Vec<Stream>,
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
    pub(super) fn new(incoming: Incoming<'a>, max_channels: u8) -> Self {
        let (listener, unnamed) = match incoming {
            Incoming::Listener(listener) => (Some(listener), Vec::new()),
            Incoming::Connections(streams) => (None, streams),
            // Played by then: its connections are made.
            Incoming::File { .. } => (None, Vec::new()),
        };
        Self {
            listener,
            unnamed,
            main: None,
            main_came: false,
            multifd: Vec::new(),
            max_channels,
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
            if self.unnamed.is_empty() && self.main.is_none() && self.listener.is_none() {
                return Err(closed());
            }
            if self.unnamed.is_empty() && self.multifd.is_empty() && self.main.is_none() {
                self.since = Instant::now();
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

    /// The multifd channels, once the source has written the first mark on main. `expected` is false
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
            let before = (self.unnamed.len(), self.multifd.len());
            self.step(SETTLE / 5, call)?;
            if (self.unnamed.len(), self.multifd.len()) != before {
                quiet_since = Instant::now();
            }
            let settle = match self.listener {
                None => Duration::ZERO,
                Some(Listener::Unix(_)) => SETTLE,
                Some(Listener::Tcp(_)) => SETTLE_TCP,
            };
            let settled = quiet_since.elapsed() >= settle;
            if self.unnamed.is_empty() && self.is_complete(settled, expected) {
                return self.take_channels(main);
            }
            let source_has_gone = settled && main.is_hung_up();
            if self.unnamed.is_empty() && (source_has_gone || self.listener.is_none()) {
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
        if self.listener.is_some() {
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
        let mut fds: Vec<_> = self
            .unnamed
            .iter()
            .map(|stream| PollFd::new(stream, PollFlags::IN))
            .collect();
        if let Some(listener) = self.listener {
            fds.push(PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN));
        }
        let wait = Timespec {
            tv_sec: 0,
            tv_nsec: wait.subsec_nanos().into(),
        };
        match rustix::event::poll(&mut fds, Some(&wait)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(MigrationError::opening(errno.into())),
        }
        let happened: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let unnamed = self.unnamed.len();
        for index in (0..unnamed).rev().filter(|index| happened[*index]) {
            self.name(index)?;
        }
        if let Some(listener) = self.listener
            && happened.last() == Some(&true)
            && let Some(stream) = listener
                .accept(Duration::ZERO)
                .map_err(MigrationError::opening)?
        {
            self.unnamed.push(stream);
        }
        Ok(())
    }

    /// Looks at what an unnamed connection says, and puts it into its place.
    fn name(&mut self, index: usize) -> Result<(), MigrationError> {
        let mut first = [0; INITIAL_PACKET_LEN];
        // One that was reset has gone like one that was closed.
        let seen = self.unnamed[index].peek(&mut first).unwrap_or(Some(0));
        let magic = [first[0], first[1], first[2], first[3]];
        let has_more = !self.unnamed[index].is_hung_up();
        match seen {
            Some(1..INITIAL_PACKET_LEN) if !has_more && !FILE_HEADER.starts_with(&magic) => {
                drop(self.unnamed.swap_remove(index));
            }
            None | Some(1..4) => std::thread::sleep(HALF_SAID),
            // Somebody looked whether the port is open.
            Some(0) => drop(self.unnamed.swap_remove(index)),
            Some(_) if FILE_HEADER.starts_with(&magic) => {
                let stream = self.unnamed.swap_remove(index);
                if !self.main_came {
                    self.main_came = true;
                    self.main = Some(stream);
                } else if !stream.is_hung_up() {
                    return Err(MigrationError::opened_with(
                        Channel::Main,
                        "a second main channel",
                    ));
                }
            }
            Some(_) if magic[..2] == [0x16, 0x03] => {
                return Err(MigrationError::opened_with(
                    Channel::Main,
                    "a TLS handshake, which cannot be looked into (switch tls-creds off between \
                     QEMU and the relay),",
                ));
            }
            Some(_) if magic != MAGIC.to_be_bytes() => {
                return Err(MigrationError::opened_with(
                    Channel::Main,
                    &format!("a connection that begins with {magic:02x?}, no migration stream,"),
                ));
            }
            Some(INITIAL_PACKET_LEN..) => {
                let stream = self.unnamed.swap_remove(index);
                let mut bytes = [0; INITIAL_PACKET_LEN];
                (&stream)
                    .read_exact(&mut bytes)
                    .map_err(MigrationError::opening)?;
                let packet =
                    InitialPacket::decode(&bytes).map_err(|source| MigrationError::Wire {
                        channel: Channel::Multifd(bytes[24]),
                        source,
                    })?;
                if packet.id == u8::MAX {
                    return Err(MigrationError::opened_with(
                        Channel::Multifd(packet.id),
                        "a channel with this id",
                    ));
                }
                // Ids count from 0, and a relay says how many there will be.
                let said = packet.hello.map_or(0, |hello| hello.channels);
                if packet.id >= self.max_channels || said > self.max_channels {
                    return Err(MigrationError::opened_with(
                        Channel::Multifd(packet.id),
                        &format!(
                            "more multifd channels than max-channels={} lets in (raise \
                             --max-channels), ",
                            self.max_channels
                        ),
                    ));
                }
                self.multifd.push((packet, stream));
            }
            Some(_) => std::thread::sleep(HALF_SAID),
        }
        Ok(())
    }

    /// A further connection whose first bytes are nobody's business, within [`TICK`].
    pub(super) fn another(&mut self) -> Result<Option<Stream>, MigrationError> {
        if let Some(stream) = self.unnamed.pop() {
            return Ok(Some(stream));
        }
        match self.listener {
            Some(listener) => listener.accept(TICK).map_err(MigrationError::opening),
            None => {
                std::thread::sleep(TICK);
                Ok(None)
            }
        }
    }

    /// True if another multifd channel waits to be accepted: one whose connection was not there yet when
    /// they were counted.
    pub(super) fn late_channel(&self) -> bool {
        let Some(listener) = self.listener else {
            return false;
        };
        while let Ok(Some(stream)) = listener.accept(Duration::ZERO) {
            let mut magic = [0; 4];
            if matches!(stream.peek(&mut magic), Ok(Some(4))) && magic == MAGIC.to_be_bytes() {
                return true;
            }
        }
        false
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
