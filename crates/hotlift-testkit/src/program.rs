//! The guest program for any VMM (`hotlift-vmm/guest/hotlift.s`), and the proof that its memory matches its writes.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use hotlift_vmm::fill::{FillSettings, FillSource, write_fill};
use hotlift_vmm::kvm;
use hotlift_vmm::layout::{Layout, Record};
use hotlift_vmm::workload::{Generator, Position, Workload};

use crate::error::KitError;

/// The guest program, and the initial content of its RAM. The values of two registers suffice to compute every write.
#[derive(Debug)]
pub struct Program {
    layout: Layout,
    /// Pages written per second, if the TSC runs at [`TSC_KHZ`].
    rate: u64,
    /// Initial content of RAM, from the start of [`Layout::filled`] on.
    fill: Vec<u8>,
    keeps_rate: bool,
}

const WORKLOAD: Workload = Workload::Random;
const SEED: u64 = 5;

/// TSC frequency that the program assumes, in kHz: a quarter of TCG's frequency, and a tenth of the development
/// machine's. So the program prints and writes four or ten times as fast as the rate, which keeps waits short.
const TSC_KHZ: u64 = 250_000;

/// Load address of the program. The next constant is the offset of the program's error count in the block of vCPU 0.
/// Origin: `guest/hotlift.s` (LOAD, ERRORS).
const LOAD: usize = 0x10_0000;
const ERRORS: usize = 8;

impl Program {
    /// Creates the program for `ram_bytes` bytes of RAM. The program writes `rate` pages per second to `working_set`
    /// bytes.
    ///
    /// # Errors
    /// If the initial content of RAM cannot be created.
    ///
    /// # Panics
    /// If RAM is too small for `working_set`.
    pub fn new(ram_bytes: u64, working_set: u64, rate: u64) -> Result<Self, KitError> {
        let layout = Layout::new(ram_bytes, 1, Some(working_set)).expect("a layout");
        let folder = tempfile::tempdir().map_err(KitError::system("make a folder"))?;
        let file = folder.path().join("fill");
        let settings = FillSettings {
            source: FillSource::Generated,
            zero_share: 0.25,
            seed: SEED,
            ..FillSettings::default()
        };
        write_fill(&file, &layout, &settings)?;
        Ok(Self {
            layout,
            rate,
            fill: fs::read(&file).map_err(KitError::system("read the content of RAM"))?,
            keeps_rate: false,
        })
    }

    /// Makes the program write at its rate even on a busy host, for tests that depend on it.
    #[must_use]
    pub fn keeping_rate(self) -> Self {
        Self {
            keeps_rate: true,
            ..self
        }
    }

    /// Returns true if its vCPU has the priority of other threads. Otherwise it has a low one, because the program never halts.
    #[must_use]
    pub fn keeps_rate(&self) -> bool {
        self.keeps_rate
    }

    /// Returns the size of RAM, in bytes.
    #[must_use]
    pub fn ram_bytes(&self) -> u64 {
        self.layout.ram_bytes()
    }

    /// Returns the number of bytes that [`Program::prove`] compares: from the record table to the end of RAM.
    #[must_use]
    pub fn proven_bytes(&self) -> u64 {
        self.layout.ram_bytes() - self.layout.table().start
    }

