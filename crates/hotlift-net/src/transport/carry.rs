//! Bytes from one connection to another, as they are.

use std::io::Write;
use std::net::Shutdown;

use super::Stream;

/// Bytes copied at once.
const COPY: usize = 256 << 10;

/// Copies what comes on `from` to `to` until its end, and ends that direction of `to`, too; the other direction is left as
/// it is. `each` is shown what was read. A slow reader of `to` makes the writer of `from` wait. True if all of it has
/// arrived; if one connection breaks, both are broken, so that a cut does not look like an end.
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
    from.break_off();
    to.break_off();
    false
}
