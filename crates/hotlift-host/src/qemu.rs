//! A QEMU, or a built-in guest, behind a QMP socket: which process it is, and which of its memory is the guest's.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use hotlift_mem::FileError;
use hotlift_qmp::{Qemu, QmpAddress, QmpError};
use rustix::net::sockopt::socket_peercred;
use serde_json::Value;

use crate::error::HostError;
use crate::memory::{self, Process};

/// How long a QMP socket may take to answer: a loaded host's QEMU takes its time.
const ANSWER: Duration = Duration::from_secs(60);

/// The memory of the guest behind a QMP socket.
///
/// # Errors
/// If the socket is of something else, or the process's memory may not be read.
pub fn memory(address: &QmpAddress) -> Result<Process, HostError> {
    // Whose socket it is comes first: nothing is said to something else.
    let pid = process(address)?;
    let ram_bytes = ram_bytes(address).map_err(HostError::Qmp)?;
    Process::open(pid, ram_bytes)
}

/// The process at the other end of a QMP socket.
fn process(address: &QmpAddress) -> Result<u32, HostError> {
    let no_peer = || HostError::NoPeer {
        address: address.to_string(),
    };
    let QmpAddress::Unix(path) = address else {
        return Err(no_peer());
    };
    // QEMU takes one client at a time: this connection ends before the next one speaks.
    let socket = UnixStream::connect(path).map_err(FileError::reading(path))?;
    let peer = socket_peercred(&socket).map_err(|_| no_peer())?;
    let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).map_err(|_| no_peer())?;
    let name = memory::name_of(pid).ok_or_else(no_peer)?;
    // Whoever called listen(2) is told: a manager that hands sockets over is not QEMU. And a built-in guest is fine.
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

/// Bytes of a QEMU's RAM, without what was plugged in; `None` if it does not say.
fn ram_bytes(address: &QmpAddress) -> Result<Option<u64>, QmpError> {
    let mut qemu = Qemu::connect(address, ANSWER)?;
    let client = qemu.client();
    let summary = client.execute("query-memory-size-summary", &Value::Null);
    Ok(summary
        .ok()
        .and_then(|summary| summary["base-memory"].as_u64()))
}
