//! Fuzz target for messages between the reader of a save file and the file's server.

use hotlift_wire::file_ranges::{Answer, Open, READ_LEN, Read, Reply, VERSION};
use hotlift_wire::{WireError, limits};

use crate::memory::{at_the_end, bounded};

/// Allocation limit in bytes. The decoder reads messages in place.
const MEMORY: usize = 8 << 10;

/// Length of the longest message, in bytes.
const LONGEST: usize = 64 + limits::FILE_TEXT;

/// Decodes `data` as each kind of message. Encoding a decoded message must give the same bytes.
pub fn messages(data: &[u8]) {
    at_the_end(data, |data| bounded(MEMORY, || read(data)));
}

fn read(data: &[u8]) {
    let mut again = Vec::with_capacity(LONGEST);
    if let Some((open, length)) = checked(data, Open::decode(data)) {
        // The format of another version's message is unknown, so its bytes cannot be compared.
        if open.version == VERSION {
            open.encode(&mut again).expect("it was read");
            assert_eq!(again, data[..length]);
        }
    }
    again.clear();
    if let Some((reply, length)) = checked(data, Reply::decode(data)) {
        reply.encode(&mut again);
        assert_eq!(again, data[..length]);
    }
    again.clear();
    if let Some((answer, length)) = checked(data, Answer::decode(data, limits::FILE_READ)) {
        answer.encode(&mut again).expect("it was read");
        assert_eq!(again, data[..length]);
    }
    if let Some(bytes) = data.first_chunk::<READ_LEN>()
        && let Ok(read) = Read::decode(bytes)
    {
        assert!(read.length <= limits::FILE_READ);
        assert_eq!(read.encode(), *bytes);
    }
}

fn checked<T>(data: &[u8], decoded: Result<(T, usize), WireError>) -> Option<(T, usize)> {
    match decoded {
        Ok((message, length)) => {
            assert!(length <= data.len().min(LONGEST));
            Some((message, length))
        }
        Err(WireError::Truncated { needed, .. }) => {
            assert!(needed > 0, "needs nothing, and says nothing");
            assert!(data.len() + needed <= LONGEST);
            None
        }
        Err(_) => None,
    }
}
