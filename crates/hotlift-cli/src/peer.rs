//! What `hotlift migrate` and `hotlift serve` say to each other: JSON, one line a message, over a
//! TCP connection of its own. Pages and devices never travel here.
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
//! A connection that ends early cancels what the other side does, as far as it still can be cancelled:
//! who has the guest is settled by the relays alone.

use hotlift::conversation::Wish;
use hotlift::relay::RelayReport;
use hotlift_qemu::shared_memory::SharedFile;
use hotlift_qemu::source::GuestThere;
use hotlift_qemu::vm::Vm;
use hotlift_qmp::{RunState, Uuid, Version};
use serde::{Deserialize, Serialize};

/// Opens the conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Hello {
    /// Version of the source's QEMU.
    pub qemu: Version,
    /// The source's VM.
    #[serde(flatten)]
    pub vm: Vm,
    /// What follows from differences of the destination's VM.
    pub differences: Differences,
    /// What the VM does, and so is to do at the destination.
    pub state: RunState,
    /// Multifd channels that the destination's QEMU is to have; 0 for multifd off.
    pub channels: u8,
    /// State of those capabilities of the source's QEMU that both sides must have alike.
    pub alike: Vec<(String, bool)>,
    /// The files that the source leaves its RAM in (`--ignore-shared`); `None`: all of RAM moves.
    pub shared_memory: Option<Vec<SharedFile>>,
}

/// What the source wants done about differences of both VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Differences {
    /// No migration if QEMU refuses one of them.
    Refuse,
    /// A migration with any of them (`--ignore-differences`).
    Ignore,
    /// Only the destination's VM (`--check`).
    Show,
}

/// What the destination says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "message",
    rename_all = "kebab-case",
    rename_all_fields = "kebab-case"
)]
pub enum Answer {
    /// The relay of the destination listens.
    Ready {
        /// On this port of the host that the conversation is with.
        port: u16,
        /// What each connection there begins with.
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
    /// Nothing was started.
    Refused {
        /// Why, in one line.
        reason: String,
    },
    /// The hello has arrived, and later: the relay of the destination is at work.
    Progress {
        /// Bytes that have arrived.
        received_bytes: u64,
    },
    /// The destination's QEMU has the guest.
    Completed {
        /// What the guest does there, which is what it is to do.
        state: RunState,
        /// What it cost the relay of the destination.
        report: Box<RelayReport>,
    },
    /// The migration failed, as the destination sees it.
    Failed {
        /// Why, in one line.
        reason: String,
        /// Where the guest is, as far as the destination can know.
        guest: GuestThere,
    },
}

/// What the source says after its hello.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum SourceMessage {
    /// Its side of the migration has failed.
    Failed {
        /// Why, in one line.
        reason: String,
    },
}

impl Wish for Hello {
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
    fn messages_arrive_as_they_were_said_however_they_are_cut() {
        let (theirs, mut ours) = pair();
        let mut line = serde_json::to_value(hello()).unwrap();
        line["hotlift"] = hotlift::conversation::VERSION.into();
        line["role"] = Hello::ROLE.into();
        let line = format!("{line}\n").into_bytes();
        let (start, end) = line.split_at(10);
        (&theirs).write_all(start).unwrap();
        assert_eq!(
            ours.hear_hello::<Hello>(Duration::from_millis(10)).unwrap(),
            None
        );
        (&theirs).write_all(end).unwrap();
        assert_eq!(ours.hear_hello::<Hello>(LONG).unwrap(), Some(hello()));
        let failed = Answer::Failed {
            reason: "why".to_owned(),
            guest: GuestThere::NotHere,
        };
        let mut theirs = Conversation::new(theirs.into());
        ours.say(&failed).unwrap();
        assert_eq!(theirs.hear(LONG).unwrap(), Some(failed));
        drop(theirs);
        assert!(matches!(
            ours.hear::<Answer>(LONG),
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
            let error = ours.hear_hello::<Hello>(LONG).unwrap_err();
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
    fn a_message_without_end_is_given_up_at_the_limit() {
        let (theirs, mut ours) = pair();
        let flood = std::thread::spawn(move || {
            let chunk = [b'x'; 64 << 10];
            // Ends when the other side has gone.
            while (&theirs).write_all(&chunk).is_ok() {}
        });
        assert!(matches!(
            ours.hear_hello::<Hello>(LONG),
            Err(ConversationError::TooLong)
        ));
        drop(ours);
        flood.join().unwrap();
    }
}
