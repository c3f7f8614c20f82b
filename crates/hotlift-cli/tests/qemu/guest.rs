//! The guests: a program of our own that any VMM runs, and a Linux. Both write, count, and check what
//! they wrote.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use hotlift_vmm::fill::{FillSettings, FillSource, write_fill};
use hotlift_vmm::kvm;
use hotlift_vmm::layout::{Layout, Record};
use hotlift_vmm::workload::{Generator, Position, Workload};

use crate::vm::{Vm, cache, folder};

/// What runs in a machine.
#[derive(Debug)]
pub enum Guest {
    /// `hotlift-vmm/guest/hotlift.s`: each write of it can be replayed from two registers.
    Program(Program),
    /// Debian's kernel with `linux/init.c` alone.
    Linux {
        /// Folder with `vmlinuz` and `initrd`.
        folder: PathBuf,
    },
}

/// The program, and what its RAM holds before it starts.
#[derive(Debug)]
pub struct Program {
    layout: Layout,
    /// Pages a second by a clock of [`TSC_KHZ`].
    rate: u64,
    /// From the start of [`Layout::filled`] on.
    fill: Vec<u8>,
}

const WORKLOAD: Workload = Workload::Random;
const SEED: u64 = 5;

/// A quarter of what TCG has, a tenth of what this machine has: the program says something four or ten
/// times a second, so that nobody waits for it for long, and writes as many times faster.
const TSC_KHZ: u64 = 250_000;

/// Where the program is loaded, and where its first vCPU's block has the count of errors that the
/// program itself has found (`guest/hotlift.s`: LOAD, ERRORS).
const LOAD: usize = 0x10_0000;
const ERRORS: usize = 8;

impl Guest {
    /// The program in 64 MiB, half of it written to. A migration takes about a second.
    pub fn program() -> Arc<Self> {
        static SHARED: OnceLock<Arc<Guest>> = OnceLock::new();
        Arc::clone(SHARED.get_or_init(|| Arc::new(Self::with(64 << 20, 32 << 20, 500))))
    }

    /// The program in so many bytes of RAM, writing so many pages a second to part of it.
    pub fn with(ram_bytes: u64, working_set: u64, rate: u64) -> Self {
        let layout = Layout::new(ram_bytes, 1, Some(working_set)).expect("a layout");
        let folder = folder();
        let file = folder.path().join("fill");
        let settings = FillSettings {
            source: FillSource::Generated,
            zero_share: 0.25,
            seed: SEED,
            ..FillSettings::default()
        };
        write_fill(&file, &layout, &settings).expect("a fill");
        Self::Program(Program {
            layout,
            rate,
            fill: fs::read(&file).expect("the fill"),
        })
    }

    /// Linux; says why not if it was not fetched.
    pub fn linux() -> Option<Arc<Self>> {
        let folder = cache().join("linux-guest");
        for file in ["vmlinuz", "initrd"] {
            if !folder.join(file).exists() {
                println!(
                    "not tested: no {file} in {}; scripts/linux-guest fetches it",
                    folder.display()
                );
                return None;
            }
        }
        Some(Arc::new(Self::Linux { folder }))
    }

    pub fn ram_bytes(&self) -> u64 {
        match self {
            Self::Program(program) => program.layout.ram_bytes(),
            // What the kernel, its decompressor and 16 MiB of pages need.
            Self::Linux { .. } => 96 << 20,
        }
    }

    /// Makes the file of RAM before the first start.
    pub fn fill(&self, ram: &Path) {
        let mut options = OpenOptions::new();
        let file = options
            .write(true)
            .create(true)
            .truncate(false)
            .open(ram)
            .expect("the RAM's file");
        file.set_len(self.ram_bytes()).expect("its length");
        if let Self::Program(program) = self {
            for (page, offset) in program
                .fill
                .chunks(4096)
                .zip((program.layout.filled().start..).step_by(4096))
            {
                if page.iter().any(|&byte| byte != 0) {
                    file.write_all_at(page, offset).expect("the RAM's content");
                }
            }
        }
    }

