//! How two Hotlifts know each other on a stream that is QEMU's.
//!
//! ```text
//! source                                                             destination
//!   first PING on main: "HL", version, features (Offer) ──────▶
//!                ◀── HELLO: version, features, name (Accepted), then PONG
//! ```
//!
//! A QEMU echoes the PING as any other, so that the absence of HELLO says what it is. A version names the meaning
//! of all that follows, and two different ones do not go together; a feature can be added without a new version, and
//! is made use of where both sides have it.
//!
//! Behind the handshake the value of each other PING of a Hotlift is the CRC-32 of every byte of main before it, and the PING
//! behind the last device asks whether all is loaded.

use bitflags::bitflags;

use crate::settle::MigrationId;

/// Version of what two Hotlifts say to each other.
pub const VERSION: u8 = 4;

/// A PING's value by which a relay says, before its source switches to postcopy, that the source has a preempt channel: a QEMU
/// that has been told of one (capability `postcopy-preempt`) waits for it. Its answer is not awaited.
pub const PREEMPT: u32 = PREFIX << 16 | 0xff01;

/// A PING's value by which a relay asks, behind the RAM blocks, whether the QEMU at the end of the way is connected. Until it is
/// answered the relay reads no page of its source.
pub const CONNECTED: u32 = PREFIX << 16 | 0xff02;

/// "HL", in the upper half of the first PING's value. QEMU counts its PINGs from 1.
const PREFIX: u32 = 0x484c;

bitflags! {
    /// What a Hotlift does on the stream; bits without a name are those of a later one, and are ignored.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Features: u32 {
        /// The stream has multifd channels.
        const MULTIFD = 1;
        /// The stream is a QEMU's, passed on: its devices come in packages, in QEMU's own format.
        const RELAYED = 1 << 1;
        /// Each multifd packet says its method, and another one may have another.
        const METHOD_BY_PACKET = 1 << 2;
        /// Pages of a postcopy that are waited for come on a connection of their own.
        const PREEMPT = 1 << 3;
        /// Between relays a PING follows the package of a postcopy, which is passed on only if its value is right.
        const PACKAGE_CHECKED = 1 << 4;
        /// Between relays a PING with the value [`CONNECTED`] follows the RAM blocks, which is answered once the destination's
        /// QEMU has answered the opening.
        const CONFIRMED = 1 << 5;
        /// Between relays the source takes what its guest does at the destination (`settle::Doing`): before the last SHUT(0), and
        /// in the answer to a question.
        const DOING = 1 << 6;
        /// The stream's sync points, a record each or the end of each section of RAM, are those of the source's QEMU. Without it
        /// they are the choice of a relay whose source has no multifd, or of an older one.
        const SYNC_POINTS_SHOWN = 1 << 7;
    }
}

/// What a source says of its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// Its [`VERSION`].
    pub version: u8,
    /// What its stream has; the first eight of [`Features`] fit.
    pub features: Features,
}

impl Offer {
    /// That of this Hotlift.
    #[must_use]
    pub fn new(features: Features) -> Self {
        Self {
            version: VERSION,
            features,
        }
    }

    /// The value of the source's first PING.
    #[must_use]
    pub fn ping(self) -> u32 {
        PREFIX << 16 | u32::from(self.version) << 8 | (self.features.bits() & 0xff)
    }

    /// What the first PING's value says; `None` if it is not a Hotlift's.
    #[must_use]
    pub fn of_ping(value: u32) -> Option<Self> {
        let [_, _, version, features] = value.to_be_bytes();
        (value >> 16 == PREFIX).then(|| Self {
            version,
            features: Features::from_bits_retain(features.into()),
        })
    }
}

/// What a destination of this [`VERSION`] answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepted {
    /// All that it can take.
    pub features: Features,
    /// What it calls this migration.
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
