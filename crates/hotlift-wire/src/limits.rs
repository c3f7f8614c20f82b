//! Every number a peer can send that would size an allocation or a loop, and the most that is
//! accepted of it.
//!
//! Where QEMU's format has a natural bound it is used; the others are ours, an order of magnitude
//! above what real machines send, and far below what would hurt a host.

/// Longest machine name, in bytes. QEMU has no bound (be32 on the wire); its longest is below 32.
pub const MACHINE_NAME: usize = 255;

/// Most names in `configuration/capabilities`. QEMU puts at most two there, of about twenty that
/// exist.
pub const CAPABILITIES: usize = 32;

/// Most RAM blocks. A `pc` machine has about ten, one with a hundred hot-plugged DIMMs not many
/// more.
pub const RAM_BLOCKS: usize = 4096;

/// Most bytes of all RAM blocks together. Receivers keep bitmaps of a bit a page: half a GiB at most.
/// The largest machines that are sold have 32 TiB; the largest VMs in use, 12.
pub const RAM: u64 = 16 << 40;

/// Most sections (START and FULL) of one stream. A minimal `pc` machine has 61.
pub const SECTIONS: usize = 4096;

/// Longest payload of one device section, in bytes. QEMU has no bound; ordinary devices stay below
/// 1 MiB.
pub const DEVICE_PAYLOAD: usize = 16 << 20;

/// Longest VM description, in bytes (32 bits on the wire). About 100 KB for a minimal machine.
pub const VM_DESCRIPTION: usize = 16 << 20;

/// Most bytes that [`MainDecoder`](crate::main_channel::MainDecoder) ever wants to see at once:
/// the longest record with its own header.
pub const MAIN_RECORD: usize = 16 << 20 | 1024;

/// Most commands before the list of RAM blocks. QEMU sends three at most.
pub const SETUP_COMMANDS: usize = 64;

/// Longest message on the return path, in bytes: `migration.c` reads into a buffer of 512.
pub const RETURN_PATH_PAYLOAD: usize = 512;

/// Longest text of an `ERROR_TEXT` message, in bytes, so that it fits [`RETURN_PATH_PAYLOAD`].
pub const ERROR_TEXT: usize = 500;

/// Most pages in one multifd packet. QEMU's packet is 512 KiB (128 pages of 4 KiB,
/// `MULTIFD_PACKET_SIZE`); between two Hotlifts a packet may be larger.
pub const PACKET_PAGES: usize = 4096;

/// A payload's upper bound, as a multiple of its packet's full page data. QEMU's receivers of
/// zlib, zstd and qatzip take 1 MiB for a packet of 512 KiB.
pub const PAYLOAD_FACTOR: usize = 2;

/// Longest legacy compressed page (`COMPRESS_PAGE`), in bytes: zlib's `compressBound(4096)`.
pub const COMPRESSED_PAGE: usize = 4109;

/// Most bytes of device sections that two relays pass on at once, with a checksum. A relay holds so many, whatever all devices
/// together have: a minimal `pc` machine has 200 KB of state, one with displays or virtiofsd tens to hundreds of MiB.
pub const DEVICE_PART: usize = 256 << 10;

/// Most bytes that a record of a `mapped-ram` file before its devices has: a configuration with as
/// many capabilities as are accepted.
pub const MAPPED_RAM_RECORD: usize = 16 << 10;

/// Longest name of a save file that is handed out, in bytes: the longest of a file system.
pub const FILE_NAME: usize = 255;

/// Longest text of a file server's refusal, in bytes.
pub const FILE_TEXT: usize = 1000;

/// Most bytes of a save file that one read asks for. A server holds so many for each of its connections.
pub const FILE_READ: usize = 1 << 20;
