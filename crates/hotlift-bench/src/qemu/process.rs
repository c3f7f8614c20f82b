//! A QEMU process with the bench's guest program: start, fill RAM, compare RAM, end.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use hotlift_command::error::SharedError;
use hotlift_command::events::Filling;
use hotlift_mem::FileError;
use hotlift_qemu::QemuError;
use hotlift_qemu::first_answer::{self, NoAnswer};
use hotlift_qmp::Qemu;
use hotlift_terminal::error::TerminalError;
use hotlift_terminal::signals::Interrupt;
use hotlift_vmm::fill::{FillSettings, write_fill};
use hotlift_vmm::kvm;
use hotlift_vmm::layout::Layout;
use hotlift_vmm::{GuestKind, GuestSettings};
use tempfile::{NamedTempFile, TempDir};

use crate::child_process::ChildProcess;
use crate::error::BenchError;

/// Time limit for the guest program to write its first page.
const START: Duration = Duration::from_secs(60);

/// Time limit for the threads of a completed migration to end.
const THREADS_END: Duration = Duration::from_secs(5);

/// Interval between two reads of the counters that the guest program keeps in its memory.
const COUNT: Duration = Duration::from_millis(50);

/// Size of the pieces in which RAM is written and compared, in bytes.
const PIECE: usize = 1 << 20;

const PAGE: usize = 4096;

/// Load address of the guest program. The next constants are offsets in its header and in the block of its first vCPU.
/// Origin: `hotlift-vmm/guest/hotlift.s` (LOAD, head, WRITES, ERRORS).
const LOAD: u64 = 0x10_0000;
const HEAD_BLOCKS: u64 = 16;
const WRITES: u64 = 0;
const ERRORS: u64 = 8;

/// TSC rate of a TCG guest in kHz: QEMU's TCG counts nanoseconds.
const TCG_TSC_KHZ: u32 = 1_000_000;

/// Prefixes of the names of migration threads. The last three prefixes are names in QEMU 7.2.
const MIGRATION_THREADS: &[&str] = &[
    "mig/",
    "multifd",
    "live_migration",
    "compress",
    "decompress",
];

/// The bytes that fill RAM, in a file that is reused as long as the settings stay the same.
#[derive(Debug, Default)]
pub struct Image(RefCell<Option<CachedImage>>);

#[derive(Debug)]
struct CachedImage {
    layout: Layout,
    settings: FillSettings,
    file: NamedTempFile,
    filling: Filling,
}

impl Image {
    /// Returns a file with the content of RAM, from the start of the filled range in `layout` on.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn of(
        &self,
        layout: &Layout,
        settings: &FillSettings,
    ) -> Result<(File, Filling), BenchError> {
        let folder = tempfile::env::temp_dir();
        let failed = |source| TerminalError::from(FileError::writing(&folder)(source));
        let mut kept = self.0.borrow_mut();
        if let Some(kept) = kept.as_ref()
            && kept.layout == *layout
            && kept.settings == *settings
        {
            return Ok((kept.file.reopen().map_err(failed)?, kept.filling));
        }
        // The old file is removed first, because there may be no space for two files.
        *kept = None;
        let file = NamedTempFile::with_prefix("hotlift-fill-").map_err(failed)?;
        let filling = Filling::from(&write_fill(file.path(), layout, settings)?);
        let opened = file.reopen().map_err(failed)?;
        *kept = Some(CachedImage {
            layout: *layout,
            settings: settings.clone(),
            file,
            filling,
        });
        Ok((opened, filling))
    }
}

/// Settings for the start of a QEMU process.
pub struct Start<'a> {
    /// Path of the QEMU executable.
    pub program: &'a Path,
    /// Kind of guest: KVM, or TCG for a guest of threads.
    pub kind: GuestKind,
    /// RAM and workload of the guest.
    pub guest: &'a GuestSettings,
    /// True if the QEMU waits for an incoming migration.
    pub incoming: bool,
    /// True if the guest's RAM is allocated before the migration.
    pub prealloc: bool,
    /// Words in front of the QEMU command line, such as a command that enters a namespace.
    pub prefix: &'a [String],
    /// Signals that end the start.
    pub interrupt: &'a Interrupt,
}

/// A QEMU process. It is killed on drop, and by the kernel if the bench is killed.
pub struct Process {
    process: ChildProcess,
    /// QMP connection to this QEMU.
    pub qmp: Qemu,
    ram_bytes: u64,
    _folder: TempDir,
}

