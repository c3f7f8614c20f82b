//! The relay, as a source and a destination see it: what comes out is what went in, and nobody runs
//! the guest whom the other might run. Real sockets, no QEMU: what a source says is recorded.

mod before_ram;
mod cancel;
mod carries;
mod damage;
mod destination;
mod dialects;
mod early;
mod hostile;
mod idle;
mod log;
mod options;
mod recording;
mod rig;
mod save;
mod source;
mod tls;
mod who_has_the_guest;
