//! Serves the save files of a folder to other hosts: ranges of their bytes, to all admitted clients.
//!
//! Nothing is decoded here: the host that restores the file verifies its checksums. Each connection with an open file has a
//! thread. Connections are few, and nearly always idle.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::sock::IoScratch;
use hotlift_net::admission::limits::{READER_IDLE, READERS, READERS_OF_ONE, VISITORS};
use hotlift_net::admission::{Admission, Admitted, Listener, Rejected};
use hotlift_net::transport::Stream;
use hotlift_wire::WireError;
use hotlift_wire::file_ranges::{Answer, Open, READ_LEN, Read, Refusal, Reply, VERSION};
use hotlift_wire::limits;
use hotlift_wire::main_channel::FILE_HEADER;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

use super::block_file::read_ends;
use super::open_file::OpenFile;
use crate::control::Control;
use crate::error::file::{FileError, ServerError};
use crate::error::{MigrationError, error_line};
use crate::life::LONG;
use crate::life::threads::spawn;
use crate::life::wake_fd::WakeFd;
use crate::lock::lock;
use crate::tls::Tls;

/// Maximum length of a client's first message: its head, and the name.
const OPENING_LEN: usize = 32 + limits::FILE_NAME;

/// Time limit for a client to read an answer. Between two reads there is no limit; the kernel detects a client that is gone
/// (keepalive).
const UNREAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Pause of the accept loop after an error, e.g. if no file descriptor is free.
const RETRY: Duration = Duration::from_millis(50);

/// A client's use of a file, over all of its concurrent connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visit {
    /// Address of the client, without its port.
    pub host: String,
    /// Name of the file.
    pub name: String,
    /// Bytes read.
    pub bytes: u64,
    /// Time since the first connection.
    pub time: Duration,
}

/// Report of a server: a change of a client, or a failure to accept.
#[derive(Debug)]
#[non_exhaustive]
pub enum ServerEvent {
    /// A client begins to read.
    Begun(Visit),
    /// The client has closed all of its connections.
    Ended(Visit),
    /// A client was rejected, or does not get the requested file.
    Refused {
        /// Address of the client, without its port.
        host: String,
        /// Reason of the rejection.
        reason: String,
    },
    /// The server cannot accept connections at the moment.
    AcceptFailed(io::Error),
}

/// Serves the save files in `folder` to the clients of `listener`, until `control` is cancelled.
///
/// Serves only complete files directly in the folder. Follows no links, and serves no file whose name begins with a dot.
///
/// # Errors
/// [`MigrationError::File`] for a folder that cannot be read; [`MigrationError::Connection`] if there are no file descriptors.
pub fn serve(
    listener: &Listener,
    tls: Option<Arc<Tls>>,
    folder: &Path,
    control: &Control,
    on_event: &(dyn Fn(ServerEvent) + Sync),
) -> Result<(), MigrationError> {
    let quota = ConnectionQuota {
        max_total: READERS,
        max_per_visitor: READERS_OF_ONE,
        idle: READER_IDLE,
    };
    serve_some(listener, tls, folder, control, (on_event, quota))
}

/// Limits for concurrent readers.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionQuota {
    /// Maximum number of connections.
    pub max_total: usize,
    /// Maximum number of connections of one visitor.
    pub max_per_visitor: usize,
    /// See [`READER_IDLE`].
    pub idle: Duration,
}

/// Serves as [`serve`], with the limits `quota`.
pub(super) fn serve_some(
    listener: &Listener,
    tls: Option<Arc<Tls>>,
    folder: &Path,
    control: &Control,
    (on_event, quota): (&(dyn Fn(ServerEvent) + Sync), ConnectionQuota),
) -> Result<(), MigrationError> {
    // Before the folder is opened, because its descriptor must be the last that a server without connections opens.
    let admission = Admission::new(listener, tls, VISITORS);
    let mut admission = admission.map_err(MigrationError::opening)?;
    let wake_fd = WakeFd::new(control.life()).map_err(MigrationError::opening)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(folder, flags, Mode::empty());
    let server = Server {
        folder: opened.map_err(|errno| FileError::read(folder, errno.into()))?,
        path: folder.to_owned(),
        control,
        quota,
        on_event,
        guests: Mutex::default(),
    };
    thread::scope(|scope| {
        while !control.is_cancelled() {
            if let Err(error) = server.step(scope, &mut admission, &wake_fd) {
                on_event(ServerEvent::AcceptFailed(error));
                let until = control.life().now() + RETRY;
                control.life().sleep_while(until, || true);
            }
        }
        server.end();
    });
    Ok(())
}

