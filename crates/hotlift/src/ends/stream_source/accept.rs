//! Accepts the connections of a source, and assigns them to channels.
//!
//! A QEMU never states its number of multifd channels. But it connects all of them before its first multifd flush on main (QEMU
//! 9 and later: before its first byte on main). So after that flush, every channel has connected. A relay states the number in
//! the opening packet of each channel.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use hotlift_net::admission::{Admitted, ConnectionClass, Listener};
use hotlift_net::transport::{Stream, wait_readable};
use hotlift_wire::multifd::{Hello, InitialPacket};

use crate::control::Control;
use crate::ends::stream_source::channel_wait::{ArrivedConnections, ChannelWait, Step};
use crate::error::MigrationError;
use crate::life::LONG;
use crate::pipe::session::WaitCheck;
use crate::pipe::settings::RelaySettings;
use crate::stream::accept_loop::AcceptLoop;
use crate::stream::arrivals::{Arrivals, stray};
use crate::stream::main_recv::WaitCondition;

/// Longest delay between the first multifd flush on main and the accept of the source's last channel. The source connected the
/// channel before the flush. On one host, only this process causes a delay.
pub(crate) const SETTLE: Duration = Duration::from_millis(50);

/// Delay as in [`SETTLE`], if another thread or a proxy accepts the connections first, e.g. on a host that is busy with other
/// migrations.
const SETTLE_HANDED: Duration = Duration::from_millis(200);

/// Delay as in [`SETTLE`], on a network. The last segment of a TCP handshake may be lost; TCP sends it again after at least 200
/// ms.
const SETTLE_TCP: Duration = Duration::from_secs(1);

/// Longest time until the next channel of a QEMU with TLS connects, after main or after another channel. QEMU connects its
/// channels after the handshake of main, each in a thread.
const CHANNELS_OF_QEMU: Duration = Duration::from_millis(300);

/// Maximum age of a silent connection that may still be a channel, if the source does not state its number of channels. A
/// channel sends its opening packet as soon as it is connected.
const UNIDENTIFIED_MAX_AGE: Duration = Duration::from_secs(2);

/// Limit of connections checked for a late channel.
const MAX_CHECKED_ARRIVALS: usize = 256;

/// Connections of a source that does not state its number of channels at first.
pub(crate) struct QemuConnections<'a> {
    arrivals: Arrivals<'a>,
    max_channels: u8,
    /// Time limit for missing connections.
    timeout: Duration,
}

/// The multifd channels of a source.
pub(crate) struct Channels {
    /// Channels by id.
    pub channels: Vec<Stream>,
    pub uuid: [u8; 16],
    /// Settings that a relay has sent; `None` for a QEMU.
    pub hello: Option<Hello>,
}

impl Channels {
    /// Sorts the channels by id, and checks that they belong together. Returns `None` if there are none.
    fn of(mut arrived: Vec<(InitialPacket, Stream)>) -> Result<Option<Self>, MigrationError> {
        arrived.sort_by_key(|(packet, _)| packet.id);
        let Some((first, _)) = arrived.first() else {
            return Ok(None);
        };
        let (uuid, hello) = (first.uuid, first.hello);
        for (expected, (packet, _)) in arrived.iter().enumerate() {
            if usize::from(packet.id) != expected || packet.uuid != uuid || packet.hello != hello {
                let what = "a second channel with this id, or one of another VM";
                return Err(stray(packet, what));
            }
        }
        let channels = arrived.into_iter();
        Ok(Some(Self {
            channels: channels.map(|(_, channel)| channel).collect(),
            uuid,
            hello,
        }))
    }
}

