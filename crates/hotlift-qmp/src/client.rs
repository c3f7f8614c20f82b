//! The client's side of QMP: greeting, commands with ids, events.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::wait_readable;
use rustix::net::sockopt::socket_peercred;
use serde_json::{Map, Value, json};

use crate::address::QmpAddress;
use crate::error::{QmpError, one_line};
use crate::guest_events::GuestEvents;
use crate::lines::{Line, Lines, Socket};

/// Maximum length of a line from QEMU, in bytes. The longest known line is the answer to `query-qmp-schema`, about 300 KiB.
/// QEMU's own input limit (`MAX_TOKEN_SIZE` of its JSON parser) is 64 MiB.
pub const MAX_LINE: usize = 4 << 20;

/// Maximum number of queued events; above it, the oldest event is dropped. Queued events only trigger queries (`query-status`,
/// `query-migrate`), so a dropped event loses no information.
pub const MAX_QUEUED_EVENTS: usize = 1024;

/// Number of commands sent before the first answer is read. QEMU queues 8 commands (`QMP_REQ_QUEUE_LEN_MAX`). The others wait
/// in the socket, whose buffers have space for these commands and their answers.
const AT_ONCE: usize = 64;

/// Interval between connection attempts.
const RETRY: Duration = Duration::from_millis(20);

/// Default timeout of an answer, see [`Client::set_timeout`]. A QEMU that loads an incoming guest does not answer while its
/// main loop waits for pages.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// An event that QEMU sent.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Name, such as `MIGRATION`.
    pub name: String,
    /// Data; an empty object if there is none.
    pub data: Value,
    /// Time since 1970 by the clock of QEMU's host; `None` if QEMU could not read that clock.
    pub at: Option<Duration>,
}

/// A connection to one QEMU.
#[derive(Debug)]
pub struct Client {
    lines: Lines,
    address: QmpAddress,
    greeting: Value,
    events: VecDeque<Event>,
    guest: GuestEvents,
    is_closed: bool,
    last_id: u64,
    timeout: Duration,
}

/// A parsed line from QEMU.
enum Message {
    Event(Event),
    /// The answer (`return`) to the command with this id.
    Return(Option<u64>, Value),
    /// Error of the command with this id: class and description.
    Error(Option<u64>, String, String),
    /// The greeting: the first message on a connection.
    Greeting(Value),
}

impl Client {
    /// Connects and reads the greeting. If the socket does not exist or refuses connections, retries until `timeout`: QEMU may
    /// be starting. Other errors are returned at once.
    ///
    /// # Errors
    /// [`QmpError::Connect`]; [`QmpError::Timeout`] if no greeting arrives, because another client is connected or QEMU hangs.
    pub fn connect(address: &QmpAddress, timeout: Duration) -> Result<Self, QmpError> {
        Self::connect_with_notice(address, timeout, |_| ())
    }

