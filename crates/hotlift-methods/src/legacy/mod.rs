//! Pages as records of the main channel, in the two compressed forms that QEMU had before multifd.
//!
//! Neither form is a method of [`METHODS`](crate::METHODS), which compress multifd packets. A record contains one page. A
//! `compress` record is complete. An XBZRLE record also needs the destination's copy of the page.

pub mod compress;
pub mod xbzrle;
