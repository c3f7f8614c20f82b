//! Who connects to a listener of Hotlift's: a migration's channels, a question about one, or a stranger.
//!
//! A stranger costs nothing: at most [`WAITING`] connections wait, each for a limited time, and one that
//! turns out to be none of a migration's is dropped and counted, whatever it says.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use hotlift_wire::WireError;
use hotlift_wire::multifd::{INITIAL_PACKET_LEN, InitialPacket, MAGIC};
use hotlift_wire::settle::{
    HEARD_LEN, MigrationId, Outcome, QUESTION_LEN, QUESTION_MAGIC, TOKEN_LEN, TOKEN_MAGIC, answer,
    heard, read_question, read_token,
};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::control::Control;
use crate::handover::Taking;
use crate::transport::{Listener, Stream};

/// First bytes of the main channel (`QEMU_VM_FILE_MAGIC`).
const MAIN_MAGIC: [u8; 4] = *b"QEVM";

/// Bytes of a main channel that say nothing yet of a VM: magic and version. A source sends more with them.
const MAIN_HEAD: usize = 8;

/// First bytes of a TLS handshake: type and major version of the record.
const TLS_MAGIC: [u8; 2] = [0x16, 0x03];

/// Why a connection was turned away that has ended by itself.
pub(crate) const BROKEN: &str = "a connection that was reset";

/// Connections that may wait to be told apart. A source says what each is as soon as it is made, so that
/// the one that has been silent for longest is the one to go.
const WAITING: usize = 64;

/// How long somebody who asked may take to say that the answer was heard.
const HEARING: Duration = Duration::from_secs(5);

/// How long the answer to a question may wait for room in a socket.
const ANSWERING: Duration = Duration::from_secs(1);

/// Between two looks at a connection that has sent a part of its first bytes.
const HALF_SAID: Duration = Duration::from_millis(2);

/// A connection of a migration.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub stream: Stream,
    /// When it was accepted.
    pub since: Instant,
    pub kind: Kind,
}

/// What an [`Arrival`] is.
#[derive(Debug)]
pub(crate) enum Kind {
    Main,
    /// A multifd channel, by its opening, which is still to be taken off the connection.
    Channel(InitialPacket),
    /// A multifd channel of a Hotlift of this other version.
    OtherVersion(u16),
}

/// Whoever has connected and not said enough yet.
#[derive(Debug)]
struct Caller {
    stream: Stream,
    since: Instant,
    /// It has shown the token, or needs none.
    admitted: bool,
}

/// What the first bytes of a connection say.
enum Said {
    /// Not enough of them yet.
    Partial,
    Main,
    Channel(InitialPacket),
    OtherVersion(u16),
    Token([u8; 16]),
    Question(MigrationId),
    /// None of it, and why.
    Stranger(&'static str),
}

/// The migration that questions are about.
pub(crate) struct Asked<'a> {
    pub id: MigrationId,
    pub taking: &'a Taking,
    /// Ends the migration, which the answer "never" has decided.
    pub refuse: &'a (dyn Fn() + Sync),
}

/// Takes connections in and tells them apart.
pub(crate) struct Door<'a> {
    listener: &'a Listener,
    control: Control,
    /// What opens each connection of a migration that a conversation has announced.
    token: Option<[u8; 16]>,
    /// How long a connection may take to say what it is.
    patience: Duration,
    callers: Vec<Caller>,
    /// Who was told an outcome and has not said that it was heard.
    told: Vec<Caller>,
    /// Connections of a later migration.
    others: Vec<Stream>,
}

impl<'a> Door<'a> {
    /// At `listener`.
    pub(crate) fn new(
        listener: &'a Listener,
        token: Option<[u8; 16]>,
        patience: Duration,
        control: &Control,
    ) -> Self {
        Self {
            listener,
            control: control.clone(),
            token,
            patience,
            callers: Vec::new(),
            told: Vec::new(),
            others: Vec::new(),
        }
    }

