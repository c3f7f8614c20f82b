//! Pages as records of the main channel, in the two compressed forms that QEMU had before multifd.
//!
//! Neither is a method of [`METHODS`](crate::METHODS): both stand for one page, and need no state
//! from record to record but, for XBZRLE, the page that the destination has.

pub mod compress;
pub mod xbzrle;
