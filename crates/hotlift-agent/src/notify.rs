//! What systemd is told of the agent, by the protocol of sd_notify(3): a datagram to the socket that it names.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// All that is to be there is there: `systemctl start` returns.
pub const READY: &str = "READY=1";

/// The agent takes nothing new, and ends.
pub const STOPPING: &str = "STOPPING=1";

/// Says `state` to systemd, if it has started this process and wants to know.
pub fn say(state: &str) {
    // What is not heard is not missed: systemd goes by the process then.
    let _ = try_to_say(state);
}

fn try_to_say(state: &str) -> std::io::Result<()> {
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