impl<'a> QemuConnections<'a> {
    pub(crate) fn new(
        listener: &'a Listener,
        settings: &RelaySettings,
        control: &Control,
    ) -> Result<Self, MigrationError> {
        let timeout = settings.limits.handshake_timeout;
        let accept_loop = AcceptLoop::new(
            listener,
            settings.incoming_tls.clone(),
            settings.incoming_pass.clone(),
            timeout,
            (control.rejections(), control.life()),
        )?;
        Ok(Self {
            arrivals: Arrivals::new(accept_loop, None, control.rejections()),
            timeout,
            max_channels: settings.limits.max_channels,
        })
    }

    /// Waits for the main channel, and returns it with the time of its arrival. Waits without a limit for the first connection,
    /// then within the handshake timeout.
    pub(crate) fn main(
        &mut self,
        call: &WaitCheck<'_>,
    ) -> Result<(Stream, Instant), MigrationError> {
        let mut deadline = None;
        loop {
            if let Some(main) = self.arrivals.main.take() {
                self.admit_channels(&main.0, call)?;
                return Ok(main);
            }
            let now = self.now();
            let left = |until: Instant| until.saturating_duration_since(now);
            self.step(deadline.map_or(LONG, left), call)?;
            if self.arrivals.multifd.is_empty() && self.arrivals.main.is_none() {
                // There is no deadline before a connection has shown that it is from a source.
                deadline = None;
                continue;
            }
            let now = self.now();
            if now > *deadline.get_or_insert(now + self.timeout) {
                return Err(MigrationError::Timeout {
                    waiting_for: "the source's main channel (a stream that begins with \"QEVM\")"
                        .to_owned(),
                    waited: self.timeout,
                });
            }
        }
    }

    /// Runs the handshakes of a QEMU's channels, until no further channel arrives for some time. A QEMU 7.2 sends nothing more
    /// on `main` before its channels have done their handshakes, so a reader of main would block.
    fn admit_channels(
        &mut self,
        main: &Stream,
        call: &WaitCheck<'_>,
    ) -> Result<(), MigrationError> {
        if !main.is_of_a_qemu() {
            return Ok(());
        }
        let begun = self.now();
        let mut gathering = ChannelWait::new(begun, 0, CHANNELS_OF_QEMU, self.timeout);
        loop {
            let (arrived, now) = (self.arrived(), self.now());
            if gathering.is_settled(&arrived, now) {
                break;
            }
            self.step(gathering.wait(&arrived, now), call)?;
        }
        Ok(())
    }

    /// Returns the multifd channels; `None` if the source has none. Called after the source's first multifd flush on main.
    /// `expected` is false if the source may have no channels.
    pub(crate) fn channels(
        &mut self,
        main: &Stream,
        expected: bool,
        call: &WaitCheck<'_>,
    ) -> Result<Option<Channels>, MigrationError> {
        let settle = settle_at(self.arrivals.accept_loop.listener());
        let before = self.arrivals.multifd.len();
        let mut gathering = ChannelWait::new(self.now(), before, settle, self.timeout);
        loop {
            let arrived = ArrivedConnections {
                main_has_ended: main.is_hung_up(),
                ..self.arrived()
            };
            match gathering.next(&arrived, expected, self.now()) {
                Step::Wait(wait) => self.step(wait, call)?,
                Step::Complete => return self.take_channels(),
                Step::MainEnded => return Err(MigrationError::main_closed()),
                Step::TimedOut => {
                    return Err(MigrationError::Timeout {
                        waiting_for: self.missing(),
                        waited: self.timeout,
                    });
                }
            }
        }
    }

    fn arrived(&self) -> ArrivedConnections {
        let packets = self.arrivals.multifd.iter().map(|(packet, _)| packet);
        let hello = packets.clone().next().and_then(|packet| packet.hello);
        ArrivedConnections {
            channels: self.arrivals.multifd.len(),
            highest_id: packets.map(|packet| packet.id).max(),
            stated: hello.map(|hello| hello.channels),
            has_unidentified: self
                .arrivals
                .accept_loop
                .has_unidentified(UNIDENTIFIED_MAX_AGE),
            main_has_ended: false,
        }
    }

