//! Handshake by which two Hotlifts recognise each other in a stream of QEMU's format.
//!
//! ```text
//! source                                                             destination
//!   first PING on main: "HL", version, features (Offer) ──────▶
//!                ◀── HELLO: version, features, name (Accepted), then PONG
//! ```
//!
//! A QEMU echoes this PING like any other PING, so an absent HELLO identifies a QEMU. A version defines the meaning of
//! everything that follows, and different versions are incompatible. A new feature needs no new version, and is used if both
//! sides support it.
//!
//! After the handshake a Hotlift sends as PING value the CRC-32 of all earlier bytes of the main channel, or one of the values
//! below. The PING after the last device asks if the guest is completely loaded.

use bitflags::bitflags;

use crate::settle::MigrationId;

/// Version of the protocol between two Hotlifts.
pub const VERSION: u8 = 4;

/// PING value of a relay whose source has a separate connection for requested pages. Sent before the source switches to
/// postcopy. A QEMU with capability `postcopy-preempt` waits for this connection. The relay does not wait for the answer.
pub const PREEMPT: u32 = PREFIX << 16 | 0xff01;

/// PING value with which a relay asks, after the RAM block list, if the destination's QEMU is connected. The relay reads no
/// page from its source before the answer.
pub const CONNECTED: u32 = PREFIX << 16 | 0xff02;

/// "HL", the upper half of the value of a Hotlift's first PING. A QEMU counts its PINGs from 1.
const PREFIX: u32 = 0x484c;

bitflags! {
    /// Features of a Hotlift's stream. Unknown bits come from later versions, and are ignored.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Features: u32 {
        /// The stream has multifd channels.
        const MULTIFD = 1;
        /// A relay sends the stream of a QEMU: its device states are in QEMU's format, inside packages.
        const RELAYED = 1 << 1;
        /// Each multifd packet names its compression method, which may differ from that of other packets.
        const METHOD_BY_PACKET = 1 << 2;
        /// Pages that the destination has requested in a postcopy use a separate connection.
        const PREEMPT = 1 << 3;
        /// Between relays: a PING with a CRC-32 follows the package of a postcopy. The package is forwarded only if the CRC-32
        /// is correct.
        const PACKAGE_CHECKED = 1 << 4;
        /// Between relays: a PING with the value [`CONNECTED`] follows the RAM block list. This PING is answered after the
        /// destination's QEMU has answered on its return path.
        const CONNECTED_PING = 1 << 5;
        /// Between relays: the source accepts the guest's state at the destination (`settle::GuestActivity`). The state is sent
        /// in a message before SHUT(0), and in the answer to a question about the outcome.
        const GUEST_ACTIVITY = 1 << 6;
        /// The sync points of the stream are those of the source's QEMU: each is a flush record or the end of a section of RAM.
        /// Without this feature a relay chooses the sync points, because its source has no multifd or is older.
        const SYNC_POINTS_SHOWN = 1 << 7;
    }
}

/// Offer of a source in its first PING: version and features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// The source's [`VERSION`].
    pub version: u8,
    /// Features of the stream; only the lowest eight bits of [`Features`] are sent.
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

    /// Decodes the value of the first PING; `None` if the source is not a Hotlift.
    #[must_use]
    pub fn of_ping(value: u32) -> Option<Self> {
        let [_, _, version, features] = value.to_be_bytes();
        (value >> 16 == PREFIX).then(|| Self {
            version,
            features: Features::from_bits_retain(features.into()),
        })
    }
}

/// HELLO: answer of a destination with the same [`VERSION`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepted {
    /// All features that the destination supports.
    pub features: Features,
    /// The id that the destination has chosen for this migration.
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
