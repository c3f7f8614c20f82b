//! A QEMU behind a QMP socket: which process it is, and how fast its guest dirties pages.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use hotlift_host::memory;
use hotlift_mem::PAGE_SIZE;
use hotlift_qmp::{Qemu, QmpAddress, QmpError, Version};
use rustix::net::sockopt::socket_peercred;
use serde_json::json;

use crate::error::AdviseError;

/// How long a QMP socket may take to answer, and a dirty rate to be measured: a loaded host's QEMU takes its time.
const ANSWER: Duration = Duration::from_secs(60);

/// How long QEMU measures its dirty rate, in seconds: the least that it takes.
const MEASURE_S: u64 = 1;

/// How often it is asked whether it has measured.
const ASK: Duration = Duration::from_millis(100);

/// QEMU measures with samples of its pages in 4 KiB, and tells MiB a second.
const PAGES_OF_A_MIB: f64 = ((1 << 20) / PAGE_SIZE) as f64;

/// The process at the other end of a QMP socket, if that is a QEMU.
pub fn process(address: &QmpAddress) -> Result<u32, AdviseError> {
    let no_peer = || AdviseError::NoPeer {
        address: address.to_string(),
    };
    let QmpAddress::Unix(path) = address else {
        return Err(no_peer());
    };
    // QEMU takes one client at a time: this connection ends before the next one speaks.
    let socket = UnixStream::connect(path).map_err(|_| no_peer())?;
    let peer = socket_peercred(&socket).map_err(|_| no_peer())?;
    let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).map_err(|_| no_peer())?;
    let name = memory::name_of(pid).ok_or_else(no_peer)?;
    // Whoever called listen(2) is told: a manager that hands sockets over is not QEMU. And a built-in guest is fine.
    let known = ["qemu", "kvm", "hotlift"];
    if known.iter().any(|known| name.contains(known)) {
        Ok(pid)
    } else {
        Err(AdviseError::OtherPeer {
            address: address.to_string(),
            name,
            pid,
        })
    }
}

/// What a QEMU says of itself.
pub struct Asked {
    pub version: Version,
    /// Bytes of its RAM, without what was plugged in; `None` if it does not say.
    pub ram_bytes: Option<u64>,
    /// Pages that its guest dirties in a second; `None` of a QEMU before 5.2, which does not measure it.
    pub dirty_rate: Option<f64>,
}

/// Asks a QEMU for its version, and with `dirty_rate` to measure that.
pub fn ask(address: &QmpAddress, dirty_rate: bool) -> Result<Asked, AdviseError> {
    let mut qemu = Qemu::connect(address, ANSWER).map_err(AdviseError::qmp)?;
    Ok(Asked {
        version: qemu.version(),
        ram_bytes: qemu
            .client()
            .execute("query-memory-size-summary", &serde_json::Value::Null)
            .ok()
            .and_then(|summary| summary["base-memory"].as_u64()),
        dirty_rate: match dirty_rate {
            true => measure_dirty_rate(&mut qemu)?,
            false => None,
        },
    })
}

/// By QEMU's `calc-dirty-rate`.
fn measure_dirty_rate(qemu: &mut Qemu) -> Result<Option<f64>, AdviseError> {
    let client = qemu.client();
    match client.execute("calc-dirty-rate", &json!({ "calc-time": MEASURE_S })) {
        Ok(_) => {}
        Err(QmpError::Command { .. }) => return Ok(None),
        Err(error) => return Err(AdviseError::qmp(error)),
    }
    let deadline = Instant::now() + ANSWER;
    loop {
        let answer = client
            .execute("query-dirty-rate", &serde_json::Value::Null)
            .map_err(AdviseError::qmp)?;
        let status = answer["status"].as_str().unwrap_or_default();
        match answer["dirty-rate"].as_f64() {
            Some(mib) if status == "measured" => return Ok(Some(mib * PAGES_OF_A_MIB)),
            _ if Instant::now() > deadline => {
                let status = hotlift_qmp::one_line(status);
                return Err(AdviseError::DirtyRate { status });
            }
            _ => std::thread::sleep(ASK),
        }
    }
}