    /// Writes the initial content of RAM to the file `ram`. Must be called before the guest starts.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn fill(&self, ram: &Path) -> Result<(), KitError> {
        let failed = || KitError::system("write the file of RAM");
        let mut options = OpenOptions::new();
        let opened = options.write(true).create(true).truncate(false).open(ram);
        let file = opened.map_err(failed())?;
        file.set_len(self.ram_bytes()).map_err(failed())?;
        let offsets = (self.layout.filled().start..).step_by(4096);
        for (page, offset) in self.fill.chunks(4096).zip(offsets) {
            if page.iter().any(|&byte| byte != 0) {
                file.write_all_at(page, offset).map_err(failed())?;
            }
        }
        Ok(())
    }

    /// Writes the initial content of RAM to `file`. Returns the QEMU arguments that load the content into RAM without a
    /// RAM file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn load(&self, file: &Path) -> Result<Vec<String>, KitError> {
        fs::write(file, &self.fill).map_err(KitError::system("write the content of RAM"))?;
        let (file, start) = (file.display(), self.layout.filled().start);
        let loader = format!("loader,file={file},addr={start},force-raw=on");
        Ok(["-device".to_owned(), loader].into())
    }

    /// Writes the program to the file `elf`, and returns the QEMU arguments that boot it.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn boot(&self, elf: &Path) -> Result<Vec<String>, KitError> {
        fs::write(elf, kvm::ELF).map_err(KitError::system("write the program"))?;
        let append = format!(
            "workload={WORKLOAD} rate={} ws={} seed={SEED} tsc_khz={TSC_KHZ}",
            self.rate,
            self.layout.working_set(),
        );
        let kernel = elf.display().to_string();
        Ok(["-kernel".to_owned(), kernel, "-append".to_owned(), append].into())
    }

    /// Proves that the RAM of a stopped guest matches the registers of its vCPU, and returns the number of its writes.
    /// `registers` is the output of HMP's `info registers`.
    ///
    /// # Errors
    /// [`KitError::Memory`] if RAM does not match.
    pub fn prove(&self, registers: &str, ram: &[u8]) -> Result<u64, KitError> {
        self.find_wrong(registers, ram, false)
            .map_err(|problem| KitError::Memory { problem })
    }

    /// Proves the RAM of a stopped guest that was reset once while it ran, and returns the number of writes since the
    /// reset. The write count restarts at a reset, but the records continue. The reset may have interrupted one write
    /// between its stores. Returns `None` if no proof is possible: before the program runs again, or between the stores
    /// of a write.
    ///
    /// # Errors
    /// [`KitError::Memory`] if RAM does not match.
    pub fn prove_after_reset(&self, registers: &str, ram: &[u8]) -> Result<Option<u64>, KitError> {
        let wrong = |problem| KitError::Memory { problem };
        // Firmware runs in other CPU modes, in which the output has no RIP.
        let (Ok(rip), Ok(head)) = (register(registers, "RIP"), Head::read(ram)) else {
            return Ok(None);
        };
        let is_program = (LOAD..head.block).contains(&usize::try_from(rip).unwrap_or(usize::MAX));
        if !is_program || word(ram, head.block) == 0 || head.stored.contains(&rip) {
            return Ok(None);
        }
        let proven = self.find_wrong(registers, ram, true);
        proven.map(Some).map_err(wrong)
    }

    fn find_wrong(&self, registers: &str, ram: &[u8], was_reset: bool) -> Result<u64, String> {
        let register = |name| register(registers, name);
        let (rip, r10, r15) = (register("RIP")?, register("R10")?, register("R15")?);
        let head = Head::read(ram)?;
        let errors = word(ram, head.block + ERRORS);
        // A reset interrupts at most one write.
        if errors > u64::from(was_reset) {
            return Err(format!("the guest itself has found {errors} errors"));
        }
        let published = if rip == head.published { r15 } else { r10 };
        if word(ram, head.block) != published {
            return Err(format!(
                "{published} writes are published, memory has {}",
                word(ram, head.block)
            ));
        }
        let stores = (1..)
            .zip(head.stored)
            .find(|&(_, at)| at == rip)
            .map_or(0, |(stores, _)| stores);
        let position = Position {
            writes: r15,
            stores,
        };
        // The guest counts an interrupted write as an error when it writes that page again.
        let may_be_interrupted = errors == 0;
        let reset = was_reset.then_some((ram, may_be_interrupted));
        let expected = self.expected(position, reset);
        let start = index(self.layout.table().start);
        let found = &ram[start..];
        // One comparison of all memory. A comparison byte by byte, without optimisation, took a fifth of the time of
        // all tests with QEMUs.
        if *found != *expected {
            let mut bytes = found.iter().zip(&expected);
            let same = bytes.position(|(found, expected)| found != expected);
            let at = start + same.unwrap_or(found.len().min(expected.len()));
            let line = |bytes: &[u8], from: usize| {
                format!("{:02x?}", &bytes[from..(from + 16).min(bytes.len())])
            };
            let row = at / 16 * 16;
            return Err(format!(
                "after {position:?} RAM differs at {at:#x} (working set from {:#x}): must be {}, is {}",
                self.layout.filled().start,
                line(&expected, row - start),
                line(ram, row),
            ));
        }
        Ok(r15)
    }

    /// Returns the expected RAM from the record table on, after the writes of `position`. `reset` is set if the guest
    /// was reset. The first value of `reset` is the found RAM, whose table has the records of writes before the reset.
    /// The second value is true if a page may show a write that the reset interrupted.
    fn expected(&self, position: Position, reset: Option<(&[u8], bool)>) -> Vec<u8> {
        let layout = &self.layout;
        let start = layout.table().start;
        let mut ram = vec![0; index(layout.filled().start - start)];
        ram.extend_from_slice(&self.fill);
        let mut put = |offset: u64, bytes: &[u8]| {
            let at = index(offset - start);
            ram[at..at + bytes.len()].copy_from_slice(bytes);
        };
        let generator = Generator::new(WORKLOAD, SEED, layout, 0);
        let mut records = generator.replay(0, position.writes);
        let mut before = Vec::new();
        for (own, record) in (0..).zip(&mut records) {
            let page = generator.page(own);
            if let Some((ram, _)) = reset {
                let entry = record_at(ram, layout.entry(page));
                // The version continues after a reset. The sequence is that of the page's last write, before or after
                // the reset.
                record.version = record.version.max(entry.version);
                if record.sequence == 0 {
                    record.sequence = entry.sequence;
                    before.push((page, entry));
                }
            }
            put(layout.entry(page), &record.to_bytes());
            put(layout.record(page), &record.to_bytes());
        }
        if let Some((ram, true)) = reset {
            let last = before.iter().map(|(_, entry)| entry.sequence).max();
            let interrupted = before.iter().find_map(|&(page, entry)| {
                let found = record_at(ram, layout.record(page));
                is_interrupted(found, entry, last?).then_some((page, found))
            });
            if let Some((page, found)) = interrupted {
                put(layout.record(page), &found.to_bytes());
            }
        }
        // Order of the stores of a write: version and sequence in the table, then version and sequence in the page.
        let number = position.writes + 1;
        let own = generator.own_page(number);
        let page = generator.page(own);
        let next: Record = records[index(own)].next(0, number);
        let bytes = next.to_bytes();
        let halves = [&bytes[..8], &bytes[8..]];
        let (entry, record) = (layout.entry(page), layout.record(page));
        let places = [entry, entry + 8, record, record + 8];
        for (place, half) in places
            .into_iter()
            .zip(halves.into_iter().cycle())
            .take(position.stores.into())
        {
            put(place, half);
        }
        ram
    }
}

