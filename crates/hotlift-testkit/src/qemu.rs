//! The QEMUs for tests: finds and starts them.

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

/// Timeout for answers that must arrive, even on a busy host.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// UUID of every QEMU from [`machine`], which multifd channels send.
pub const UUID: &str = "486f746c-6966-7420-6265-736964652051";

/// Machine type that all releases of QEMU here support.
pub const PC_7: &str = "pc-i440fx-7.2";
/// Machine type of QEMU 10.0. New in its streams: sync points once per round, SWITCHOVER_START, and zero pages in
/// packets.
pub const PC_10: &str = "pc-i440fx-10.0";
/// Machine type of QEMU 11.1.
pub const PC_11: &str = "pc-i440fx-11.1";

/// Name of the QMP socket for the test only, in a QEMU's folder.
pub const QMP: &str = "test.qmp";

/// A release of QEMU that tests use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Release {
    /// QEMU 7.2, from Debian 12.
    #[serde(rename = "7.2")]
    V7,
    /// QEMU 10.0, from bookworm-backports; `scripts/qemu-10.0` unpacks it.
    #[serde(rename = "10.0")]
    V10,
    /// QEMU 11, from forky; `scripts/qemu-11` unpacks it.
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

    /// Returns the newest machine type of this release.
    #[must_use]
    pub fn machine(self) -> &'static str {
        match self {
            Self::V7 => PC_7,
            Self::V10 => PC_10,
            Self::V11 => PC_11,
        }
    }

    /// Returns the path of this release; `None` if it is not installed.
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

    /// Returns the path of this release. If it is not installed, notes a skip and returns `None`.
    #[must_use]
    pub fn program(self) -> Option<PathBuf> {
        let found = self.find();
        if found.is_none() {
            let (key, reason) = self.skip();
            skip!(key, "{reason}");
        }
        found
    }

    /// Returns key and reason of the skip for a missing release.
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

/// Returns the QEMU in `PATH`, of any release. Without one, notes a skip and returns `None`.
#[must_use]
pub fn installed() -> Option<PathBuf> {
    let found = find_installed();
    if found.is_none() {
        skip!("qemu", "no {PROGRAM} in PATH (package qemu-system-x86)");
    }
    found
}

/// Returns the QEMU that a script has fetched: in the folder that the environment variable names, or in the cache.
/// `None` if there is none.
fn fetched(variable: &str, name: &str) -> Option<PathBuf> {
    let folder = set(variable).unwrap_or_else(|| cache().join(name).join("bin"));
    Some(folder.join(PROGRAM)).filter(|program| program.exists())
}

fn find_installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut programs = std::env::split_paths(&path).map(|folder| folder.join(PROGRAM));
    programs.find(|program| program.is_file())
}

/// Returns true if this machine can run guests under KVM. Otherwise notes a skip and returns false.
#[must_use]
pub fn has_kvm() -> bool {
    let usable = hotlift_vmm::kvm::usable();
    if let Err(why) = &usable {
        skip!("kvm", "{why}");
    }
    usable.is_ok()
}

/// Kind of host memory for a guest's RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The file `ram` in the QEMU's folder. Tests can read and write it before and while QEMU runs.
    File,
    /// A memfd of huge pages of 2 MiB (hugetlbfs).
    HugePages,
}

impl Memory {
    /// Returns true if this machine has the memory. Otherwise notes a skip and returns false.
    #[must_use]
    pub fn is_there(self) -> bool {
        self == Self::File || has_huge_pages()
    }

    /// Returns QEMU's argument for the memory object `pc.ram`.
    fn object(self, ram_bytes: u64, folder: &Path) -> String {
        let backend = match self {
            // The mapping is shared, so that writes of the guest reach the file.
            Self::File => format!("file,mem-path={}", folder.join("ram").display()),
            Self::HugePages => "memfd,hugetlb=on,hugetlbsize=2M".to_owned(),
        };
        format!("memory-backend-{backend},id=pc.ram,size={ram_bytes},share=on")
    }
}