struct Server<'a> {
    folder: OwnedFd,
    path: PathBuf,
    control: &'a Control,
    quota: ConnectionQuota,
    on_event: &'a (dyn Fn(ServerEvent) + Sync),
    guests: Mutex<CurrentReaders>,
}

/// Open connections of a server, and their visits: the use of one file by one client.
#[derive(Default)]
struct CurrentReaders {
    /// Connections by number.
    connections: HashMap<u64, Arc<Connection>>,
    next: u64,
    visits: HashMap<(String, String, u64), VisitState>,
}

struct Connection {
    stream: Stream,
    /// Identity of the client: all names in its certificate, or its address.
    visitor: String,
    /// Time since which no request is pending; `None` while one is answered.
    idle: Mutex<Option<Instant>>,
}

impl CurrentReaders {
    /// Returns true if `visitor` may have another connection. If a limit is reached, first closes an idle connection: one of
    /// `visitor` at the limit for each visitor, any at the limit for all.
    fn make_room(&mut self, visitor: &str, quota: ConnectionQuota, now: Instant) -> bool {
        let own = self
            .connections
            .values()
            .filter(|one| one.visitor == visitor);
        let own = own.count();
        if own < quota.max_per_visitor && self.connections.len() < quota.max_total {
            return true;
        }
        let is_own = own >= quota.max_per_visitor;
        let idle = self.connections.iter().filter_map(|(number, one)| {
            let may_go = !is_own || one.visitor == visitor;
            let is_idle = |since: &Instant| now.saturating_duration_since(*since) >= quota.idle;
            let since = (*lock(&one.idle)).filter(is_idle);
            since.filter(|_| may_go).map(|since| (since, *number))
        });
        let Some((_, number)) = idle.min() else {
            return false;
        };
        if let Some(gone) = self.connections.remove(&number) {
            gone.stream.shutdown(Shutdown::Both);
        }
        true
    }
}

struct VisitState {
    connections: usize,
    bytes: u64,
    since: Instant,
}

/// Quota of one connection, released on drop.
struct QuotaGuard<'a> {
    guests: &'a Mutex<CurrentReaders>,
    number: u64,
}

impl Drop for QuotaGuard<'_> {
    fn drop(&mut self) {
        lock(self.guests).connections.remove(&self.number);
    }
}

/// A served file.
struct ServedFile {
    file: OpenFile,
    id: u64,
}

/// First message of a client: version, visitor, name of the file.
type Opening = (u32, u64, String);

/// Reads a client's first message without waiting. Returns `None` if the message is incomplete, and `Ok(None)` if the client
/// closed the stream.
fn opening(stream: &Stream) -> Option<Result<Option<Opening>, ServerError>> {
    let mut bytes = [0; OPENING_LEN];
    let seen = match stream.peek(&mut bytes) {
        Ok(None) => return None,
        Ok(Some(0)) => return Some(Ok(None)),
        Ok(Some(seen)) => seen,
        Err(error) => return Some(Err(ServerError::Connection(error))),
    };
    let (opening, length) = match Open::decode(&bytes[..seen]) {
        Ok((open, length)) => ((open.version, open.visitor, open.name.to_owned()), length),
        Err(WireError::Truncated { .. }) if !stream.is_hung_up() => return None,
        Err(WireError::Truncated { .. }) => return Some(Err(ServerError::Closed)),
        Err(error) => return Some(Err(ServerError::Protocol(error))),
    };
    let mut from = stream;
    let taken = from.read_exact(&mut bytes[..length]);
    Some(
        taken
            .map(|()| Some(opening))
            .map_err(ServerError::Connection),
    )
}

