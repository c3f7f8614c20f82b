//! Fuzz targets for page records of the main channel: XBZRLE deltas and `compress` pages.

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::legacy::compress::{Deflater, Inflater, LEVELS};
use hotlift_methods::legacy::xbzrle::{self, Delta};

use crate::memory::{Order, Place, at_the_end, bounded};

/// Allocation limit in bytes. A decoder allocates only its own state.
const MEMORY: usize = 1 << 20;

/// Applies the input as an XBZRLE delta to a page. Then encodes the change as Hotlift's own delta, which must produce
/// the same page.
pub fn xbzrle(data: &[u8]) {
    let mut old = [0; PAGE_SIZE];
    for (i, byte) in old.iter_mut().enumerate() {
        *byte = i.to_le_bytes()[0];
    }
    let mut new = old;
    let applied = at_the_end(data, |delta| {
        bounded(MEMORY, || xbzrle::apply(delta, &mut new))
    });
    if applied.is_err() {
        return;
    }
    let mut delta = Vec::new();
    match xbzrle::encode(&old, &new, PAGE_SIZE, &mut delta) {
        Delta::Same => assert_eq!(old, new),
        Delta::Overflow => {}
        Delta::Encoded => {
            let mut again = old;
            let applied = at_the_end(&delta, |delta| xbzrle::apply(delta, &mut again));
            applied.expect("our own delta");
            assert!(again == new, "our own delta makes another page");
        }
    }
}

/// Inflates the input into a page. Then deflates a page with the repeated input as content, at any level, and inflates
/// it again.
pub fn compress(data: &[u8]) {
    let mut inflater = Inflater::new().expect("an inflater");
    let mut inflate = |stream: &[u8]| {
        at_the_end(stream, |stream| {
            Place::with(|place| {
                place.decoded(1, Order::Whole, |runs| {
                    bounded(MEMORY, || inflater.inflate(stream, runs[0]))
                })
            })
        })
    };
    // The result is ignored: the decoder must remain usable after an error.
    let _ = inflate(data);

    let level = data.first().map_or(1, |byte| byte % (LEVELS.end() + 1));
    let mut page = [0; PAGE_SIZE];
    if !data.is_empty() {
        let bytes = data.iter().cycle();
        page.iter_mut()
            .zip(bytes)
            .for_each(|(to, from)| *to = *from);
    }
    let mut deflater = Deflater::new(level).expect("a deflater");
    let mut stream = Vec::new();
    if deflater.deflate(&page, &mut stream).expect("deflate") {
        assert!(stream.len() < PAGE_SIZE, "{} bytes", stream.len());
        let (result, got) = inflate(&stream);
        result.expect("our own stream");
        assert!(got == page, "our own stream makes another page");
    } else {
        assert!(stream.is_empty(), "half a stream");
    }
}
