//! Accepts the connections of a guest's migration; the options set their number.
//!
//! A Hotlift adds its settings to the opening packet of each multifd channel. Settings that differ are rejected here. The error
//! names the values of both sides.

use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::AUTO;
use hotlift_net::admission::Listener;
use hotlift_net::transport::Stream;
use hotlift_wire::handshake::{Features, Offer};
use hotlift_wire::multifd::{Hello, InitialPacket, Method};

use crate::control::Control;
use crate::error::{Channel, MigrationError};
use crate::life::LONG;
use crate::options::{MAX_PACKET_SIZE, Options};
use crate::pipe::stream_in::StreamIn;
use crate::stream::accept_loop::AcceptLoop;
use crate::stream::arrivals::{Arrivals, stray};
use crate::stream::handshake::{self, Beginning};
use crate::stream::multifd_recv::Methods;
use crate::tls;

/// Interval at which the main channel's first bytes are checked while its multifd channels are missing.
const TICK: Duration = Duration::from_millis(100);

/// Time that a multifd channel may arrive after pages on the main channel. The source connected it before, but TCP may have
/// lost the last segment of the handshake, and repeats it after at least 200 ms.
const LATE: Duration = Duration::from_secs(2);

/// Required properties of the migration's channels.
struct Expected<'a> {
    uuid: [u8; 16],
    options: &'a Options,
}

/// Opens the accept loop of a guest's migration at `listener`.
pub(crate) fn open<'a>(
    listener: &'a Listener,
    options: &Options,
    control: &Control,
) -> Result<AcceptLoop<'a>, MigrationError> {
    let address = listener.address().map_err(MigrationError::opening)?;
    AcceptLoop::new(
        listener,
        tls::of_options(&options.tls, &options.limits, &address)?,
        None,
        options.limits.handshake_timeout,
        (control.rejections(), control.life()),
    )
}

/// Waits for the connections of a source: for the first without a limit, for the rest within the handshake timeout. A rejected
/// Hotlift receives the reason.
///
/// Returns the connections, the time when the first was accepted, and the accept loop. The accept loop must run during the
/// migration.
pub(crate) fn accept<'a>(
    accept_loop: AcceptLoop<'a>,
    uuid: [u8; 16],
    options: &Options,
    control: &Control,
) -> Result<(StreamIn, Instant, AcceptLoop<'a>), MigrationError> {
    let expected = Expected { uuid, options };
    let mut arrivals = Arrivals::new(
        accept_loop,
        Some(options.stream.channels()),
        control.rejections(),
    );
    let (main, since) = loop {
        match expected.step(&mut arrivals, control) {
            Ok(Some(main)) => break main,
            Ok(None) => {}
            Err(error) => {
                arrivals.refuse(&error);
                return Err(error);
            }
        }
    };
    let Arrivals {
        accept_loop,
        mut multifd,
        since: first,
        ..
    } = arrivals;
    multifd.sort_by_key(|(packet, _)| packet.id);
    let hello = multifd.first().and_then(|(packet, _)| packet.hello);
    let methods = match (options.stream.multifd_compression, hello) {
        (_, Some(hello)) if hello.method.is_none() => Methods::Each,
        (one, _) if !one.is_auto() => Methods::One(one),
        (_, Some(_)) => Methods::Each,
        (_, None) => Methods::First,
    };
    let channels = multifd.into_iter().map(|(_, stream)| stream).collect();
    let source = StreamIn::new(main, channels, hello.is_some(), hello, methods);
    Ok((source, first.unwrap_or(since), accept_loop))
}

