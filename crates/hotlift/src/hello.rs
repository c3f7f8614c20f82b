//! How this engine answers an offer: which source goes with which destination, and what a migration is called.

use hotlift_wire::handshake::{Accepted, Features, Offer, VERSION};
use hotlift_wire::main_channel::{Command, DeviceLengths, MainDecoder, MainEvent, Step};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::MigrationId;

use crate::error::MigrationError;
use crate::options::Options;
use crate::transport::Stream;

/// Bytes of main up to the first PING, at most: machine names are short.
const OPENING: usize = 1024;

/// A name for a migration that no other has, and that nobody can guess.
///
/// # Errors
/// The kernel gives no random bytes.
pub(crate) fn new_id() -> std::io::Result<MigrationId> {
    let mut id = [0; 16];
    let filled = rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    if filled < id.len() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(MigrationId(id))
}

/// Of a guest's own migration with these options.
pub(crate) fn features(options: &Options) -> Features {
    match options.multifd() {
        true => Features::MULTIFD,
        false => Features::empty(),
    }
}

/// The offer on `main`, of which nothing was taken yet; `None` while it has not come, and of a QEMU.
pub(crate) fn peek(main: &Stream) -> Option<Offer> {
    let mut bytes = [0; OPENING];
    let seen = main.peek(&mut bytes).ok()??;
    let mut decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
    let mut rest = &bytes[..seen];
    while let Ok(Step::Event { event, consumed }) = decoder.next(rest) {
        if let MainEvent::Command(Command::Ping(value)) = event {
            return Offer::of_ping(value);
        }
        rest = &rest[consumed..];
    }
    None
}

/// HELLO of a destination that calls the migration `id` and takes streams with `features`; and PONG.
pub(crate) fn answer(
    offer: Offer,
    features: Features,
    id: MigrationId,
) -> [ReturnMessage<'static>; 2] {
    let hello = ReturnMessage::Hello {
        version: VERSION.into(),
        accepted: Some(Accepted { features, id }),
    };
    [hello, ReturnMessage::Pong(offer.ping())]
}

/// Whether the source speaks this version, and its stream is what this side reads, by `takes`.
///
/// # Errors
/// [`MigrationError::Mismatch`], with what both are.
pub(crate) fn check(offer: Offer, takes: Features) -> Result<(), MigrationError> {
    if offer.version != VERSION {
        return Err(MigrationError::other_version(
            offer.version.into(),
            VERSION.into(),
        ));
    }
    let names = [
        (Features::RELAYED, "the stream", RELAYED),
        (Features::MULTIFD, "multifd", ["off", "on"]),
    ];
    for (feature, what, [without, with]) in names {
        let name = |features: Features| match features.contains(feature) {
            true => with.to_owned(),
            false => without.to_owned(),
        };
        if offer.features.contains(feature) != takes.contains(feature) {
            return Err(MigrationError::Mismatch {
                what: what.to_owned(),
                source_has: name(offer.features),
                destination_has: name(takes),
            });
        }
    }
    Ok(())
}

/// Whose stream it is.
const RELAYED: [&str; 2] = ["that of a guest of Hotlift's own", "a relay's, of a QEMU"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_does_not_fit_is_refused_with_what_both_sides_are() {
        let refused = |offer, takes| check(offer, takes).unwrap_err().chain();
        let guest = Offer::new(Features::MULTIFD);
        check(guest, Features::MULTIFD).unwrap();

        let relay = Offer::new(Features::MULTIFD | Features::RELAYED);
        let text = refused(relay, Features::MULTIFD);
        assert!(text.contains("a relay's, of a QEMU"), "{text}");

        let text = refused(guest, Features::empty());
        assert!(text.contains("multifd"), "{text}");

        // The first PING of version 2 was "HLFT".
        let old = Offer::of_ping(0x484c_4654).unwrap();
        let text = refused(old, Features::MULTIFD);
        assert!(text.contains("the same hotlift on both hosts"), "{text}");
    }

    #[test]
    fn features_of_a_later_version_are_no_reason_to_refuse() {
        let later = Offer::new(Features::from_bits_retain(0x80));
        check(later, Features::empty()).unwrap();
    }
}
