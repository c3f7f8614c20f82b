//! Limits for every number from a peer that sizes an allocation or a loop.
//!
//! QEMU's format has natural limits for some; the others are Hotlift's. They are an order of magnitude above what real machines
//! send, and far below what would harm a host.

/// Longest machine name, in bytes. QEMU has no limit (be32 on the wire); its longest is below 32.
pub const MACHINE_NAME: usize = 255;

/// Maximum number of names in `configuration/capabilities`. QEMU sends at most two, of about twenty that exist.
pub const CAPABILITIES: usize = 32;

/// Maximum number of RAM blocks. A `pc` machine has about ten; a hundred hot-plugged DIMMs add one each.
pub const RAM_BLOCKS: usize = 4096;

/// Maximum total bytes of all RAM blocks. Receivers keep bitmaps of one bit for each page: at most half a GiB. The largest
/// machines sold have 32 TiB; the largest VMs in use, 12.
pub const RAM: u64 = 16 << 40;

/// Maximum number of sections (START and FULL) of one stream. A minimal `pc` machine has 61.
pub const SECTIONS: usize = 4096;

/// Longest payload of one device section, in bytes. QEMU has no limit; ordinary devices stay below 1 MiB.
pub const DEVICE_PAYLOAD: usize = 16 << 20;

/// Longest VM description, in bytes (32 bits on the wire). About 100 KB for a minimal machine.
pub const VM_DESCRIPTION: usize = 16 << 20;

/// Maximum number of bytes that [`MainDecoder`](crate::main_channel::MainDecoder) needs at once: the longest record with its
/// header.
pub const MAIN_RECORD: usize = 16 << 20 | 1024;

/// Maximum number of commands before the list of RAM blocks. QEMU sends at most three.
pub const SETUP_COMMANDS: usize = 64;

/// Longest message on the return path, in bytes: `migration.c` reads into a buffer of 512.
pub const RETURN_PATH_PAYLOAD: usize = 512;

/// Longest text of an `ERROR_TEXT` message, in bytes, so that it fits [`RETURN_PATH_PAYLOAD`].
pub const ERROR_TEXT: usize = 500;

/// Maximum number of pages in one multifd packet. QEMU's packet is 512 KiB (128 pages of 4 KiB, `MULTIFD_PACKET_SIZE`); between
/// two Hotlifts a packet may be larger.
pub const PACKET_PAGES: usize = 4096;

/// Limit of a payload, as a multiple of its packet's full page data. QEMU's receivers of zlib, zstd and qatzip accept 1 MiB for
/// a packet of 512 KiB.
pub const PAYLOAD_FACTOR: usize = 2;

/// Longest legacy compressed page (`COMPRESS_PAGE`), in bytes: zlib's `compressBound(4096)`.
pub const COMPRESSED_PAGE: usize = 4109;

/// Maximum number of bytes of device sections that a relay sends to another at once, with a checksum. A relay buffers no more:
/// a minimal `pc` machine has 200 KB of state, but one with displays or virtiofsd has tens to hundreds of MiB.
pub const DEVICE_PART: usize = 256 << 10;

/// Maximum length of a record of a `mapped-ram` file before its devices: a configuration with the maximum number of
/// capabilities.
pub const MAPPED_RAM_RECORD: usize = 16 << 10;

/// Longest name of an exported save file, in bytes: the limit of file systems.
pub const FILE_NAME: usize = 255;

/// Longest text of a file server's refusal, in bytes.
pub const FILE_TEXT: usize = 1000;

/// Maximum number of bytes of a save file in one read, and size of a server's buffer for each connection.
pub const FILE_READ: usize = 1 << 20;
