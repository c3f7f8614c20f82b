//! How two Hotlifts know each other on a stream that is QEMU's.
//!
//! The source's first PING has the value [`OPENING_PING`]. A QEMU echoes it; a Hotlift sends HELLO
//! on the return path before the echo, and takes the value of every later PING for the CRC-32 of all
//! bytes that came on main before it.

/// "HLFT".
pub(crate) const OPENING_PING: u32 = 0x484c_4654;

/// Version of the additions, sent in HELLO.
pub(crate) const VERSION: u32 = 1;
