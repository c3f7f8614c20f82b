//! Accepts the connections of one migration and puts them into their places.
//!
//! A migration is one main channel and N multifd channels, in any order of arrival. All that have not said yet
//! what they are are watched at once: a source writes to main only after all its connections are made, and
//! one that is silent must not keep the others waiting. A Hotlift adds its settings to the opening of each
//! multifd channel; settings that differ are refused here, with both values.

use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::handshake::{Features, Offer, VERSION};
use hotlift_wire::multifd::{Hello, InitialPacket, Method, PacketLayout};
use rustix::event::PollFlags;

use crate::control::Control;
use crate::door::{Arrival, BROKEN, Door, Kind};
use crate::error::{Channel, MigrationError};
use crate::hello;
use crate::options::{MAX_PACKET_SIZE, Options};
use crate::stream::graceful_close;
use crate::transport::Stream;

/// How often a wait for connections looks whether it was called off.
const TICK: Duration = Duration::from_millis(100);

/// The connections of one migration.
pub(super) struct Accepted {
    pub main: Stream,
    /// By channel id.
    pub multifd: Vec<Stream>,
    /// Whether the source is a Hotlift.
    pub is_hotlift: bool,
    /// Size of its packets.
    pub layout: PacketLayout,
    /// When the first of them was accepted.
    pub since: Instant,
}

/// Waits for the first connection as long as it takes, and for the others as long as a handshake may
/// take. A Hotlift is told why it is refused.
pub(super) fn accept(
    door: &mut Door<'_>,
    uuid: [u8; 16],
    method: Method,
    options: &Options,
    control: &Control,
) -> Result<Accepted, MigrationError> {
    let mut arriving = Arriving {
        uuid,
        method,
        options,
        refused: None,
        main: None,
        multifd: (0..options.channels()).map(|_| None).collect(),
        is_hotlift: None,
        layout: PacketLayout::QEMU,
        since: None,
    };
    loop {
        if let Err(error) = arriving.step(door, control) {
            arriving.refuse(&error);
            return Err(error);
        }
        arriving = match arriving.complete() {
            Ok(accepted) => return Ok(accepted),
            Err(arriving) => arriving,
        };
    }
}

/// Connections that have arrived so far.
struct Arriving<'a> {
    uuid: [u8; 16],
    method: Method,
    options: &'a Options,
    /// The connection that made this side refuse the source.
    refused: Option<Stream>,
    main: Option<Stream>,
    multifd: Vec<Option<Stream>>,
    is_hotlift: Option<bool>,
    /// As a Hotlift says it.
    layout: PacketLayout,
    since: Option<Instant>,
}

