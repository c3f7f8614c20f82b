//! The QEMUs for tests: their location and their start.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use hotlift_qmp::{Qemu, QmpAddress};
use rustix::process::{Pid, setpriority_process};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tempfile::TempDir;

use crate::error::KitError;
use crate::process::Process;
use crate::skip;

/// Timeout of required answers on a busy host.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// UUID of every [`machine`]; multifd channels carry it.
pub const UUID: &str = "486f746c-6966-7420-6265-736964652051";

/// Machine supported by all releases.
pub const PC_7: &str = "pc-i440fx-7.2";
/// Machine of QEMU 10.0: barriers by round, SWITCHOVER_START, zero pages in packets.
pub const PC_10: &str = "pc-i440fx-10.0";
/// Machine of QEMU 11.1.
pub const PC_11: &str = "pc-i440fx-11.1";

/// QMP socket for the test only, in a QEMU's folder.
pub const QMP: &str = "test.qmp";

/// A release of QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Release {
    /// Debian 12's.
    #[serde(rename = "7.2")]
    V7,
    /// bookworm-backports', unpacked by `scripts/qemu-10.0`.
    #[serde(rename = "10.0")]
    V10,
    /// forky's, unpacked by `scripts/qemu-11`.
    #[serde(rename = "11.1")]
    V11,
}

impl Release {
    /// Returns the release number.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::V7 => "7.2",
            Self::V10 => "10.0",
            Self::V11 => "11.1",
        }
    }

    /// Returns the newest machine.
    #[must_use]
    pub fn machine(self) -> &'static str {
        match self {
            Self::V7 => PC_7,
            Self::V10 => PC_10,
            Self::V11 => PC_11,
        }
    }

    /// Returns the path; `None` if it is not installed.
    #[must_use]
    pub fn find(self) -> Option<PathBuf> {
        match self {
            Self::V7 => {
                static IS_V7: OnceLock<bool> = OnceLock::new();
                let found = find_installed()?;
                let is_v7 = || {
                    let run = Command::new(&found).arg("--version").output();
                    run.is_ok_and(|run| String::from_utf8_lossy(&run.stdout).contains(" 7.2."))
                };
                IS_V7.get_or_init(is_v7).then_some(found)
            }
            Self::V10 => fetched("HOTLIFT_QEMU10", "qemu-10.0"),
            Self::V11 => fetched("HOTLIFT_QEMU11", "qemu-11"),
        }
    }

    /// Returns the path, or notes a skip.
    #[must_use]
    pub fn program(self) -> Option<PathBuf> {
        let found = self.find();
        if found.is_none() {
            let (key, reason) = self.skip();
            skip!(key, "{reason}");
        }
        found
    }

    /// Returns key and reason of a skip without it.
    #[must_use]
    pub fn skip(self) -> (&'static str, &'static str) {
        match self {
            Self::V7 => ("qemu-7.2", "PATH has no qemu-system-x86_64 of version 7.2"),
            Self::V10 => ("qemu-10.0", "scripts/qemu-10.0 fetches it"),
            Self::V11 => ("qemu-11.1", "scripts/qemu-11 fetches it"),
        }
    }
}

const PROGRAM: &str = "qemu-system-x86_64";

/// Returns the QEMU in `PATH`, of any release, or notes a skip.
#[must_use]
pub fn installed() -> Option<PathBuf> {
    let found = find_installed();
    if found.is_none() {
        skip!("qemu", "no {PROGRAM} in PATH (package qemu-system-x86)");
    }
    found
}

/// Returns a QEMU fetched by a script: in the folder of `variable`, or in the cache.
fn fetched(variable: &str, name: &str) -> Option<PathBuf> {
    let folder = set(variable).unwrap_or_else(|| cache().join(name).join("bin"));
    Some(folder.join(PROGRAM)).filter(|program| program.exists())
}

fn find_installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut programs = std::env::split_paths(&path).map(|folder| folder.join(PROGRAM));
    programs.find(|program| program.is_file())
}

/// Returns true if guests can run under KVM, or notes a skip.
#[must_use]
pub fn has_kvm() -> bool {
    let usable = hotlift_vmm::kvm::usable();
    if let Err(why) = &usable {
        skip!("kvm", "{why}");
    }
    usable.is_ok()
}

/// Storage of a machine's RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The file `ram` in its folder, readable and writable as a whole, also before QEMU runs.
    File,
    /// A memfd of pages of 2 MiB (hugetlbfs).
    HugePages,
}

impl Memory {
    /// Returns true if it is available, or notes a skip.
    #[must_use]
    pub fn is_there(self) -> bool {
        self == Self::File || has_huge_pages()
    }

    /// Returns QEMU's object, called `pc.ram`.
    fn object(self, ram_bytes: u64, folder: &Path) -> String {
        let backend = match self {
            // Shared, so that writes reach the file.
            Self::File => format!("file,mem-path={}", folder.join("ram").display()),
            Self::HugePages => "memfd,hugetlb=on,hugetlbsize=2M".to_owned(),
        };
        format!("memory-backend-{backend},id=pc.ram,size={ram_bytes},share=on")
    }
}

/// Pages of 2 MiB that the kernel allocates on demand, in addition to its permanent pages.
const MORE_HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages";

