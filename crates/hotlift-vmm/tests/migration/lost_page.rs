//! The proof of a migration would notice a single page that was not sent.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hotlift::Options;
use hotlift::guest::GuestError;
use hotlift_mem::{DirtyBitmap, PAGE_SIZE};

use crate::census::alone;
use crate::probe::{Quirks, Sync, let_write};
use crate::rig::{self, settings};

/// Makes a migration with a downtime limit of 0 take three rounds, as `three_rounds` does, and keeps
/// to itself one page of the working set that was written after the second: no other round sends it.
fn one_page_short(first_of_working_set: usize) -> Sync {
    let dropped = AtomicBool::new(false);
    let held: OnceLock<DirtyBitmap> = OnceLock::new();
    Box::new(move |guest, number, into| {
        let fetch = || -> Result<DirtyBitmap, GuestError> {
            let fetched = DirtyBitmap::new(into.pages());
            guest.sync_dirty_log(0, &fetched)?;
            guest.clear_dirty_log(0, 0, into.pages())?;
            Ok(fetched)
        };
        let write = || let_write(guest, 5).map_err(|reason| GuestError::new("write", reason));
        match number {
            1 => {
                write()?;
                guest.sync_dirty_log(0, into)
            }
            2 => {
                let _ = held.set(fetch()?);
                write()?;
                Ok(0)
            }
            _ => {
                let late = fetch()?;
                let lost = (first_of_working_set..late.pages()).find(|page| late.test(*page));
                let lost = lost.filter(|_| !dropped.swap(true, Ordering::SeqCst));
                for page in 0..late.pages() {
                    let dirty = late.test(page) || held.get().is_some_and(|held| held.test(page));
                    if dirty && lost != Some(page) {
                        into.set(page);
                    }
                }
                Ok(into.count())
            }
        }
    })
}

#[test]
fn a_single_dirty_page_that_is_not_sent_fails_the_check() {
    let _alone = alone();
    let options = Options {
        max_bandwidth: 0,
        downtime_limit: Duration::ZERO,
        ..Options::default()
    };
    for kind in rig::kinds() {
        let source = rig::source(kind, &settings(), Quirks::default());
        let layout = source.guest.layout();
        let base = usize::try_from(layout.filled().start).unwrap() / PAGE_SIZE;
        drop(source);
        let quirks = Quirks {
            sync: Some(one_page_short(base)),
            ..Quirks::default()
        };
        let source = rig::source(kind, &settings(), quirks);
        let destination = rig::destination(kind, &settings(), Quirks::default());
        let (listener, to) = rig::listen();
        let ended = rig::migrate(&source, &destination, listener, &to, &options);
        assert!(
            ended.source.is_ok() && ended.destination.is_ok(),
            "{:?}",
            ended.errors()
        );
        let problem = ended.holder(&source, &destination).unwrap_err();
        assert!(problem.contains("working set"), "{kind}: {problem}");
        eprintln!("{kind} guest, a page short: {problem}");
    }
}
