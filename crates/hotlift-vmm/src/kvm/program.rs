//! The guest program: its ELF file and its load address.

use hotlift_mem::{MemError, RamBlock};

use crate::bytes::to_usize;
use crate::settings::Program;

/// ELF file of the guest program (`guest/hotlift.s`), with a PVH note. Any VMM that boots Linux by PVH can also run it
/// (`qemu-system-x86_64 -kernel`).
pub static ELF: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hotlift.elf"));

/// Load address of the program, which begins with data for the host (`head` in the source).
const LOAD: usize = 0x10_0000;
const HEAD_MAGIC: &[u8; 8] = b"HLFTprg1";

/// Address of the boot information, below the program; the command line follows.
const START_INFO: u64 = 0x1000;
const COMMAND_LINE: u64 = 0x2000;

/// Magic number of the boot information (`XEN_HVM_START_MAGIC_VALUE`).
const START_MAGIC: u32 = 0x336e_c578;

/// Length of a vCPU's block in guest memory, in bytes. The next constants are fields of the block.
pub(super) const BLOCK_LEN: u64 = 4096;
pub(super) const PUBLISHED: u64 = 0;
pub(super) const ERRORS: u64 = 8;

/// Sleep port: the vCPU writes the microseconds to sleep. A read returns [`SLEEP_HERE`].
pub(super) const SLEEP_PORT: u16 = 0x5158;
pub(super) const SLEEP_HERE: u32 = u32::from_le_bytes(*b"HLFT");
/// Stolen time port: a read returns the microseconds for which the vCPU was not run since the last read.
pub(super) const STOLEN_PORT: u16 = 0x5160;
/// Ready port: written when the page tables are complete. The other vCPUs may start at the written address.
pub(super) const READY_PORT: u16 = 0x515c;
/// First serial port (COM1): transmit register, and line status with "transmitter empty".
pub(super) const SERIAL_PORT: u16 = 0x3f8;
pub(super) const SERIAL_STATUS: u16 = 0x3fd;
pub(super) const SERIAL_EMPTY: u8 = 0x60;

/// Data of the guest program for the host.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    /// Start address of every vCPU except vCPU 0; the vCPU's index is in rdi.
    pub vcpu_main: u64,
    /// Address of the vCPUs' blocks.
    pub blocks: u64,
    /// Instruction address (rip) at which the published write count is in r15; elsewhere it is in r10.
    pub published: u64,
    /// Values of rip at which one, two, three, four stores of the next write are in memory.
    pub stored: [u64; 4],
}

/// The fields of the guest program's ELF that loading needs. The file is part of this build, so a malformed file is a
/// bug that the first test finds.
struct Image<'a> {
    entry: u64,
    segment: &'a [u8],
}

fn image() -> Image<'static> {
    let number = |at: usize, len: usize| {
        ELF[at..at + len]
            .iter()
            .rev()
            .fold(0, |so_far, &byte| so_far << 8 | u64::from(byte))
    };
    // ELF64: e_entry is at 24, e_phoff at 32. The program is in the first program header (guest/hotlift.ld).
    let header = to_usize(number(32, 8));
    let (offset, address) = (to_usize(number(header + 8, 8)), number(header + 24, 8));
    assert_eq!(
        to_usize(address),
        LOAD,
        "the guest program is linked for another address"
    );
    let segment = &ELF[offset..offset + to_usize(number(header + 32, 8))];
    Image {
        entry: number(24, 8),
        segment,
    }
}

impl Head {
    pub fn read() -> Self {
        let (magic, numbers) = image().segment.split_at(8);
        assert_eq!(magic, HEAD_MAGIC, "the guest program has another head");
        let mut numbers = numbers
            .as_chunks::<8>()
            .0
            .iter()
            .map(|&bytes| u64::from_le_bytes(bytes));
        let mut next = || numbers.next().expect("the program is longer than its head");
        Self {
            vcpu_main: next(),
            blocks: next(),
            published: next(),
            stored: [next(), next(), next(), next()],
        }
    }

    /// Returns the offset of a vCPU's block in RAM.
    pub fn block(&self, vcpu: u8) -> u64 {
        self.blocks + u64::from(vcpu) * BLOCK_LEN
    }
}

/// Start address of vCPU 0, in 32-bit mode, and the value of its register ebx.
pub(super) struct Entry {
    pub rip: u64,
    pub start_info: u64,
}

/// Writes the guest program, its boot information and its command line into unwritten RAM.
pub(super) fn load(ram: &RamBlock, program: &Program, tsc_khz: u32) -> Result<Entry, MemError> {
    let image = image();
    ram.write(LOAD, image.segment)?;

    let layout = &program.layout;
    let line = format!(
        "workload={} rate={} ws={} vcpus={} seed={} tsc_khz={tsc_khz} tick_us={}\0",
        program.workload,
        program.rate,
        layout.working_set(),
        layout.vcpus(),
        program.seed,
        program.pace().tick_us,
    );
    ram.write(to_usize(COMMAND_LINE), line.as_bytes())?;

    // struct hvm_start_info, version 0: no modules, no ACPI; the program needs no memory map.
    let mut info = [0; 40];
    info[..4].copy_from_slice(&START_MAGIC.to_le_bytes());
    info[24..32].copy_from_slice(&COMMAND_LINE.to_le_bytes());
    ram.write(to_usize(START_INFO), &info)?;
    Ok(Entry {
        rip: image.entry,
        start_info: START_INFO,
    })
}
