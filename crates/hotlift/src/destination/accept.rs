//! Accepts the connections of one migration and tells them apart by their first bytes.
//!
//! A migration is one main channel and N multifd channels, in any order of arrival, and the first bytes
//! of each say which it is, as QEMU 8.0 and later tell them apart. All that have not said so yet are
//! watched at once: a source writes to main only after all its connections are made, and one that is
//! silent must not keep the others waiting. A Hotlift adds its settings to the opening of each multifd
//! channel; settings that differ are refused here, with both values.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::multifd::{
    Hello, INITIAL_PACKET_LEN, InitialPacket, MAGIC, Method, PacketLayout,
};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::last_words;
use crate::control::Control;
use crate::error::{Channel, MigrationError};
use crate::options::{MAX_PACKET_SIZE, Options};
use crate::transport::{Listener, Stream};

/// First bytes of the main channel (`QEMU_VM_FILE_MAGIC`).
const MAIN_MAGIC: [u8; 4] = *b"QEVM";

/// How often a wait for connections looks whether it was called off.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Between two looks at a connection that has sent a part of its first bytes.
const HALF_SAID: Duration = Duration::from_millis(5);

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
    listener: &Listener,
    uuid: [u8; 16],
    method: Method,
    options: &Options,
    control: &Control,
) -> Result<Accepted, MigrationError> {
    let mut arriving = Arriving {
        uuid,
        method,
        options,
        unnamed: Vec::new(),
        main: None,
        multifd: (0..options.channels()).map(|_| None).collect(),
        is_hotlift: None,
        layout: PacketLayout::QEMU,
        since: None,
    };
    loop {
        if let Err(error) = arriving.step(listener, control) {
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
    /// Connections that have not said what they are.
    unnamed: Vec<Stream>,
    main: Option<Stream>,
    multifd: Vec<Option<Stream>>,
    is_hotlift: Option<bool>,
    /// As a Hotlift says it.
    layout: PacketLayout,
    since: Option<Instant>,
}

/// What the first bytes of a connection say.
enum Opening {
    Main,
    Multifd,
    /// Not enough of them yet.
    Partial,
    /// It was closed without a word.
    Closed,
    Other([u8; 4]),
}

impl Arriving<'_> {
    /// Waits for something to happen, and takes it in.
    fn step(&mut self, listener: &Listener, control: &Control) -> Result<(), MigrationError> {
        if control.is_cancelled() {
            return Err(MigrationError::Cancelled);
        }
        let waited = self.since.map(|since| since.elapsed());
        if waited.is_some_and(|waited| waited > self.options.handshake_timeout) {
            return Err(self.timed_out());
        }
        let mut fds = vec![PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
        fds.extend(self.unnamed.iter().map(|s| PollFd::new(s, PollFlags::IN)));
        // A channel that has said what it is waits for the others; only its end is of interest.
        let named = self.main.iter().chain(self.multifd.iter().flatten());
        fds.extend(named.map(|s| PollFd::new(s, PollFlags::RDHUP)));
        match rustix::event::poll(&mut fds, Some(&TICK)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(MigrationError::opening(errno.into())),
        }
        let happened: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let unnamed = self.unnamed.len();
        if happened[1 + unnamed..].contains(&true) {
            return Err(MigrationError::Closed {
                channel: Channel::Main,
            });
        }
        if happened[0]
            && let Some(stream) = listener
                .accept(Duration::ZERO)
                .map_err(MigrationError::opening)?
        {
            self.since.get_or_insert_with(Instant::now);
            self.unnamed.push(stream);
        }
        for index in (0..unnamed).rev().filter(|index| happened[1 + index]) {
            self.name(index)?;
        }
        Ok(())
    }

    /// Looks at what an unnamed connection says, and puts it into its place.
    fn name(&mut self, index: usize) -> Result<(), MigrationError> {
        match look(&self.unnamed[index]).map_err(MigrationError::opening)? {
            Opening::Partial => std::thread::sleep(HALF_SAID),
            Opening::Closed => {
                // Somebody looked whether the port is open.
                self.unnamed.swap_remove(index);
                if self.unnamed.is_empty() && self.main.is_none() && self.is_hotlift.is_none() {
                    self.since = None;
                }
            }
            Opening::Main if self.main.is_some() => {
                return Err(MigrationError::opened_with(
                    Channel::Main,
                    "a second main channel",
                ));
            }
            Opening::Main => self.main = Some(self.unnamed.swap_remove(index)),
            Opening::Multifd => {
                let stream = self.unnamed.swap_remove(index);
                self.add_multifd(stream)?;
            }
            Opening::Other(magic) => {
                return Err(MigrationError::opened_with(
                    Channel::Main,
                    &format!("a connection that begins with {magic:02x?}, no migration stream,"),
                ));
            }
        }
        Ok(())
    }

    /// Takes in a multifd channel, whose whole opening has arrived.
    fn add_multifd(&mut self, stream: Stream) -> Result<(), MigrationError> {
        let mut bytes = [0; INITIAL_PACKET_LEN];
        let mut reader = &stream;
        reader
            .read_exact(&mut bytes)
            .map_err(MigrationError::opening)?;
        let decoded = InitialPacket::decode(&bytes);
        // Kept among the unnamed while it is checked, so that a refusal reaches it, too.
        self.unnamed.push(stream);
        let packet = decoded.map_err(|source| MigrationError::Wire {
            channel: Channel::Multifd(bytes[24]),
            source,
        })?;
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
        *place = self.unnamed.pop();
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
            .chain(&self.unnamed)
            .collect();
        if self.is_hotlift == Some(true) {
            last_words::give_up(&streams, &error.chain());
            last_words::close(&streams);
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

/// Looks at the first bytes of a connection without waiting and without taking them.
fn look(stream: &Stream) -> io::Result<Opening> {
    let mut bytes = [0; INITIAL_PACKET_LEN];
    let Some(seen) = stream.peek(&mut bytes)? else {
        return Ok(Opening::Partial);
    };
    let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
    Ok(match seen {
        0 => Opening::Closed,
        1..4 => Opening::Partial,
        _ if magic == MAIN_MAGIC => Opening::Main,
        _ if magic != MAGIC.to_be_bytes() => Opening::Other(magic),
        INITIAL_PACKET_LEN.. => Opening::Multifd,
        _ => Opening::Partial,
    })
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
