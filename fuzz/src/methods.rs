//! Fuzz targets for the payloads of compression methods.

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{Accelerator, Decode, EncoderSettings, METHODS, MethodError, method};

use crate::memory::{Order, PAGES_MAX, Place, at_the_end, bounded};

/// Allocation limit of a decoder in bytes: several times the largest packet here. zstd's window is allocated in C, and
/// not counted.
const MEMORY: usize = 4 << 20;

/// Maximum number of packets per input: enough to test state that a channel keeps between packets, and still fast.
const PACKETS: usize = 4;

/// Decodes several packets by the method `name`. The input is a byte for the number and layout of the pages, then a
/// be16 length before each payload. Two decoders decode every payload into pages in different places, and must give
/// equal results.
pub fn decode(name: &str, data: &[u8]) {
    let Some((&[head], mut rest)) = data.split_first_chunk() else {
        return;
    };
    let pages = 1 + usize::from(head) % PAGES_MAX;
    let order = Order::of(head >> 4);
    let new = || (method(name).expect(name).decoder)(Accelerator::Off).expect(name);
    let (mut decoder, mut other) = (new(), new());
    let mut failed = false;
    for _ in 0..PACKETS {
        let Some((length, behind)) = rest.split_first_chunk() else {
            return;
        };
        let length = usize::from(u16::from_be_bytes(*length)).min(behind.len());
        let (payload, behind) = behind.split_at(length);
        rest = behind;
        let (result, content) = one(&mut *decoder, payload, pages, order);
        let (again, same) = one(&mut *other, payload, pages, Order::Scattered);
        assert_eq!(result.is_ok(), again.is_ok(), "{result:?} and {again:?}");
        if failed && name != "none" {
            let expected = Err(MethodError::Failed {
                method: method(name).expect(name).name,
            });
            assert_eq!(result, expected, "after an error");
        }
        failed |= result.is_err();
        if result.is_ok() {
            assert!(
                content == same,
                "pages that lie elsewhere hold something else"
            );
        }
    }
}

fn one(
    decoder: &mut dyn Decode,
    payload: &[u8],
    pages: usize,
    order: Order,
) -> (Result<(), MethodError>, Vec<u8>) {
    at_the_end(payload, |payload| {
        Place::with(|place| {
            place.decoded(pages, order, |runs| {
                bounded(MEMORY, || decoder.decode(payload, runs))
            })
        })
    })
}

/// Number of levels that [`round_trip`] tries per method, from the lowest. The highest levels of zstd take tenths of a
/// second per packet.
const ROUND_TRIP_LEVELS: u8 = 9;

/// Maximum number of pages per packet in [`round_trip`].
const ROUND_TRIP_PAGES: usize = 4;

/// Encodes pages by any method, and decodes the result. The input is method, level, number of pages and layout, then
/// content that is repeated until the pages are full. Encodes two packets, because some methods keep state between
/// packets.
pub fn round_trip(data: &[u8]) {
    let Some((&[which, level, shape], content)) = data.split_first_chunk() else {
        return;
    };
    let method = &METHODS[usize::from(which) % METHODS.len()];
    let level = match &method.levels {
        Some(levels) => levels.start() + level % ROUND_TRIP_LEVELS,
        None => method.default_level,
    };
    let order = Order::of(shape >> 4);
    let pages = 1 + usize::from(shape) % ROUND_TRIP_PAGES;
    let mut encoder = (method.encoder)(&EncoderSettings::software(level)).expect(method.name);
    let mut decoder = (method.decoder)(Accelerator::Off).expect(method.name);
    let mut payload = Vec::new();
    let content = if content.is_empty() { &[0] } else { content };
    let mut bytes = content.iter().copied().cycle();
    for _ in 0..2 {
        let sent: Vec<u8> = bytes.by_ref().take(pages * PAGE_SIZE).collect();
        let encoded = at_the_end(&sent, |sent| encoder.encode(sent, &mut payload));
        encoded.expect(method.name);
        let room = hotlift_wire::limits::PAYLOAD_FACTOR * sent.len();
        assert!(payload.len() <= room, "{} bytes of payload", payload.len());
        let (result, got) = one(&mut *decoder, &payload, pages, order);
        result.expect(method.name);
        assert!(got == sent, "{} at level {level}", method.name);
    }
}
