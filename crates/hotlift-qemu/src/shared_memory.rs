//! RAM in files that both QEMUs map. Such RAM is not sent.
//!
//! Equal paths do not prove that both QEMUs map the same file: the hosts or mount namespaces may differ, or the file may have
//! been replaced. So each side reads the kernel's list of its QEMU's mappings. Both lists must name the same files of the same
//! host.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;

use hotlift_qmp::{Qemu, QmpAddress, SharedBackend};
use rustix::net::sockopt::socket_peercred;
use serde::{Deserialize, Serialize};

use crate::error::{QemuError, Side};

/// A file that backs the RAM of a QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct SharedFile {
    /// Id of the memory backend.
    pub memory: String,
    /// Size of the memory backend in bytes.
    pub bytes: u64,
    /// Boot id of the host's kernel.
    pub host: String,
    /// Device and inode of the file, in the format of /proc/PID/maps.
    pub file: String,
}

/// Lists the files that back the RAM of this QEMU.
///
/// # Errors
/// If no file backs the RAM, or a file cannot be identified.
pub fn of(qemu: &mut Qemu, side: Side) -> Result<Vec<SharedFile>, QemuError> {
    let backends = qemu.shared_backends().map_err(|error| side.error(error))?;
    if backends.is_empty() {
        return Err(shared(
            "QEMU has no memory backend with share=on".to_owned(),
        ));
    }
    let address = qemu.client().address().clone();
    let maps = maps(&address).map_err(|problem| {
        shared(format!(
            "cannot list the files that the QEMU at {address} maps: {problem}"
        ))
    })?;
    let host = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    backends
        .into_iter()
        .map(|backend| file_of(backend, &maps, host.trim()))
        .collect()
}

/// Checks that both QEMUs map the same files.
///
/// # Errors
/// [`QemuError::Shared`] if a file differs.
pub fn check(here: &[SharedFile], there: &[SharedFile]) -> Result<(), QemuError> {
    if here == there && !here.is_empty() {
        return Ok(());
    }
    let names = |files: &[SharedFile]| {
        let names = files
            .iter()
            .map(|it| format!("{} ({} bytes)", it.memory, it.bytes));
        names.collect::<Vec<_>>().join(", ")
    };
    Err(shared(format!(
        "the two QEMUs map different files: the source has {}, the destination has {}; start both on one host with the same \
         mem-path",
        names(here),
        names(there)
    )))
}

fn shared(problem: String) -> QemuError {
    QemuError::Shared { problem }
}

/// Reads /proc/PID/maps of the QEMU that listens at `address`.
fn maps(address: &QmpAddress) -> Result<String, String> {
    let QmpAddress::Unix(path) = address else {
        return Err("its QMP socket must be a UNIX socket".to_owned());
    };
    let peer = UnixStream::connect(path).map_err(|error| error.to_string())?;
    let peer = socket_peercred(&peer).map_err(|error| error.to_string())?;
    let pid = peer.pid.as_raw_nonzero().to_string();
    let maps = fs::read_to_string(Path::new("/proc").join(pid).join("maps"));
    maps.map_err(|error| error.to_string())
}

/// Finds the file of a memory backend in the kernel's list (proc(5): address, permissions, offset, device, inode, path).
fn file_of(backend: SharedBackend, maps: &str, host: &str) -> Result<SharedFile, QemuError> {
    let SharedBackend { id, bytes, file } = backend;
    let Some(path) = file else {
        let problem = format!("memory backend '{id}' maps no file that another QEMU can map");
        return Err(shared(problem));
    };
    let found = maps.lines().find_map(|line| {
        let (fields, mapped) = line.split_at_checked(line.find('/')?)?;
        let mut fields = fields.split_whitespace().skip(1);
        let is_shared = fields.next()?.ends_with('s');
        let device = fields.nth(1)?;
        let inode = fields.next()?;
        (is_shared && mapped == path).then(|| format!("{device} {inode}"))
    });
    match found {
        Some(file) => Ok(SharedFile {
            memory: id,
            bytes,
            host: host.to_owned(),
            file,
        }),
        None => Err(shared(format!(
            "memory backend '{id}' does not map the current file {path}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "7f0000000000-7f0004000000 rw-s 00000000 00:1b 42      /dev/shm/vm ram\n\
                        7f0004000000-7f0008000000 rw-p 00000000 00:1b 43      /dev/shm/private\n\
                        7f0008000000-7f000c000000 rw-s 00000000 00:1b 44      /dev/shm/gone (deleted)\n\
                        7f000c000000-7f000d000000 rw-p 00000000 00:00 0\n";

    fn file(path: Option<&str>) -> Result<SharedFile, QemuError> {
        let backend = SharedBackend {
            id: "ram".to_owned(),
            bytes: 1 << 26,
            file: path.map(str::to_owned),
        };
        file_of(backend, MAPS, "host")
    }

    #[test]
    fn a_file_is_identified_by_device_and_inode() {
        assert_eq!(file(Some("/dev/shm/vm ram")).unwrap().file, "00:1b 42");
        for path in ["/dev/shm/private", "/dev/shm/gone", "/dev/shm/other"] {
            let error = file(Some(path)).unwrap_err().to_string();
            assert!(error.contains(path), "{error}");
        }
        assert!(file(None).is_err());
    }

    #[test]
    fn the_same_file_must_be_mapped_on_the_same_host() {
        let here = [file(Some("/dev/shm/vm ram")).unwrap()];
        check(&here, &here).unwrap();
        let mut there = here.clone();
        there[0].host = "another".to_owned();
        assert!(check(&here, &there).is_err());
        let mut there = here.clone();
        there[0].file = "00:1b 43".to_owned();
        assert!(check(&here, &there).is_err());
        assert!(check(&here, &[]).is_err() && check(&[], &[]).is_err());
    }
}
