//! Finds the process of a QEMU or of a built-in guest by its QMP socket, and the guest's RAM in this process.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use hotlift_mem::FileError;
use hotlift_qmp::{Qemu, QmpAddress, QmpError};
use rustix::net::sockopt::socket_peercred;
use serde_json::Value;

use crate::error::HostError;
use crate::memory::{self, Process};

/// Timeout of an answer on a QMP socket: QEMU answers slowly on a loaded host.
const ANSWER: Duration = Duration::from_secs(60);

/// Returns the memory of the guest that is controlled through the QMP socket `address`.
///
/// # Errors
/// If the socket belongs to another program, QEMU does not answer, or the memory of the process cannot be read.
pub fn memory(address: &QmpAddress) -> Result<Process, HostError> {
    // Checks first which process has the socket: another program must not receive QMP commands.
    let pid = process(address)?;
    let ram_bytes = ram_bytes(address).map_err(HostError::Qmp)?;
    Process::open(pid, ram_bytes)
}

/// Returns the id of the QEMU (or built-in guest) that has the QMP socket `address`.
fn process(address: &QmpAddress) -> Result<u32, HostError> {
    let no_peer = || HostError::NoPeer {
        address: address.to_string(),
    };
    let QmpAddress::Unix(path) = address else {
        return Err(no_peer());
    };
    // QEMU serves one QMP client at a time: this connection is closed before the next connection sends a command.
    let socket = UnixStream::connect(path).map_err(FileError::reading(path))?;
    let peer = socket_peercred(&socket).map_err(|_| no_peer())?;
    let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).map_err(|_| no_peer())?;
    let name = memory::name_of(pid).ok_or_else(no_peer)?;
    // The kernel reports the process that called listen(2). This can be a manager, which passed the socket to QEMU.
    let known = ["qemu", "kvm", "hotlift"];
    if known.iter().any(|known| name.contains(known)) {
        Ok(pid)
    } else {
        Err(HostError::OtherPeer {
            address: address.to_string(),
            name,
            pid,
        })
    }
}

/// Returns the size of QEMU's RAM in bytes, without hot-plugged memory; `None` if QEMU does not report it.
fn ram_bytes(address: &QmpAddress) -> Result<Option<u64>, QmpError> {
    let mut qemu = Qemu::connect(address, ANSWER)?;
    let client = qemu.client();
    let summary = client.execute("query-memory-size-summary", &Value::Null);
    Ok(summary
        .ok()
        .and_then(|summary| summary["base-memory"].as_u64()))
}
