//! Who connects to a listener of Hotlift's: a migration's channels, a question about one, or a stranger.
//!
//! A stranger costs nothing: at most [`WAITING`] connections wait, each for a limited time, and one that
//! turns out to be none of a migration's is dropped and counted, whatever it says.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use hotlift_tls::HANDSHAKE_BEGINS;
use hotlift_wire::WireError;
use hotlift_wire::multifd::{INITIAL_PACKET_LEN, InitialPacket, MAGIC};
use hotlift_wire::settle::{
    Doing, HEARD_LEN, MigrationId, Outcome, QUESTION_LEN, QUESTION_MAGIC, TOKEN_LEN, TOKEN_MAGIC,
    answer, heard, read_question, read_token,
};
use rustix::event::{PollFd, PollFlags};

use crate::error::error_line;
use crate::handover::Taking;
use crate::life::Life;
use crate::life::bell::Bell;
use crate::stream::pass::Pass;
use crate::stream::strangers::Strangers;
use crate::transport::{Acceptor, Host, Listener, Stream};

/// First bytes of the main channel (`QEMU_VM_FILE_MAGIC`).
const MAIN_MAGIC: [u8; 4] = *b"QEVM";

/// The same of a postcopy that was interrupted and goes on: the command RECV_BITMAP.
pub(crate) const RESUMED_MAGIC: [u8; 3] = [0x08, 0x00, 0x0a];

/// Bytes of a main channel that say nothing yet of a VM: magic and version. A source sends more with them.
const MAIN_HEAD: usize = 8;

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
    /// Another connection of the migration that questions are about: it has shown what that is called, which its source
    /// alone was told.
    Named,
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
    acceptor: Acceptor<'a>,
    strangers: Strangers,
    bell: Bell,
    /// What opens each connection of a migration that a conversation has announced.
    pass: Option<Pass>,
    /// How long a connection may take to say what it is.
    patience: Duration,
    callers: Vec<Caller>,
    /// Who was told an outcome and has not said that it was heard.
    told: Vec<Caller>,
    /// Connections of a later migration.
    others: Vec<Stream>,
}

impl<'a> Door<'a> {
    /// For the connections of `acceptor`. Changes of `life` end its waits.
    ///
    /// # Errors
    /// The system gives no descriptor.
    pub(crate) fn new(
        acceptor: Acceptor<'a>,
        pass: Option<Pass>,
        patience: Duration,
        strangers: &Strangers,
        life: &Life,
    ) -> io::Result<Self> {
        Ok(Self {
            acceptor,
            strangers: strangers.clone(),
            bell: Bell::new(life)?,
            pass,
            patience,
            callers: Vec::new(),
            told: Vec::new(),
            others: Vec::new(),
        })
    }

