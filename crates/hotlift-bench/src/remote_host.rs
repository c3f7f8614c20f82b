//! Runs whose destination is on another host. There, `hotlift-bench --serve` starts a guest for each run.
//!
//! ```text
//! hotlift-bench --to         hotlift-bench --serve
//! settings         ---->     checks the settings, then starts 'guest run --incoming' with them
//!                  <----     the events of that process, one per line
//! ```
//!
//! Each connection is one run. When the connection closes, the destination's guest is killed. Settings from the peer
//! reach a command line only after a check: as a number in range, or as a value that the table of options accepts.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hotlift::Address;
use hotlift::conversation::callers::{Call, Callers};
use hotlift::conversation::{Conversation, ConversationError, OpeningRequest};
use hotlift::tls::Tls;
use hotlift_command::connect::connect;
use hotlift_command::error::SharedError;
use hotlift_command::events::{self, Event};
use hotlift_command::migration_args::{Given, MigrationArgs};
use hotlift_command::pair::Destination;
use hotlift_command::security::SecurityArgs;
use hotlift_mem::is_readable;
use hotlift_terminal::error::TerminalError;
use hotlift_terminal::signals::{Interrupt, end_of_thread};
use hotlift_vmm::layout::{MAX_RAM, MAX_VCPUS, MIN_RAM};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::cell::{Cell, memory};
use super::machine;
use crate::error::BenchError;

/// Maximum number of options in a request; the table of options has fewer.
const MAX_OPTIONS: usize = 256;

/// Settings of a run that the destination host receives.
#[derive(Debug, Serialize, Deserialize)]
struct Wanted {
    guest: String,
    ram: u64,
    vcpus: u8,
    options: Vec<(String, String)>,
}

impl OpeningRequest for Wanted {
    const ROLE: &'static str = "bench";
}

/// Address of a `hotlift-bench --serve` on another host.
#[derive(Debug, Clone)]
pub struct RemoteHost {
    address: Address,
    tls: Option<Arc<Tls>>,
}

impl RemoteHost {
    /// Creates the address from `tcp:HOST:PORT`. `security` has the TLS settings of the connection.
    ///
    /// # Errors
    /// If `address` is a UNIX socket.
    pub fn new(address: &Address, security: &SecurityArgs) -> Result<Self, BenchError> {
        match address {
            Address::Tcp { .. } => Ok(Self {
                address: address.clone(),
                tls: security.tls(address)?,
            }),
            Address::Unix { .. } => Err(SharedError::OnlyTcp { flag: "--to" }.into()),
        }
    }

    /// Returns the name of the host, as records contain it.
    pub fn name(&self) -> String {
        let text = self.address.to_string();
        text.strip_prefix("tcp:").unwrap_or(&text).to_owned()
    }

    /// Requests a destination for `cell` from the other host. A host that sends nothing for longer than `limit` counts
    /// as lost.
    ///
    /// # Errors
    /// If the host cannot be reached.
    pub fn destination(
        &self,
        cell: &Cell,
        limit: Duration,
        interrupt: &Interrupt,
    ) -> Result<Destination, BenchError> {
        let mut conversation = self.ask(cell, interrupt)?;
        let interrupt = interrupt.clone();
        let next = move || receive(&mut conversation, limit, &interrupt).ok().flatten();
        Ok(Destination {
            process: None,
            events: Box::new(std::iter::from_fn(next)),
        })
    }

    fn ask(&self, cell: &Cell, interrupt: &Interrupt) -> Result<Conversation, BenchError> {
        let (ended, ends) = end_of_thread()?;
        let host = self.clone();
        // A name lookup or a silent host cannot be interrupted, so a separate thread waits for the connection.
        let connection = thread::spawn(move || {
            let _ends = ends;
            connect(&host.address, "--to", host.tls.as_deref())
        });
        if interrupt.wait(&[ended.as_fd()], None) {
            return Err(TerminalError::Interrupted.into());
        }
        let mut conversation = match connection.join() {
            Ok(Err(SharedError::NoServe { source })) => {
                return Err(BenchError::NoRemoteHost(source.into()));
            }
            Ok(conversation) => conversation?,
            Err(_) => return Err(TerminalError::Interrupted.into()),
        };
        let given = cell.migration.given().iter();
        // Each host has its own TLS options.
        let given = given.filter(|given| !given.option.group.is_of_tls());
        let given = given.map(|given| (given.option.name.to_owned(), given.text.clone()));
        let wanted = Wanted {
            guest: cell.kind.name().to_owned(),
            ram: cell.guest.ram,
            vcpus: cell.guest.vcpus,
            options: given.collect(),
        };
        let sent = conversation.send_hello(&wanted);
        sent.map_err(|error| BenchError::NoRemoteHost(error.into()))?;
        Ok(conversation)
    }
}

