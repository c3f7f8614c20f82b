//! The first 64 bytes of a multifd channel. The second half, which QEMU leaves zero, contains Hotlift's fields.
//!
//! ```text
//!  0 magic  4 version  8 uuid (16)  24 channel id  25 zero (7)  32 Hello or zero (32)
//!
//! 32 "HLFT"  36 be16 version  38 channels  39 method or 0xff  40 be32 packet pages  44 be32 page size
//! 48 zero page detection  49 zero (11)  60 be32 CRC-32 of bytes 32 to 59
//! ```

use super::{MAGIC, Method, PacketLayout, VERSION, expect};
use crate::{Reader, WireError, handshake};

/// Length of the opening packet in bytes (`MultiFDInit_t`).
pub const INITIAL_PACKET_LEN: usize = 64;

const HELLO: usize = 32;
const HELLO_CRC: usize = 60;
/// Method code that means: each packet names its method. No method has this code.
const BY_PACKET: u8 = 0xff;
const HELLO_MAGIC: [u8; 4] = *b"HLFT";

/// Opening packet of a channel, before its page packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InitialPacket {
    /// UUID of the VM; all zero if it has none. A receiver must refuse the UUID of another VM.
    pub uuid: [u8; 16],
    /// Channel number, from 0. A receiver must refuse a repeated number, and a number that is not below the channel count.
    /// (QEMU accepts a number that equals the count.)
    pub id: u8,
    /// Settings of a Hotlift; `None` for a QEMU, which sends zero bytes here, and ignores others.
    pub hello: Option<Hello>,
}

/// Settings of the sending Hotlift. A receiver with other settings reports this at once. Between QEMUs, channels with different
/// settings fail at a later packet, or hang.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// Number of multifd channels of the migration, at least 1.
    pub channels: u8,
    /// Compression method of the migration; `None` if each packet names its method.
    pub method: Option<Method>,
    /// Size of the packets.
    pub layout: PacketLayout,
    /// Where the source detects zero pages.
    pub zero_page_detection: ZeroPageDetection,
}

/// Where the source detects zero pages: QEMU's parameter `zero-page-detection`, with the numbers of QEMU's enum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ZeroPageDetection {
    /// Nowhere: zero pages are sent like other pages.
    None = 0,
    /// In the migration thread. Zero pages are sent on the main channel.
    Legacy = 1,
    /// In the threads of the channels. Zero pages are listed in packets.
    #[default]
    Multifd = 2,
}

impl ZeroPageDetection {
    fn from_code(code: u8) -> Result<Self, WireError> {
        [Self::None, Self::Legacy, Self::Multifd]
            .into_iter()
            .find(|&detection| detection as u8 == code)
            .ok_or(WireError::Unknown {
                what: "zero page detection of a Hotlift hello",
                got: u64::from(code),
            })
    }
}

impl InitialPacket {
    /// Encodes the packet.
    pub fn encode(&self) -> [u8; INITIAL_PACKET_LEN] {
        let mut packet = [0; INITIAL_PACKET_LEN];
        packet[..4].copy_from_slice(&MAGIC.to_be_bytes());
        packet[4..8].copy_from_slice(&VERSION.to_be_bytes());
        packet[8..24].copy_from_slice(&self.uuid);
        packet[24] = self.id;
        if let Some(hello) = self.hello {
            hello.put(&mut packet);
        }
        packet
    }

    /// Decodes a packet. The reserved bytes 25 to 31 are ignored, as in QEMU. Bytes 32 to 63 must be zero or a valid [`Hello`]:
    /// a Hotlift's damaged packet must not be mistaken for a QEMU's.
    pub fn decode(packet: &[u8; INITIAL_PACKET_LEN]) -> Result<Self, WireError> {
        let mut reader = Reader::new(packet);
        expect(reader.be32("multifd magic")?, MAGIC, "multifd magic")?;
        expect(reader.be32("multifd version")?, VERSION, "multifd version")?;
        let uuid = *reader.array("multifd UUID")?;
        let id = reader.u8("multifd channel id")?;

        let hello = if packet[HELLO..].iter().all(|&byte| byte == 0) {
            None
        } else {
            Some(Hello::read(packet)?)
        };
        if let Some(hello) = hello
            && id >= hello.channels
        {
            return Err(WireError::OverLimit {
                what: "multifd channel id",
                limit: u64::from(hello.channels) - 1,
                got: u64::from(id),
            });
        }
        Ok(Self { uuid, id, hello })
    }
}

impl Hello {
    fn put(self, packet: &mut [u8; INITIAL_PACKET_LEN]) {
        // The numbers of a layout are limited far below 32 bits.
        let wire = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_be_bytes();
        packet[32..36].copy_from_slice(&HELLO_MAGIC);
        packet[36..38].copy_from_slice(&u16::from(handshake::VERSION).to_be_bytes());
        packet[38] = self.channels;
        packet[39] = self.method.map_or(BY_PACKET, Method::code);
        packet[40..44].copy_from_slice(&wire(self.layout.pages()));
        packet[44..48].copy_from_slice(&wire(self.layout.page_size()));
        packet[48] = self.zero_page_detection as u8;
        let sum = crc32fast::hash(&packet[HELLO..HELLO_CRC]);
        packet[HELLO_CRC..].copy_from_slice(&sum.to_be_bytes());
    }

    fn read(packet: &[u8; INITIAL_PACKET_LEN]) -> Result<Self, WireError> {
        let mut reader = Reader::new(&packet[HELLO..]);
        let magic = u32::from_be_bytes(HELLO_MAGIC);
        expect(reader.be32("Hotlift hello")?, magic, "Hotlift hello")?;

        let expected = Reader::new(&packet[HELLO_CRC..]).be32("Hotlift hello")?;
        let got = crc32fast::hash(&packet[HELLO..HELLO_CRC]);
        WireError::check_crc("Hotlift hello", expected, got)?;

        let version = reader.be16("Hotlift hello version")?;
        if version != u16::from(handshake::VERSION) {
            return Err(WireError::HotliftVersion { got: version });
        }
        let channels = reader.u8("channels of a Hotlift hello")?;
        if channels == 0 {
            return Err(WireError::Empty {
                what: "channel count of a Hotlift hello",
            });
        }
        let method = match reader.u8("method of a Hotlift hello")? {
            BY_PACKET => None,
            code => Some(Method::from_flag(code.into()).ok_or(WireError::Unknown {
                what: "method of a Hotlift hello",
                got: u64::from(code),
            })?),
        };
        // The layout limits both numbers. A 32-bit number that does not fit `usize` is far above these limits.
        let wire = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
        let pages = wire(reader.be32("packet pages of a Hotlift hello")?);
        let page_size = wire(reader.be32("page size of a Hotlift hello")?);
        let layout = PacketLayout::new(page_size, pages)?;
        let zero_page_detection = ZeroPageDetection::from_code(reader.u8("Hotlift hello")?)?;
        if let Some(&byte) = reader
            .array::<11>("Hotlift hello")?
            .iter()
            .find(|&&b| b != 0)
        {
            return Err(WireError::Mismatch {
                what: "reserved byte of a Hotlift hello",
                expected: 0,
                got: u64::from(byte),
            });
        }
        Ok(Self {
            channels,
            method,
            layout,
            zero_page_detection,
        })
    }
}
