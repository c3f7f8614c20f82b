//! Tests that the proof of a migration detects a single page that was not sent.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hotlift::Options;
use hotlift::guest::GuestError;
use hotlift::options::{StreamOptions, SwitchoverOptions};
use hotlift_mem::{DirtyBitmap, PAGE_SIZE};
use hotlift_testkit::alone;
use hotlift_vmm::layout::Layout;

use crate::probe::{Quirks, Sync, let_write};
use crate::rig::{self, settings};

/// Bits of a record's sequence with the number of the write among those of its vCPU.
const NUMBER: u64 = (1 << 56) - 1;

fn to_usize(offset: u64) -> usize {
    usize::try_from(offset).unwrap()
}

/// Makes a migration with a downtime limit of 0 take three rounds, as `three_rounds` does. Withholds one page of the working
/// set that was written after the second round: no other round sends it.
fn one_page_short(layout: Layout) -> Sync {
    let dropped = AtomicBool::new(false);
    let writes_before = AtomicU64::new(0);
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
                // The guest publishes its count some time after its writes.
                write()?;
                write()?;
                writes_before.store(guest.writes(), Ordering::SeqCst);
                write()?;
                Ok(0)
            }
            _ => {
                let late = fetch()?;
                // A page may be marked before its write begins: the withheld page was written.
                let before = writes_before.load(Ordering::SeqCst);
                let was_written = |page: &u64| {
                    let sequence = to_usize(layout.record(*page) + 8);
                    guest.ram()[0].load_u64(sequence).unwrap() & NUMBER > before
                };
                let lost = (0..layout.pages())
                    .find(was_written)
                    .map(|page| to_usize(layout.record(page)) / PAGE_SIZE)
                    .filter(|_| !dropped.swap(true, Ordering::SeqCst));
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
    alone!();
    let options = Options {
        stream: StreamOptions {
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        switchover: SwitchoverOptions {
            downtime_limit: Duration::ZERO,
            ..SwitchoverOptions::default()
        },
        ..Options::default()
    };
    for kind in rig::kinds() {
        let source = rig::source(kind, &settings(), Quirks::default());
        let layout = source.guest.layout();
        drop(source);
        let quirks = Quirks {
            sync: Some(one_page_short(layout)),
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
        // The check names the page; the guest may have found it before, and then reports it.
        let found = ["of the working set", "wrong records"];
        assert!(
            found.iter().any(|words| problem.contains(words)),
            "{kind}: {problem}"
        );
        eprintln!("{kind} guest, a page short: {problem}");
    }
}