/// Returns the next message; `None` if no message arrives within `limit`, or if a signal arrives first.
fn receive<T: DeserializeOwned>(
    conversation: &mut Conversation,
    limit: Duration,
    interrupt: &Interrupt,
) -> Result<Option<T>, ConversationError> {
    let end = Instant::now() + limit;
    loop {
        let received = conversation.receive_until(&[interrupt.wake_fd()], Some(end))?;
        if received.is_some() || interrupt.is_raised() || Instant::now() >= end {
            return Ok(received);
        }
    }
}

/// Serves runs, one at a time, until a signal arrives. Each run's guest is a process of `hotlift`.
///
/// # Errors
/// If the address cannot be listened on.
pub fn serve(
    at: &Address,
    hotlift: &Path,
    security: &SecurityArgs,
    interrupt: &Interrupt,
) -> Result<(), BenchError> {
    let failed = TerminalError::process("listener");
    let tls = security.tls(at)?;
    let listener = at
        .listen()
        .map_err(|source| SharedError::Listen { source })?;
    let Address::Tcp { port, .. } = listener.address().map_err(failed)? else {
        return Err(SharedError::OnlyTcp { flag: "--serve" }.into());
    };
    super::write_line(format!(
        "waiting for 'hotlift-bench --to tcp:HOST:{port}'; Ctrl-C ends it"
    ))?;
    let report_failure = |why: &str| super::warn(why);
    let mut callers = Callers::new(&listener, tls, &report_failure).map_err(failed)?;
    while !interrupt.is_raised() {
        let mut receive = |source: &mut Conversation| source.receive_hello(Duration::ZERO);
        let Some(call) = callers.next(None, &[interrupt.wake_fd()], &mut receive) else {
            continue;
        };
        let peer = call.conversation.stream().peer_host();
        match serve_one(call, hotlift, security, interrupt) {
            // A closed output pipe is ignored, and the next run is served.
            Ok(what) => {
                let _ = super::write_line(format!("{peer}: {what}"));
            }
            Err(error) => super::warn(format!("{peer}: {error}")),
        }
    }
    Ok(())
}

/// Serves one run, and returns a description of the run for the output.
fn serve_one(
    call: Call<Wanted>,
    hotlift: &Path,
    security: &SecurityArgs,
    interrupt: &Interrupt,
) -> Result<String, ConversationError> {
    let mut conversation = call.conversation;
    let here = conversation.stream().local_ip();
    let here = here.ok_or(ConversationError::Closed)?;
    let checked = match call.request {
        Ok(wanted) => flags(&wanted).map(|flags| (wanted, flags)),
        Err(error) => Err(error.to_string()),
    };
    let host = if here.is_ipv6() && here.to_canonical().is_ipv6() {
        format!("[{here}]")
    } else {
        here.to_canonical().to_string()
    };
    let (wanted, flags) = match checked {
        Ok(checked) => checked,
        Err(reason) => {
            let refused = Event::Failed {
                error: format!("the other host refuses: {reason}"),
            };
            // Send errors are ignored, because the client may have closed the connection.
            let _ = conversation.send(&refused);
            return Ok(format!("refused: {reason}"));
        }
    };
    let mut child = Command::new(hotlift)
        .args(["guest", "run", "--tell-events", "--quiet"])
        .arg(format!("--incoming=tcp:{host}:0"))
        .args(flags)
        .args(
            security
                .given()
                .iter()
                .map(|(name, value)| format!("--{name}={value}")),
        )
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let events = child.stdout.take().map(events::read);
    let sender = conversation.sender();
    let (done, is_done) = io::pipe()?;
    thread::scope(|scope| {
        let child = &mut child;
        // When the source closes the connection, the destination's guest must be killed. It would wait forever.
        scope.spawn(move || end_with(child, &mut conversation, done.as_fd(), interrupt));
        let _is_done = is_done;
        let mut events = events.into_iter().flatten();
        events.all(|event| sender.send(&event).is_ok());
    });
    sender.end();
    let _ = child.wait();
    Ok(format!("a run with {}", summary(&wanted)))
}

