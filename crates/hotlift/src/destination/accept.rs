//! Accepts the connections of one migration and tells them apart by their first bytes.
//!
//! A migration is one main channel and N multifd channels, in any order of arrival; with four bytes
//! each says which it is, as QEMU 8.0 and later tell them apart. A Hotlift adds its settings to the
//! opening of each multifd channel, so that settings that differ are refused here, with both values.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use hotlift_wire::multifd::{
    Hello, INITIAL_PACKET_LEN, InitialPacket, MAGIC, Method, PacketLayout,
};

use crate::control::Control;
use crate::error::{Channel, MigrationError};
use crate::options::Options;
use crate::transport::{Listener, Stream};

/// First bytes of the main channel (`QEMU_VM_FILE_MAGIC`).
const MAIN_MAGIC: [u8; 4] = *b"QEVM";

/// How often a wait for connections looks whether it was called off.
const TICK: Duration = Duration::from_millis(100);

/// The connections of one migration.
pub(super) struct Accepted {
    pub main: Stream,
    /// By channel id.
    pub multifd: Vec<Stream>,
    /// Whether the source is a Hotlift.
    pub is_hotlift: bool,
    /// When the first of them was accepted.
    pub since: Instant,
}

/// Waits for the first connection as long as it takes, and for the others as long as a handshake may
/// take.
pub(super) fn accept(
    listener: &Listener,
    uuid: [u8; 16],
    method: Method,
    options: &Options,
    control: &Control,
) -> Result<Accepted, MigrationError> {
    let wanted = usize::from(options.multifd_channels);
    let mut main = None;
    let mut multifd: Vec<Option<Stream>> = (0..wanted).map(|_| None).collect();
    let mut hotlift = None;
    let mut since: Option<Instant> = None;
    loop {
        let arrived = multifd.iter().flatten().count();
        if main.is_some() && arrived == wanted {
            break;
        }
        if control.is_cancelled() {
            return Err(MigrationError::Cancelled);
        }
        if since.is_some_and(|since| since.elapsed() > options.handshake_timeout) {
            let main = if main.is_some() { "has" } else { "has not" };
            return Err(MigrationError::Timeout {
                waiting_for: format!(
                    "the rest of the connections (the main channel {main} arrived, {arrived} of \
                     {wanted} multifd channels have; is multifd-channels {wanted} on the source too?)"
                ),
                waited: options.handshake_timeout,
            });
        }
        let Some(stream) = listener
            .accept(TICK)
            .map_err(|source| setup_error(Channel::Main, source))?
        else {
            continue;
        };
        since.get_or_insert_with(Instant::now);
        stream
            .set_read_timeout(Some(options.handshake_timeout))
            .map_err(|source| setup_error(Channel::Main, source))?;
        let mut magic = [0; 4];
        let seen = stream
            .peek(&mut magic)
            .map_err(|source| setup_error(Channel::Main, source))?;
        if seen == 0 && main.is_none() && arrived == 0 {
            // Somebody looked whether the port is open.
            since = None;
            continue;
        }
        if magic == MAIN_MAGIC {
            if main.is_some() {
                return Err(protocol(Channel::Main, "a second main channel"));
            }
            main = Some(stream);
            continue;
        }
        if magic != MAGIC.to_be_bytes() {
            return Err(protocol(
                Channel::Main,
                &format!("a connection that begins with {magic:02x?}, no migration stream"),
            ));
        }
        let hello = multifd_channel(stream, uuid, method, options, &mut multifd)?;
        if *hotlift.get_or_insert(hello) != hello {
            return Err(protocol(Channel::Main, "channels of different sources"));
        }
    }
    let main = main.ok_or_else(|| protocol(Channel::Main, "no main channel"))?;
    let multifd: Vec<_> = multifd.into_iter().flatten().collect();
    for stream in std::iter::once(&main).chain(&multifd) {
        stream
            .set_read_timeout(None)
            .map_err(|source| setup_error(Channel::Main, source))?;
    }
    Ok(Accepted {
        main,
        multifd,
        is_hotlift: hotlift == Some(true),
        since: since.unwrap_or_else(Instant::now),
    })
}

/// Reads a multifd channel's opening and puts it into its place; true if its source is a Hotlift.
fn multifd_channel(
    stream: Stream,
    uuid: [u8; 16],
    method: Method,
    options: &Options,
    multifd: &mut [Option<Stream>],
) -> Result<bool, MigrationError> {
    let unnamed = Channel::Main;
    let mut bytes = [0; INITIAL_PACKET_LEN];
    let mut reader = &stream;
    reader
        .read_exact(&mut bytes)
        .map_err(|source| setup_error(unnamed, source))?;
    let packet = InitialPacket::decode(&bytes).map_err(|source| MigrationError::Wire {
        channel: Channel::Multifd(bytes[24]),
        source,
    })?;
    let channel = Channel::Multifd(packet.id);
    if let Some(hello) = &packet.hello {
        check_hello(hello, method, options)?;
    }
    if packet.uuid != uuid {
        return Err(MigrationError::Mismatch {
            what: format!("the VM's UUID on {channel}"),
            source_has: hex(&packet.uuid),
            destination_has: hex(&uuid),
        });
    }
    let count = multifd.len();
    let place =
        multifd
            .get_mut(usize::from(packet.id))
            .ok_or_else(|| MigrationError::Mismatch {
                what: "multifd-channels".to_owned(),
                source_has: format!("a channel with id {}", packet.id),
                destination_has: format!("{count} channels"),
            })?;
    if place.is_some() {
        return Err(protocol(channel, "a second connection with this id"));
    }
    *place = Some(stream);
    Ok(packet.hello.is_some())
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
    if hello.channels != options.multifd_channels {
        return differs(
            "multifd-channels",
            hello.channels.to_string(),
            options.multifd_channels.to_string(),
        );
    }
    if hello.method != method {
        return differs(
            "multifd-compression",
            hello.method.name().to_owned(),
            method.name().to_owned(),
        );
    }
    if hello.layout != PacketLayout::QEMU {
        let show =
            |layout: PacketLayout| format!("{} of {} bytes", layout.pages(), layout.page_size());
        return differs(
            "pages per packet",
            show(hello.layout),
            show(PacketLayout::QEMU),
        );
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn setup_error(channel: Channel, source: io::Error) -> MigrationError {
    MigrationError::Connection {
        channel,
        doing: "opening the migration",
        source,
    }
}

fn protocol(channel: Channel, got: &str) -> MigrationError {
    MigrationError::Protocol {
        channel,
        got: got.to_owned(),
        doing: "opening the migration",
    }
}
