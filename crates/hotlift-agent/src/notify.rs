//! Status reports to systemd: datagrams to its socket, as in sd_notify(3).

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// Report that the agent is ready; then `systemctl start` returns.
pub const READY: &str = "READY=1";

/// Returns the report that the agent is stopping. The agent ends within `time`; systemd extends TimeoutStopSec= to `time`.
pub fn stopping(time: Duration) -> String {
    let microseconds = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={microseconds}")
}

/// Sends `state` to systemd. Does nothing if systemd did not start this process with a notification socket.
pub fn notify(state: &str) {
    // Errors are ignored: without these reports, systemd still watches the process.
    let _ = try_notify(state);
}

fn try_notify(state: &str) -> std::io::Result<()> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else {
        return Ok(());
    };
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(&name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_is_asked_for_the_longest_time_that_a_stop_takes() {
        let hour = stopping(Duration::from_secs(3600));
        assert_eq!(hour, "STOPPING=1\nEXTEND_TIMEOUT_USEC=3600000000");
        let forever = format!("EXTEND_TIMEOUT_USEC={}", u64::MAX);
        assert!(stopping(Duration::MAX).ends_with(&forever));
    }
}
