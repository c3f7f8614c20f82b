//! Prefetch of blocks: a few large reads replace many small ones, because each read from another host costs a round trip.

use super::FileError;
use super::exchange::Range;
use super::layout::Entry;
use super::remote::RemoteReader;

/// Largest gap between two blocks that one read covers, in bytes.
const GAP: u64 = 16 << 10;

/// Maximum length of one read, in bytes.
const RANGE: u64 = 1 << 20;

/// Maximum size of all prefetched ranges, in bytes. 4 MiB of RAM need at most half of it; blocks that exceed it are read on
/// demand.
const MAX_CACHED: usize = 8 << 20;

/// Prefetched ranges of one thread.
#[derive(Default)]
pub(crate) struct PrefetchedRanges {
    /// Position and content of each range, in ascending order.
    ranges: Vec<(u64, Vec<u8>)>,
}

impl PrefetchedRanges {
    /// Reads the blocks of `entries`, and drops all earlier ranges.
    ///
    /// # Errors
    /// Errors of the server. An error in the file is not reported here, but when its page is read.
    pub(crate) fn fill(
        &mut self,
        file: &RemoteReader,
        entries: impl Iterator<Item = Entry>,
    ) -> Result<(), FileError> {
        self.ranges = ranges(entries);
        let ranges = self.ranges.iter_mut();
        let mut ranges: Vec<_> = ranges
            .map(|(position, bytes)| Range::new((*position, bytes.as_mut_slice())))
            .collect();
        let outcome = file.read(&mut ranges);
        let got: Vec<_> = ranges.iter().map(|range| range.got).collect();
        for ((_, bytes), got) in self.ranges.iter_mut().zip(got) {
            bytes.truncate(got);
        }
        match outcome {
            Err(error) if error.is_final() => Err(error),
            Err(_) => {
                self.ranges.clear();
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Fills `into` with prefetched bytes from `position` on, and returns their number. Returns `None` if not all bytes were
    /// prefetched.
    pub(crate) fn copy(&self, into: &mut [u8], position: u64) -> Option<usize> {
        let behind = self.ranges.partition_point(|(start, _)| *start <= position);
        let (start, bytes) = self.ranges.get(behind.checked_sub(1)?)?;
        let bytes = bytes.get(usize::try_from(position - start).ok()?..)?;
        let length = bytes.len().min(into.len());
        into[..length].copy_from_slice(&bytes[..length]);
        // A range is short at the end of the file, or if its read failed: the caller reads again and gets the error.
        (length == into.len()).then_some(length)
    }
}

/// Merges neighbouring blocks into ranges; each range has a buffer for its bytes.
fn ranges(entries: impl Iterator<Item = Entry>) -> Vec<(u64, Vec<u8>)> {
    let mut blocks: Vec<_> = entries
        .map(|entry| (entry.position, entry.position + entry.length as u64))
        .collect();
    blocks.sort_unstable();
    let mut spans: Vec<(u64, u64)> = Vec::new();
    for (start, end) in blocks {
        match spans.last_mut() {
            Some(last) if start <= last.1 + GAP && end.max(last.1) - last.0 <= RANGE => {
                last.1 = end.max(last.1);
            }
            _ => spans.push((start, end)),
        }
    }
    let mut left = MAX_CACHED;
    let lengths = spans.into_iter().map_while(|(start, end)| {
        let length = usize::try_from(end - start).ok()?;
        left = left.checked_sub(length)?;
        Some((start, vec![0; length]))
    });
    lengths.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_pages_form_one_range_up_to_the_limit() {
        let entry = |position, length| Entry {
            position,
            length,
            place: 0,
        };
        let spans = |entries: &[Entry]| -> Vec<_> {
            let ranges = ranges(entries.iter().copied()).into_iter();
            ranges.map(|(start, bytes)| (start, bytes.len())).collect()
        };
        let far = 1 << 30;
        assert_eq!(
            spans(&[
                entry(9000, 64),
                entry(100, 640),
                entry(100, 640),
                entry(far, 64)
            ]),
            [(100, 8964), (far, 64)]
        );
        let many: Vec<_> = (0..1000).map(|i| entry(i * 32_000, 32_000)).collect();
        let spans = spans(&many);
        assert!(spans.iter().all(|(_, length)| *length <= 1 << 20));
        let total: usize = spans.iter().map(|(_, length)| length).sum();
        assert!(total <= MAX_CACHED && total > MAX_CACHED / 2);
    }

    #[test]
    fn prefetched_data_is_copied_completely_or_not_at_all() {
        let ahead = PrefetchedRanges {
            ranges: vec![(100, (0..50).collect()), (1000, vec![7; 10])],
        };
        let mut into = [0; 20];
        assert_eq!(ahead.copy(&mut into, 110), Some(20));
        assert_eq!((into[0], into[19]), (10, 29));
        for position in [99, 140, 150, 991, 1000, 2000] {
            assert_eq!(ahead.copy(&mut into, position), None, "{position}");
        }
        assert_eq!(ahead.copy(&mut into[..10], 1000), Some(10));
    }
}