/// Makes the memory of a guest after a reset, for tests.
#[cfg(test)]
impl Program {
    /// Returns the page of write `number`, from 1 on.
    pub(crate) fn page(&self, number: u64) -> u64 {
        let generator = Generator::new(WORKLOAD, SEED, &self.layout, 0);
        generator.page(generator.own_page(number))
    }

    /// Makes the first `stores` stores (0 to 4) of one more write to `page`, in the RAM file of a stopped guest.
    pub(crate) fn interrupt(&self, file: &Path, page: u64, stores: usize) -> std::io::Result<()> {
        let ram = fs::read(file)?;
        let file = OpenOptions::new().write(true).open(file)?;
        let (entry, record) = (self.layout.entry(page), self.layout.record(page));
        let pages = self.layout.working_set() / 4096;
        let sequences = (0..pages).map(|page| record_at(&ram, self.layout.entry(page)).sequence);
        let next = record_at(&ram, entry).next(0, sequences.max().unwrap_or(0) + 1);
        let places = [
            (entry, next.version),
            (entry + 8, next.sequence),
            (record, next.version),
        ];
        for &(offset, value) in &places[..stores] {
            file.write_all_at(&value.to_le_bytes(), offset)?;
        }
        Ok(())
    }
}

/// Data about the program at its load address (`head` in the source).
struct Head {
    block: usize,
    published: u64,
    stored: [u64; 4],
}

impl Head {
    fn read(ram: &[u8]) -> Result<Self, String> {
        let words = ram
            .get(LOAD..LOAD + 64)
            .ok_or_else(|| "RAM ends before the program".to_owned())?
            .as_chunks::<8>()
            .0;
        if &words[0] != b"HLFTprg1" {
            return Err("the program is not where it was loaded".to_owned());
        }
        let [_, _, blocks, published, stored @ ..] = words else {
            unreachable!("eight words");
        };
        Ok(Self {
            block: index(u64::from_le_bytes(*blocks)),
            published: u64::from_le_bytes(*published),
            stored: std::array::from_fn(|i| u64::from_le_bytes(stored[i])),
        })
    }
}

/// Returns true if a page shows an interrupted write: the stores into the table and the page are incomplete. `found` is
/// the record in the page, `entry` the record in the table. `last` is the highest sequence stored before the reset.
fn is_interrupted(found: Record, entry: Record, last: u64) -> bool {
    let before = entry.version.wrapping_sub(1);
    let is_last = entry.sequence == last && found.sequence < last;
    match found.version {
        version if version == before => entry.sequence == found.sequence || is_last,
        version if version == entry.version => is_last,
        _ => false,
    }
}

/// Returns the write record at offset `offset` of RAM.
fn record_at(ram: &[u8], offset: u64) -> Record {
    let at = index(offset);
    Record {
        version: word(ram, at),
        sequence: word(ram, at + 8),
    }
}

/// Returns the u64 at offset `at` of RAM.
fn word(ram: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(ram[at..at + 8].try_into().expect("eight bytes"))
}

/// Returns the value of the register `name` from the output of HMP's `info registers`.
fn register(registers: &str, name: &str) -> Result<u64, String> {
    let words = registers.split_whitespace();
    let mut values = words.filter_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    let hex = values
        .next()
        .ok_or_else(|| format!("no {name}: the guest is not in its program"))?;
    u64::from_str_radix(hex, 16).map_err(|error| format!("{name}={hex}: {error}"))
}

fn index(offset: u64) -> usize {
    usize::try_from(offset).expect("an offset in RAM")
}
