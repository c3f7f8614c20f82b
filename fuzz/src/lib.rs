//! What the fuzz targets do with their input. Each asserts the promises of one decoder.
//!
//! | file | decoder |
//! |---|---|
//! | `methods` | payloads of every method; and `round_trip`, every encoder into its decoder |
//! | `records` | XBZRLE deltas and `compress` pages |
//! | `main_channel` | the main channel, and its device state |
//! | `channel` | packet headers and opening packets of multifd channels |
//! | `return_path` | what a destination says |
//! | `file_ranges` | how a save file is read from another host |
//! | `mapped_ram` | QEMU's `mapped-ram` file |
//! | `save_file` | Hotlift's save file |
//! | `tls_records` | what comes behind a TLS handshake |
//! | `memory` | input at the end of memory, pages between canaries, a limit on what is allocated |

pub mod channel;
pub mod file_ranges;
pub mod main_channel;
pub mod mapped_ram;
pub mod memory;
pub mod methods;
pub mod records;
pub mod return_path;
pub mod save_file;
pub mod tls_records;