    pub(crate) fn listener(&self) -> &'a Listener {
        self.acceptor.listener()
    }

    /// Whether somebody has connected within `time` and not said yet what it is.
    pub(crate) fn has_newcomer(&self, time: Duration) -> bool {
        let callers = self.callers.iter().map(|caller| caller.since);
        let mut all = callers.chain(self.acceptor.under_way());
        all.any(|since| since.elapsed() < time)
    }

    /// A connection that was let in, whatever its first bytes; `None` if there is none within `wait`.
    ///
    /// # Errors
    /// The system's reason why nothing can be waited for, or nobody be accepted.
    pub(crate) fn take_any(&mut self, wait: Duration) -> io::Result<Option<Stream>> {
        self.drop_late();
        let is_admitted = |caller: &Caller| caller.admitted;
        if !self.callers.iter().any(is_admitted) {
            let silent = self.callers.iter();
            let silent = silent.map(|caller| PollFd::new(&caller.stream, PollFlags::IN));
            let knocking = self.acceptor.polled();
            let knocking = knocking.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            let wait = match self.acceptor.is_ready() {
                true => Duration::ZERO,
                false => wait,
            };
            let mut fds = silent.chain(knocking).collect();
            self.bell.poll(&mut fds, self.until_late(wait))?;
            drop(fds);
            self.accept()?;
            for index in (0..self.callers.len()).rev() {
                if !self.callers[index].admitted {
                    // It shows its pass, or is turned away.
                    self.look(index, None, &mut Vec::new());
                }
            }
        }
        let index = self.callers.iter().position(is_admitted);
        Ok(index.map(|index| self.callers.remove(index).stream))
    }

    /// A connection of `host` that was let in and has said nothing.
    pub(crate) fn take_silent(&mut self, host: &Host) -> Option<Stream> {
        let is_silent = |caller: &Caller| {
            let stream = &caller.stream;
            let says_nothing = matches!(stream.peek(&mut [0]), Ok(None)) && !stream.is_hung_up();
            caller.admitted && says_nothing && host.is_at_the_end_of(stream)
        };
        let index = self.callers.iter().position(is_silent)?;
        Some(self.callers.remove(index).stream)
    }

    /// Waits for up to `wait` for something to happen here or on `watched`, or for a change of the lifetime; what has
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
        let knocking = self.acceptor.polled();
        fds.extend(knocking.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let returned = self.acceptor.is_ready();
        let decrypted: Vec<bool> = self
            .callers
            .iter()
            .map(|it| it.stream.has_plaintext())
            .collect();
        let at_once = returned || decrypted.contains(&true);
        let wait = match at_once {
            true => Duration::ZERO,
            false => self.until_late(wait),
        };
        self.bell.poll(&mut fds, wait)?;
        let happened: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let (callers, told) = (self.callers.len(), self.told.len());
        let (on_watched, knocking) = happened[callers + told..].split_at(watched.len());
        let (on_watched, knocks) = (on_watched.contains(&true), knocking.contains(&true));
        for index in (0..told).rev().filter(|index| happened[callers + index]) {
            self.hear(index, asked);
        }
        let mut arrivals = Vec::new();
        let mut partial = false;
        for index in (0..callers).rev() {
            if !happened[index] && !decrypted[index] {
                continue;
            }
            partial |= !self.look(index, asked, &mut arrivals);
        }
        // As they have come: the first of a migration says whose the others must be.
        arrivals.reverse();
        if returned || knocks {
            self.accept()?;
        } else if partial {
            // What has come keeps the poll from waiting.
            std::thread::sleep(HALF_SAID);
        }
        Ok((arrivals, on_watched))
    }

    /// Whoever has ended its handshake may say what it is.
    fn accept(&mut self) -> io::Result<()> {
        for (stream, since) in self.acceptor.take()? {
            match stream {
                Ok(stream) => self.let_in(stream, since),
                Err(refused) => self.strangers.turn_away(&error_line(&refused)),
            }
        }
        Ok(())
    }

    fn let_in(&mut self, stream: Stream, since: Instant) {
        if self.callers.len() >= WAITING {
            self.callers.remove(0);
            self.strangers.turn_away("more connections than may wait");
        }
        self.callers.push(Caller {
            stream,
            since,
            admitted: self.pass.is_none(),
        });
    }

    /// Shortens `wait` to the moment when a connection has been silent for too long, or when a handshake may give way.
    fn until_late(&self, wait: Duration) -> Duration {
        let left =
            |caller: &Caller, patience: Duration| patience.saturating_sub(caller.since.elapsed());
        let callers = self
            .callers
            .iter()
            .map(|caller| left(caller, self.patience));
        let told = self.told.iter().map(|caller| left(caller, HEARING));
        let wait = callers.chain(told).fold(wait, Duration::min);
        self.acceptor.shortened(wait)
    }

    /// Drops whoever has been silent for too long.
    fn drop_late(&mut self) {
        let before = self.callers.len();
        let patience = self.patience;
        self.callers
            .retain(|caller| caller.since.elapsed() < patience);
        for _ in self.callers.len()..before {
            self.strangers
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
        let caller = &self.callers[index].stream;
        let pass = self.pass.as_ref().map(|pass| pass.token_on(caller));
        if let Said::Token(token) = said
            && !admitted
            && pass == Some(token)
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
                self.strangers
                    .turn_away("a connection without this migration's token");
                return true;
            }
            Said::Token(token)
                if asked.is_some_and(|asked| asked.id.0 == token)
                    && (&stream).read_exact(&mut [0; TOKEN_LEN]).is_ok() =>
            {
                Kind::Named
            }
            Said::Question(id) => {
                self.reply(stream, id, asked);
                return true;
            }
            Said::Token(_) => {
                self.strangers
                    .turn_away("a connection with another migration's token");
                return true;
            }
            Said::Stranger(why) => {
                self.strangers.turn_away(why);
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
        let (outcome, doing) = match asked {
            Some(asked) if asked.id == id => {
                let outcome = asked.taking.ask();
                if outcome == Outcome::Never {
                    (asked.refuse)();
                }
                (outcome, asked.taking.doing())
            }
            _ => (Outcome::Unknown, Doing::Unknown),
        };
        let mut question = [0; QUESTION_LEN];
        let told = (&stream)
            .read_exact(&mut question)
            .and_then(|()| stream.set_timeouts(ANSWERING))
            .and_then(|()| (&stream).write_all(&answer(id, outcome, doing)));
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
        // What was shown on those is taken off, and of this migration they are.
        let mut arrivals = arrivals;
        arrivals.retain(|arrival| !matches!(arrival.kind, Kind::Named));
        for _ in room..arrivals.len() {
            self.strangers.turn_away("more connections than may wait");
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
            .for_each(|stream| self.acceptor.listener().put_back(stream));
    }
}

impl Arrival {
    /// Takes a channel's opening off its connection; false if that has broken meanwhile.
    pub(crate) fn take_opening(&self) -> bool {
        let mut opening = [0; INITIAL_PACKET_LEN];
        (&self.stream).read_exact(&mut opening).is_ok()
    }
}

/// What a connection says it is, by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Announced {
    /// It has not said enough.
    Nothing,
    /// The main channel of a migration.
    Main,
    /// A multifd channel of one.
    Channel,
    /// It shows the token of a migration that was announced in a conversation.
    Token([u8; 16]),
    /// It asks about the migration with this id.
    Question([u8; 16]),
    /// None of these.
    Other,
    /// It has ended, without a word or by a reset.
    Gone,
}