    /// Connects as [`Client::connect`] does. Calls `waits` once before the first retry, with the error of the first attempt.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect_with_notice(
        address: &QmpAddress,
        timeout: Duration,
        waits: impl FnOnce(&io::Error),
    ) -> Result<Self, QmpError> {
        let deadline = Instant::now() + timeout;
        let mut waits = Some(waits);
        let socket = loop {
            match open(address, deadline) {
                Ok(socket) => break socket,
                Err(error) if is_worth_a_retry(&error) && Instant::now() + RETRY < deadline => {
                    if let Some(waits) = waits.take() {
                        waits(&error);
                    }
                    thread::sleep(RETRY);
                }
                Err(source) => {
                    return Err(QmpError::Connect {
                        address: address.to_string(),
                        waited: timeout,
                        source,
                    });
                }
            }
        };
        let mut client = Self {
            lines: Lines::new(socket, MAX_LINE),
            address: address.clone(),
            greeting: Value::Null,
            events: VecDeque::new(),
            guest: GuestEvents::default(),
            is_closed: false,
            last_id: 0,
            timeout: ANSWER_TIMEOUT,
        };
        loop {
            match client.message("greeting", deadline, timeout)? {
                Message::Greeting(greeting) => {
                    client.greeting = greeting;
                    break;
                }
                // QEMU 10.0 may send an event before the greeting while it starts.
                Message::Event(event) => client.queue(event),
                Message::Return(..) | Message::Error(..) => {
                    return Err(protocol("greeting", "an answer without a request"));
                }
            }
        }
        client.execute("qmp_capabilities", &Value::Null)?;
        Ok(client)
    }

    /// Returns the address of this QEMU.
    #[must_use]
    pub fn address(&self) -> &QmpAddress {
        &self.address
    }

    /// Returns the `QMP` member of the greeting, with version and features.
    #[must_use]
    pub fn greeting(&self) -> &Value {
        &self.greeting
    }

    /// Sets the timeout of answers to commands.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Executes a command and returns its answer. `arguments` are an object, or null for none.
    ///
    /// # Errors
    /// [`QmpError::Command`] if QEMU refuses; any other [`QmpError`] if the connection fails.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, QmpError> {
        let deadline = Instant::now() + self.timeout;
        let id = self.send(command, std::slice::from_ref(arguments), deadline)?;
        self.answer(command, id, deadline)
    }

    /// Executes a command once for each element of `arguments`. Sends several commands before their answers are read. Returns
    /// the answers in order; `None` for a command that QEMU refused.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn execute_each(
        &mut self,
        command: &str,
        arguments: &[Value],
    ) -> Result<Vec<Option<Value>>, QmpError> {
        let mut answers = Vec::with_capacity(arguments.len());
        for arguments in arguments.chunks(AT_ONCE) {
            let deadline = Instant::now() + self.timeout;
            let first = self.send(command, arguments, deadline)?;
            for id in (first..).take(arguments.len()) {
                answers.push(match self.answer(command, id, deadline) {
                    Ok(answer) => Some(answer),
                    Err(QmpError::Command { .. }) => None,
                    Err(error) => return Err(error),
                });
            }
        }
        Ok(answers)
    }

    /// Sends a command once for each element of `arguments`. Returns the id of the first command; the ids of the others follow
    /// in order.
    fn send(
        &mut self,
        command: &str,
        arguments: &[Value],
        deadline: Instant,
    ) -> Result<u64, QmpError> {
        let first = self.last_id + 1;
        let mut lines = String::new();
        for arguments in arguments {
            self.last_id += 1;
            let mut request = json!({ "execute": command, "id": self.last_id });
            if !arguments.is_null() {
                request["arguments"] = arguments.clone();
            }
            lines.push_str(&request.to_string());
            lines.push('\n');
        }
        let written = self.lines.write(lines.as_bytes(), deadline);
        if !written.map_err(|source| io_error(command, source))? {
            return Err(self.timed_out(command));
        }
        Ok(first)
    }

    /// Waits for the answer to the command with this id.
    fn answer(&mut self, command: &str, id: u64, deadline: Instant) -> Result<Value, QmpError> {
        loop {
            let (answered, outcome) = match self.message(command, deadline, self.timeout)? {
                Message::Event(event) => {
                    self.queue(event);
                    continue;
                }
                Message::Greeting(_) => return Err(protocol(command, "a second greeting")),
                Message::Return(id, value) => (id, Ok(value)),
                Message::Error(id, class, desc) => (
                    id,
                    Err(QmpError::Command {
                        command: command.to_owned(),
                        class,
                        desc,
                    }),
                ),
            };
            match answered {
                Some(answered) if answered == id => return outcome,
                // This is a late answer to a command that has timed out.
                Some(answered) if answered < id => {}
                _ => {
                    return Err(protocol(
                        command,
                        match &outcome {
                            Err(QmpError::Command { desc, .. }) => desc,
                            _ => "an answer to another command",
                        },
                    ));
                }
            }
        }
    }

    /// Returns the next event without waiting; `None` if none has arrived.
    ///
    /// # Errors
    /// If the connection has ended or QEMU sends invalid data.
    pub fn poll_event(&mut self) -> Result<Option<Event>, QmpError> {
        self.wait_event(Duration::ZERO)
    }

    /// Returns the next event, or `None` if none arrives within `timeout`.
    ///
    /// # Errors
    /// If the connection has ended or QEMU sends invalid data.
    pub fn wait_event(&mut self, timeout: Duration) -> Result<Option<Event>, QmpError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            match self.message("events", deadline, timeout) {
                Ok(Message::Event(event)) => self.queue(event),
                Ok(Message::Return(Some(id), _) | Message::Error(Some(id), ..))
                    if id <= self.last_id => {}
                Ok(_) => return Err(protocol("events", "an answer without a request")),
                Err(QmpError::Timeout { .. }) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until QEMU sends something, one of `others` is readable, or `deadline` has passed. Events stay in the queue. A
    /// closed QMP connection does not end the wait.
    pub fn wait_for_event(&mut self, others: &[BorrowedFd<'_>], deadline: Instant) {
        let own = (!self.is_closed).then(|| self.lines.connection().as_fd());
        let fds: Vec<_> = own.into_iter().chain(others.iter().copied()).collect();
        let has_line = self.lines.buffered().contains(&b'\n');
        if has_line || wait_readable(&fds, Some(deadline)) {
            // An error is reported by the next command.
            let _ = self.take_events();
        }
    }

    /// Returns the summary of all guest events that have arrived.
    pub fn guest_events(&mut self) -> &GuestEvents {
        // Events that arrived before an error are still valid.
        let _ = self.take_events();
        &self.guest
    }

    /// Returns true if an event since the start of the connection reported that the guest runs or has run.
    ///
    /// # Errors
    /// If an event may be lost: QEMU sent an invalid message, or the connection broke. A connection that QEMU closed is not an
    /// error.
    pub fn has_run(&mut self) -> Result<bool, QmpError> {
        self.take_events()?;
        Ok(self.guest.has_run)
    }

    /// Processes all events that have arrived. The end of the connection is not an error; [`MAX_QUEUED_EVENTS`] messages at
    /// once are an error.
    fn take_events(&mut self) -> Result<(), QmpError> {
        for _ in 0..MAX_QUEUED_EVENTS {
            match self.message("events", Instant::now(), Duration::ZERO) {
                Ok(Message::Event(event)) => self.queue(event),
                Ok(Message::Return(..) | Message::Error(..)) => {}
                Ok(Message::Greeting(_))
                | Err(QmpError::Timeout { .. } | QmpError::Closed { .. }) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Err(self.timed_out("events"))
    }

    /// Duplicates the socket's descriptor, which becomes readable when QEMU sends something.
    ///
    /// # Errors
    /// The system's reason.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.lines.connection().as_fd().try_clone_to_owned()
    }

    /// Returns true if QEMU has closed the connection, and everything sent before the close was read.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Returns the id of the process that listens on a UNIX socket; `None` over TCP, or if the kernel does not report it.
    #[must_use]
    pub fn peer(&self) -> Option<u32> {
        let Socket::Unix(stream) = self.lines.connection() else {
            return None;
        };
        let peer = socket_peercred(stream).ok()?;
        u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
    }

    fn queue(&mut self, event: Event) {
        self.guest.take(&event.name, &event.data);
        if self.events.len() == MAX_QUEUED_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn timed_out(&self, command: &str) -> QmpError {
        QmpError::Timeout {
            command: command.to_owned(),
            waited: self.timeout,
        }
    }

    /// Returns the next message of any kind.
    fn message(
        &mut self,
        command: &str,
        deadline: Instant,
        waited: Duration,
    ) -> Result<Message, QmpError> {
        let line = self
            .lines
            .read(deadline)
            .map_err(|source| io_error(command, source))?;
        match line {
            Line::Whole(line) => parse(&line).map_err(|problem| protocol(command, &problem)),
            Line::TooLong => Err(protocol(
                command,
                &format!("a line of more than {MAX_LINE} bytes"),
            )),
            Line::Closed => {
                self.is_closed = true;
                Err(QmpError::Closed {
                    command: command.to_owned(),
                })
            }
            Line::Late => Err(QmpError::Timeout {
                command: command.to_owned(),
                waited,
            }),
        }
    }
}

fn open(address: &QmpAddress, deadline: Instant) -> io::Result<Socket> {
    match address {
        QmpAddress::Unix(path) => Ok(Socket::Unix(UnixStream::connect(path)?)),
        QmpAddress::Tcp(host_and_port) => {
            let mut failed = io::ErrorKind::AddrNotAvailable.into();
            for address in host_and_port.to_socket_addrs()? {
                let left = deadline.saturating_duration_since(Instant::now());
                match TcpStream::connect_timeout(&address, left.max(RETRY)) {
                    Ok(stream) => {
                        stream.set_nodelay(true)?;
                        return Ok(Socket::Tcp(stream));
                    }
                    // The caller adds the address to the error. Only an address that was resolved from a host name is added
                    // here.
                    Err(error) if host_and_port.parse::<SocketAddr>().is_ok() => failed = error,
                    Err(error) => {
                        failed = io::Error::new(error.kind(), format!("{address}: {error}"))
                    }
                }
            }
            Err(failed)
        }
    }
}

/// Returns true if a retry makes sense: while QEMU starts, its socket file does not exist, or refuses connections.
fn is_worth_a_retry(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::TimedOut
            | io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted
    )
}

fn io_error(command: &str, source: io::Error) -> QmpError {
    match source.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => QmpError::Closed {
            command: command.to_owned(),
        },
        _ => QmpError::Io {
            command: command.to_owned(),
            source,
        },
    }
}

fn protocol(command: &str, problem: &str) -> QmpError {
    QmpError::Protocol {
        command: command.to_owned(),
        problem: one_line(problem),
    }
}

fn parse(line: &[u8]) -> Result<Message, String> {
    let value: Value = serde_json::from_slice(line)
        .map_err(|error| format!("a line that is not JSON ({error})"))?;
    let Value::Object(mut members) = value else {
        return Err("a line that is not an object".to_owned());
    };
    let id = members.get("id").and_then(Value::as_u64);
    if let Some(name) = members.get("event") {
        let name = name.as_str().ok_or("an event without a name")?;
        return Ok(Message::Event(Event {
            name: one_line(name),
            at: members.get("timestamp").and_then(timestamp),
            data: members
                .remove("data")
                .unwrap_or_else(|| Value::Object(Map::new())),
        }));
    }
    if let Some(error) = members.get("error") {
        let text = |name: &str| error.get(name).and_then(Value::as_str).map(one_line);
        let class = text("class").ok_or("an error without a class")?;
        let desc = text("desc").ok_or("an error without a description")?;
        return Ok(Message::Error(id, class, desc));
    }
    if let Some(value) = members.remove("return") {
        return Ok(Message::Return(id, value));
    }
    members
        .remove("QMP")
        .map(Message::Greeting)
        .ok_or_else(|| "a line that is neither an answer nor an event".to_owned())
}

/// Parses a timestamp; `None` if QEMU could not read its clock: it then sends -1 for both members.
fn timestamp(value: &Value) -> Option<Duration> {
    let seconds = value.get("seconds")?.as_u64()?;
    let microseconds = value.get("microseconds")?.as_u64()?;
    Duration::from_secs(seconds).checked_add(Duration::from_micros(microseconds))
}
