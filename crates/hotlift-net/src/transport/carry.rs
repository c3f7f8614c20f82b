//! Copies bytes from one connection to another, unchanged.

use std::io::Write;
use std::net::Shutdown;

use super::Stream;

/// Size of the copy buffer, in bytes.
const COPY: usize = 256 << 10;

/// Copies `from` to `to` until the end of `from`, then shuts down writing to `to`. The opposite direction is not changed.
/// `each` receives the bytes read. If the peer of `to` reads slowly, the peer of `from` must wait. Returns true if all bytes
/// were copied. If one connection breaks, resets both: otherwise the peer would see a normal end of the data.
pub fn carry(from: &Stream, to: &Stream, each: &mut dyn FnMut(&[u8])) -> bool {
    let mut buffer = vec![0; COPY];
    loop {
        let read = match from.read_some(&mut buffer) {
            Ok(0) => {
                to.shutdown(Shutdown::Write);
                return true;
            }
            Ok(read) => read,
            Err(_) => break,
        };
        each(&buffer[..read]);
        let mut out = to;
        if out.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    from.shut_down_abruptly();
    to.shut_down_abruptly();
    false
}