    fn now(&self) -> Instant {
        self.arrivals.accept_loop.now()
    }

    /// Names the missing connections for a timeout error.
    fn missing(&self) -> String {
        let packets = self.arrivals.multifd.iter().map(|(packet, _)| packet);
        let hello = packets.clone().find_map(|packet| packet.hello);
        // A QEMU does not state the number, but it has all channels below the highest id.
        let highest = packets.map(|packet| packet.id).max();
        let channels = hello.map_or(highest.map_or(0, |id| id.saturating_add(1)), |hello| {
            hello.channels
        });
        let arrived = self.arrivals.multifd.len();
        match arrived < usize::from(channels) {
            true => format!("{} of the source", self.arrivals.missing(channels)),
            false => format!("the rest of the source's multifd channels ({arrived} arrived)"),
        }
    }

    fn take_channels(&mut self) -> Result<Option<Channels>, MigrationError> {
        let mut arrived = std::mem::take(&mut self.arrivals.multifd);
        drop_stale(&mut arrived)?;
        Channels::of(arrived)
    }

    /// Waits up to `wait` for an event, and handles it.
    fn step(&mut self, wait: Duration, call: &WaitCheck<'_>) -> Result<(), MigrationError> {
        call.check()?;
        let most = self.max_channels;
        let check = |packet: &InitialPacket, _: &[_]| check_number(packet, most);
        self.arrivals.step(wait, &check)
    }

    /// Returns a further connection from the host of `main`, with its first bytes unread; `None` if none arrives within `wait`.
    /// With `call`, also waits for handshakes in progress. Rejects connections of other hosts.
    pub(crate) fn another(
        &mut self,
        main: &Stream,
        wait: Duration,
        call: Option<&WaitCheck<'_>>,
    ) -> Result<Option<Stream>, MigrationError> {
        let deadline = self.now() + wait + UNIDENTIFIED_MAX_AGE;
        let mut wait = wait;
        loop {
            let another = self.arrivals.accept_loop.take_any(wait);
            let another = another.map_err(MigrationError::opening)?;
            let came = another.is_some();
            let another = another.filter(|stream| self.arrivals.admits_with(main, stream));
            if came && another.is_none() {
                // The rejected connection may have been before the source's connection in the queue, so the queue is checked
                // again.
                wait = Duration::ZERO;
                continue;
            }
            let may_come = self
                .arrivals
                .accept_loop
                .has_unidentified(UNIDENTIFIED_MAX_AGE)
                && self.now() < deadline;
            match call.filter(|_| another.is_none() && may_come) {
                Some(call) => call.check()?,
                None => return Ok(another),
            }
            wait = SETTLE / 5;
        }
    }

    /// Returns true if a further multifd channel of the VM, after the `count` known ones, waits to be accepted. Its connection
    /// came too late to be counted.
    pub(crate) fn late_channel(&mut self, uuid: Option<[u8; 16]>, count: usize) -> bool {
        for _ in 0..MAX_CHECKED_ARRIVALS {
            let Ok((arrivals, _)) = self.arrivals.accept_loop.step(Duration::ZERO, &[], None)
            else {
                return false;
            };
            let is_late = |arrival: &Admitted| match arrival.head() {
                ConnectionClass::Channel(packet) => {
                    usize::from(packet.id) == count
                        && uuid.is_none_or(|uuid| uuid == packet.uuid)
                        && self.arrivals.is_of_their_host(&arrival.stream)
                }
                _ => false,
            };
            if arrivals.iter().any(is_late) {
                return true;
            }
            self.arrivals.accept_loop.keep(arrivals);
            let listener = self.arrivals.accept_loop.listener();
            let is_quiet = !matches!(wait_readable(listener.as_fd(), Duration::ZERO), Ok(true));
            if is_quiet
                && !self
                    .arrivals
                    .accept_loop
                    .has_unidentified(UNIDENTIFIED_MAX_AGE)
            {
                return false;
            }
        }
        false
    }

