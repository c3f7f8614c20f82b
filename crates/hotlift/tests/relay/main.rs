//! Tests relays between a source and a destination: output equals input, and the guest never runs on both sides.
//! Sockets are real. There is no QEMU; the source's data is recorded.

mod before_ram;
mod cancel;
mod carries;
mod damage;
mod destination;
mod dialects;
mod early;
mod guest_owner;
mod hostile;
mod idle;
mod log;
mod options;
mod recording;
mod rig;
mod save;
mod source;
mod tls;
