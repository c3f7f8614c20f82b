//! What another host and the link to it can do: asked by `hotlift advise --to`, answered by `hotlift serve` and `hotlift
//! bench --serve`, over a conversation of JSON lines and some connections beside it.
//!
//! ```text
//! asks                                      answers
//! request: how many connections     ---->
//!                                   <----   ready: a port, and a token for it
//! opens them, sends the token and
//! then its sample over and over     ---->   counts for a time that is its own, keeps some MiB
//!                                   <----   received: bytes in seconds, and CPU
//!                                   <----   measured: its cores, sockets, memory, and codecs on those pages
//! ```
//!
//! The pages go where the guest is to go. All limits are the answering side's, and nothing that it is sent outlives the
//! answer; what it says is checked to be numbers in range, and changes nothing but the advice.

mod answer;
mod ask;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cost::Work;
pub use answer::{At, answer, refuse};
pub use ask::{Far, ask};

/// Version of these messages. Another is refused: both commands come from one binary.
const PROTOCOL: u32 = 1;

/// The key that tells a request from what else opens a conversation.
const KEY: &str = "hotlift-survey";

/// Most connections of a survey: more channels than fill any link that one host drives.
pub const MOST_CONNECTIONS: u8 = 16;

/// How long TCP may take to find its rate, uncounted: slow start, and a shaper's bucket that is full at first.
const WARM_UP: Duration = Duration::from_millis(500);

/// How long bytes are counted.
const COUNTED: Duration = Duration::from_secs(2);

/// How long a message, a connection or a token may take.
const GREETING: Duration = Duration::from_secs(10);

/// Bytes of a token.
const TOKEN: usize = 16;

/// What somebody asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Request {
    /// [`PROTOCOL`].
    hotlift_survey: u32,
    /// Connections that the link is to be measured with, 1 to [`MOST_CONNECTIONS`].
    connections: u8,
}

impl Request {
    /// The request that a first message is; `None` if it is something else's first message.
    ///
    /// # Errors
    /// Why the request cannot be answered.
    pub fn read(message: &Value) -> Option<Result<Self, String>> {
        let theirs = message.get(KEY)?;
        let request = serde_json::from_value::<Self>(message.clone());
        Some(match request {
            Ok(request) if request.hotlift_survey != PROTOCOL => {
                Err("use the same hotlift on both hosts".to_owned())
            }
            Ok(request) if (1..=MOST_CONNECTIONS).contains(&request.connections) => Ok(request),
            Ok(_) => Err(format!("1 to {MOST_CONNECTIONS} connections can be had")),
            Err(_) if theirs != PROTOCOL => Err("use the same hotlift on both hosts".to_owned()),
            Err(_) => Err("the request is not understood".to_owned()),
        })
    }
}

/// What is answered, in this order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "message",
    rename_all = "kebab-case",
    rename_all_fields = "kebab-case"
)]
enum Answer {
    /// Connections are taken.
    Ready {
        /// At this port of the address that the conversation is with.
        port: u16,
        /// What each of them begins with, in hexadecimal digits.
        token: String,
        /// This start of this host's kernel (`boot_id`); empty if it is not known.
        boot: String,
    },
    /// There is no survey.
    Refused {
        /// Why, in one line.
        reason: String,
    },
    /// The link was measured.
    Received {
        /// Bytes that arrived in `seconds`.
        bytes: u64,
        seconds: f64,
        /// Bytes that arrived in all, and the CPU time that took.
        all_bytes: u64,
        cpu_s: f64,
    },
    /// The host was measured.
    Measured(Host),
}

/// A host as it sees itself. Costs are seconds of a core for a GiB.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Cores that it has.
    pub cores: usize,
    /// How many of them its threads got while they measured.
    pub cores_free: f64,
    /// First touch of memory.
    pub first_touch: f64,
    /// Methods on pages that arrived; none of them if too few did.
    pub decoders: Vec<Decoder>,
}

/// A method that decodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Decoder {
    /// The method's name.
    pub method: String,
    /// Its level, if it has one.
    pub level: Option<u8>,
    /// Decoding a GiB of pages.
    pub decode: Work,
}

/// Which start of which kernel this is; the same for all containers and network namespaces of a host.
fn boot() -> String {
    let read = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    read.unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_request_is_told_from_other_messages_and_checked() {
        let read = |message: Value| Request::read(&message);
        assert_eq!(read(json!({ "hotlift-control": 1 })), None);
        assert_eq!(read(json!(["hotlift-survey"])), None);
        let good = read(json!({ "hotlift-survey": 1, "connections": 16 }));
        assert!(matches!(good, Some(Ok(_))), "{good:?}");
        for (bad, words) in [
            (
                json!({ "hotlift-survey": 2, "connections": 1 }),
                "same hotlift",
            ),
            (json!({ "hotlift-survey": 2 }), "same hotlift"),
            (json!({ "hotlift-survey": 1, "connections": 0 }), "1 to 16"),
            (json!({ "hotlift-survey": 1, "connections": 17 }), "1 to 16"),
            (
                json!({ "hotlift-survey": 1, "connections": -1 }),
                "not understood",
            ),
            (json!({ "hotlift-survey": 1 }), "not understood"),
        ] {
            let reason = read(bad.clone()).unwrap().unwrap_err();
            assert!(reason.contains(words), "{bad}: {reason}");
        }
    }
}
