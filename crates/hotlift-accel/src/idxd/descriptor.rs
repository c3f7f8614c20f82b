//! Descriptors: the 64-byte commands to DSA.
//!
//! ```text
//!  0 PASID and privilege (the kernel's or the CPU's)   4 flags (24 bits)   7 opcode
//!  8 completion record   16 source   24 destination, or pattern   32 bytes, or count   36 interrupt
//! 40 by operation
//! ```
//!
//! All little endian. Layout and values: Intel's "Data Streaming Accelerator Architecture
//! Specification", chapter 8, and Linux' `uapi/linux/idxd.h`.

use super::record::Record;

/// Bytes of a descriptor.
pub const DESCRIPTOR: usize = 64;

/// Operation; also the number of its bit in `op_cap`, the device's supported operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// Does nothing and completes.
    Noop = 0x00,
    /// Executes a list of descriptors.
    Batch = 0x01,
    /// Copies a range.
    Memmove = 0x03,
    /// Fills a range with an 8-byte pattern.
    Fill = 0x04,
    /// Compares two ranges.
    Compare = 0x05,
    /// Compares a range with an 8-byte pattern.
    ComparePattern = 0x06,
}

impl Opcode {
    /// Returns the operation of that number, if it is known.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        use Opcode::{Batch, Compare, ComparePattern, Fill, Memmove, Noop};
        [Noop, Batch, Memmove, Fill, Compare, ComparePattern]
            .into_iter()
            .find(|opcode| *opcode as u8 == number)
    }
}

/// Flag: the address of the completion record is valid.
const RECORD_ADDRESS_VALID: u32 = 0x04;
/// Flag: the device must write a completion record.
const REQUEST_RECORD: u32 = 0x08;

/// One descriptor.
///
/// A descriptor contains addresses, not references. The submitter guarantees that the addresses are valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Descriptor {
    pasid: u32,
    flags_and_opcode: u32,
    record: u64,
    source: u64,
    destination: u64,
    size: u32,
    interrupt: u16,
    reserved: u16,
    by_operation: [u64; 3],
}

const _: () = assert!(size_of::<Descriptor>() == DESCRIPTOR);

impl Descriptor {
    fn new(opcode: Opcode, record: *const Record) -> Self {
        Self {
            pasid: 0,
            flags_and_opcode: RECORD_ADDRESS_VALID | REQUEST_RECORD | u32::from(opcode as u8) << 24,
            record: record as u64,
            source: 0,
            destination: 0,
            size: 0,
            interrupt: 0,
            reserved: 0,
            by_operation: [0; 3],
        }
    }

    /// Returns a no-op, which the device completes immediately. It tests a queue.
    #[must_use]
    pub fn noop(record: *const Record) -> Self {
        Self::new(Opcode::Noop, record)
    }

    /// Returns a descriptor that compares `bytes` bytes from `range` on with zero. The result in the completion record is 0 if
    /// all bytes are zero.
    #[must_use]
    pub fn is_zero(range: *const u8, bytes: u32, record: *const Record) -> Self {
        Self {
            source: range as u64,
            size: bytes,
            ..Self::new(Opcode::ComparePattern, record)
        }
    }

    /// Returns a batch of `count` descriptors from `list` on, which the device executes in any order. `count` must be from 2 to
    /// the queue's `max_batch_size`. No descriptor of the list may be a batch, and each has its own record.
    #[must_use]
    pub fn batch(list: *const Descriptor, count: u32, record: *const Record) -> Self {
        Self {
            source: list as u64,
            size: count,
            ..Self::new(Opcode::Batch, record)
        }
    }

    /// Returns the operation; `None` if it is unknown.
    #[must_use]
    pub fn opcode(&self) -> Option<Opcode> {
        Opcode::from_number(self.flags_and_opcode.to_le_bytes()[3])
    }

    /// Returns the address of the completion record.
    #[must_use]
    pub fn record(&self) -> *const Record {
        self.record as *const Record
    }