    pub(crate) fn listener(&self) -> &'a Listener {
        self.listener
    }

    /// Whether somebody has connected within `time` and not said yet what it is.
    pub(crate) fn has_newcomer(&self, time: Duration) -> bool {
        self.callers
            .iter()
            .any(|caller| caller.since.elapsed() < time)
    }

    /// Any connection, whatever its first bytes.
    pub(crate) fn take_any(&mut self) -> Option<Stream> {
        self.callers.pop().map(|caller| caller.stream)
    }

    /// Waits for up to `wait`, less than a second, for something to happen here or on `watched`; what has
    /// arrived, and whether something happened on `watched` (that `flags` speak of). Questions are answered
    /// by `asked`.
    ///
    /// # Errors
    /// The system's reason why nothing can be waited for.
    pub(crate) fn step(
        &mut self,
        wait: Duration,
        watched: &[(&Stream, PollFlags)],
        asked: Option<&Asked<'_>>,
    ) -> io::Result<(Vec<Arrival>, bool)> {
        self.drop_late();
        let mut fds = Vec::with_capacity(self.callers.len() + self.told.len() + watched.len() + 1);
        let all = self.callers.iter().chain(&self.told);
        fds.extend(all.map(|caller| PollFd::new(&caller.stream, PollFlags::IN)));
        fds.extend(
            watched
                .iter()
                .map(|(stream, flags)| PollFd::new(*stream, *flags)),
        );
        fds.push(PollFd::from_borrowed_fd(
            self.listener.as_fd(),
            PollFlags::IN,
        ));
        let returned = self.listener.has_returned();
        let wait = Timespec {
            tv_sec: 0,
            tv_nsec: if returned {
                0
            } else {
                wait.subsec_nanos().into()
            },
        };
        match rustix::event::poll(&mut fds, Some(&wait)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let happened: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let (callers, told) = (self.callers.len(), self.told.len());
        let on_watched = happened[callers + told..][..watched.len()].contains(&true);
        let knocks = returned || happened.last() == Some(&true);
        for index in (0..told).rev().filter(|index| happened[callers + index]) {
            self.hear(index, asked);
        }
        let mut arrivals = Vec::new();
        let mut partial = false;
        for index in (0..callers).rev().filter(|index| happened[*index]) {
            partial |= !self.look(index, asked, &mut arrivals);
        }
        if knocks {
            self.accept()?;
        } else if partial {
            // What has come keeps the poll from waiting.
            std::thread::sleep(HALF_SAID);
        }
        Ok((arrivals, on_watched))
    }

    fn accept(&mut self) -> io::Result<()> {
        // One that has gone before it was accepted is no reason to end anything.
        let accepted = match self.listener.accept(Duration::ZERO) {
            Err(error) if error.kind() != io::ErrorKind::ConnectionAborted => return Err(error),
            accepted => accepted.unwrap_or(None),
        };
        if let Some(stream) = accepted {
            if self.callers.len() >= WAITING {
                self.callers.remove(0);
                self.control.turn_away("more connections than may wait");
            }
            self.callers.push(Caller {
                stream,
                since: Instant::now(),
                admitted: self.token.is_none(),
            });
        }
        Ok(())
    }

    /// Drops whoever has been silent for too long.
    fn drop_late(&mut self) {
        let before = self.callers.len();
        let patience = self.patience;
        self.callers
            .retain(|caller| caller.since.elapsed() < patience);
        for _ in self.callers.len()..before {
            self.control
                .turn_away("a connection that did not say what it is in time");
        }
        self.told.retain(|caller| caller.since.elapsed() < HEARING);
    }

    /// Looks at what a caller says; false if it has to say more.
    fn look(
        &mut self,
        index: usize,
        asked: Option<&Asked<'_>>,
        arrivals: &mut Vec<Arrival>,
    ) -> bool {
        let said = said(&self.callers[index].stream);
        if let Said::Partial = said {
            return false;
        }
        let admitted = self.callers[index].admitted;
        if let Said::Token(token) = said
            && !admitted
            && self.token == Some(token)
        {
            self.callers[index].admitted = true;
            let mut shown = [0; TOKEN_LEN];
            let mut stream = &self.callers[index].stream;
            if stream.read_exact(&mut shown).is_ok() {
                return true;
            }
        }
        let Caller { stream, since, .. } = self.callers.remove(index);
        let kind = match said {
            Said::Main if admitted => Kind::Main,
            Said::Channel(packet) if admitted => Kind::Channel(packet),
            Said::OtherVersion(version) if admitted => Kind::OtherVersion(version),
            Said::Main | Said::Channel(_) | Said::OtherVersion(_) => {
                self.control
                    .turn_away("a connection without this migration's token");
                return true;
            }
            Said::Question(id) => {
                self.reply(stream, id, asked);
                return true;
            }
            Said::Token(_) => {
                self.control
                    .turn_away("a connection with another migration's token");
                return true;
            }
            Said::Stranger(why) => {
                self.control.turn_away(why);
                return true;
            }
            Said::Partial => return false,
        };
        arrivals.push(Arrival {
            stream,
            since,
            kind,
        });
        true
    }

    /// Answers a question about `id`.
    fn reply(&mut self, stream: Stream, id: MigrationId, asked: Option<&Asked<'_>>) {
        let outcome = match asked {
            Some(asked) if asked.id == id => {
                let outcome = asked.taking.ask();
                if outcome == Outcome::Never {
                    (asked.refuse)();
                }
                outcome
            }
            _ => Outcome::Unknown,
        };
        let mut question = [0; QUESTION_LEN];
        let told = (&stream)
            .read_exact(&mut question)
            .and_then(|()| stream.set_timeouts(ANSWERING))
            .and_then(|()| (&stream).write_all(&answer(id, outcome)));
        if told.is_ok() {
            self.told.push(Caller {
                stream,
                since: Instant::now(),
                admitted: true,
            });
        }
    }

    /// Somebody who was told an outcome says something, or has gone.
    fn hear(&mut self, index: usize, asked: Option<&Asked<'_>>) {
        let mut bytes = [0; HEARD_LEN];
        let seen = self.told[index].stream.peek(&mut bytes);
        let complete = matches!(seen, Ok(Some(HEARD_LEN)));
        if complete
            && let Some(asked) = asked
            && bytes == heard(asked.id)
        {
            asked.taking.note_heard();
        }
        if complete || !matches!(seen, Ok(Some(1..) | None)) {
            self.told.remove(index);
        } else {
            std::thread::sleep(HALF_SAID);
        }
    }

    /// Keeps connections for the migration after this one.
    pub(crate) fn keep(&mut self, arrivals: Vec<Arrival>) {
        let room = WAITING.saturating_sub(self.others.len());
        for _ in room..arrivals.len() {
            self.control.turn_away("more connections than may wait");
        }
        let streams = arrivals.into_iter().map(|arrival| arrival.stream);
        self.others.extend(streams.take(room));
    }
}

