//! Mutual recognition of two Hotlifts on a stream in QEMU's format.
//!
//! ```text
//! source                                                             destination
//!   first PING on main: "HL", version, features (Offer) ──────▶
//!                ◀── HELLO: version, features, name (Accepted), then PONG
//! ```
//!
//! QEMU echoes this PING like any other, so an absent HELLO identifies a QEMU. A version defines the meaning of everything that
//! follows, and different versions are incompatible. Features can be added without a new version, and are used if both sides
//! have them.
//!
//! After the handshake the value of a Hotlift's PING is the CRC-32 of every earlier byte of the main channel, unless it is one
//! of the values below. The PING after the last device asks if everything is loaded.

use bitflags::bitflags;

use crate::settle::MigrationId;

/// Version of the protocol between two Hotlifts.
pub const VERSION: u8 = 4;

/// PING value with which a relay reports, before its source switches to postcopy, that the source has a preempt channel. A QEMU
/// with capability `postcopy-preempt` waits for that channel. The relay does not wait for the answer.
pub const PREEMPT: u32 = PREFIX << 16 | 0xff01;

/// PING value with which a relay asks, after the RAM blocks, if the destination's QEMU is connected. Until the answer the relay
/// reads no page from its source.
pub const CONNECTED: u32 = PREFIX << 16 | 0xff02;

/// "HL", the upper half of the first PING's value. QEMU counts its PINGs from 1.
const PREFIX: u32 = 0x484c;

bitflags! {
    /// Features of a Hotlift on the stream; unnamed bits come from later versions and are ignored.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Features: u32 {
        /// The stream has multifd channels.
        const MULTIFD = 1;
        /// The stream is relayed from a QEMU: its devices come in packages, in QEMU's own format.
        const RELAYED = 1 << 1;
        /// Each multifd packet names its method; methods may differ between packets.
        const METHOD_BY_PACKET = 1 << 2;
        /// Urgent pages of a postcopy come on a separate connection.
        const PREEMPT = 1 << 3;
        /// Between relays a PING with a CRC-32 follows the package of a postcopy, which is forwarded only if the value is
        /// correct.
        const PACKAGE_CHECKED = 1 << 4;
        /// Between relays a PING with the value [`CONNECTED`] follows the RAM blocks, answered once the destination's QEMU has
        /// answered the opening.
        const CONFIRMED = 1 << 5;
        /// Between relays the source accepts the guest's state at the destination (`settle::GuestActivity`), in a message
        /// before SHUT(0) and in the answer to a question.
        const DOING = 1 << 6;
        /// The stream's sync points come from the source's QEMU. Each is a flush record or the end of a section of RAM. Without
        /// this feature a relay chooses the sync points, because its source has no multifd or is older.
        const SYNC_POINTS_SHOWN = 1 << 7;
    }
}

/// Offer of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// The source's [`VERSION`].
    pub version: u8,
    /// Features of the stream; only the first eight of [`Features`] fit.
    pub features: Features,
}

impl Offer {
    /// Creates the offer of this Hotlift.
    #[must_use]
    pub fn new(features: Features) -> Self {
        Self {
            version: VERSION,
            features,
        }
    }

    /// Returns the value of the source's first PING.
    #[must_use]
    pub fn ping(self) -> u32 {
        PREFIX << 16 | u32::from(self.version) << 8 | (self.features.bits() & 0xff)
    }

    /// Decodes the first PING's value; `None` if it is not from a Hotlift.
    #[must_use]
    pub fn of_ping(value: u32) -> Option<Self> {
        let [_, _, version, features] = value.to_be_bytes();
        (value >> 16 == PREFIX).then(|| Self {
            version,
            features: Features::from_bits_retain(features.into()),
        })
    }
}

/// Answer of a destination with this [`VERSION`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepted {
    /// All features that the destination supports.
    pub features: Features,
    /// The destination's id for this migration.
    pub id: MigrationId,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_survives_with_the_features_of_a_later_version() {
        let offer = Offer {
            version: 9,
            features: Features::MULTIFD | Features::from_bits_retain(0x80),
        };
        assert_eq!(Offer::of_ping(offer.ping()), Some(offer));
    }

    #[test]
    fn a_ping_of_qemu_is_no_offer() {
        for value in [0, 1, 2, 3, u32::MAX] {
            assert_eq!(Offer::of_ping(value), None, "{value}");
        }
    }
}
