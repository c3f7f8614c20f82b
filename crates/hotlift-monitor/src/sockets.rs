//! Sockets for a monitor's clients, and their access control.

use std::io::{self, Write};
use std::net::{TcpListener, ToSocketAddrs};
use std::str::FromStr;
use std::sync::Arc;

use hotlift::transport::UnixSocketFile;
use hotlift_qmp::server::{BoundSocket, Clients, Commands, Events, TOO_MANY_CLIENTS, serve_client};
use hotlift_qmp::{QmpAddress, QmpError, Socket};
use hotlift_terminal::error::TerminalError;

use crate::error::MonitorError;
use crate::{hmp, introspection};

/// Message to an operator who connects when too many clients are connected.
const TOO_MANY_HMP_CLIENTS: &[u8] = b"too many clients: end another one first\r\n";

/// Permissions of a UNIX socket: only its owner can connect.
const OWNER_ONLY: u32 = 0o600;

/// Sockets for the clients of a monitor, and their access control.
#[derive(Debug, Clone)]
pub struct Sockets {
    /// Address of the QMP socket; `None` for no socket.
    pub qmp: Option<QmpAddress>,
    /// Address of the human monitor; `None` for no human monitor.
    pub hmp: Option<HmpAddress>,
    /// Permissions of the UNIX sockets, as the mode of their files, at most 0o777.
    pub mode: u32,
    /// True if TCP sockets may have addresses that other hosts can reach. There is no authentication.
    pub from_other_hosts: bool,
}

/// Address of the human monitor.
#[derive(Debug, Clone)]
pub enum HmpAddress {
    /// Standard input and output of this process.
    Stdio,
    /// A socket.
    Socket(QmpAddress),
}

impl FromStr for HmpAddress {
    type Err = QmpError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "stdio" => Ok(Self::Stdio),
            _ => text.parse().map(Self::Socket),
        }
    }
}

/// Monitors that serve their clients until this value is dropped.
pub struct Monitors {
    // Fields are dropped in this order: clients are disconnected before their socket files are removed.
    _clients: Vec<Clients>,
    _files: Vec<UnixSocketFile>,
    _terminal: Option<hmp::TerminalSettings>,
}

impl Sockets {
    /// Creates the configuration of a monitor with only QMP at `address`. Only this user can connect to a UNIX socket.
    #[must_use]
    pub fn qmp_at(address: QmpAddress) -> Self {
        Self {
            qmp: Some(address),
            hmp: None,
            mode: OWNER_ONLY,
            from_other_hosts: false,
        }
    }

    /// Starts to serve clients with `commands`. QMP clients also receive `events`.
    ///
    /// # Errors
    /// If a socket cannot be opened, or is not allowed because other hosts can reach it.
    pub fn serve(
        &self,
        commands: &Arc<dyn Commands>,
        events: &Events,
    ) -> Result<Monitors, MonitorError> {
        let mut monitors = Monitors {
            _clients: Vec::new(),
            _files: Vec::new(),
            _terminal: None,
        };
        if let Some(address) = &self.qmp {
            let (commands, events) = (Arc::clone(commands), events.clone());
            let version = introspection::version();
            self.listen(address, TOO_MANY_CLIENTS, &mut monitors, move |socket| {
                serve_client(socket, &version, &*commands, &events)
            })?;
        }
        match &self.hmp {
            None => {}
            Some(HmpAddress::Socket(address)) => {
                let commands = Arc::clone(commands);
                self.listen(
                    address,
                    TOO_MANY_HMP_CLIENTS,
                    &mut monitors,
                    move |socket| hmp::serve_client(&*commands, socket),
                )?;
            }
            Some(HmpAddress::Stdio) => {
                monitors._terminal = Some(hmp::TerminalSettings::keep());
                let commands = Arc::clone(commands);
                let serve = move || {
                    let _ = hmp::serve_terminal(&*commands);
                };
                // The thread may wait forever for input, so it is not joined.
                std::thread::Builder::new()
                    .name("hmp/terminal".to_owned())
                    .spawn(serve)
                    .map_err(TerminalError::process("monitor"))?;
            }
        }
        Ok(monitors)
    }

    fn listen(
        &self,
        address: &QmpAddress,
        refusal: &'static [u8],
        monitors: &mut Monitors,
        serve: impl Fn(Socket) -> io::Result<()> + Send + Sync + 'static,
    ) -> Result<(), MonitorError> {
        let failed = |source| MonitorError::Serve {
            address: address.to_string(),
            source,
        };
        let (bound, file) = match address {
            QmpAddress::Unix(path) => {
                let file = UnixSocketFile::bind(path, self.mode).map_err(failed)?;
                let listener = file.listener().try_clone().map_err(failed)?;
                (BoundSocket::Unix(listener), Some(file))
            }
            QmpAddress::Tcp(place) => {
                let addresses: Vec<_> = place.to_socket_addrs().map_err(failed)?.collect();
                let reached = addresses.iter().find(|one| !one.ip().is_loopback());
                if let (Some(reached), false) = (reached, self.from_other_hosts) {
                    return Err(MonitorError::OtherHosts {
                        address: address.to_string(),
                        reached: reached.ip(),
                    });
                }
                let listener = TcpListener::bind(&addresses[..]).map_err(failed)?;
                (BoundSocket::Tcp(listener), None)
            }
        };
        let place = address.to_string();
        let serve = move |socket| match serve(socket) {
            // Always logged, because a web page may be trying to reach this socket through a browser.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let _ = writeln!(io::stderr(), "hotlift: a client of {place}: {error}");
            }
            // Nothing is logged if the client has disconnected.
            Ok(()) | Err(_) => {}
        };
        let clients = Clients::serve(bound, refusal, Arc::new(serve)).map_err(failed)?;
        monitors._clients.push(clients);
        monitors._files.extend(file);
        Ok(())
    }
}
