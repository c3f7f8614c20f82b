//! How two Hotlifts know each other on a stream that is QEMU's.
//!
//! The source's first PING has the value [`OPENING_PING`]. A QEMU echoes it; a Hotlift sends HELLO
//! on the return path before the echo, and takes the value of every later PING for the CRC-32 of all
//! bytes that came on main before it.

use hotlift_wire::settle::MigrationId;

/// "HLFT".
pub(crate) const OPENING_PING: u32 = 0x484c_4654;

/// Version of the additions, sent in HELLO.
pub(crate) const VERSION: u32 = 2;

/// A name for a migration that no other has, and that nobody can guess.
///
/// # Errors
/// The kernel gives no random bytes.
pub(crate) fn new_id() -> std::io::Result<MigrationId> {
    let mut id = [0; 16];
    let filled = rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    if filled < id.len() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(MigrationId(id))
}