impl Process {
    /// Starts a QEMU. Its vCPUs are paused, with one exception: the destination of a guest that writes.
    ///
    /// # Errors
    /// If QEMU does not start. The error contains QEMU's last message.
    pub fn start(start: &Start<'_>) -> Result<Self, BenchError> {
        let failed = TerminalError::process("setpriv … QEMU");
        let folder = tempfile::Builder::new()
            .prefix("hotlift-bench-")
            .tempdir()
            .map_err(failed)?;
        let socket = folder.path().join("qmp");
        let mut words = vec![OsString::from(start.program)];
        let line = command_line(start, folder.path()).map_err(failed)?;
        words.extend(line.into_iter().map(OsString::from));
        words.extend(first_answer::qmp_arguments(&socket));
        let errors = folder.path().join("stderr");
        let mut process =
            ChildProcess::start(start.prefix, words, Stdio::null(), &errors).map_err(failed)?;
        let connected = first_answer::connect(&mut process.child, &socket, start.interrupt);
        Ok(Self {
            qmp: connected.map_err(|error| explain(error, &process))?,
            process,
            ram_bytes: start.guest.ram_bytes,
            _folder: folder,
        })
    }

    /// Returns the process ID of this QEMU.
    pub fn pid(&self) -> u32 {
        self.process.child.id()
    }

    /// Writes `image` into the guest's RAM. Skips zero pages unless `touched` is true.
    ///
    /// # Errors
    /// If the guest's memory cannot be found or written.
    pub fn fill(&self, image: &File, layout: &Layout, touched: bool) -> Result<(), BenchError> {
        let memory = self.memory(true)?;
        let start = memory.at + layout.filled().start;
        let write = |at: u64, bytes: &[u8]| memory.file.write_all_at(bytes, start + at);
        pieces(image, |at, piece| {
            if touched {
                return write(at, piece);
            }
            // Skipped zero pages stay unallocated.
            let mut offset = at;
            for page in piece.chunks(PAGE) {
                if page.iter().any(|&byte| byte != 0) {
                    write(offset, page)?;
                }
                offset += PAGE as u64;
            }
            Ok(())
        })
        .map_err(|source| self.failed("fill the RAM of QEMU", source))
    }

    /// Returns true if RAM equals `image`, apart from the working set. If the guest `writes`, it must also continue to
    /// write, and its own check must have found no error.
    ///
    /// # Errors
    /// If the guest's memory cannot be read.
    pub fn holds(&self, image: &File, layout: &Layout, writes: bool) -> Result<bool, BenchError> {
        let memory = self.memory(false)?;
        let start = memory.at + layout.filled().start;
        let skip = if writes { layout.working_set() } else { 0 };
        let mut same = true;
        let mut theirs = vec![0; PIECE];
        let compared = pieces(image, |at, piece| {
            let theirs = &mut theirs[..piece.len()];
            memory.file.read_exact_at(theirs, start + at)?;
            let own = skip.saturating_sub(at).min(piece.len() as u64);
            let own = usize::try_from(own).unwrap_or(piece.len());
            same &= theirs[own..] == piece[own..];
            Ok(())
        });
        compared.map_err(|source| self.failed("read the RAM of QEMU", source))?;
        if writes {
            let before = self.count(WRITES)?;
            let deadline = Instant::now() + START;
            while self.count(WRITES)? == before {
                if Instant::now() > deadline {
                    return Ok(false);
                }
                std::thread::sleep(COUNT);
            }
            same &= self.count(ERRORS)? == 0;
        }
        Ok(same)
    }

    /// Waits until the guest has written a page.
    ///
    /// # Errors
    /// If the guest writes no page in time, or a signal arrives.
    pub fn await_writes(&self, interrupt: &Interrupt) -> Result<(), BenchError> {
        let deadline = Instant::now() + START;
        while self.count(WRITES)? == 0 {
            if Instant::now() > deadline {
                return Err(SharedError::NotWell {
                    problem: format!("it has written nothing for {START:?}"),
                }
                .into());
            }
            if interrupt.sleep(Some(COUNT)) {
                return Err(TerminalError::Interrupted.into());
            }
        }
        Ok(())
    }

