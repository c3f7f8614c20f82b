//! Hands the save files of a folder out to other hosts: ranges of their bytes, to whoever is let in.
//!
//! What is in a file is covered by its own checksums, up to whoever restores it; so nothing is decoded here. A thread a
//! connection that has named a file: there are few, and each waits for its client nearly always.

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
use hotlift_net::admission::{Admission, Admitted, Entered, Listener};
use hotlift_net::transport::Stream;
use hotlift_wire::WireError;
use hotlift_wire::file_ranges::{Answer, Open, READ_LEN, Read, Refusal, Reply, VERSION};
use hotlift_wire::limits;
use hotlift_wire::main_channel::FILE_HEADER;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

use super::block_file::read_ends;
use super::place_reader::PlaceReader;
use crate::control::Control;
use crate::error::file::{FileError, ServerError};
use crate::error::{MigrationError, error_line};
use crate::life::LONG;
use crate::life::bell::Bell;
use crate::life::threads::spawn;
use crate::lock::lock;
use crate::tls::Tls;

/// Most bytes of a client's first message: its head, and the name.
const OPENING_LEN: usize = 32 + limits::FILE_NAME;

/// How long a client may leave an answer unread. Between two reads it may take as long as it likes; one that is gone is
/// found by the kernel (keepalive).
const UNREAD: Duration = Duration::from_secs(60);

/// After an error of the listener (no file descriptors are left, for one), which goes on.
const RETRY: Duration = Duration::from_millis(50);

/// What somebody reads of a file, over all connections that he has at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visit {
    /// Who: an address without its port.
    pub host: String,
    /// Name of the file.
    pub name: String,
    /// Bytes that were read.
    pub bytes: u64,
    /// Since the first connection.
    pub time: Duration,
}

/// What happens at a server.
#[derive(Debug)]
#[non_exhaustive]
pub enum ServerEvent {
    /// Somebody begins to read.
    Begun(Visit),
    /// He has closed all of his connections.
    Ended(Visit),
    /// Somebody was not let in, or does not get the file that he wants.
    Refused {
        /// Who: an address without its port.
        host: String,
        /// Why.
        reason: String,
    },
    /// No connection can be taken just now.
    Trouble(io::Error),
}

/// Hands out the save files in `folder` to all who connect to `listener`, until `control` is cancelled. Only files that are
/// whole, directly in the folder, whose names do not begin with a dot; no link is followed.
///
/// # Errors
/// [`MigrationError::File`] for a folder that cannot be read; [`MigrationError::Connection`] if the system gives no file
/// descriptors.
pub fn serve(
    listener: &Listener,
    tls: Option<Arc<Tls>>,
    folder: &Path,
    control: &Control,
    on_event: &(dyn Fn(ServerEvent) + Sync),
) -> Result<(), MigrationError> {
    let places = Places {
        most: READERS,
        each: READERS_OF_ONE,
        idle: READER_IDLE,
    };
    serve_some(listener, tls, folder, control, (on_event, places))
}

/// How many may read at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places {
    /// Connections.
    pub most: usize,
    /// The same of one visitor.
    pub each: usize,
    /// See [`READER_IDLE`].
    pub idle: Duration,
}

