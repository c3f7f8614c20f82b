//! The host to inspect: files in `/sys`, `/dev` and `/proc`, and this process's permissions on them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use hotlift_accel::idxd::CpuFeatures;
use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::AccelError;
use hotlift_mem::FileError;

/// Capability of a process, with its bit number in the sets of `/proc/self/status` (`linux/capability.h`).
#[derive(Debug, Clone, Copy)]
pub enum Capability {
    /// Permission to open files regardless of their mode.
    DacOverride = 1,
    /// Permission to lock an unlimited amount of memory.
    IpcLock = 14,
    /// Permission to map the portal of a work queue (the page to which descriptors are written).
    SysRawio = 17,
}

/// Result of a check: may this process open a device node for reading and writing?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MayOpen {
    Yes,
    No,
    /// The device node does not exist.
    Missing,
}

/// This host, or a folder with copies of the `/sys`, `/dev` and `/proc` of any host.
#[derive(Debug)]
pub struct Host {
    root: PathBuf,
    /// True for this host, false for copied files.
    live: bool,
    status: String,
}

impl Host {
    pub fn new(root: &Path) -> Result<Self, AccelError> {
        let found = root.canonicalize();
        let root = found.map_err(FileError::of("inspect", root))?;
        let mut host = Self {
            live: root == Path::new("/"),
            root,
            status: String::new(),
        };
        host.status = host.read("/proc/self/status").unwrap_or_default();
        Ok(host)
    }

    /// Returns true for this host, where libraries can be tried; false for copied files of a host.
    pub fn is_live(&self) -> bool {
        self.live
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path on this machine of the inspected host's `path`.
    pub fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Returns the path on the inspected host of `path` on this machine.
    pub fn name_of(&self, path: &Path) -> String {
        let inside = path.strip_prefix(&self.root).unwrap_or(path);
        Path::new("/").join(inside).display().to_string()
    }

    pub fn exists(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// Returns the text of the file `path` without its line end; `None` if it cannot be read.
    pub fn read(&self, path: &str) -> Option<String> {
        let text = fs::read_to_string(self.at(path)).ok()?;
        Some(text.trim_end().to_owned())
    }

    /// Returns the decimal number in the file `path`; `None` if it has none.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    /// Returns the last part of the target of the symbolic link `path`; `None` if it cannot be read.
    pub fn link(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.at(path)).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    }

    /// Returns the sorted names of the files in the folder `path`; none if it cannot be read.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    /// Checks if this process may open the device node `path` for reading and writing. Does not open the node, as this affects
    /// some devices.
    pub fn may_open(&self, path: &str) -> MayOpen {
        let at = self.at(path);
        let Ok(metadata) = fs::metadata(&at) else {
            return MayOpen::Missing;
        };
        let may = if self.live {
            let both = Access::READ_OK | Access::WRITE_OK;
            accessat(CWD, &at, both, AtFlags::EACCESS).is_ok()
        } else {
            // Copied files: computed from their modes.
            let shift = match () {
                () if self.ids("Uid").get(1) == Some(&metadata.uid()) => 6,
                () if self.groups().contains(&metadata.gid()) => 3,
                () => 0,
            };
            metadata.mode() >> shift & 0o6 == 0o6 || self.has(Capability::DacOverride)
        };
        if may { MayOpen::Yes } else { MayOpen::No }
    }

    /// Returns true if this process has `capability` in its effective set.
    pub fn has(&self, capability: Capability) -> bool {
        let set = self.status_line("CapEff").unwrap_or_default();
        let bits = u64::from_str_radix(set, 16).unwrap_or(0);
        bits >> (capability as u32) & 1 == 1
    }

    /// Returns the limit of memory that this process may lock, in bytes; `None` if unlimited or unknown.
    pub fn memory_lock_limit(&self) -> Option<u64> {
        if self.has(Capability::IpcLock) {
            return None;
        }
        let limits = self.read("/proc/self/limits")?;
        let line = limits
            .lines()
            .find_map(|line| line.strip_prefix("Max locked memory"))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// Returns the name of this process's effective user.
    pub fn user(&self) -> String {
        let uid = self.ids("Uid").get(1).copied().unwrap_or(0);
        self.name_in("/etc/passwd", uid)
    }

    /// Returns the name of this process's effective group.
    pub fn group(&self) -> String {
        let gid = self.ids("Gid").get(1).copied().unwrap_or(0);
        self.name_in("/etc/group", gid)
    }

    /// Returns the features of the CPU: from CPUID, or from the copied `/proc/cpuinfo`.
    pub fn cpu(&self) -> CpuFeatures {
        if self.live {
            CpuFeatures::of_this_cpu()
        } else {
            CpuFeatures::of_cpuinfo(&self.read("/proc/cpuinfo").unwrap_or_default())
        }
    }

    /// Returns true if the kernel's command line has all values of `option`, as in `intel_iommu=on,sm_on`.
    pub fn kernel_has_option(&self, option: &str) -> bool {
        let cmdline = self.read("/proc/cmdline").unwrap_or_default();
        let (name, values) = option.split_once('=').unwrap_or((option, ""));
        let given: Vec<_> = cmdline
            .split_whitespace()
            .filter_map(|word| word.split_once('='))
            .filter(|(given, _)| *given == name)
            .flat_map(|(_, values)| values.split(','))
            .collect();
        values.split(',').all(|value| given.contains(&value))
    }

    fn groups(&self) -> Vec<u32> {
        [self.ids("Gid"), self.ids("Groups")].concat()
    }

    fn ids(&self, line: &str) -> Vec<u32> {
        let ids = self.status_line(line).unwrap_or_default();
        ids.split_whitespace()
            .filter_map(|id| id.parse().ok())
            .collect()
    }

    fn status_line(&self, name: &str) -> Option<&str> {
        self.status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(str::trim)
    }

    /// Returns the name that `file` (`/etc/passwd` or `/etc/group`) has for `id`; the number as text if it has none.
    fn name_in(&self, file: &str, id: u32) -> String {
        let text = self.read(file).unwrap_or_default();
        let number = id.to_string();
        let name = text
            .lines()
            .map(|line| line.split(':').collect::<Vec<_>>())
            .find(|fields| fields.get(2) == Some(&number.as_str()));
        name.map_or(number, |fields| fields[0].to_owned())
    }
}

/// Returns shell commands that add `option` to the kernel's command line on Debian, and restart the host.
pub fn add_kernel_option(option: &str) -> [String; 2] {
    [
        format!("sed -i 's/^GRUB_CMDLINE_LINUX=\"/&{option} /' /etc/default/grub"),
        "update-grub && reboot".to_owned(),
    ]
}
