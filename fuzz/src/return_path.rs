//! Fuzz target for messages from a destination to its source (return path).

use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::{WireError, limits};

use crate::memory::{at_the_end, bounded};

/// Allocation limit in bytes. The decoder reads messages in place.
const MEMORY: usize = 4 << 10;

/// Decodes a sequence of messages. Encoding a decoded message must give the same bytes.
pub fn messages(data: &[u8]) {
    at_the_end(data, |data| bounded(MEMORY, || read(data)));
}

fn read(mut rest: &[u8]) {
    while !rest.is_empty() {
        match ReturnMessage::decode(rest) {
            Ok((message, length)) => {
                assert!((4..=4 + limits::RETURN_PATH_PAYLOAD).contains(&length));
                let mut again = Vec::with_capacity(length);
                message.encode(&mut again).expect("a message that was read");
                match message {
                    // The format of another version's message is unknown, so its bytes cannot be compared.
                    ReturnMessage::Hello { accepted: None, .. } => {
                        assert_eq!(again[4..8], rest[4..8]);
                    }
                    _ => assert_eq!(again, rest[..length]),
                }
                rest = &rest[length..];
            }
            Err(WireError::Truncated { needed, .. }) => {
                assert!(needed > 0, "needs nothing, and says nothing");
                assert!(rest.len() + needed <= 4 + limits::RETURN_PATH_PAYLOAD);
                return;
            }
            Err(_) => return,
        }
    }
}