    /// Reads the counter at byte offset `word` in the block of the first vCPU; 0 before the guest program is loaded.
    fn count(&self, word: u64) -> Result<u64, BenchError> {
        let memory = self.memory(false)?;
        let read = |offset: u64| {
            let mut bytes = [0; 8];
            memory
                .file
                .read_exact_at(&mut bytes, memory.at + offset)
                .map_err(|source| self.failed("read the RAM of QEMU", source))?;
            Ok::<_, BenchError>(u64::from_le_bytes(bytes))
        };
        let block = read(LOAD + HEAD_BLOCKS)?;
        // The block does not exist before the firmware has loaded the guest program.
        if block == 0 || block >= self.ram_bytes {
            return Ok(0);
        }
        read(block + word)
    }

    /// Returns the TCP port on which QEMU waits for a migration, from the kernel's socket lists of its namespace;
    /// `None` if QEMU does not listen.
    pub fn listens_on(&self) -> Option<u16> {
        let process = PathBuf::from(format!("/proc/{}", self.pid()));
        let sockets: Vec<String> = std::fs::read_dir(process.join("fd"))
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|fd| Some(std::fs::read_link(fd.path()).ok()?.display().to_string()))
            .collect();
        let listens = |line: &str| {
            let (port, inode) = listening(line)?;
            sockets
                .contains(&format!("socket:[{inode}]"))
                .then_some(port)
        };
        ["net/tcp", "net/tcp6"].into_iter().find_map(|list| {
            let text = std::fs::read_to_string(process.join(list)).ok()?;
            text.lines().find_map(listens)
        })
    }

    /// Waits until QEMU has ended its channel threads. QEMU reports `completed` earlier, and the CPU time until their
    /// end counts.
    pub fn await_end_of_migration_threads(&self) {
        let deadline = Instant::now() + THREADS_END;
        let runs = || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid()));
            tasks.into_iter().flatten().flatten().any(|task| {
                let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
                MIGRATION_THREADS
                    .iter()
                    .any(|begin| name.starts_with(begin))
            })
        };
        while runs() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Opens the memory of the QEMU process, and finds the start of the guest's RAM. A parent may open the memory of
    /// its child (ptrace(2), access mode checking), unless a security policy forbids it.
    fn memory(&self, write: bool) -> Result<Memory, BenchError> {
        let pid = self.pid();
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))
            .map_err(|source| self.failed("find the RAM of QEMU", source))?;
        let mut found = maps
            .lines()
            .filter_map(|line| anonymous(line, self.ram_bytes));
        let (Some(at), None) = (found.next(), found.next()) else {
            let problem = io::Error::other("not one mapping of its size");
            return Err(self.failed("find the RAM of QEMU", problem));
        };
        let file = File::options()
            .read(true)
            .write(write)
            .open(format!("/proc/{pid}/mem"))
            .map_err(|source| self.failed("open the memory of QEMU", source))?;
        Ok(Memory { file, at })
    }

    fn failed(&self, what: &'static str, source: io::Error) -> BenchError {
        // If QEMU has ended, its last message explains the error.
        match self.process.last_line() {
            Some(words) if !Path::new(&format!("/proc/{}/maps", self.pid())).exists() => {
                QemuError::Command { problem: words }.into()
            }
            _ => TerminalError::Process { what, source }.into(),
        }
    }
}

struct Memory {
    file: File,
    at: u64,
}

/// Returns the start address if `line` describes a private, writable, anonymous mapping of `length` bytes.
fn anonymous(line: &str, length: u64) -> Option<u64> {
    let mut words = line.split_whitespace();
    let (from, to) = words.next()?.split_once('-')?;
    let from = u64::from_str_radix(from, 16).ok()?;
    let to = u64::from_str_radix(to, 16).ok()?;
    let mode = words.next()?;
    let inode = words.nth(2)?;
    let is_ram = to - from == length && mode == "rw-p" && inode == "0" && words.next().is_none();
    is_ram.then_some(from)
}

/// Returns port and inode if `line` of /proc/net/tcp (proc_net_tcp(5)) describes a listening socket.
fn listening(line: &str) -> Option<(u16, u64)> {
    /// `TCP_LISTEN`, in hexadecimal.
    const LISTEN: &str = "0A";
    let mut words = line.split_whitespace().skip(1);
    let (_, port) = words.next()?.rsplit_once(':')?;
    let is_listening = words.nth(1)? == LISTEN;
    let inode = words.nth(5)?.parse().ok()?;
    let port = u16::from_str_radix(port, 16).ok()?;
    is_listening.then_some((port, inode))
}