/// File with the limit of 2 MiB pages that the kernel may allocate on demand, in addition to its permanent ones.
const MORE_HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages";

/// Returns true if the kernel has 2 MiB pages; otherwise notes a skip and returns false. Raises the limit of pages on
/// demand, permanently. The limit reserves no memory, so concurrent tests need not sum up their use.
fn has_huge_pages() -> bool {
    /// Pages to allow: 2 GiB, eight times the need of the largest test.
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

/// Returns the folder of fetched files, the same as in `scripts/`.
#[must_use]
pub fn cache() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache");
    set("HOTLIFT_CACHE").unwrap_or_else(default)
}

fn set(name: &str) -> Option<PathBuf> {
    let value = std::env::var_os(name).filter(|value| !value.is_empty());
    value.map(PathBuf::from)
}

/// Creates a temporary folder, in memory if possible. The folder is for guests' RAM, which should not be written to a
/// disk.
///
/// # Errors
/// If the folder cannot be created.
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

/// Returns the arguments of a QEMU with a QMP socket at `qmp` and no default devices.
#[must_use]
pub fn bare(qmp: &Path) -> Vec<String> {
    let mut line = ["-nodefaults", "-display", "none", "-qmp"]
        .map(str::to_owned)
        .to_vec();
    line.push(format!("unix:{},server=on,wait=off", qmp.display()));
    line
}

/// Returns the arguments of a QEMU with machine type `name` and `ram_bytes` bytes of RAM. The QEMU creates files in
/// `folder`: the guest's output `console`, the process ID `pid`, and the socket [`QMP`].
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

/// Lowers the priority of a QEMU's vCPUs to nice 10.
pub fn lower_vcpu_priority(qmp: &mut Qemu) {
    let vcpus = qmp.client().execute("query-cpus-fast", &Value::Null);
    for vcpu in vcpus.iter().flat_map(|vcpus| vcpus.as_array()).flatten() {
        let thread = vcpu["thread-id"].as_i64();
        let thread = thread.and_then(|thread| Pid::from_raw(i32::try_from(thread).ok()?));
        // Without it the tests only take longer.
        let _ = thread.map(|thread| setpriority_process(Some(thread), VCPU_NICE));
    }
}

/// A QEMU process with its own folder. It is killed on drop.
#[derive(Debug)]
pub struct Launched {
    process: Process,
    folder: TempDir,
}

impl Launched {
    /// Starts a [`bare`] QEMU with these additional arguments.
    ///
    /// # Errors
    /// If QEMU cannot be started.
    pub fn bare(program: &Path, arguments: &[&str]) -> Result<Self, KitError> {
        let folder = folder()?;
        let mut line = bare(&folder.path().join(QMP));
        line.extend(arguments.iter().map(|&word| word.to_owned()));
        Self::start(program, &line, folder)
    }

    /// Starts a QEMU with these arguments, which must include the socket [`QMP`] in `folder`.
    ///
    /// # Errors
    /// If QEMU cannot be started.
    pub fn start(program: &Path, arguments: &[String], folder: TempDir) -> Result<Self, KitError> {
        let mut command = Command::new(program);
        command.args(arguments);
        let process = Process::start("QEMU", None, command, &[])?;
        Ok(Self { process, folder })
    }

    /// Connects to the QEMU's socket [`QMP`], which serves one client at a time.
    ///
    /// # Errors
    /// If QEMU does not answer within [`PATIENCE`]. The error includes QEMU's output.
    pub fn connect(&self) -> Result<Qemu, KitError> {
        let address = QmpAddress::Unix(self.path(QMP));
        Qemu::connect(&address, PATIENCE).map_err(|error| KitError::Late {
            process: "QEMU".to_owned(),
            what: "answered over QMP".to_owned(),
            waited: PATIENCE,
            output: format!("{error}: {}", self.process.output_lines().join(" | ")),
        })
    }

    /// Returns the path of the file `name` in the QEMU's folder.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the QEMU's process.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Returns the QEMU's process, so that the caller can wait for it or end it.
    pub fn process_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}
