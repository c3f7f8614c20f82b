//! Messages between `hotlift migrate` and `hotlift serve`: JSON, one line per message, over a separate TCP connection. Pages
//! and devices never travel here.
//!
//! ```text
//! migrate                 serve
//! hello            ---->  compares, prepares its QEMU, starts its relay
//!                  <----  progress, at once: the hello has arrived
//!                  <----  ready, or refused; or its VM, where the source only compares: the end
//!                  <----  progress, each second
//! failed           ---->  (in place of a connection that only ends)
//!                  <----  completed, or failed
//! ```
//!
//! A connection that ends early cancels the other side's work, where this is still possible. The relays alone settle which host
//! has the guest.

use hotlift::conversation::OpeningRequest;
use hotlift::relay::RelayReport;
use hotlift_qemu::shared_memory::SharedFile;
use hotlift_qemu::source::DestinationKnowledge;
use hotlift_qemu::vm::Vm;
use hotlift_qmp::{RunState, Uuid, Version};
use serde::{Deserialize, Serialize};

/// First message of the source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Hello {
    /// Version of the source's QEMU.
    pub qemu: Version,
    /// The source's VM.
    #[serde(flatten)]
    pub vm: Vm,
    /// Handling of differences of the destination's VM.
    pub differences: Differences,
    /// Run state of the VM, and its target at the destination.
    pub state: RunState,
    /// Required multifd channels of the destination's QEMU; 0 for multifd off.
    pub channels: u8,
    /// State of the source's capabilities that must be equal on both sides.
    pub alike: Vec<(String, bool)>,
    /// Files in which the source leaves its RAM (`--ignore-shared`); `None`: all RAM is sent.
    pub shared_memory: Option<Vec<SharedFile>>,
}

/// Handling of differences of both VMs at the source's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Differences {
    /// No migration if QEMU refuses one of them.
    Refuse,
    /// Migration despite any of them (`--ignore-differences`).
    Ignore,
    /// Comparison only (`--check`).
    Show,
}

/// Message of the destination.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "message",
    rename_all = "kebab-case",
    rename_all_fields = "kebab-case"
)]
pub enum Answer {
    /// The relay of the destination listens.
    Ready {
        /// Port, on the host of this connection.
        port: u16,
        /// Token at the start of each connection to it.
        token: Uuid,
        /// Version of the destination's QEMU.
        qemu: Version,
        /// The destination's VM.
        vm: Box<Vm>,
    },
    /// The destination's VM, for a source that only compares. Nothing was started.
    Compared {
        /// The VM.
        vm: Box<Vm>,
    },
    /// The migration is refused; nothing was started.
    Refused {
        /// Reason in one line.
        reason: String,
    },
    /// The hello has arrived; later: the relay of the destination is running.
    Progress {
        /// Bytes that have arrived.
        received_bytes: u64,
    },
    /// The destination's QEMU has the guest.
    Completed {
        /// Run state of the guest there, as requested.
        state: RunState,
        /// Report of the destination's relay.
        report: Box<RelayReport>,
    },
    /// The migration failed at the destination.
    Failed {
        /// Reason in one line.
        reason: String,
        /// Location of the guest, as far as the destination knows.
        guest: DestinationKnowledge,
    },
}

/// Message of the source after its hello.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum SourceMessage {
    /// Its side of the migration has failed.
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
            // Ends when the other side has closed the connection.
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
