//! Pages as records of the main channel, in the two compressed forms that QEMU had before multifd.
//!
//! Neither is a method of [`METHODS`](crate::METHODS). A record holds one page and needs no state of earlier records, except
//! for XBZRLE: the destination's copy of the page.

pub mod compress;
pub mod xbzrle;
