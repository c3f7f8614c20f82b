//! A QEMU or a built-in guest behind a QMP socket: its process, and the guest's part of its memory.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use hotlift_mem::FileError;
use hotlift_qmp::{Qemu, QmpAddress, QmpError};
use rustix::net::sockopt::socket_peercred;
use serde_json::Value;

use crate::error::HostError;
use crate::memory::{self, Process};

/// Timeout of an answer on a QMP socket: QEMU is slow on a loaded host.
const ANSWER: Duration = Duration::from_secs(60);

/// Returns the memory of the guest behind a QMP socket.
///
/// # Errors
/// The socket belongs to another program, or the process's memory cannot be read.
pub fn memory(address: &QmpAddress) -> Result<Process, HostError> {
    // Checks the owner of the socket first: another program must not receive commands.
    let pid = process(address)?;
    let ram_bytes = ram_bytes(address).map_err(HostError::Qmp)?;
    Process::open(pid, ram_bytes)
}

/// Returns the id of the process at the other end of a QMP socket.
fn process(address: &QmpAddress) -> Result<u32, HostError> {
    let no_peer = || HostError::NoPeer {
        address: address.to_string(),
    };
    let QmpAddress::Unix(path) = address else {
        return Err(no_peer());
    };
    // QEMU accepts one client at a time: this connection ends before the next one sends a command.
    let socket = UnixStream::connect(path).map_err(FileError::reading(path))?;
    let peer = socket_peercred(&socket).map_err(|_| no_peer())?;
    let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).map_err(|_| no_peer())?;
    let name = memory::name_of(pid).ok_or_else(no_peer)?;
    // The kernel reports the caller of listen(2). A manager that passes sockets on is no QEMU; a built-in guest is accepted.
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

/// Returns the bytes of a QEMU's RAM without hot-plugged memory; `None` if it reports none.
fn ram_bytes(address: &QmpAddress) -> Result<Option<u64>, QmpError> {
    let mut qemu = Qemu::connect(address, ANSWER)?;
    let client = qemu.client();
    let summary = client.execute("query-memory-size-summary", &Value::Null);
    Ok(summary
        .ok()
        .and_then(|summary| summary["base-memory"].as_u64()))
}