/// Calls `each` with the offset and content of every piece of `file`.
fn pieces(file: &File, mut each: impl FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<()> {
    let length = file.metadata()?.len();
    let mut buffer = vec![0; PIECE];
    let mut at = 0;
    while at < length {
        let piece = usize::try_from((length - at).min(PIECE as u64)).unwrap_or(PIECE);
        file.read_exact_at(&mut buffer[..piece], at)?;
        each(at, &buffer[..piece])?;
        at += piece as u64;
    }
    Ok(())
}

fn command_line(start: &Start<'_>, folder: &Path) -> io::Result<Vec<String>> {
    let guest = start.guest;
    let accelerator = match start.kind {
        GuestKind::Kvm => "kvm",
        GuestKind::Threads => "tcg",
    };
    let ram = format!("{}k", guest.ram_bytes >> 10);
    // RAM is private anonymous memory, as in Hotlift's guests.
    let mut words: Vec<String> = [
        "-machine",
        "pc,graphics=off",
        "-accel",
        accelerator,
        "-m",
        &ram,
        "-nodefaults",
        "-display",
        "none",
        "-vga",
        "none",
        "-serial",
        "null",
        "-name",
        "hotlift-bench,debug-threads=on",
    ]
    .map(str::to_owned)
    .into();
    let writes = guest.workload.name() != "idle" && guest.rate > 0;
    if writes {
        let elf = folder.join("hotlift.elf");
        std::fs::write(&elf, kvm::ELF)?;
        let tsc_khz = match start.kind {
            GuestKind::Kvm => kvm::host_tsc_khz().map_err(io::Error::other)?,
            GuestKind::Threads => TCG_TSC_KHZ,
        };
        words.extend([
            // SeaBIOS takes 12 s under the KVM of a nested cloud, qboot 0.3 s.
            "-bios".to_owned(),
            "qboot.rom".to_owned(),
            "-kernel".to_owned(),
            elf.display().to_string(),
            "-append".to_owned(),
            format!(
                "workload={} rate={} ws={} seed={} tsc_khz={tsc_khz}",
                guest.workload,
                guest.rate,
                guest.working_set.unwrap_or(guest.ram_bytes / 8),
                guest.seed
            ),
        ]);
    }
    if start.incoming {
        words.extend(["-incoming", "defer"].map(str::to_owned));
    }
    // The bench sends `cont` to a source after the fill. A destination whose guest writes resumes the guest itself.
    if !start.incoming || !writes {
        words.push("-S".to_owned());
    }
    words.extend(start.prealloc.then(|| "-mem-prealloc".to_owned()));
    Ok(words)
}

/// Returns the error for a QEMU that did not answer. If the QEMU has ended, the error has its last line of standard
/// error, or its exit status.
fn explain(error: NoAnswer, process: &ChildProcess) -> BenchError {
    match error {
        NoAnswer::Ended(status) => match process.last_line() {
            Some(problem) => QemuError::Command { problem }.into(),
            None => QemuError::EndedAtStart { status }.into(),
        },
        NoAnswer::Interrupted => TerminalError::Interrupted.into(),
        NoAnswer::Qmp(error) => BenchError::qmp(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listening_socket_is_identified_by_its_port_and_inode() {
        let line = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 22345 \
                    1 ffff8b0000000000 100 0 0 10 0";
        assert_eq!(listening(line), Some((8080, 22345)));
        let established = line.replace(" 0A ", " 01 ");
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode";
        for other in [established.as_str(), head, ""] {
            assert_eq!(listening(other), None, "{other}");
        }
    }

    #[test]
    fn guest_ram_is_the_anonymous_private_mapping_of_its_size() {
        let ram = "7f0000000000-7f0004000000 rw-p 00000000 00:00 0 ";
        assert_eq!(anonymous(ram, 64 << 20), Some(0x7f00_0000_0000));
        assert_eq!(anonymous(ram, 32 << 20), None);
        for other in [
            "7f0000000000-7f0004000000 rw-s 00000000 00:01 7 /memfd:x",
            "7f0000000000-7f0004000000 rw-p 00000000 00:00 0 [heap]",
            "7f0000000000-7f0004000000 r--p 00000000 00:00 0 ",
            "",
        ] {
            assert_eq!(anonymous(other, 64 << 20), None, "{other}");
        }
    }
}