impl Arriving<'_> {
    /// Waits for something to happen, and takes it in.
    fn step(&mut self, door: &mut Door<'_>, control: &Control) -> Result<(), MigrationError> {
        if control.is_cancelled() {
            return Err(MigrationError::Cancelled);
        }
        let waited = self.since.map(|since| since.elapsed());
        if waited.is_some_and(|waited| waited > self.options.handshake_timeout) {
            return Err(self.timed_out());
        }
        // A channel that has said what it is waits for the others; only its end is of interest.
        let named = self.main.iter().chain(self.multifd.iter().flatten());
        let watched: Vec<_> = named.map(|stream| (stream, PollFlags::RDHUP)).collect();
        let (arrivals, ended) = door
            .step(TICK, &watched, None)
            .map_err(MigrationError::opening)?;
        if ended && self.multifd.iter().all(Option::is_none) && self.options.multifd() {
            control.turn_away("a main channel without a migration");
            (self.main, self.since) = (None, None);
        } else if ended {
            return Err(MigrationError::Closed {
                channel: Channel::Main,
            });
        }
        for arrival in arrivals {
            self.since.get_or_insert(arrival.since);
            match arrival.kind {
                Kind::Main if self.main.is_some() => control.turn_away("a second main channel"),
                Kind::Main => self.main = Some(arrival.stream),
                Kind::Channel(packet) if arrival.take_opening() => {
                    self.add_multifd(packet, arrival)?;
                }
                Kind::Channel(_) => control.turn_away(BROKEN),
                Kind::OtherVersion(version) => {
                    // Taken off, so that what is said to it does not end in a reset.
                    arrival.take_opening();
                    self.is_hotlift = Some(true);
                    self.refused = Some(arrival.stream);
                    return Err(MigrationError::other_version(
                        version.into(),
                        VERSION.into(),
                    ));
                }
            }
        }
        // The channels would be waited for in vain.
        let waits = self.options.multifd() && self.multifd.iter().all(Option::is_none);
        // One that has gone already is turned away in the next step.
        let main = self.main.as_ref().filter(|main| !main.is_hung_up());
        if waits
            && let Some(offer) = main.and_then(hello::peek)
            && let Err(error) = hello::check(offer, hello::features(self.options))
        {
            self.is_hotlift = Some(true);
            return Err(error);
        }
        Ok(())
    }

    /// Takes in a multifd channel.
    fn add_multifd(
        &mut self,
        packet: InitialPacket,
        arrival: Arrival,
    ) -> Result<(), MigrationError> {
        // Kept while it is checked, so that a refusal reaches it, too.
        self.refused = Some(arrival.stream);
        let channel = Channel::Multifd(packet.id);
        let is_hotlift = packet.hello.is_some();
        if *self.is_hotlift.get_or_insert(is_hotlift) != is_hotlift {
            return Err(MigrationError::opened_with(
                channel,
                "a channel of another source",
            ));
        }
        if let Some(hello) = &packet.hello {
            check_hello(hello, self.method, self.options)?;
            let first = self.multifd.iter().all(Option::is_none);
            if !first && self.layout != hello.layout {
                return Err(MigrationError::opened_with(
                    channel,
                    "a channel with packets of another size",
                ));
            }
            self.layout = hello.layout;
        }
        if packet.uuid != self.uuid {
            return Err(MigrationError::Mismatch {
                what: format!("the VM's UUID on {channel}"),
                source_has: hex(&packet.uuid),
                destination_has: hex(&self.uuid),
            });
        }
        let count = self.multifd.len();
        let place = self
            .multifd
            .get_mut(usize::from(packet.id))
            .ok_or_else(|| MigrationError::Mismatch {
                what: "multifd-channels".to_owned(),
                source_has: format!("a channel with id {}", packet.id),
                destination_has: format!("{count} channels"),
            })?;
        if place.is_some() {
            return Err(MigrationError::opened_with(
                channel,
                "a second connection with this id",
            ));
        }
        *place = self.refused.take();
        Ok(())
    }

    /// The connections, if they are all there.
    fn complete(mut self) -> Result<Accepted, Self> {
        if self.multifd.iter().any(Option::is_none) {
            return Err(self);
        }
        let Some(main) = self.main.take() else {
            return Err(self);
        };
        Ok(Accepted {
            main,
            multifd: self.multifd.into_iter().flatten().collect(),
            is_hotlift: self.is_hotlift == Some(true),
            layout: self.layout,
            since: self.since.unwrap_or_else(Instant::now),
        })
    }

    /// Tells a Hotlift why it is refused, on whatever it has opened: which of the unnamed is main is
    /// not known yet. A QEMU would not understand.
    fn refuse(&self, error: &MigrationError) {
        let streams: Vec<_> = self
            .main
            .iter()
            .chain(self.multifd.iter().flatten())
            .chain(&self.refused)
            .collect();
        if self.is_hotlift == Some(true) {
            graceful_close::say_reason(&streams, &error.chain());
            graceful_close::close(&streams);
        }
    }

    fn timed_out(&self) -> MigrationError {
        let wanted = self.multifd.len();
        let arrived = self.multifd.iter().flatten().count();
        let main = if self.main.is_some() {
            "has"
        } else {
            "has not"
        };
        MigrationError::Timeout {
            waiting_for: format!(
                "the rest of the connections (the main channel {main} arrived, {arrived} of \
                 {wanted} multifd channels have; is multifd-channels {wanted} on the source too?)"
            ),
            waited: self.options.handshake_timeout,
        }
    }
}

/// Compares what the wire cannot say later.
fn check_hello(hello: &Hello, method: Method, options: &Options) -> Result<(), MigrationError> {
    let differs = |what: &str, source_has: String, destination_has: String| {
        Err(MigrationError::Mismatch {
            what: what.to_owned(),
            source_has,
            destination_has,
        })
    };
    hello::check(Offer::new(Features::MULTIFD), hello::features(options))?;
    if hello.channels != options.channels() {
        return differs(
            "multifd-channels",
            hello.channels.to_string(),
            options.channels().to_string(),
        );
    }
    if hello.method != method {
        return differs(
            "multifd-compression",
            hello.method.name().to_owned(),
            method.name().to_owned(),
        );
    }
    let layout = hello.layout;
    if layout.page_size() != PAGE_SIZE || layout.pages() * PAGE_SIZE > MAX_PACKET_SIZE {
        return differs(
            "multifd-packet-size",
            format!("{} pages of {}", layout.pages(), layout.page_size()),
            format!("room for {MAX_PACKET_SIZE} bytes in pages of {PAGE_SIZE}"),
        );
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use hotlift_wire::multifd::ZeroPageDetection;

    use super::*;

    #[test]
    fn packets_of_a_size_that_no_source_can_be_told_to_send_are_refused() {
        let options = Options::default();
        let checked = |page_size, pages| {
            let hello = Hello {
                channels: options.channels(),
                method: Method::None,
                layout: PacketLayout::new(page_size, pages).unwrap(),
                zero_page_detection: ZeroPageDetection::Multifd,
            };
            check_hello(&hello, Method::None, &options)
        };
        for pages in [1, 127, 128, 129, 2048] {
            checked(PAGE_SIZE, pages).unwrap();
        }
        for (page_size, pages) in [(PAGE_SIZE, 2049), (PAGE_SIZE, 4096), (8192, 128)] {
            let error = checked(page_size, pages).unwrap_err().chain();
            assert!(error.contains("multifd-packet-size"), "{error}");
            assert!(error.contains(&pages.to_string()), "{error}");
        }
    }
}
