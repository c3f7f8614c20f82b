//! The guests of the tests: Hotlift's guest program, which any VMM runs, and a Linux. Each guest writes, counts its
//! writes, and checks them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use hotlift_testkit::program::Program;
use hotlift_testkit::qemu::cache;
use hotlift_testkit::skip;

use crate::vm::Vm;

/// Software in a machine.
#[derive(Debug)]
pub enum Guest {
    /// `hotlift-vmm/guest/hotlift.s`: each of its writes can be replayed from two registers.
    Program(Program),
    /// Debian's kernel with only `linux/init.c`.
    Linux {
        /// Folder with `vmlinuz` and `initrd`.
        folder: PathBuf,
        ram_bytes: u64,
        /// Arguments of the kernel's command line.
        settings: String,
        /// QEMU's objects that precede its RAM.
        objects: Vec<String>,
    },
    /// SeaBIOS without a disk, for machine types on which the program prints nothing. It counts timer ticks, and writes to no
    /// other page once it has found no boot device.
    Firmware,
}

/// Last line of a [`Guest::Firmware`].
pub const NOTHING_TO_BOOT: &str = "No bootable device.";

/// Address of the firmware's tick count, 32 bits (BIOS data area).
const TICKS: u64 = 0x46c;

/// End of the firmware's stack, on which each tick leaves bytes. Below it are the ticks, too.
pub const FIRMWARE_STACK_END: usize = 0x7000;

/// Returns the program in `ram_bytes`, writing `rate` pages per second to part of it.
fn new(ram_bytes: u64, working_set: u64, rate: u64) -> Program {
    Program::new(ram_bytes, working_set, rate).expect("a program")
}

impl Guest {
    /// Returns the program in 64 MiB; it writes to half of them. A migration takes about a second.
    pub fn program() -> Arc<Self> {
        static SHARED: OnceLock<Arc<Guest>> = OnceLock::new();
        Arc::clone(SHARED.get_or_init(|| Arc::new(Self::Program(new(64 << 20, 32 << 20, 500)))))
    }

    /// Returns the same, which writes at its rate even on a busy host, and to 4 MiB only, so that rounds resend the same pages.
    pub fn program_that_keeps_its_rate() -> Arc<Self> {
        Arc::new(Self::with(64 << 20, 4 << 20, 500))
    }

    /// Returns the program in `ram_bytes`, writing `rate` pages per second to part of it, even on a busy host.
    pub fn with(ram_bytes: u64, working_set: u64, rate: u64) -> Self {
        Self::Program(new(ram_bytes, working_set, rate).keeping_rate())
    }

    /// Returns the Linux; prints the reason if it was not fetched.
    pub fn linux() -> Option<Arc<Self>> {
        // Memory of the kernel, its decompressor and 16 MiB of pages.
        Self::linux_with(96 << 20, "pages=4096 rate=1000".to_owned(), Vec::new())
    }

    /// Returns a Linux that uses all but an eighth of `bytes` plugged by virtio-mem; prints the reason if it was not fetched.
    /// The machine has two backends of `region` bytes: `vm0` for this memory, and `vm1`, which the guest does not use.
    ///
    /// QEMU 10.0 searches for a guest's writes under TCG at a wrong place, and may fail an assertion
    /// (`tlb_reset_dirty_range_all`). This affects RAM blocks with a multiple of 256 KiB as length, except the first. So `vm0`
    /// is first, and the length of RAM is no such multiple.
    pub fn linux_with_plugged(bytes: u64, region: u64) -> Option<Arc<Self>> {
        let (pages, mib) = (bytes / 4096 / 8 * 7, bytes >> 20);
        let settings = format!(
            // The default of `swiotlb` exceeds this RAM if there is memory above 4 GiB.
            "pages={pages} rate=1000 plugged={mib} memhp_default_state=online_movable swiotlb=1024"
        );
        let objects = ["vm0", "vm1"].map(|id| {
            let backend = format!("memory-backend-memfd,id={id},size={region}");
            ["-object".to_owned(), backend]
        });
        Self::linux_with((256 << 20) + (128 << 10), settings, objects.concat())
    }

    fn linux_with(ram_bytes: u64, settings: String, objects: Vec<String>) -> Option<Arc<Self>> {
        let folder = cache().join("linux-guest");
        for file in ["vmlinuz", "modules/virtio_mem.ko", "initrd"] {
            if !folder.join(file).exists() {
                skip!("linux-guest", "no {file}; scripts/linux-guest fetches it");
                return None;
            }
        }
        Some(Arc::new(Self::Linux {
            folder,
            ram_bytes,
            settings,
            objects,
        }))
    }

