//! Fuzz target for the input after a TLS handshake: arbitrary records, and sealed (encrypted) records with any content.

use hotlift_tls::fixed::{End, ends, next_key, record};
use hotlift_tls::{CONNECTION_MEMORY, RECORD_PLAINTEXT, RecordError};

use crate::memory::bounded;

/// Allocation limit in bytes: the buffers of one TLS endpoint. The sealed records are created before.
const MEMORY: usize = CONNECTION_MEMORY + (16 << 10);

/// The two KeyUpdate handshake messages (RFC 8446, section 4.6.3). After a record with exactly one of these messages,
/// its sender uses the next key.
const KEY_UPDATES: [&[u8]; 2] = [&[24, 0, 0, 1, 0], &[24, 0, 0, 1, 1]];

/// Reads TLS records. The first byte selects the cipher, the endpoint that reads, and the kind of input. The input is
/// raw bytes, or a type, a length and the content of each record to seal.
pub fn records(data: &[u8]) {
    let Some((&first, data)) = data.split_first() else {
        return;
    };
    let [client, server] = ends(usize::from(first % 3), 4);
    let (mut reader, mut writer) = match first & 4 {
        0 => (client, server),
        _ => (server, client),
    };
    if first & 8 == 0 {
        let read = read(&mut reader, data, first);
        assert!(
            read.is_err() && read.data == 0,
            "records that nobody has sealed"
        );
        return;
    }
    let sealed = seal(&mut writer, data);
    let whole = read(&mut reader, &sealed.bytes, first);
    assert!(whole.data <= sealed.data, "more than was sent");
    if !sealed.is_closed {
        assert!(whole.is_err(), "an end that nobody has said");
    }
    // The same bytes must give the same result if they are read in pieces of another length.
    let [client, server] = ends(usize::from(first % 3), 4);
    let mut again = if first & 4 == 0 { client } else { server };
    let again = read(&mut again, &sealed.bytes, first.wrapping_add(16));
    assert_eq!(whole.data, again.data);
    assert_eq!(whole.is_err(), again.is_err());
}

struct Sealed {
    bytes: Vec<u8>,
    /// Number of bytes of application data in the records.
    data: usize,
    is_closed: bool,
}

/// Seals (encrypts) the records that `data` lists: type, length and content of each.
fn seal(writer: &mut End, mut data: &[u8]) -> Sealed {
    let mut sealed = Sealed {
        bytes: Vec::new(),
        data: 0,
        is_closed: false,
    };
    while let Some((&[kind, high, low], rest)) = data.split_first_chunk() {
        let length = usize::from(u16::from_be_bytes([high, low]));
        let length = length.min(rest.len()).min(RECORD_PLAINTEXT);
        let (content, rest) = rest.split_at(length);
        data = rest;
        let kind = [20, 21, 22, 23, kind][usize::from(kind % 5)];
        sealed
            .bytes
            .extend(record(&mut writer.sealer, kind, content));
        if kind == 23 {
            sealed.data += length;
        }
        sealed.is_closed |= kind == 21 && length == 2 && content[1] == 0;
        if kind == 22 && KEY_UPDATES.contains(&content) {
            next_key(&mut writer.sealer);
        }
    }
    sealed
}

/// Result of reading records: the number of bytes of application data, and the error.
struct Outcome {
    data: usize,
    error: Option<RecordError>,
}

impl Outcome {
    fn is_err(&self) -> bool {
        self.error.is_some()
    }
}

/// Reads all records in `bytes`. `pieces` determines the length of the pieces in which the bytes arrive.
fn read(end: &mut End, bytes: &[u8], pieces: u8) -> Outcome {
    let piece = 1 + 777 * usize::from(pieces >> 4);
    bounded(MEMORY, || {
        let mut from = Pieces(bytes, piece);
        let mut data = 0;
        let error = loop {
            match end.opener.plaintext(&mut from) {
                Ok([]) => break None,
                Ok(plaintext) => {
                    let n = plaintext.len();
                    data += n;
                    end.opener.consume(n);
                }
                Err(error) => break Some(error),
            }
        };
        assert!(end.opener.memory() <= CONNECTION_MEMORY);
        Outcome { data, error }
    })
}

/// A reader that returns at most the given number of bytes per read.
struct Pieces<'a>(&'a [u8], usize);

impl std::io::Read for Pieces<'_> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let n = to.len().min(self.1);
        self.0.read(&mut to[..n])
    }
}