    /// Returns the address of the source, or of a batch's list.
    #[must_use]
    pub fn source(&self) -> u64 {
        self.source
    }

    /// Returns the address of the destination, or the pattern.
    #[must_use]
    pub fn destination(&self) -> u64 {
        self.destination
    }

    /// Returns the number of bytes of the range, or of descriptors in the batch.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Returns the descriptor as bytes, as the device reads them.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; DESCRIPTOR] {
        let mut bytes = [0; DESCRIPTOR];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.pasid.to_le_bytes());
        put(4, &self.flags_and_opcode.to_le_bytes());
        put(8, &self.record.to_le_bytes());
        put(16, &self.source.to_le_bytes());
        put(24, &self.destination.to_le_bytes());
        put(32, &self.size.to_le_bytes());
        put(36, &self.interrupt.to_le_bytes());
        put(38, &self.reserved.to_le_bytes());
        for (at, word) in (40..).step_by(8).zip(self.by_operation) {
            put(at, &word.to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a descriptor's bytes: `parts` at their offsets, and zeros elsewhere.
    fn golden(parts: &[(usize, &[u8])]) -> [u8; DESCRIPTOR] {
        let mut bytes = [0; DESCRIPTOR];
        for (at, part) in parts {
            bytes[*at..at + part.len()].copy_from_slice(part);
        }
        bytes
    }

    const RECORD: *const Record = 0x7fff_0000_1020_u64 as *const Record;
    const RECORD_BYTES: &[u8] = &[0x20, 0x10, 0, 0, 0xff, 0x7f, 0, 0];

    #[test]
    fn descriptors_have_the_bytes_of_the_specification() {
        assert_eq!(
            Descriptor::noop(RECORD).to_bytes(),
            golden(&[(4, &[0x0c, 0, 0, 0x00]), (8, RECORD_BYTES)])
        );
        let page = 0x5555_0000_3000_u64 as *const u8;
        let page_bytes = &[0, 0x30, 0, 0, 0x55, 0x55, 0, 0];
        assert_eq!(
            Descriptor::is_zero(page, 4096, RECORD).to_bytes(),
            golden(&[
                (4, &[0x0c, 0, 0, 0x06]),
                (8, RECORD_BYTES),
                (16, page_bytes),
                (32, &[0, 0x10, 0, 0]),
            ])
        );
        assert_eq!(
            Descriptor::batch(page.cast(), 128, RECORD).to_bytes(),
            golden(&[
                (4, &[0x0c, 0, 0, 0x01]),
                (8, RECORD_BYTES),
                (16, page_bytes),
                (32, &[128, 0, 0, 0]),
            ])
        );
    }

    #[test]
    fn memory_holds_what_to_bytes_says() {
        let descriptor = Descriptor::is_zero(0x1234_5678_9abc_u64 as *const u8, 77, RECORD);
        let bytes = descriptor.to_bytes();
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(std::mem::offset_of!(Descriptor, record), 8);
        assert_eq!(std::mem::offset_of!(Descriptor, source), 16);
        assert_eq!(std::mem::offset_of!(Descriptor, destination), 24);
        assert_eq!(std::mem::offset_of!(Descriptor, size), 32);
        assert_eq!(std::mem::offset_of!(Descriptor, by_operation), 40);
        assert_eq!((word(8), word(16)), (descriptor.record, descriptor.source));
        assert_eq!(align_of::<Descriptor>(), DESCRIPTOR);
    }

    #[test]
    fn opcodes_are_read_back() {
        assert_eq!(Descriptor::noop(RECORD).opcode(), Some(Opcode::Noop));
        assert_eq!(
            Descriptor::is_zero(std::ptr::null(), 8, RECORD).opcode(),
            Some(Opcode::ComparePattern)
        );
        assert_eq!(Opcode::from_number(0x02), None);
    }
}