    pub fn ram_bytes(&self) -> u64 {
        match self {
            Self::Program(program) => program.ram_bytes(),
            Self::Linux { ram_bytes, .. } => *ram_bytes,
            Self::Firmware => 64 << 20,
        }
    }

    /// Counts the compared pages after the guest has moved.
    pub fn compared_pages(&self) -> usize {
        let bytes = match self {
            Self::Program(program) => program.proven_bytes(),
            Self::Firmware => self.ram_bytes() - FIRMWARE_STACK_END as u64,
            Self::Linux { .. } => 0,
        };
        usize::try_from(bytes / 4096).expect("few pages")
    }

    /// Creates the file of RAM before the first start.
    pub fn fill(&self, ram: &Path) {
        match self {
            Self::Program(program) => program.fill(ram).expect("the RAM's content"),
            Self::Linux { .. } | Self::Firmware => {
                let file = File::create(ram).expect("the RAM's file");
                file.set_len(self.ram_bytes()).expect("its length");
            }
        }
    }

    /// Returns arguments that let QEMU fill RAM without a file before the first start.
    pub fn load(&self, folder: &Path) -> Vec<String> {
        match self {
            Self::Program(program) => {
                let content = program.load(&folder.join("content"));
                content.expect("the RAM's content")
            }
            Self::Linux { .. } | Self::Firmware => Vec::new(),
        }
    }

    /// Returns the arguments of objects that precede RAM.
    pub fn objects(&self) -> Vec<String> {
        match self {
            Self::Program(_) | Self::Firmware => Vec::new(),
            Self::Linux { objects, .. } => objects.clone(),
        }
    }

    /// Returns the arguments for booting.
    pub fn boot(&self, folder: &Path) -> Vec<String> {
        let path = |path: PathBuf| path.display().to_string();
        match self {
            Self::Program(program) => {
                let elf = folder.join("hotlift.elf");
                program.boot(&elf).expect("the program's file")
            }
            Self::Linux {
                folder, settings, ..
            } => {
                let (kernel, initrd) = (folder.join("vmlinuz"), folder.join("initrd"));
                // On a busy host TCG's timer ticks arrive too late for the kernel's test of them, and it would stop.
                let append = format!("console=ttyS0 quiet no_timer_check {settings}");
                let flags = ["-kernel", "-initrd", "-append"].map(str::to_owned);
                let values = [path(kernel), path(initrd), append];
                flags
                    .into_iter()
                    .zip(values)
                    .flat_map(<[_; 2]>::from)
                    .collect()
            }
            // The ticks start with the time of day, and wrap at midnight.
            Self::Firmware => ["-bios", "bios-256k.bin", "-rtc", "base=2000-01-01"]
                .map(str::to_owned)
                .into(),
        }
    }

    /// Reads a firmware's tick count from the file of RAM; `None` before the first, and for another guest.
    pub fn ticks(&self, ram: &Path) -> Option<u64> {
        let Self::Firmware = self else { return None };
        let mut ticks = [0; 4];
        let file = File::open(ram).expect("the RAM's file");
        file.read_exact_at(&mut ticks, TICKS).expect("its content");
        Some(u32::from_le_bytes(ticks).into()).filter(|&ticks| ticks > 0)
    }

    /// Returns the count in a line of the guest. Panics if the line reports wrong memory.
    pub fn count(&self, line: &str) -> Option<u64> {
        let value = |name: &str| -> Option<u64> {
            let mut words = line.split_whitespace();
            words.find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        };
        let wrong = match self {
            Self::Program(_) => "errors",
            Self::Linux { .. } => "bad",
            Self::Firmware => return None,
        };
        let says_so = line.starts_with("linux BAD") || value(wrong).is_some_and(|wrong| wrong > 0);
        assert!(!says_so, "the guest finds its memory wrong: {line}");
        value(wrong).and(value("writes"))
    }

    /// Verifies that a stopped guest's RAM matches its vCPU's registers, and returns its writes. A Linux verifies this itself
    /// with each line of output.
    pub fn prove(&self, vm: &mut Vm) -> Result<u64, String> {
        match self {
            Self::Program(program) => {
                let registers = vm.hmp("info registers");
                let proven = program.prove(&registers, &vm.ram());
                proven.map_err(|error| error.to_string())
            }
            Self::Linux { .. } => vm.count().ok_or_else(|| "it prints nothing".to_owned()),
            Self::Firmware => Err("the firmware's writes cannot be replayed".to_owned()),
        }
    }
}
