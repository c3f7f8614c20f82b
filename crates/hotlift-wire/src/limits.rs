//! Limits for every number from a peer that determines the size of an allocation or the length of a loop.
//!
//! Some limits come from QEMU's format; Hotlift defines the others. They are about ten times what real machines send, and far
//! below what would harm a host.

/// Maximum length of a machine name, in bytes. QEMU has no limit (be32 in the stream); its longest name is below 32.
pub const MACHINE_NAME: usize = 255;

/// Maximum number of names in `configuration/capabilities`. QEMU has about twenty capabilities, and sends the names of at most
/// two.
pub const CAPABILITIES: usize = 32;

/// Maximum number of RAM blocks. A `pc` machine has about ten; a hundred hot-plugged DIMMs add one each.
pub const RAM_BLOCKS: usize = 4096;

/// Maximum total size of all RAM blocks, in bytes. Receivers keep bitmaps with one bit for each page: at most half a GiB. The
/// largest VMs in use have 12 TiB; the largest machines sold have 32 TiB.
pub const RAM: u64 = 16 << 40;

/// Maximum number of START and FULL sections in one stream. A minimal `pc` machine has 61.
pub const SECTIONS: usize = 4096;

/// Maximum length of a device's state in one section, in bytes. QEMU has no limit; ordinary devices stay below 1 MiB.
pub const DEVICE_PAYLOAD: usize = 16 << 20;

/// Maximum length of the VM description, in bytes (be32 in the stream). A minimal machine's description has about 100 KB.
pub const VM_DESCRIPTION: usize = 16 << 20;

/// Maximum number of bytes that [`MainDecoder`](crate::main_channel::MainDecoder) needs for one event: the longest record with
/// its header.
pub const MAIN_RECORD: usize = 16 << 20 | 1024;

/// Maximum number of commands before the RAM block list. QEMU sends at most three.
pub const SETUP_COMMANDS: usize = 64;

/// Maximum length of a message on the return path, in bytes. QEMU reads it into a buffer of 512 (`migration.c`).
pub const RETURN_PATH_PAYLOAD: usize = 512;

/// Maximum length of the text of an `ERROR_TEXT` message, in bytes. The message must fit into [`RETURN_PATH_PAYLOAD`].
pub const ERROR_TEXT: usize = 500;

/// Maximum number of pages in one multifd packet. QEMU's packets have 128 pages of 4 KiB (`MULTIFD_PACKET_SIZE`). Packets
/// between two Hotlifts may be larger.
pub const PACKET_PAGES: usize = 4096;

/// Maximum length of a packet's payload, as a multiple of the uncompressed size of a full packet. QEMU's receivers of zlib,
/// zstd and qatzip accept 1 MiB for a packet of 512 KiB.
pub const PAYLOAD_FACTOR: usize = 2;

/// Maximum length of a compressed page on the main channel (`COMPRESS_PAGE`), in bytes: zlib's `compressBound(4096)`.
pub const COMPRESSED_PAGE: usize = 4109;

/// Maximum number of bytes of device sections that one relay sends to another in one piece, followed by a checksum. A relay
/// buffers only one piece. A minimal `pc` machine has 200 KB of device state; a machine with displays or virtiofsd has tens to
/// hundreds of MiB.
pub const DEVICE_PART: usize = 256 << 10;

/// Maximum length of a record in a `mapped-ram` file before the devices, in bytes: a configuration with the maximum number of
/// capabilities.
pub const MAPPED_RAM_RECORD: usize = 16 << 10;

/// Maximum length of the name of an exported save file, in bytes: the limit of file systems.
pub const FILE_NAME: usize = 255;

/// Maximum length of the text with which a file server refuses a request, in bytes.
pub const FILE_TEXT: usize = 1000;

/// Maximum number of bytes in one read of a save file, and size of a file server's buffer for each connection.
pub const FILE_READ: usize = 1 << 20;
