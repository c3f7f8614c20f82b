//! Where clients of a monitor connect, and who may.

use std::io::{self, Write};
use std::net::{TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use hotlift::transport::UnixSocketFile;
use hotlift_console::error::ConsoleError;
use hotlift_qmp::QmpAddress;
use hotlift_qmp::server::{BoundSocket, Clients, Commands, Events, TOO_MANY_CLIENTS, serve_client};

use super::{common, hmp};
use crate::error::CommandError;

/// What a person hears who is one too many.
const TOO_MANY_PEOPLE: &[u8] = b"too many clients: end another one first\r\n";

/// Flags of every command that can be driven and watched.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Control")]
pub struct ControlArgs {
    /// Serve QMP there, as QEMU does: PATH, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    control: Option<QmpAddress>,
    /// Serve the human monitor (HMP) there: stdio, PATH, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    monitor: Option<MonitorAddress>,
    /// Permissions of the UNIX sockets, in octal
    #[arg(
        long,
        value_name = "MODE",
        default_value = "600",
        value_parser = mode,
        hide_short_help = true
    )]
    control_mode: u32,
    /// Let the TCP sockets be on addresses that other hosts reach, though there is no authentication
    #[arg(long, hide_short_help = true)]
    control_from_other_hosts: bool,
}

/// Where a person sits.
#[derive(Debug, Clone)]
enum MonitorAddress {
    /// At the terminal.
    Stdio,
    Socket(QmpAddress),
}

impl std::str::FromStr for MonitorAddress {
    type Err = hotlift_qmp::QmpError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "stdio" => Ok(Self::Stdio),
            _ => text.parse().map(Self::Socket),
        }
    }
}

fn mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "expected permissions in octal, such as 600".to_owned())
}

/// Clients that are served, until it goes out of scope.
pub struct Monitors {
    // In this order: clients go before the files that they came by.
    _clients: Vec<Clients>,
    _files: Vec<UnixSocketFile>,
    _terminal: Option<hmp::TerminalSettings>,
}

impl ControlArgs {
    /// QMP at `address` and nothing else, for this user alone.
    pub fn at(address: QmpAddress) -> Self {
        Self {
            control: Some(address),
            control_mode: 0o600,
            ..Self::default()
        }
    }

    /// True if anybody is served at all.
    pub fn is_given(&self) -> bool {
        self.control.is_some() || self.monitor.is_some()
    }

    /// True if a person at the terminal is.
    pub fn has_terminal(&self) -> bool {
        matches!(self.monitor, Some(MonitorAddress::Stdio))
    }

    /// Starts to serve.
    pub fn serve(
        &self,
        commands: &Arc<dyn Commands>,
        events: &Events,
    ) -> Result<Monitors, CommandError> {
        let mut monitors = Monitors {
            _clients: Vec::new(),
            _files: Vec::new(),
            _terminal: None,
        };
        if let Some(address) = &self.control {
            let (commands, events) = (Arc::clone(commands), events.clone());
            let version = common::version();
            self.listen(address, TOO_MANY_CLIENTS, &mut monitors, move |socket| {
                serve_client(socket, &version, &*commands, &events)
            })?;
        }
        match &self.monitor {
            None => {}
            Some(MonitorAddress::Socket(address)) => {
                let commands = Arc::clone(commands);
                self.listen(address, TOO_MANY_PEOPLE, &mut monitors, move |socket| {
                    hmp::serve_client(&*commands, socket)
                })?;
            }
            Some(MonitorAddress::Stdio) => {
                monitors._terminal = Some(hmp::TerminalSettings::keep());
                let commands = Arc::clone(commands);
                let serve = move || {
                    let _ = hmp::serve_terminal(&*commands);
                };
                // It waits for input that may never come, so that nobody waits for it.
                std::thread::Builder::new()
                    .name("hmp/terminal".to_owned())
                    .spawn(serve)
                    .map_err(|source| ConsoleError::Process {
                        what: "monitor",
                        source,
                    })?;
            }
        }
        Ok(monitors)
    }

    fn listen(
        &self,
        address: &QmpAddress,
        refusal: &'static [u8],
        monitors: &mut Monitors,
        serve: impl Fn(hotlift_qmp::Socket) -> io::Result<()> + Send + Sync + 'static,
    ) -> Result<(), CommandError> {
        let failed = |source| CommandError::Serve {
            address: address.to_string(),
            source,
        };
        let (bound, file) = self.bind(address).map_err(failed)?;
        let place = address.to_string();
        let serve = move |socket| match serve(socket) {
            // Told even if nobody reads it: a browser that comes here was sent by somebody.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let _ = writeln!(io::stderr(), "hotlift: a client of {place}: {error}");
            }
            // The client has gone, whatever the reason.
            Ok(()) | Err(_) => {}
        };
        let clients = Clients::serve(bound, refusal, Arc::new(serve)).map_err(failed)?;
        monitors._clients.push(clients);
        monitors._files.extend(file);
        Ok(())
    }

    fn bind(&self, address: &QmpAddress) -> io::Result<(BoundSocket, Option<UnixSocketFile>)> {
        match address {
            QmpAddress::Unix(path) => {
                let path: &PathBuf = path;
                let file = UnixSocketFile::bind(path, self.control_mode)?;
                let listener = file.listener().try_clone()?;
                Ok((BoundSocket::Unix(listener), Some(file)))
            }
            QmpAddress::Tcp(address) => {
                let addresses: Vec<_> = address.to_socket_addrs()?.collect();
                let reached = addresses.iter().find(|one| !one.ip().is_loopback());
                if let (Some(reached), false) = (reached, self.control_from_other_hosts) {
                    return Err(io::Error::other(format!(
                        "other hosts reach {}, and there is no authentication: give a loopback \
                         address, or --control-from-other-hosts too",
                        reached.ip()
                    )));
                }
                let listener = TcpListener::bind(&addresses[..])?;
                Ok((BoundSocket::Tcp(listener), None))
            }
        }
    }
}