impl Server<'_> {
    /// Waits for an event of the accept loop, and handles it.
    fn step<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        admission: &mut Admission<'_, Admitted>,
        wake_fd: &WakeFd,
    ) -> io::Result<()> {
        let now = self.control.life().now();
        let polled = admission.polled(now);
        let polled = polled.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        wake_fd.poll(&mut polled.collect(), admission.shortened(LONG, now))?;
        while let Some(number) = admission.pending.next_ready() {
            let one = admission.pending.get(number);
            let Some(opening) = one.and_then(|one| opening(&one.stream)) else {
                continue;
            };
            let Some((Admitted { stream, .. }, _)) = admission.pending.remove(number) else {
                continue;
            };
            match opening {
                Ok(Some(opening)) => self.begin(scope, stream, opening),
                // The client has closed the connection without a request.
                Ok(None) => {}
                Err(ServerError::Protocol(_)) => {
                    let reason =
                        "it requests no file, and this 'hotlift serve --files' accepts no guest";
                    self.refused(&stream, reason.to_owned());
                }
                Err(error) => self.refused(&stream, error_line(&error)),
            }
        }
        let now = self.control.life().now();
        while let Some(late) = admission.pending.take_late(now) {
            let error = ServerError::Connection(io::ErrorKind::TimedOut.into());
            self.refused(&late.stream, error_line(&error));
        }
        for entered in admission.accept(now, |one| one)? {
            match entered {
                Rejected::Refused(refused) => (self.on_event)(ServerEvent::Refused {
                    reason: error_line(&refused.source),
                    host: refused.from,
                }),
                // Closed in favour of a newer connection, because it was silent for the longest time: not reported.
                Rejected::Replaced(_) => {}
            }
        }
        Ok(())
    }

    fn refused(&self, stream: &Stream, reason: String) {
        let host = stream.peer_host();
        (self.on_event)(ServerEvent::Refused { host, reason });
    }

    /// Serves a connection in its own thread.
    fn begin<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        stream: Stream,
        opening: Opening,
    ) {
        let (version, _, name) = &opening;
        if *version != VERSION {
            let text = format!("it supports version {VERSION} of this protocol, not {version}");
            return self.refuse(&stream, name, Refusal::Version, &text);
        }
        let visitor = visitor_of(&stream);
        let mut guests = lock(&self.guests);
        if !guests.make_room(&visitor, self.quota, self.control.life().now()) {
            drop(guests);
            return self.refuse(&stream, name, Refusal::NotNow, "too many clients");
        }
        let connection = Arc::new(Connection {
            stream,
            visitor,
            idle: Mutex::default(),
        });
        let number = guests.next;
        guests.next += 1;
        guests.connections.insert(number, Arc::clone(&connection));
        drop(guests);
        let guests = &self.guests;
        let place = QuotaGuard { guests, number };
        let serving = spawn(scope, "files/serve".to_owned(), move || {
            let _place = place;
            self.serve(&connection, opening);
            connection.stream.shutdown(Shutdown::Both);
        });
        if let Err(MigrationError::Thread { source, .. }) = serving {
            (self.on_event)(ServerEvent::AcceptFailed(source));
        }
    }

    /// Closes all connections.
    fn end(&self) {
        for connection in lock(&self.guests).connections.values() {
            connection.stream.shutdown(Shutdown::Both);
        }
    }

    /// Sends the client the reason why it does not get file `name`, and reports the rejection.
    fn refuse(&self, mut stream: &Stream, name: &str, why: Refusal, text: &str) {
        let mut reply = Vec::new();
        Reply::Refused { why, text }.encode(&mut reply);
        // The first bytes on a connection always fit the send buffer. An error means that the client is gone.
        let _ = stream.write_all(&reply);
        self.refused(stream, format!("{}: {text}", name.escape_debug()));
    }

    fn serve(&self, connection: &Connection, (_, visitor, name): Opening) {
        let stream = &connection.stream;
        let file = match self.open(&name) {
            Ok(file) => file,
            Err((why, reason)) => return self.refuse(stream, &name, why, &reason),
        };
        let mut reply = Vec::new();
        let _ = stream.set_write_timeout(UNREAD_TIMEOUT);
        let opened = Reply::Opened {
            length: file.file.length(),
            id: file.id,
        };
        opened.encode(&mut reply);
        if { stream }.write_all(&reply).is_ok() {
            let key = (stream.peer_host(), name, visitor);
            self.arrives(&key);
            let _leaves = VisitGuard {
                server: self,
                key: &key,
            };
            let count = |bytes| self.count(&key, bytes);
            // Errors are ignored: the client sees them in its reads.
            let _ = hand_out(connection, &file.file, count);
        }
    }

    /// Opens the save file with that name, or returns the reason to reject it.
    fn open(&self, name: &str) -> Result<ServedFile, (Refusal, String)> {
        let missing = || {
            let reason = "no save file has that name";
            (Refusal::NotThere, reason.to_owned())
        };
        let failed = |what: &str, error: &io::Error| {
            let why = match is_passing(error) {
                true => Refusal::NotNow,
                false => Refusal::NotThere,
            };
            (why, format!("{what}: {error}"))
        };
        if name.starts_with('.') || name.contains(['/', '\0']) {
            return Err(missing());
        }
        // NONBLOCK, because the open of a pipe would block.
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match openat(&self.folder, name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Err(missing()),
            Err(errno) => return Err(failed("it cannot be opened", &errno.into())),
        };
        match file.metadata() {
            Ok(about) if about.is_file() => {}
            Ok(_) => return Err(missing()),
            Err(error) => return Err(failed("it cannot be read", &error)),
        }
        let mut is_of_qemu = false;
        let read = OpenFile::of(file, &self.path.join(name)).and_then(|file| {
            let (info, ..) = read_ends(&file).inspect_err(|_| {
                let mut magic = [0; FILE_HEADER.len()];
                is_of_qemu = file.read_exact(&mut magic, 0).is_ok() && magic == FILE_HEADER;
            })?;
            Ok(ServedFile { file, id: info.id })
        });
        read.map_err(|error| match error {
            FileError::Read { source, .. } => failed("it cannot be read", &source),
            FileError::NotASave if is_of_qemu => {
                let reason = "it is a file of QEMU (mapped-ram or a plain stream), but only files of 'hotlift save' are \
                              served: copy it to the other host and restore it there";
                (Refusal::NotThere, reason.to_owned())
            }
            error => (Refusal::NotThere, error_line(&error)),
        })
    }

    fn arrives(&self, key: &(String, String, u64)) {
        let mut guests = lock(&self.guests);
        let visiting = guests.visits.entry(key.clone()).or_insert(VisitState {
            connections: 0,
            bytes: 0,
            since: Instant::now(),
        });
        visiting.connections += 1;
        if visiting.connections == 1 {
            let visit = visiting.visit(key);
            drop(guests);
            (self.on_event)(ServerEvent::Begun(visit));
        }
    }

    fn count(&self, key: &(String, String, u64), bytes: usize) {
        if let Some(visiting) = lock(&self.guests).visits.get_mut(key) {
            visiting.bytes += bytes as u64;
        }
    }

    fn leaves(&self, key: &(String, String, u64)) {
        let mut guests = lock(&self.guests);
        let Some(visiting) = guests.visits.get_mut(key) else {
            return;
        };
        visiting.connections -= 1;
        if visiting.connections == 0 {
            let visit = visiting.visit(key);
            guests.visits.remove(key);
            drop(guests);
            (self.on_event)(ServerEvent::Ended(visit));
        }
    }
}

