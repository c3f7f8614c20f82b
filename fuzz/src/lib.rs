//! Functions of the fuzz targets. Each function checks the guarantees of one decoder for any input.
//!
//! | file | decoder |
//! |---|---|
//! | `methods` | payloads of every method; and `round_trip`, every encoder into its decoder |
//! | `records` | XBZRLE deltas and `compress` pages |
//! | `main_channel` | the main channel, and its device state |
//! | `channel` | packet headers and opening packets of multifd channels |
//! | `return_path` | messages of a destination |
//! | `file_ranges` | messages to read a save file from another host |
//! | `mapped_ram` | QEMU's `mapped-ram` file |
//! | `save_file` | Hotlift's save file |
//! | `tls_records` | records after a TLS handshake |
//! | `memory` | input at the end of memory, pages between canaries, an allocation limit |

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

/// All fuzz targets: the name of the program and corpus, and the function that runs one input.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("compress", records::compress),
    ("file_ranges", file_ranges::messages),
    ("initial_packet", channel::initial_packet),
    ("lz4", |data| methods::decode("lz4", data)),
    ("main_channel", main_channel::read),
    ("mapped_ram", mapped_ram::walk),
    ("none", |data| methods::decode("none", data)),
    ("packet", channel::packet),
    ("qatzip", |data| methods::decode("qatzip", data)),
    ("qpl", |data| methods::decode("qpl", data)),
    ("return_path", return_path::messages),
    ("round_trip", methods::round_trip),
    ("save_file", save_file::read),
    ("tail", main_channel::tail),
    ("tls_records", tls_records::records),
    ("uadk", |data| methods::decode("uadk", data)),
    ("xbzrle", records::xbzrle),
    ("zlib", |data| methods::decode("zlib", data)),
    ("zstd", |data| methods::decode("zstd", data)),
];

/// Runs the target `name` with one input.
///
/// # Panics
/// If a guarantee of the decoder is violated, or the target does not exist.
pub fn run(name: &str, data: &[u8]) {
    let target = TARGETS.iter().find(|(target, _)| *target == name);
    let (_, target) = target.expect("a row of TARGETS");
    target(data);
}