/// Looks at the first bytes of `stream` without taking them and without waiting for them.
#[must_use]
pub fn announced(stream: &Stream) -> Announced {
    if !matches!(stream.peek(&mut [0]), Ok(None | Some(1..))) {
        return Announced::Gone;
    }
    match said(stream) {
        Said::Partial => Announced::Nothing,
        Said::Main => Announced::Main,
        Said::Channel(_) | Said::OtherVersion(_) => Announced::Channel,
        Said::Token(token) => Announced::Token(token),
        Said::Question(id) => Announced::Question(id.0),
        Said::Stranger(_) => Announced::Other,
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
        return match bytes[..seen].starts_with(&HANDSHAKE_BEGINS) {
            true => TLS,
            false => partial,
        };
    };
    match *magic {
        MAIN_MAGIC if seen > MAIN_HEAD => Said::Main,
        MAIN_MAGIC => partial,
        _ if magic.starts_with(&RESUMED_MAGIC) => Said::Main,
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
        _ if magic.starts_with(&HANDSHAKE_BEGINS) => TLS,
        _ => Said::Stranger("a connection that begins like no migration stream"),
    }
}

const TLS: Said = Said::Stranger(
    "a TLS handshake: this side has no certificates for it (--tls DIR; --qemu-tls DIR if a QEMU connects)",
);