impl Drop for Door<'_> {
    fn drop(&mut self) {
        let callers = self.callers.drain(..).filter(|caller| caller.admitted);
        let callers = callers.map(|caller| caller.stream);
        self.others
            .drain(..)
            .chain(callers)
            .for_each(|stream| self.listener.put_back(stream));
    }
}

impl Arrival {
    /// Takes a channel's opening off its connection; false if that has broken meanwhile.
    pub(crate) fn take_opening(&self) -> bool {
        let mut opening = [0; INITIAL_PACKET_LEN];
        (&self.stream).read_exact(&mut opening).is_ok()
    }
}

/// Looks at the first bytes of a connection without waiting and without taking them.
fn said(stream: &Stream) -> Said {
    let mut bytes = [0; INITIAL_PACKET_LEN];
    let seen = match stream.peek(&mut bytes) {
        Ok(None) => return Said::Partial,
        Ok(Some(0)) => return Said::Stranger("a connection that was closed without a word"),
        Ok(Some(seen)) => seen,
        Err(_) => return Said::Stranger(BROKEN),
    };
    let partial = if stream.is_hung_up() {
        Said::Stranger("a connection that was closed in its first bytes")
    } else {
        Said::Partial
    };
    let Some(magic) = bytes[..seen].first_chunk::<4>() else {
        return match bytes[..seen].starts_with(&TLS_MAGIC) {
            true => TLS,
            false => partial,
        };
    };
    match *magic {
        MAIN_MAGIC if seen > MAIN_HEAD => Said::Main,
        MAIN_MAGIC => partial,
        TOKEN_MAGIC => match bytes[..seen].first_chunk().and_then(read_token) {
            Some(token) => Said::Token(token),
            None => partial,
        },
        QUESTION_MAGIC => match bytes[..seen].first_chunk().map(read_question) {
            Some(Ok(id)) => Said::Question(id),
            Some(Err(_)) => Said::Stranger("a damaged question"),
            None => partial,
        },
        _ if *magic == MAGIC.to_be_bytes() => match seen {
            INITIAL_PACKET_LEN => match InitialPacket::decode(&bytes) {
                Ok(packet) => Said::Channel(packet),
                Err(WireError::HotliftVersion { got }) => Said::OtherVersion(got),
                Err(_) => Said::Stranger("a damaged opening of a multifd channel"),
            },
            _ => partial,
        },
        _ if magic.starts_with(&TLS_MAGIC) => TLS,
        _ => Said::Stranger("a connection that begins like no migration stream"),
    }
}

const TLS: Said = Said::Stranger(
    "a TLS handshake, which cannot be looked into (switch tls-creds off between QEMU and the relay)",
);
