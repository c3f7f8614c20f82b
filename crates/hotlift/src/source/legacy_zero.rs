//! `zero-page-detection=legacy`: the migration thread looks for zero pages, ahead of the channels.
//!
//! Zero pages become records of the main channel; whatever else is dirty goes back into the bitmap,
//! and the chunk is released to the channel threads. A page is settled once a round, either here or
//! there, and both lie before the round's barrier, so the two ways need no order between them.

use super::main_channel::MainSender;
use super::ram::offsets;
use super::session::Session;
use crate::error::MigrationError;

/// Works through all chunks of the round that has just started.
pub(super) fn scan(session: &Session<'_>, main: &mut MainSender<'_>) -> Result<(), MigrationError> {
    let mut dirty = Vec::new();
    let mut untouched = Vec::new();
    for (index, chunk) in session.ram.chunks().iter().copied().enumerate() {
        if session.control.is_stopped() || session.has_failed() {
            return Ok(());
        }
        if session.ram.fetch_and_clear(chunk, &mut dirty)? {
            session.ram.untouched(chunk, &mut untouched);
            let ram = &session.guest.ram()[chunk.block];
            let mut zero_pages = 0;
            for (page, offset) in offsets(chunk, &dirty) {
                let is_zero = untouched[page / 64] >> (page % 64) & 1 == 1
                    || ram.page_is_zero(chunk.first_page + page);
                if is_zero {
                    main.zero_page(chunk.block, offset as u64)?;
                    zero_pages += 1;
                } else {
                    session.ram.put_back(chunk.block, chunk.first_page + page);
                }
            }
            session.main_counters().add_pages(0, zero_pages);
        }
        session.ram.release(index + 1);
    }
    Ok(())
}