    /// Returns the accept loop, which must run during the migration.
    pub(crate) fn into_accept_loop(self) -> AcceptLoop<'a> {
        self.arrivals.accept_loop
    }

    /// Returns true if multifd channels have arrived.
    pub(crate) fn has_channels(&self) -> bool {
        !self.arrivals.multifd.is_empty()
    }
}

/// Returns the delay for this listener: [`SETTLE`], [`SETTLE_HANDED`] or [`SETTLE_TCP`].
fn settle_at(listener: &Listener) -> Duration {
    match (listener.is_local(), listener.is_queue()) {
        (true, false) => SETTLE,
        (true, true) => SETTLE_HANDED,
        (false, _) if listener.is_loopback() => SETTLE_HANDED,
        (false, _) => SETTLE_TCP,
    }
}

/// Checks that the number of channels is within the limit.
fn check_number(packet: &InitialPacket, max_channels: u8) -> Result<(), MigrationError> {
    // Ids range from 0, and a relay states the number.
    let hello = packet.hello.map_or(0, |hello| hello.channels);
    if packet.id >= max_channels || hello > max_channels {
        return Err(stray(
            packet,
            &format!(
                "more multifd channels than max-channels={max_channels} (raise --max-channels), "
            ),
        ));
    }
    Ok(())
}

/// State of a channel's connection, in ascending order: a later variant is more likely a connection of this source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ConnectionState {
    /// A part of the sent data may be lost.
    Reset,
    /// Closed in order: all sent data is there.
    Closed,
    Open,
}

impl ConnectionState {
    fn of(channel: &Stream) -> Self {
        if channel.is_reset() {
            Self::Reset
        } else if channel.is_hung_up() {
            Self::Closed
        } else {
            Self::Open
        }
    }
}

/// Drops channels that an earlier, failed migration has left in the queue. A channel is dropped if another channel with its id
/// is in a better state.
///
/// A closed channel without a second one belongs to this source. A QEMU without return-path closes each channel as soon as the
/// kernel has the last byte. The close is visible here only if all bytes fit into the receive buffer.
fn drop_stale(arrived: &mut Vec<(InitialPacket, Stream)>) -> Result<(), MigrationError> {
    let conditions: Vec<_> = arrived
        .iter()
        .map(|(packet, channel)| (packet.id, ConnectionState::of(channel)))
        .collect();
    let best = |id| {
        let same = conditions.iter().filter(|(other, _)| *other == id);
        same.map(|(_, condition)| *condition).max()
    };
    let lost = conditions
        .iter()
        .position(|(id, _)| best(*id) == Some(ConnectionState::Reset));
    if let Some(lost) = lost {
        return Err(stray(&arrived[lost].0, "a channel that was reset"));
    }
    let mut each = conditions.iter();
    let is_best = |_: &_| {
        each.next()
            .is_some_and(|(id, condition)| best(*id) == Some(*condition))
    };
    arrived.retain(is_best);
    Ok(())
}

#[cfg(test)]
mod tests {
    use hotlift_net::transport::Address;

    use super::*;

    #[test]
    fn a_lost_segment_is_awaited_only_across_a_network() {
        let folder = tempfile::tempdir().unwrap();
        let unix = format!("unix:{}", folder.path().join("socket").display());
        for (at, expected) in [
            (unix.as_str(), SETTLE),
            ("tcp:127.0.0.1:0", SETTLE_HANDED),
            ("tcp:0.0.0.0:0", SETTLE_TCP),
        ] {
            let address: Address = at.parse().unwrap();
            assert_eq!(settle_at(&address.listen().unwrap()), expected, "{at}");
        }
        let (handed, _giver) = Listener::queue(true).unwrap();
        assert_eq!(settle_at(&handed), SETTLE_HANDED);
    }
}