/// Returns true if the kernel has pages of 2 MiB for any process, or notes a skip. Permits allocation on demand, permanently:
/// that reserves no memory, and concurrent tests need not add up what they use.
fn has_huge_pages() -> bool {
    /// 2 GiB: eight times the need of the largest test.
    const ENOUGH: u32 = 1024;
    let allowed = fs::read_to_string(MORE_HUGE_PAGES).map(|allowed| allowed.trim().parse());
    let allowed = match allowed {
        Ok(Ok(ENOUGH..)) => Ok(()),
        Ok(_) => fs::write(MORE_HUGE_PAGES, ENOUGH.to_string()),
        Err(error) => Err(error),
    };
    if let Err(error) = &allowed {
        skip!("hugepages", "{MORE_HUGE_PAGES}: {error}");
    }
    allowed.is_ok()
}

/// Returns the folder of fetched files, as in `scripts/`.
#[must_use]
pub fn cache() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache");
    set("HOTLIFT_CACHE").unwrap_or_else(default)
}

fn set(name: &str) -> Option<PathBuf> {
    let value = std::env::var_os(name).filter(|value| !value.is_empty());
    value.map(PathBuf::from)
}

/// Creates a folder in memory if possible: it holds RAM, which must not be written to a disk.
///
/// # Errors
/// If it cannot be created.
pub fn folder() -> Result<TempDir, KitError> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("hotlift-");
    let memory = Path::new("/dev/shm");
    let made = match memory.is_dir() {
        true => builder.tempdir_in(memory),
        false => builder.tempdir(),
    };
    made.map_err(KitError::system("make a folder"))
}

/// Returns arguments of a QEMU with a QMP socket and no other devices; callers add the rest.
#[must_use]
pub fn bare(qmp: &Path) -> Vec<String> {
    let mut line = ["-nodefaults", "-display", "none", "-qmp"]
        .map(str::to_owned)
        .to_vec();
    line.push(format!("unix:{},server=on,wait=off", qmp.display()));
    line
}

/// Returns arguments of a QEMU with the machine `name` and `ram_bytes` bytes of RAM. Files in `folder`: its guest's output
/// `console`, its process id `pid`, and the socket [`QMP`].
#[must_use]
pub fn machine(
    name: &str,
    accelerator: &str,
    (memory, ram_bytes): (Memory, u64),
    folder: &Path,
) -> Vec<String> {
    let path = |name: &str| folder.join(name).display().to_string();
    let ram = memory.object(ram_bytes, folder);
    let mut line = bare(&folder.join(QMP));
    for (flag, value) in [
        (
            "-machine",
            &*format!("{name},graphics=off,memory-backend=pc.ram"),
        ),
        ("-accel", accelerator),
        ("-object", &ram),
        ("-m", &format!("{}k", ram_bytes >> 10)),
        // SeaBIOS takes 12 s under the KVM of a nested cloud, qboot 0.3 s.
        ("-bios", "qboot.rom"),
        ("-uuid", UUID),
        ("-vga", "none"),
        ("-name", "hotlift-test,debug-threads=on"),
        ("-serial", &format!("file:{}", path("console"))),
        ("-pidfile", &path("pid")),
    ] {
        line.extend([flag, value].map(str::to_owned));
    }
    line
}

/// Priority of vCPUs whose program writes without a pause: a tenth of the share of a thread at 0, so that the programs under
/// test get the rest.
pub(crate) const VCPU_NICE: i32 = 10;

/// Lowers the priority of a QEMU's vCPUs to [`VCPU_NICE`].
pub fn lower_vcpu_priority(qmp: &mut Qemu) {
    let vcpus = qmp.client().execute("query-cpus-fast", &Value::Null);
    for vcpu in vcpus.iter().flat_map(|vcpus| vcpus.as_array()).flatten() {
        let thread = vcpu["thread-id"].as_i64();
        let thread = thread.and_then(|thread| Pid::from_raw(i32::try_from(thread).ok()?));
        // Without it the tests only take longer.
        let _ = thread.map(|thread| setpriority_process(Some(thread), VCPU_NICE));
    }
}

/// A QEMU in a folder of its own, killed on drop.
#[derive(Debug)]
pub struct Launched {
    process: Process,
    folder: TempDir,
}

impl Launched {
    /// Starts a [`bare`] QEMU with these further arguments.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn bare(program: &Path, arguments: &[&str]) -> Result<Self, KitError> {
        let folder = folder()?;
        let mut line = bare(&folder.path().join(QMP));
        line.extend(arguments.iter().map(|&word| word.to_owned()));
        Self::start(program, &line, folder)
    }

    /// Starts a QEMU with these arguments, which include the socket [`QMP`] in `folder`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(program: &Path, arguments: &[String], folder: TempDir) -> Result<Self, KitError> {
        let mut command = Command::new(program);
        command.args(arguments);
        let process = Process::start("QEMU", None, command, &[])?;
        Ok(Self { process, folder })
    }

    /// Connects to its socket [`QMP`], which serves one client at a time.
    ///
    /// # Errors
    /// If it does not answer within [`PATIENCE`]; includes its output.
    pub fn connect(&self) -> Result<Qemu, KitError> {
        let address = QmpAddress::Unix(self.path(QMP));
        Qemu::connect(&address, PATIENCE).map_err(|error| KitError::Late {
            process: "QEMU".to_owned(),
            what: "answered over QMP".to_owned(),
            waited: PATIENCE,
            said: format!("{error}: {}", self.process.said().join(" | ")),
        })
    }

    /// Returns the path of one of its files.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns its process.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Returns its process, to wait for it or to end it.
    pub fn process_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}