    /// What QEMU is to boot, as a part of its command line.
    pub fn boot(&self, folder: &Path) -> Vec<String> {
        let path = |path: PathBuf| path.display().to_string();
        match self {
            Self::Program(program) => {
                let elf = folder.join("hotlift.elf");
                fs::write(&elf, kvm::ELF).expect("the program's file");
                let append = format!(
                    "workload={WORKLOAD} rate={} ws={} seed={SEED} tsc_khz={TSC_KHZ}",
                    program.rate,
                    program.layout.working_set(),
                );
                [
                    "-kernel".to_owned(),
                    path(elf),
                    "-append".to_owned(),
                    append,
                ]
                .into()
            }
            Self::Linux { folder } => {
                let (kernel, initrd) = (folder.join("vmlinuz"), folder.join("initrd"));
                let append = "console=ttyS0 quiet pages=4096 rate=1000".to_owned();
                let flags = ["-kernel", "-initrd", "-append"].map(str::to_owned);
                let values = [path(kernel), path(initrd), append];
                flags
                    .into_iter()
                    .zip(values)
                    .flat_map(<[_; 2]>::from)
                    .collect()
            }
        }
    }

    /// The count in a line of the guest. Panics if the line says that memory is wrong.
    pub fn count(&self, line: &str) -> Option<u64> {
        let value = |name: &str| -> Option<u64> {
            let mut words = line.split_whitespace();
            words.find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        };
        let wrong = match self {
            Self::Program(_) => "errors",
            Self::Linux { .. } => "bad",
        };
        let says_so = line.starts_with("linux BAD") || value(wrong).is_some_and(|wrong| wrong > 0);
        assert!(!says_so, "the guest finds its memory wrong: {line}");
        value(wrong).and(value("writes"))
    }

    /// Proves that a stopped guest's RAM is what its vCPU's registers ask for, and returns its writes. A
    /// Linux proves that itself, whenever it says something.
    pub fn prove(&self, vm: &mut Vm) -> Result<u64, String> {
        match self {
            Self::Program(program) => program.prove(vm),
            Self::Linux { .. } => vm.count().ok_or_else(|| "it says nothing".to_owned()),
        }
    }
}

impl Program {
    fn prove(&self, vm: &mut Vm) -> Result<u64, String> {
        let registers = vm.hmp("info registers");
        let register = |name: &str| -> Result<u64, String> {
            let words = registers.split_whitespace();
            let mut values = words.filter_map(|word| word.strip_prefix(name)?.strip_prefix('='));
            let hex = values
                .next()
                .ok_or_else(|| format!("no {name} in {registers}"))?;
            u64::from_str_radix(hex, 16).map_err(|error| format!("{name}={hex}: {error}"))
        };
        let (rip, r10, r15) = (register("RIP")?, register("R10")?, register("R15")?);
        let ram = vm.ram();
        let head = Head::read(&ram)?;
        let word = |at: usize| u64::from_le_bytes(ram[at..at + 8].try_into().expect("eight bytes"));
        let errors = word(head.block + ERRORS);
        if errors > 0 {
            return Err(format!("the guest itself has found {errors} errors"));
        }
        let published = if rip == head.published { r15 } else { r10 };
        if word(head.block) != published {
            return Err(format!(
                "{published} writes are published, memory says {}",
                word(head.block)
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
        let expected = self.expected(position);
        let start = index(self.layout.table().start);
        if let Some(at) = (start..ram.len()).find(|&at| ram[at] != expected[at - start]) {
            let line = |bytes: &[u8], from: usize| {
                format!("{:02x?}", &bytes[from..(from + 16).min(bytes.len())])
            };
            let row = at / 16 * 16;
            return Err(format!(
                "after {position:?} RAM differs at {at:#x} (working set from {:#x}): must be {}, is {}",
                self.layout.filled().start,
                line(&expected, row - start),
                line(&ram, row),
            ));
        }
        Ok(r15)
    }

    /// RAM from the table on, after so many writes.
    fn expected(&self, position: Position) -> Vec<u8> {
        let layout = &self.layout;
        let start = layout.table().start;
        let mut ram = vec![0; index(layout.filled().start - start)];
        ram.extend_from_slice(&self.fill);
        let mut put = |offset: u64, bytes: &[u8]| {
            let at = index(offset - start);
            ram[at..at + bytes.len()].copy_from_slice(bytes);
        };
        let generator = Generator::new(WORKLOAD, SEED, layout, 0);
        let records = generator.replay(0, position.writes);
        for (own, record) in (0..).zip(&records) {
            let page = generator.page(own);
            put(layout.entry(page), &record.to_bytes());
            put(layout.record(page), &record.to_bytes());
        }
        // The stores of a write are, in order: version and sequence in the table, the same in the page.
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

/// What the program says of itself at its start (`head` in its source).
struct Head {
    block: usize,
    published: u64,
    stored: [u64; 4],
}

impl Head {
    fn read(ram: &[u8]) -> Result<Self, String> {
        let words = ram[LOAD..LOAD + 64].as_chunks::<8>().0;
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

fn index(offset: u64) -> usize {
    usize::try_from(offset).expect("an offset in RAM")
}