/// Returns the identity for the limit of connections per client: the names in its certificate, or its address without TLS.
fn visitor_of(stream: &Stream) -> String {
    match stream.peer() {
        Some(peer) => format!("{} {:?} {:?}", peer.subject, peer.dns, peer.uri),
        None => stream.peer_host(),
    }
}

impl VisitState {
    fn visit(&self, (host, name, _): &(String, String, u64)) -> Visit {
        Visit {
            host: host.clone(),
            name: name.clone(),
            bytes: self.bytes,
            time: self.since.elapsed(),
        }
    }
}

/// Returns true if a retry may succeed: a resource is short, or a disk or a network file system has a failure.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(
            Errno::MFILE
                | Errno::NFILE
                | Errno::NOMEM
                | Errno::INTR
                | Errno::AGAIN
                | Errno::IO
                | Errno::STALE
                | Errno::TIMEDOUT
        )
    )
}

/// Guard that records the end of a visit's connection on drop.
struct VisitGuard<'a> {
    server: &'a Server<'a>,
    key: &'a (String, String, u64),
}

impl Drop for VisitGuard<'_> {
    fn drop(&mut self) {
        self.server.leaves(self.key);
    }
}

/// Answers reads, one after the other, until the client closes the connection.
fn hand_out(
    connection: &Connection,
    file: &OpenFile,
    mut count: impl FnMut(usize),
) -> Result<(), ServerError> {
    let stream = &connection.stream;
    let mut from = stream;
    let mut scratch = IoScratch::new();
    let (mut head, mut bytes) = (Vec::new(), Vec::new());
    loop {
        let mut request = [0; READ_LEN];
        *lock(&connection.idle) = Some(Instant::now());
        from.read_exact(&mut request)
            .map_err(ServerError::Connection)?;
        *lock(&connection.idle) = None;
        let read = Read::decode(&request).map_err(ServerError::Protocol)?;
        if bytes.len() < read.length {
            bytes.resize(read.length, 0);
        }
        head.clear();
        let mut content: &[u8] = &[];
        let answer = match file.read_some(&mut bytes[..read.length], read.position) {
            Ok(length) => {
                content = &bytes[..length];
                Answer::Bytes(length).encode(&mut head)
            }
            Err(FileError::Read { source, .. }) => {
                Answer::Failed(&source.to_string()).encode(&mut head)
            }
            Err(_) => Answer::Failed("it cannot be read").encode(&mut head),
        };
        answer.map_err(ServerError::Protocol)?;
        stream
            .send_parts(&[&head, content], &mut scratch)
            .map_err(ServerError::Connection)?;
        count(content.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONNECTION_QUOTA: ConnectionQuota = ConnectionQuota {
        max_total: 4,
        max_per_visitor: 2,
        idle: Duration::ZERO,
    };

    /// Returns the other end of a new connection that is being answered, if there is a place.
    fn come(guests: &mut CurrentReaders, visitor: &str) -> Option<Stream> {
        let (stream, client) = Stream::pair().unwrap();
        if !guests.make_room(visitor, CONNECTION_QUOTA, Instant::now()) {
            return None;
        }
        let number = guests.next;
        guests.next += 1;
        let connection = Connection {
            stream,
            visitor: visitor.to_owned(),
            idle: Mutex::default(),
        };
        guests.connections.insert(number, Arc::new(connection));
        Some(client)
    }

    #[test]
    fn one_client_cannot_hold_all_slots_and_yields_unused_ones() {
        let mut guests = CurrentReaders::default();
        let first = come(&mut guests, "a").unwrap();
        let second = come(&mut guests, "a").unwrap();
        assert!(come(&mut guests, "a").is_none(), "a third of his");
        let _others = [(); 2].map(|()| come(&mut guests, "b").expect("the others have theirs"));
        assert!(come(&mut guests, "c").is_none(), "all read");
        let rests = |guests: &CurrentReaders, number| {
            *lock(&guests.connections[&number].idle) = Some(Instant::now());
        };
        rests(&guests, 1);
        assert!(come(&mut guests, "c").is_some());
        assert!(second.is_hung_up() && !first.is_hung_up());
        rests(&guests, 3);
        assert!(come(&mut guests, "a").is_some(), "that of another");
        assert!(come(&mut guests, "a").is_none());
        rests(&guests, 0);
        assert!(come(&mut guests, "a").is_some());
        assert!(first.is_hung_up());
    }
}
