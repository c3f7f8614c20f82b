//! Handshake of a destination with a Hotlift source: checks that source and destination are compatible, and gives the migration
//! an id.

use hotlift_net::transport::Stream;
use hotlift_wire::handshake::{Accepted, Features, Offer, VERSION};
use hotlift_wire::main_channel::{Command, DeviceLengths, MainDecoder, MainEvent, Step};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::MigrationId;

use crate::error::MigrationError;
use crate::options::StreamOptions;

/// Maximum count of main's bytes before the first page. Suffices because machine and RAM block names are short.
const BEGINNING: usize = 16 << 10;

/// Returns a unique id for a migration. The id cannot be guessed.
///
/// # Errors
/// The system's error if the kernel cannot provide random bytes.
pub(crate) fn new_id() -> std::io::Result<MigrationId> {
    let mut id = [0; 16];
    let filled = rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    if filled < id.len() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(MigrationId(id))
}

/// Returns the features of a stream of a guest's migration with these options. `preempts` is true with `postcopy-preempt`.
pub(crate) fn features(options: &StreamOptions, preempts: bool) -> Features {
    let mut features = Features::empty();
    features.set(Features::MULTIFD, options.multifd());
    features.set(
        Features::METHOD_BY_PACKET,
        options.multifd() && options.packet_method().is_none(),
    );
    features.set(Features::PREEMPT, preempts);
    features
}

/// First bytes of a main channel, which were peeked and are not consumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beginning {
    /// A Hotlift offers its version and features.
    Offer(Offer),
    /// A QEMU has sent pages before a multifd flush (with multifd: `legacy` zero page detection). By then the QEMU has
    /// connected all its channels.
    Pages,
}

/// Peeks at the first bytes of `main`. Returns `None` while too few bytes have arrived.
pub(crate) fn peek(main: &Stream) -> Option<Beginning> {
    let mut bytes = vec![0; BEGINNING];
    let seen = main.peek(&mut bytes).ok()??;
    beginning(&bytes[..seen])
}

fn beginning(bytes: &[u8]) -> Option<Beginning> {
    let mut decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
    let mut rest = bytes;
    while let Ok(Step::Event { event, consumed }) = decoder.next(rest) {
        match event {
            MainEvent::Command(Command::Ping(value)) => {
                if let Some(offer) = Offer::of_ping(value) {
                    return Some(Beginning::Offer(offer));
                }
            }
            MainEvent::RamPage { .. } => return Some(Beginning::Pages),
            MainEvent::MultifdFlush => return None,
            _ => {}
        }
        rest = &rest[consumed..];
    }
    None
}

/// Returns the answer of a destination to `offer`: HELLO and PONG. The answer contains the migration's `id`, and the `features`
/// of streams that the destination accepts.
pub(crate) fn answer(
    offer: Offer,
    features: Features,
    id: MigrationId,
) -> [ReturnMessage<'static>; 2] {
    // Every stream of this version can have another method in each packet.
    let features = features | Features::METHOD_BY_PACKET;
    let hello = ReturnMessage::Hello {
        version: VERSION.into(),
        accepted: Some(Accepted { features, id }),
    };
    [hello, ReturnMessage::Pong(offer.ping())]
}

/// Checks that the source has the same version, and that this destination can read its stream. `takes` are the features that
/// the destination accepts.
///
/// # Errors
/// [`MigrationError::Mismatch`] with the values of source and destination.
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
        (Features::PREEMPT, "postcopy-preempt", ["off", "on"]),
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

/// Names of a stream's origin for errors: without and with feature RELAYED.
const RELAYED: [&str; 2] = ["that of a guest of Hotlift's own", "a relay's, of a QEMU"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mismatched_source_is_refused_with_both_kinds() {
        let refused = |offer, takes| check(offer, takes).unwrap_err().chain();
        let guest = Offer::new(Features::MULTIFD);
        check(guest, Features::MULTIFD).unwrap();

        let relay = Offer::new(Features::MULTIFD | Features::RELAYED);
        let text = refused(relay, Features::MULTIFD);
        assert!(text.contains("a relay's, of a QEMU"), "{text}");

        let text = refused(guest, Features::empty());
        assert!(text.contains("multifd"), "{text}");

        let preempts = Offer::new(Features::MULTIFD | Features::PREEMPT);
        let text = refused(preempts, Features::MULTIFD);
        assert!(text.contains("postcopy-preempt"), "{text}");

        // The first PING of version 2 was "HLFT".
        let old = Offer::of_ping(0x484c_4654).unwrap();
        let text = refused(old, Features::MULTIFD);
        assert!(text.contains("the same hotlift on both hosts"), "{text}");
    }

    #[test]
    fn a_stream_without_multifd_shows_by_its_first_page() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../hotlift-wire/fixtures");
        let main = |name: &str| {
            let file = std::fs::File::open(format!("{folder}/{name}/main.zst")).unwrap();
            zstd::stream::decode_all(file).unwrap()
        };
        for name in ["10.0-off", "7.2-off", "7.2-compress", "7.2-xbzrle"] {
            let bytes = main(name);
            let found = beginning(&bytes[..bytes.len().min(BEGINNING)]);
            assert_eq!(found, Some(Beginning::Pages), "{name}");
        }
        for name in ["10.0-none", "10.0-zstd"] {
            assert_eq!(beginning(&main(name)), None, "{name}");
        }
    }

    #[test]
    fn features_of_a_later_version_are_not_refused() {
        let later = Offer::new(Features::from_bits_retain(0x80));
        check(later, Features::empty()).unwrap();
    }
}