/// Kills `child` when the connection closes or a signal arrives. Returns without killing once `done` is readable.
fn end_with(
    child: &mut Child,
    conversation: &mut Conversation,
    done: BorrowedFd<'_>,
    interrupt: &Interrupt,
) {
    let wakes = [done, interrupt.wake_fd()];
    while !is_readable(done) {
        let gone = conversation.receive_until::<Value>(&wakes, None).is_err();
        if gone || interrupt.is_raised() {
            let _ = child.kill();
            return;
        }
    }
}

/// Converts the settings to flags of `guest run`, and checks each setting first.
fn flags(wanted: &Wanted) -> Result<Vec<String>, String> {
    let kind = wanted
        .guest
        .parse::<hotlift_vmm::GuestKind>()
        .map_err(|error| error.to_string())?;
    if !(MIN_RAM..=MAX_RAM).contains(&wanted.ram) || !(1..=MAX_VCPUS).contains(&wanted.vcpus) {
        return Err("RAM or vCPUs are out of range".to_owned());
    }
    if memory(wanted.ram, 1) > machine::available() {
        return Err("there is not enough free memory for the guest".to_owned());
    }
    if wanted.options.len() > MAX_OPTIONS {
        return Err("too many options".to_owned());
    }
    let mut options = MigrationArgs::default();
    let mut flags = vec![
        format!("--guest={kind}"),
        format!("--ram={}", wanted.ram),
        format!("--vcpus={}", wanted.vcpus),
    ];
    for (name, value) in &wanted.options {
        let given = Given::parse(name, value).map_err(|error| error.to_string())?;
        if given.option.group.is_of_tls() {
            return Err(format!("{name} is each host's own"));
        }
        options.set(given);
    }
    options.options().map_err(|error| error.to_string())?;
    flags.extend(options.to_flags());
    Ok(flags)
}

fn summary(wanted: &Wanted) -> String {
    let ram = hotlift_terminal::progress::bytes(wanted.ram);
    let options: Vec<_> = wanted
        .options
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    format!("{ram}, {}", options.join(" "))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn wanted(options: &[(&str, &str)]) -> Wanted {
        Wanted {
            guest: "threads".to_owned(),
            ram: 16 << 20,
            vcpus: 1,
            options: options
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
        }
    }

    #[test]
    fn a_signal_ends_the_wait_for_a_silent_host_and_an_endless_line_is_cut_off() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut ours = Conversation::new(listener.accept().unwrap().0.into());
        let interrupt = Interrupt::catch().unwrap();
        interrupt.raise();
        let day = Duration::from_secs(86_400);
        assert!(
            receive::<Event>(&mut ours, day, &interrupt)
                .unwrap()
                .is_none()
        );
        let writer = std::thread::spawn(move || {
            // Ends when the reader closes the connection at the size limit.
            while theirs.write_all(&[b'x'; 4096]).is_ok() {}
        });
        let interrupt = Interrupt::catch().unwrap();
        let received = receive::<Event>(&mut ours, day, &interrupt);
        assert!(
            matches!(received, Err(ConversationError::TooLong)),
            "{received:?}"
        );
        drop(ours);
        writer.join().unwrap();
    }

    #[test]
    fn requests_of_another_host_are_checked_before_they_become_flags() {
        let good = flags(&wanted(&[("multifd-compression", "zstd")])).unwrap();
        assert!(good.contains(&"--multifd-compression=zstd".to_owned()));
        for options in [
            &[("json", "/etc/passwd")][..],
            &[("multifd-channels", "0")],
            &[("multifd-channels", "2 --json=x")],
            &[("compress", "on"), ("multifd", "on")],
        ] {
            assert!(flags(&wanted(options)).is_err(), "{options:?}");
        }
        for change in [
            |wanted: &mut Wanted| wanted.ram = u64::MAX,
            |wanted: &mut Wanted| wanted.ram = 0,
            |wanted: &mut Wanted| wanted.vcpus = 0,
            |wanted: &mut Wanted| wanted.guest = "kvm --json=x".to_owned(),
        ] {
            let mut bad = wanted(&[]);
            change(&mut bad);
            assert!(flags(&bad).is_err(), "{bad:?}");
        }
    }
}
