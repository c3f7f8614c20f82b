//! What the migration thread itself does with pages, chunk by chunk.
//!
//! With `zero-page-detection=legacy` it looks for zero pages ahead of the channels: they become records
//! of the main channel, whatever else is dirty goes back into the bitmap, and the chunk is released to
//! the channel threads. A page is settled once a round, either here or there, and both lie before the
//! round's barrier, so the two ways need no order between them.
//!
//! Without multifd it sends all pages, as records of the main channel; with `compress` other threads make
//! those records, and with `xbzrle` they are what has changed of a page.

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::multifd::ZeroPageDetection;

use crate::ends::guest_source::compress_threads::HandOut;
use crate::ends::guest_source::normal_share::NormalShare;
use crate::ends::guest_source::source::GuestSource;
use crate::ends::guest_source::xbzrle::{Form, Xbzrle};
use crate::error::MigrationError;
use crate::options::Options;
use crate::precopy::ram::offsets;
use crate::stream::main_send::MainSend;

/// Pages between two looks at what else is to be done. So many with content fill the main channel's buffer of
/// 64 KiB once: at a low `max-bandwidth` the thread is away for one write, not for several.
const PAGES_BETWEEN: usize = 16;

/// Whether the migration thread has to look at pages.
pub(crate) fn needed(options: &Options) -> bool {
    !options.multifd() || options.zero_page_detection == ZeroPageDetection::Legacy
}

/// Works through all chunks of the round that has just started.
/// `between` is called again and again: a chunk may take minutes.
pub(crate) fn scan(
    source: &GuestSource<'_>,
    main: &mut MainSend,
    xbzrle: &mut Option<Xbzrle>,
    mut between: impl FnMut(&Option<Xbzrle>),
) -> Result<(), MigrationError> {
    let detection = source.options.zero_page_detection;
    let detect = detection != ZeroPageDetection::None;
    let mut hand_out = source.options.compress.then(|| {
        HandOut::new(
            &source.compress,
            source.guest,
            source.options,
            &source.out.link.counters,
        )
    });
    // Threads that compress look for themselves.
    let looks = detect && (hand_out.is_none() || detection == ZeroPageDetection::Legacy);
    let mut normal_share = NormalShare::new(source.options.multifd_normal_page_ratio);
    let mut dirty = Vec::new();
    let mut untouched = Vec::new();
    for (index, chunk) in source.ram.chunks().iter().copied().enumerate() {
        if source.control.life().is_stopped() {
            return Ok(());
        }
        if source.cuts_round() {
            source.ram.release(source.ram.chunks().len());
            break;
        }
        if source.ram.fetch_and_clear(chunk, &mut dirty)? {
            source.ram.untouched(chunk, &mut untouched);
            let ram = &source.guest.ram()[chunk.block];
            let (mut normal_pages, mut zero_pages) = (0, 0);
            for (nth, (page, offset)) in offsets(chunk, &dirty).enumerate() {
                if nth % PAGES_BETWEEN == 0 {
                    between(xbzrle);
                }
                if source.cuts_round() {
                    source.ram.put_back(chunk.block, chunk.first_page + page);
                    continue;
                }
                let is_zero = detect && untouched[page / 64] >> (page % 64) & 1 == 1
                    || looks && ram.page_is_zero(chunk.first_page + page);
                if is_zero && !normal_share.takes() {
                    main.zero_page(chunk.block, offset as u64)?;
                    if let Some(xbzrle) = xbzrle {
                        xbzrle.zero_page(chunk.block, chunk.first_page + page);
                    }
                    zero_pages += 1;
                } else if source.options.multifd() {
                    source.ram.put_back(chunk.block, chunk.first_page + page);
                } else if let Some(hand_out) = &mut hand_out {
                    hand_out.page(main, chunk.block, offset as u64)?;
                } else {
                    let form = match xbzrle {
                        Some(xbzrle) => xbzrle.page(ram, chunk.block, chunk.first_page + page)?,
                        None => None,
                    };
                    let at = offset as u64;
                    match form {
                        Some(Form::Same) => continue,
                        Some(Form::Delta(delta)) => main.xbzrle_page(chunk.block, at, delta)?,
                        Some(Form::Whole(copy)) => main.copied_page(chunk.block, at, copy)?,
                        None => main.guest_page(chunk.block, at, ram.run(offset, PAGE_SIZE)?)?,
                    }
                    normal_pages += 1;
                }
            }
            source.out.link.counters.add_pages(normal_pages, zero_pages);
        }
        source.ram.release(index + 1);
        between(xbzrle);
    }
    if let Some(hand_out) = &mut hand_out {
        hand_out.finish(main)?;
    }
    Ok(())
}