impl Expected<'_> {
    /// Waits for an event, and handles it. Returns the main channel and its time of arrival once all channels are connected,
    /// `None` before.
    fn step(
        &self,
        arrivals: &mut Arrivals<'_>,
        control: &Control,
    ) -> Result<Option<(Stream, Instant)>, MigrationError> {
        if control.is_cancelled() {
            return Err(MigrationError::Cancelled);
        }
        let now = control.life().now();
        let waited = (arrivals.since).map(|since| now.saturating_duration_since(since));
        let left = waited.map_or(LONG, |waited| {
            self.options.limits.handshake_timeout.saturating_sub(waited)
        });
        if left.is_zero() {
            return Err(self.timed_out(arrivals));
        }
        // While channels are missing, main is not polled for input, so its first bytes are checked at an interval.
        let wait = match arrivals.main {
            Some(_) if arrivals.waits_for_channels() => TICK.min(left),
            _ => left,
        };
        arrivals.step(wait, &|packet, others| self.check(packet, others))?;
        // Rejects a source whose first bytes on main do not fit a migration with multifd channels. Otherwise the wait for the
        // channels would end only by its timeout. (If main has already closed, the next step rejects it.)
        let main = arrivals.main.as_ref().map(|(main, _)| main);
        if arrivals.waits_for_channels()
            && let Some(beginning) = main
                .filter(|main| !main.is_hung_up())
                .and_then(handshake::peek)
        {
            self.check_beginning(beginning, arrivals, now)?;
        }
        let complete = arrivals.multifd.len() == usize::from(self.options.stream.channels());
        Ok(arrivals.main.take_if(|_| complete))
    }

    /// Checks that the first bytes of main allow for multifd channels.
    fn check_beginning(
        &self,
        beginning: Beginning,
        arrivals: &mut Arrivals<'_>,
        now: Instant,
    ) -> Result<(), MigrationError> {
        let is_late = |since| now.saturating_duration_since(since) > LATE;
        match beginning {
            Beginning::Offer(offer) => {
                let takes =
                    handshake::features(&self.options.stream, self.options.postcopy.preempt);
                handshake::check(offer, takes).inspect_err(|_| arrivals.is_hotlift = true)
            }
            Beginning::Pages if arrivals.since.is_some_and(is_late) => {
                Err(MigrationError::Mismatch {
                    what: "multifd".to_owned(),
                    source_has: "off".to_owned(),
                    destination_has: "on".to_owned(),
                })
            }
            Beginning::Pages => Ok(()),
        }
    }

    /// Checks that a channel belongs to the migration.
    fn check(
        &self,
        packet: &InitialPacket,
        others: &[(InitialPacket, Stream)],
    ) -> Result<(), MigrationError> {
        let first = others.first().map(|(packet, _)| packet.hello);
        if first.is_some_and(|first| first.is_some() != packet.hello.is_some()) {
            return Err(stray(packet, "a channel of another source"));
        }
        if let Some(hello) = &packet.hello {
            check_hello(hello, self.options)?;
            if first
                .flatten()
                .is_some_and(|first| first.layout != hello.layout)
            {
                return Err(stray(packet, "a channel with packets of another size"));
            }
        }
        if packet.uuid != self.uuid {
            return Err(MigrationError::Mismatch {
                what: format!("the VM's UUID on {}", Channel::Multifd(packet.id)),
                source_has: hex(&packet.uuid),
                destination_has: hex(&self.uuid),
            });
        }
        let count = self.options.stream.channels();
        if packet.id >= count {
            return Err(MigrationError::Mismatch {
                what: "multifd-channels".to_owned(),
                source_has: format!("at least {} channels", u16::from(packet.id) + 1),
                destination_has: format!("{count} channels"),
            });
        }
        if others.iter().any(|(other, _)| other.id == packet.id) {
            return Err(stray(packet, "a second connection with this id"));
        }
        Ok(())
    }

    fn timed_out(&self, arrivals: &Arrivals<'_>) -> MigrationError {
        let wanted = self.options.stream.channels();
        let is_complete = arrivals.multifd.len() == usize::from(wanted);
        let missing = match (&arrivals.main, is_complete) {
            // A source writes to main after all channels are connected.
            (None, true) => "the main channel".to_owned(),
            (None | Some(_), _) => arrivals.missing(wanted),
        };
        MigrationError::Timeout {
            waiting_for: format!(
                "{missing} (check that multifd-channels is {wanted} on the source too)"
            ),
            waited: self.options.limits.handshake_timeout,
        }
    }
}

/// Compares the settings in a channel's hello with this side's, because the stream does not repeat them.
fn check_hello(hello: &Hello, options: &Options) -> Result<(), MigrationError> {
    let differs = |what: &str, source_has: String, destination_has: String| {
        Err(MigrationError::Mismatch {
            what: what.to_owned(),
            source_has,
            destination_has,
        })
    };
    // The hello has only this feature; the first PING on main has the others.
    let takes = handshake::features(&options.stream, false) & Features::MULTIFD;
    handshake::check(Offer::new(Features::MULTIFD), takes)?;
    if hello.channels != options.stream.channels() {
        return differs(
            "multifd-channels",
            hello.channels.to_string(),
            options.stream.channels().to_string(),
        );
    }
    // `auto` accepts every method. `none`, the default of a monitor, also accepts a source that selects the method of each
    // packet.
    let takes = options.stream.multifd_compression;
    let fits = match hello.method {
        Some(method) => takes.is_auto() || method.flag() == takes.flag,
        None => takes.is_auto() || takes.flag == 0,
    };
    if !fits {
        return differs(
            "multifd-compression",
            hello.method.map_or(AUTO.name, Method::name).to_owned(),
            takes.name.to_owned(),
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
    use hotlift_wire::multifd::{PacketLayout, ZeroPageDetection};

    use super::*;

    #[test]
    fn packets_of_a_size_that_no_option_allows_are_refused() {
        let options = Options::default();
        let checked = |page_size, pages| {
            let hello = Hello {
                channels: options.stream.channels(),
                method: Some(Method::None),
                layout: PacketLayout::new(page_size, pages).unwrap(),
                zero_page_detection: ZeroPageDetection::Multifd,
            };
            check_hello(&hello, &options)
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