/// The same with so many places.
pub(super) fn serve_some(
    listener: &Listener,
    tls: Option<Arc<Tls>>,
    folder: &Path,
    control: &Control,
    (on_event, places): (&(dyn Fn(ServerEvent) + Sync), Places),
) -> Result<(), MigrationError> {
    // Before the folder: its descriptor is the last that a server without connections opens.
    let admission = Admission::new(listener, tls, VISITORS);
    let mut admission = admission.map_err(MigrationError::opening)?;
    let bell = Bell::new(control.life()).map_err(MigrationError::opening)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(folder, flags, Mode::empty());
    let server = Server {
        folder: opened.map_err(|errno| FileError::read(folder, errno.into()))?,
        path: folder.to_owned(),
        control,
        places,
        on_event,
        guests: Mutex::default(),
    };
    thread::scope(|scope| {
        while !control.is_cancelled() {
            if let Err(error) = server.step(scope, &mut admission, &bell) {
                on_event(ServerEvent::Trouble(error));
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
    places: Places,
    on_event: &'a (dyn Fn(ServerEvent) + Sync),
    guests: Mutex<Guests>,
}

/// Who is here.
#[derive(Default)]
struct Guests {
    /// By number.
    connections: HashMap<u64, Arc<Connection>>,
    next: u64,
    visits: HashMap<(String, String, u64), Visiting>,
}

struct Connection {
    stream: Stream,
    /// Whose it is: all that a certificate names, or an address.
    visitor: String,
    /// Since when it asks for nothing; `None` while it is answered.
    idle: Mutex<Option<Instant>>,
}

impl Guests {
    /// Whether there is a place for `visitor`. One that its client does not use is taken from it for that: from its own
    /// connections if it has as many as it may have, else from anybody's.
    fn has_place(&mut self, visitor: &str, places: Places, now: Instant) -> bool {
        let own = self
            .connections
            .values()
            .filter(|one| one.visitor == visitor);
        let own = own.count();
        if own < places.each && self.connections.len() < places.most {
            return true;
        }
        let is_own = own >= places.each;
        let idle = self.connections.iter().filter_map(|(number, one)| {
            let may_go = !is_own || one.visitor == visitor;
            let is_idle = |since: &Instant| now.saturating_duration_since(*since) >= places.idle;
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

struct Visiting {
    connections: usize,
    bytes: u64,
    since: Instant,
}

/// A connection that is counted until this is dropped.
struct Place<'a> {
    guests: &'a Mutex<Guests>,
    number: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        lock(self.guests).connections.remove(&self.number);
    }
}

/// A file that is handed out.
struct Handed {
    file: PlaceReader,
    id: u64,
}

/// The first message of a client: version, visitor, name of the file.
type Opening = (u32, u64, String);

/// Takes the first message off `stream` without waiting, or nothing if it has ended without a byte; `None` while it has not come.
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
    /// Waits for something to happen at the door, and takes it in.
    fn step<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        admission: &mut Admission<'_, Admitted>,
        bell: &Bell,
    ) -> io::Result<()> {
        let now = self.control.life().now();
        let polled = admission.polled(now);
        let polled = polled.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        bell.poll(&mut polled.collect(), admission.shortened(LONG, now))?;
        while let Some(number) = admission.room.next_news() {
            let one = admission.room.get(number);
            let Some(opening) = one.and_then(|one| opening(&one.stream)) else {
                continue;
            };
            let Some((Admitted { stream, .. }, _)) = admission.room.remove(number) else {
                continue;
            };
            match opening {
                Ok(Some(opening)) => self.begin(scope, stream, opening),
                // The client needs nothing any more.
                Ok(None) => {}
                Err(ServerError::Protocol(_)) => {
                    let reason = "it asks for no file, and this 'hotlift serve' has --files and takes no guest";
                    self.refused(&stream, reason.to_owned());
                }
                Err(error) => self.refused(&stream, error_line(&error)),
            }
        }
        let now = self.control.life().now();
        while let Some(late) = admission.room.take_late(now) {
            let error = ServerError::Connection(io::ErrorKind::TimedOut.into());
            self.refused(&late.stream, error_line(&error));
        }
        for entered in admission.accept(now, |one| one)? {
            match entered {
                Entered::Refused(refused) => (self.on_event)(ServerEvent::Refused {
                    reason: error_line(&refused.source),
                    host: refused.from,
                }),
                // It has sent nothing for longest.
                Entered::Left(_) => {}
            }
        }
        Ok(())
    }

    fn refused(&self, stream: &Stream, reason: String) {
        let host = stream.peer_host();
        (self.on_event)(ServerEvent::Refused { host, reason });
    }

    /// Serves a connection in a thread of its own.
    fn begin<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        stream: Stream,
        opening: Opening,
    ) {
        let (version, _, name) = &opening;
        if *version != VERSION {
            let text = format!("it speaks version {VERSION} of this protocol, and not {version}");
            return self.refuse(&stream, name, Refusal::Version, &text);
        }
        let visitor = visitor_of(&stream);
        let mut guests = lock(&self.guests);
        if !guests.has_place(&visitor, self.places, self.control.life().now()) {
            drop(guests);
            return self.refuse(&stream, name, Refusal::NotNow, "all places are taken");
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
        let place = Place { guests, number };
        let serving = spawn(scope, "files/serve".to_owned(), move || {
            let _place = place;
            self.serve(&connection, opening);
            connection.stream.shutdown(Shutdown::Both);
        });
        if let Err(MigrationError::Thread { source, .. }) = serving {
            (self.on_event)(ServerEvent::Trouble(source));
        }
    }

    /// Closes all connections.
    fn end(&self) {
        for connection in lock(&self.guests).connections.values() {
            connection.stream.shutdown(Shutdown::Both);
        }
    }

    /// Tells a client why it does not get the file with this name.
    fn refuse(&self, mut stream: &Stream, name: &str, why: Refusal, text: &str) {
        let mut reply = Vec::new();
        Reply::Refused { why, text }.encode(&mut reply);
        // The first bytes on a connection always have room. A client that has gone needs no reason.
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
        let _ = stream.set_write_timeout(UNREAD);
        let opened = Reply::Opened {
            length: file.file.length(),
            id: file.id,
        };
        opened.encode(&mut reply);
        if { stream }.write_all(&reply).is_ok() {
            let key = (stream.peer_host(), name, visitor);
            self.arrives(&key);
            let _leaves = Leaves {
                server: self,
                key: &key,
            };
            let count = |bytes| self.count(&key, bytes);
            // However it ends, the client knows better what became of its reads.
            let _ = hand_out(connection, &file.file, count);
        }
    }

    /// The save file of that name, or why it is not handed out.
    fn open(&self, name: &str) -> Result<Handed, (Refusal, String)> {
        let not_there = || {
            let reason = "there is no save file of that name";
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
            return Err(not_there());
        }
        // One that is a pipe must not be waited for.
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match openat(&self.folder, name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Err(not_there()),
            Err(errno) => return Err(failed("it cannot be opened", &errno.into())),
        };
        match file.metadata() {
            Ok(about) if about.is_file() => {}
            Ok(_) => return Err(not_there()),
            Err(error) => return Err(failed("it cannot be read", &error)),
        }
        let mut is_of_qemu = false;
        let read = PlaceReader::of(file, &self.path.join(name)).and_then(|file| {
            let (info, ..) = read_ends(&file).inspect_err(|_| {
                let mut magic = [0; FILE_HEADER.len()];
                is_of_qemu = file.read_exact(&mut magic, 0).is_ok() && magic == FILE_HEADER;
            })?;
            Ok(Handed { file, id: info.id })
        });
        read.map_err(|error| match error {
            FileError::Read { source, .. } => failed("it cannot be read", &source),
            FileError::NotASave if is_of_qemu => {
                let reason = "it is a file of QEMU's (mapped-ram, or a plain stream), and only files of 'hotlift save' are handed \
                              out: copy it to the other host, and restore it there";
                (Refusal::NotThere, reason.to_owned())
            }
            error => (Refusal::NotThere, error_line(&error)),
        })
    }

    fn arrives(&self, key: &(String, String, u64)) {
        let mut guests = lock(&self.guests);
        let visiting = guests.visits.entry(key.clone()).or_insert(Visiting {
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

/// Whose connections count together.
fn visitor_of(stream: &Stream) -> String {
    match stream.peer() {
        Some(peer) => format!("{} {:?} {:?}", peer.subject, peer.dns, peer.uri),
        None => stream.peer_host(),
    }
}

impl Visiting {
    fn visit(&self, (host, name, _): &(String, String, u64)) -> Visit {
        Visit {
            host: host.clone(),
            name: name.clone(),
            bytes: self.bytes,
            time: self.since.elapsed(),
        }
    }
}

/// Whether the same may go well later: the system is short of something, or a disk or a network file system is in trouble.
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

/// Says at the end that a connection of a visit is gone.
struct Leaves<'a> {
    server: &'a Server<'a>,
    key: &'a (String, String, u64),
}

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.server.leaves(self.key);
    }
}

/// Answers reads, one after the other, until the client has no more.
fn hand_out(
    connection: &Connection,
    file: &PlaceReader,
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

    const PLACES: Places = Places {
        most: 4,
        each: 2,
        idle: Duration::ZERO,
    };

    /// Who reads at the moment; the other end of his connection.
    fn come(guests: &mut Guests, visitor: &str) -> Option<Stream> {
        let (stream, client) = Stream::pair().unwrap();
        if !guests.has_place(visitor, PLACES, Instant::now()) {
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
    fn one_visitor_does_not_have_the_places_of_all_and_gives_those_that_he_does_not_use() {
        let mut guests = Guests::default();
        let first = come(&mut guests, "a").unwrap();
        let second = come(&mut guests, "a").unwrap();
        assert!(come(&mut guests, "a").is_none(), "a third of his");
        let _others = [(); 2].map(|()| come(&mut guests, "b").expect("the others have theirs"));
        assert!(come(&mut guests, "c").is_none(), "all read");
        let rests = |guests: &Guests, number| {
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
