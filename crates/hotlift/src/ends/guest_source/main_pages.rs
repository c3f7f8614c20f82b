//! Pages that the migration thread itself handles, chunk by chunk.
//!
//! With `zero-page-detection=legacy`, the migration thread scans each chunk before the channel threads. It sends zero pages as
//! records of the main channel, and puts other dirty pages back into the bitmap. Then it releases the chunk to the channel
//! threads. Each page is sent once per round, on main or on a channel. Both are sent before the round's barrier, so they need
//! no order.
//!
//! Without multifd, the migration thread sends all pages as records of the main channel. With `compress`, other threads make
//! the records. With `xbzrle`, a record may be the delta of a page.

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::multifd::ZeroPageDetection;

use crate::ends::guest_source::normal_share::NormalShare;
use crate::ends::guest_source::source::GuestSource;
use crate::ends::guest_source::xbzrle::{Form, Xbzrle};
use crate::error::MigrationError;
use crate::options::Options;
use crate::pipe::batch::Batch;
use crate::pipe::flow::Flow;
use crate::precopy::ram::offsets;

/// Number of pages between two calls of `between`. Pages with content fill the main channel's buffer of 64 KiB once in this
/// time. So a low `max-bandwidth` blocks the thread for at most one write.
const PAGES_BETWEEN: usize = 16;

/// Maximum pages in a batch for a `compress` thread. With 1, 8, 32 and 128 pages the migration thread took 1.05, 0.53, 0.40
/// and 0.36 CPU s/GiB (8 threads, level 1, Silesia; the pages were not copied). The `compress` threads gained nothing beyond
/// 8 pages. At the end of a round the other threads wait for the last batch, which is 1 ms of work.
const HANDED_OUT: usize = 32;

/// Returns true if the migration thread must scan pages.
pub(crate) fn needed(options: &Options) -> bool {
    !options.stream.multifd() || options.zero_pages.detection == ZeroPageDetection::Legacy
}

/// Scans all chunks of the round that has just started. Calls `between` repeatedly, because the scan of one chunk may take
/// minutes.
pub(crate) fn scan(
    source: &GuestSource<'_>,
    flow: &Flow<Batch>,
    xbzrle: &mut Option<Xbzrle>,
    mut between: impl FnMut(&Option<Xbzrle>),
) -> Result<(), MigrationError> {
    let options = source.options;
    let detection = options.zero_pages.detection;
    let detect = detection != ZeroPageDetection::None;
    // `compress` threads detect zero pages themselves.
    let detects = detect && (!options.stream.compress || detection == ZeroPageDetection::Legacy);
    let mut normal_share = NormalShare::new(options.zero_pages.normal_page_ratio);
    let mut dirty = Vec::new();
    let mut untouched = Vec::new();
    let mut handed_out: Option<Batch> = None;
    for (index, chunk) in source.ram.chunks().iter().copied().enumerate() {
        if source.control.life().is_stopped() {
            return Ok(());
        }
        if source.cuts_round() {
            source.ram.release_all();
            break;
        }
        if source.ram.fetch_and_clear(chunk, &mut dirty)? {
            source.ram.untouched(chunk, &mut untouched);
            let ram = &source.guest.ram()[chunk.block];
            let (mut normal_pages, mut zero_pages) = (0, 0);
            let mut turn = None;
            for (nth, (page, offset)) in offsets(chunk, &dirty).enumerate() {
                let number = chunk.first_page + page;
                if nth % PAGES_BETWEEN == 0 {
                    between(xbzrle);
                }
                if source.cuts_round() {
                    source.ram.put_back(chunk.block, number);
                    continue;
                }
                let is_untouched = detect && untouched[page / 64] >> (page % 64) & 1 == 1;
                let is_zero = is_untouched || detects && ram.page_is_zero(number);
                let as_zero = is_zero && !normal_share.takes();
                if !as_zero && options.stream.multifd() {
                    source.ram.put_back(chunk.block, number);
                    continue;
                }
                if !as_zero && options.stream.compress {
                    let has_room =
                        |batch: &Batch| batch.block == chunk.block && batch.len() < HANDED_OUT;
                    if !handed_out.as_ref().is_some_and(has_room) {
                        // Main is unlocked first: a thread that must free a batch may wait for main.
                        turn = None;
                        handed_out.take().into_iter().for_each(|it| flow.submit(it));
                        handed_out = match options.compress_wait_thread {
                            true => flow.take(),
                            false => flow.try_take(),
                        };
                        if let Some(batch) = &mut handed_out {
                            batch.start(chunk.block);
                        }
                    }
                    if let Some(batch) = &mut handed_out {
                        batch.push_guest(offset as u64, ram.run(offset, PAGE_SIZE)?);
                        continue;
                    }
                }
                let main = turn.get_or_insert_with(|| source.out.main.take());
                let (block, at) = (chunk.block, offset as u64);
                // If no `compress` thread is free, the page is sent uncompressed.
                if as_zero || options.stream.compress && detect && ram.page_is_zero(number) {
                    main.zero_page(block, at)?;
                    if let Some(xbzrle) = xbzrle {
                        xbzrle.zero_page(block, number);
                    }
                    zero_pages += 1;
                    continue;
                }
                let form = match xbzrle {
                    Some(xbzrle) => xbzrle.page(ram, block, number)?,
                    None => None,
                };
                match form {
                    Some(Form::Same) => continue,
                    Some(Form::Delta(delta)) => main.xbzrle_page(block, at, delta)?,
                    Some(Form::Whole(copy)) => main.copied_page(block, at, copy)?,
                    None => main.guest_page(block, at, ram.run(offset, PAGE_SIZE)?)?,
                }
                normal_pages += 1;
            }
            let counters = &source.out.link.counters;
            counters.add_pages(normal_pages, zero_pages);
        }
        source.ram.release(index + 1);
        between(xbzrle);
    }
    handed_out.into_iter().for_each(|it| flow.submit(it));
    // The result is ignored: a broken flow means that a thread has failed, which the caller checks.
    flow.drain();
    Ok(())
}
