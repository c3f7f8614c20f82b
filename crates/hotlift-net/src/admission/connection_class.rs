//! Classification of a connection by its first bytes.

use hotlift_tls::HANDSHAKE_BEGINS;
use hotlift_wire::WireError;
use hotlift_wire::multifd::{INITIAL_PACKET_LEN, InitialPacket, MAGIC};
use hotlift_wire::settle::{QUESTION_MAGIC, TOKEN_MAGIC, read_question, read_token};

use crate::transport::Stream;

/// First bytes of the main channel (`QEMU_VM_FILE_MAGIC`).
const MAIN_MAGIC: [u8; 4] = *b"QEVM";

/// First bytes of the main channel when an interrupted postcopy is resumed: the command RECV_BITMAP.
pub const RESUMED_MAGIC: [u8; 3] = [0x08, 0x00, 0x0a];

/// Length of a main channel's magic and version. A source always sends more, so a connection that ends here has failed.
const MAIN_HEAD: usize = 8;

/// Reason for refusing a connection that was reset.
pub const BROKEN: &str = "a connection that was reset";

/// Reason for refusing a connection with unknown first bytes.
pub const NO_STREAM: &str = "a connection that does not start as a migration stream";

/// Purpose of a connection, derived from its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionClass {
    /// More bytes are needed to classify the connection.
    Partial,
    /// The main channel of a migration.
    Main,
    /// The main channel of an interrupted postcopy that is resumed.
    Resumed,
    /// A multifd channel; contains its opening packet.
    Channel(InitialPacket),
    /// A multifd channel of a Hotlift with this other version of the protocol.
    OtherVersion(u16),
    /// A connection that a conversation has announced; contains the presented token.
    Token([u8; 16]),
    /// A question about the outcome of the migration with this id.
    Question([u8; 16]),
    /// The first message of a conversation.
    Hello,
    /// No known kind of connection, with the reason for refusing it.
    Other(&'static str),
    /// A connection that was reset, or closed before its first byte, with the reason for the log.
    Gone(&'static str),
}

/// Peeks at the first bytes of `stream` without waiting, and classifies them.
#[must_use]
pub fn peek_class(stream: &Stream) -> ConnectionClass {
    let mut bytes = [0; INITIAL_PACKET_LEN];
    match stream.peek(&mut bytes) {
        Ok(None) => ConnectionClass::Partial,
        Ok(Some(0)) => ConnectionClass::Gone("a connection that was closed before its first byte"),
        Ok(Some(seen)) => match read_class(&bytes[..seen]) {
            ConnectionClass::Partial if stream.is_hung_up() => {
                ConnectionClass::Other("a connection that was closed in its first bytes")
            }
            head => head,
        },
        Err(_) => ConnectionClass::Gone(BROKEN),
    }
}

/// Classifies a connection that begins with `bytes`.
pub fn read_class(bytes: &[u8]) -> ConnectionClass {
    if bytes.starts_with(&HANDSHAKE_BEGINS) {
        return ConnectionClass::Other(
            "a TLS handshake: this side has no certificates for it (--tls DIR; --qemu-tls DIR if a QEMU connects)",
        );
    }
    if bytes.starts_with(b"{") {
        return ConnectionClass::Hello;
    }
    let Some(magic) = bytes.first_chunk::<4>() else {
        return ConnectionClass::Partial;
    };
    match *magic {
        MAIN_MAGIC if bytes.len() > MAIN_HEAD => ConnectionClass::Main,
        MAIN_MAGIC => ConnectionClass::Partial,
        _ if magic.starts_with(&RESUMED_MAGIC) => ConnectionClass::Resumed,
        TOKEN_MAGIC => {
            let token = bytes.first_chunk().and_then(read_token);
            token.map_or(ConnectionClass::Partial, ConnectionClass::Token)
        }
        QUESTION_MAGIC => match bytes.first_chunk().map(read_question) {
            Some(Ok(id)) => ConnectionClass::Question(id.0),
            Some(Err(_)) => ConnectionClass::Other("a damaged question"),
            None => ConnectionClass::Partial,
        },
        _ if *magic == MAGIC.to_be_bytes() => match bytes.first_chunk::<INITIAL_PACKET_LEN>() {
            None => ConnectionClass::Partial,
            Some(opening) => match InitialPacket::decode(opening) {
                Ok(packet) => ConnectionClass::Channel(packet),
                Err(WireError::HotliftVersion { got }) => ConnectionClass::OtherVersion(got),
                Err(_) => ConnectionClass::Other("a damaged opening of a multifd channel"),
            },
        },
        _ => ConnectionClass::Other(NO_STREAM),
    }
}

#[cfg(test)]
mod tests {
    use hotlift_wire::settle::{MigrationId, question, token};

    use super::*;

    #[test]
    fn each_class_needs_its_whole_first_bytes() {
        let opening = InitialPacket {
            uuid: [7; 16],
            id: 3,
            hello: None,
        };
        let heads: [(ConnectionClass, Vec<u8>); 5] = [
            (ConnectionClass::Main, b"QEVM\0\0\0\x03\x01".to_vec()),
            (ConnectionClass::Resumed, b"\x08\x00\x0a\x00".to_vec()),
            (ConnectionClass::Channel(opening), opening.encode().to_vec()),
            (ConnectionClass::Token([9; 16]), token([9; 16]).to_vec()),
            (
                ConnectionClass::Question([5; 16]),
                question(MigrationId([5; 16])).to_vec(),
            ),
        ];
        for (kind, bytes) in heads {
            assert_eq!(read_class(&bytes), kind);
            for part in 0..bytes.len() {
                assert_eq!(
                    read_class(&bytes[..part]),
                    ConnectionClass::Partial,
                    "{kind:?} {part}"
                );
            }
        }
        assert_eq!(read_class(b"{"), ConnectionClass::Hello);
        for other in [&b"GET / HTTP/1.1"[..], b"\x16\x03\x01"] {
            assert!(
                matches!(read_class(other), ConnectionClass::Other(_)),
                "{other:?}"
            );
        }
    }
}
