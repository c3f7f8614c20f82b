//! Completion records: the 32 bytes that a device writes when a descriptor is done.
//!
//! ```text
//!  0 status (0: not yet)   1 result   2 fault info   4 bytes or descriptors done   8 fault address
//! 16 by operation
//! ```

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Bytes of a record.
pub const RECORD: usize = 32;

/// Status: done.
const SUCCESS: u8 = 0x01;
/// Status: done, and the result differs from the expected one.
const SUCCESS_BUT_DIFFERS: u8 = 0x02;
/// Status: a page was absent; only the bytes before it are done.
const PAGE_FAULT: u8 = 0x03;
/// Status: the system could not provide the page.
const PAGE_REQUEST_FAILED: u8 = 0x04;
/// Status of a batch: some descriptors failed.
const BATCH_FAILED: u8 = 0x05;
/// Status of a batch: its list could not be read completely.
const BATCH_FAULT: u8 = 0x06;
/// Status: the address could not be translated.
const TRANSLATION_FAILED: u8 = 0x22;
/// Bit of the status: the fault was on a write.
const ON_WRITE: u8 = 0x80;

/// One record. A device writes it while a program reads it.
#[derive(Debug, Default)]
#[repr(C, align(32))]
pub struct Record {
    status: AtomicU8,
    result: AtomicU8,
    fault_info: AtomicU8,
    reserved: AtomicU8,
    completed: AtomicU32,
    fault_address: AtomicU64,
    by_operation: [AtomicU64; 2],
}

const _: () = assert!(size_of::<Record>() == RECORD);

/// Result of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// The descriptor is not done.
    Pending,
    /// The descriptor is done.
    Done {
        /// True if the record's result is not 0: a comparison found a difference.
        differs: bool,
    },
    /// The device stopped at an absent or unreachable page. The CPU must continue from there.
    Fault {
        /// True if a difference was already found.
        differs: bool,
        /// Bytes done before the fault.
        completed: u32,
    },
    /// Some descriptors of a batch failed. Each descriptor has its own record. A record that is still pending belongs to a
    /// descriptor that the device did not read.
    BatchFailed,
    /// The device failed with this status code.
    Failed(u8),
}

impl Record {
    /// Resets the record to pending, before the next submission.
    pub fn clear(&self) {
        self.result.store(0, Ordering::Relaxed);
        self.completed.store(0, Ordering::Relaxed);
        self.status.store(0, Ordering::Relaxed);
    }

    /// Returns the current result. If it is not pending, all earlier writes of the device are visible too.
    #[must_use]
    pub fn read(&self) -> Completion {
        let status = self.status.load(Ordering::Acquire);
        let differs = self.result.load(Ordering::Relaxed) != 0;
        match status & !ON_WRITE {
            0 => Completion::Pending,
            SUCCESS | SUCCESS_BUT_DIFFERS => Completion::Done { differs },
            PAGE_FAULT | PAGE_REQUEST_FAILED | TRANSLATION_FAILED => Completion::Fault {
                differs,
                completed: self.completed.load(Ordering::Relaxed),
            },
            BATCH_FAILED | BATCH_FAULT => Completion::BatchFailed,
            code => Completion::Failed(code),
        }
    }

    /// Writes the record as a device does: the status last.
    pub fn complete(&self, status: u8, result: u8, completed: u32, fault_address: u64) {
        self.result.store(result, Ordering::Relaxed);
        self.completed.store(completed, Ordering::Relaxed);
        self.fault_address.store(fault_address, Ordering::Relaxed);
        self.status.store(status, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_lie_where_the_device_writes_them() {
        assert_eq!(std::mem::offset_of!(Record, result), 1);
        assert_eq!(std::mem::offset_of!(Record, completed), 4);
        assert_eq!(std::mem::offset_of!(Record, fault_address), 8);
        assert_eq!(align_of::<Record>(), RECORD);
    }

    #[test]
    fn every_status_is_understood() {
        let read = |status, result, completed| {
            let record = Record::default();
            record.complete(status, result, completed, 0x1000);
            record.read()
        };
        assert_eq!(Record::default().read(), Completion::Pending);
        assert_eq!(read(0x01, 0, 4096), Completion::Done { differs: false });
        assert_eq!(read(0x01, 1, 64), Completion::Done { differs: true });
        assert_eq!(read(0x02, 1, 64), Completion::Done { differs: true });
        for status in [0x03, 0x83, 0x04, 0x22] {
            let expected = Completion::Fault {
                differs: false,
                completed: 512,
            };
            assert_eq!(read(status, 0, 512), expected, "{status:#x}");
        }
        for status in [0x05, 0x06] {
            assert_eq!(read(status, 0, 3), Completion::BatchFailed, "{status:#x}");
        }
        for status in (0x07..=0x21).chain([0x26, 0x27, 0x7f]) {
            assert_eq!(read(status, 0, 0), Completion::Failed(status));
        }
    }

    #[test]
    fn a_cleared_record_is_pending_again() {
        let record = Record::default();
        record.complete(0x03, 1, 77, 0);
        record.clear();
        assert_eq!(record.read(), Completion::Pending);
        record.complete(0x01, 0, 0, 0);
        assert_eq!(record.read(), Completion::Done { differs: false });
    }
}
