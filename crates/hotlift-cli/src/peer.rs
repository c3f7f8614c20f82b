//! Messages between `hotlift migrate` and `hotlift serve`: JSON, one line per message, over a separate TCP connection. Pages
//! and device states never use this connection.
//!
//! ```text
//! migrate                 serve
//! hello            ---->  compares, prepares its QEMU, starts its relay
//!                  <----  progress, at once: the hello has arrived
//!                  <----  ready, or refused; only its VM, if the source only compares: the end
//!                  <----  progress, each second
//! failed           ---->  (in place of a connection that only ends)
//!                  <----  completed, or failed
//! ```
//!
//! If this connection ends early, each side cancels its work if this is still possible. Only the relays settle which host owns
//! the guest.

use hotlift::conversation::OpeningRequest;
use hotlift::relay::RelayReport;
use hotlift_qemu::shared_memory::SharedFile;
use hotlift_qemu::source::DestinationKnowledge;
use hotlift_qemu::vm::Vm;
use hotlift_qmp::{RunState, Uuid, Version};
use serde::{Deserialize, Serialize};

/// First message, from the source: describes its VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Hello {
    /// Version of the source's QEMU.
    pub qemu: Version,
    /// Description of the source's VM.
    #[serde(flatten)]
    pub vm: Vm,
    /// Handling of differences between the VMs of source and destination.
    pub differences: Differences,
    /// Run state of the guest before the migration; the guest must have it at the destination, too.
    pub state: RunState,
    /// Number of multifd channels that the destination's QEMU must use; 0 without multifd.
    pub channels: u8,
    /// Capabilities of the source's QEMU that must have the same value on both sides.
    pub alike: Vec<(String, bool)>,
    /// Files with the source's RAM, which the destination maps instead of receiving it (`--ignore-shared`). `None` if all RAM
    /// is sent.
    pub shared_memory: Option<Vec<SharedFile>>,
}

/// Handling of differences between both VMs, as the source requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Differences {
    /// Refuse the migration if QEMU would refuse one of the differences.
    Refuse,
    /// Migrate in spite of all differences (`--ignore-differences`).
    Ignore,
    /// Only compare, and migrate nothing (`--check`).
    Show,
}

/// Messages of the destination.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "message",
    rename_all = "kebab-case",
    rename_all_fields = "kebab-case"
)]
pub enum Answer {
    /// The relay of the destination is ready for connections.
    Ready {
        /// Port of the relay, on the host of this connection.
        port: u16,
        /// Token at the start of each connection to the relay.
        token: Uuid,
        /// Version of the destination's QEMU.
        qemu: Version,
        /// Description of the destination's VM.
        vm: Box<Vm>,
    },
    /// Answer to a source that only compares. Nothing was started.
    Compared {
        /// Description of the destination's VM.
        vm: Box<Vm>,
    },
    /// The destination refuses the migration; nothing was started.
    Refused {
        /// Reason in one line.
        reason: String,
    },
    /// First message: the hello has arrived. Later messages: the relay of the destination is running.
    Progress {
        /// Bytes of the stream that have arrived.
        received_bytes: u64,
    },
    /// The destination's QEMU has loaded the guest.
    Completed {
        /// Run state of the guest at the destination, as the source requested.
        state: RunState,
        /// Report of the destination's relay.
        report: Box<RelayReport>,
    },
    /// The migration failed at the destination.
    Failed {
        /// Reason in one line.
        reason: String,
        /// Location of the guest, as the destination knows it.
        guest: DestinationKnowledge,
    },
}

/// Messages of the source after its hello.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum SourceMessage {
    /// The source's part of the migration has failed.
    Failed {
        /// Reason in one line.
        reason: String,
    },
}

impl OpeningRequest for Hello {
    const ROLE: &'static str = "serve";
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use hotlift::conversation::{Conversation, ConversationError};

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    fn pair() -> (TcpStream, Conversation) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ours = Conversation::new(listener.accept().unwrap().0.into());
        (theirs, ours)
    }

    fn hello() -> Hello {
        Hello {
            qemu: Version {
                major: 7,
                minor: 2,
                micro: 22,
            },
            vm: Vm {
                machine: Some("pc-i440fx-7.2".to_owned()),
                ram_bytes: Some(64 << 20),
                ..Vm::default()
            },
            differences: Differences::Refuse,
            state: RunState::Running,
            channels: 2,
            alike: vec![("dirty-bitmaps".to_owned(), false)],
            shared_memory: None,
        }
    }

    #[test]
    fn messages_arrive_unchanged_in_any_fragments() {
        let (theirs, mut ours) = pair();
        let mut line = serde_json::to_value(hello()).unwrap();
        line["hotlift"] = hotlift::conversation::VERSION.into();
        line["role"] = Hello::ROLE.into();
        let line = format!("{line}\n").into_bytes();
        let (start, end) = line.split_at(10);
        (&theirs).write_all(start).unwrap();
        assert_eq!(
            ours.receive_hello::<Hello>(Duration::from_millis(10))
                .unwrap(),
            None
        );
        (&theirs).write_all(end).unwrap();
        assert_eq!(ours.receive_hello::<Hello>(LONG).unwrap(), Some(hello()));
        let failed = Answer::Failed {
            reason: "why".to_owned(),
            guest: DestinationKnowledge::NotHere,
        };
        let mut theirs = Conversation::new(theirs.into());
        ours.send(&failed).unwrap();
        assert_eq!(theirs.receive(LONG).unwrap(), Some(failed));
        drop(theirs);
        assert!(matches!(
            ours.receive::<Answer>(LONG),
            Err(ConversationError::Closed)
        ));
    }

    #[test]
    fn garbage_is_an_error_of_one_short_line() {
        let deep = "[".repeat(10_000);
        for bad in [
            "GET / HTTP/1.1\r",
            "\u{1b}[2J",
            "",
            "{}",
            "[]",
            "null",
            &deep,
        ] {
            let (theirs, mut ours) = pair();
            writeln!(&theirs, "{bad}").unwrap();
            let error = ours.receive_hello::<Hello>(LONG).unwrap_err();
            assert!(
                matches!(error, ConversationError::Garbage { .. }),
                "{error}"
            );
            let error = error.to_string();
            assert!(
                error.len() < 300 && !error.chars().any(char::is_control),
                "{error:?}"
            );
        }
    }

    #[test]
    fn a_message_without_end_is_refused_at_the_limit() {
        let (theirs, mut ours) = pair();
        let flood = std::thread::spawn(move || {
            let chunk = [b'x'; 64 << 10];
            // The write fails once the peer has closed the connection.
            while (&theirs).write_all(&chunk).is_ok() {}
        });
        assert!(matches!(
            ours.receive_hello::<Hello>(LONG),
            Err(ConversationError::TooLong)
        ));
        drop(ours);
        flood.join().unwrap();
    }
}
