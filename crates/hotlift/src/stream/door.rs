//! Who connects to a listener of Hotlift's: a migration's channels, a question about one, or a stranger.
//!
//! A stranger costs nothing: at most [`WAITING`] connections wait, each for a limited time, and one that
//! turns out to be none of a migration's is dropped and counted, whatever it says.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotlift_wire::multifd::{INITIAL_PACKET_LEN, InitialPacket};
use hotlift_wire::settle::{
    Doing, HEARD_LEN, MigrationId, Outcome, QUESTION_LEN, TOKEN_LEN, answer, heard,
};
use rustix::event::{PollFd, PollFlags};

use crate::admission::head::{Head, peek_head};
use crate::admission::pass::Pass;
use crate::admission::strangers::Strangers;
use crate::admission::{Acceptor, Admission, Entered, Limits, Room};
use crate::error::error_line;
use crate::handover::Taking;
use crate::life::Life;
use crate::life::bell::Bell;
use crate::tls::Tls;
use crate::transport::{Host, Listener, Stream};

/// Connections that may wait to be told apart. A source says what each is as soon as it is made, so that
/// the one that has been silent for longest is the one to go.
const WAITING: usize = 64;

/// How long somebody who asked may take to say that the answer was heard.
const HEARING: Duration = Duration::from_secs(5);

/// How long the answer to a question may wait for room in a socket.
const ANSWERING: Duration = Duration::from_secs(1);

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
    /// It has shown the token, or needs none.
    admitted: bool,
}

impl AsFd for Caller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
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
    admission: Admission<'a, Caller>,
    strangers: Strangers,
    bell: Bell,
    /// What opens each connection of a migration that a conversation has announced.
    pass: Option<Pass>,
    /// Who was told an outcome and has not said that it was heard.
    told: Room<Stream>,
    /// Connections of a later migration.
    others: Vec<Stream>,
}

impl<'a> Door<'a> {
    /// For the connections of `listener`, TLS ones with `tls`, which may take `patience` to say what they are. Changes of
    /// `life` end its waits.
    ///
    /// # Errors
    /// The system gives no descriptor.
    pub(crate) fn new(
        listener: &'a Listener,
        tls: Option<Arc<Tls>>,
        pass: Option<Pass>,
        patience: Duration,
        strangers: &Strangers,
        life: &Life,
    ) -> io::Result<Self> {
        let limits = |patience| Limits {
            most: WAITING,
            patience,
        };
        Ok(Self {
            admission: Admission::new(Acceptor::new(listener, tls)?, limits(patience))?,
            strangers: strangers.clone(),
            bell: Bell::new(life)?,
            pass,
            told: Room::new(limits(HEARING))?,
            others: Vec::new(),
        })
    }

    pub(crate) fn listener(&self) -> &'a Listener {
        self.admission.listener()
    }

    /// Whether somebody has connected within `time` and not said yet what it is.
    pub(crate) fn has_newcomer(&self, time: Duration) -> bool {
        let mut since = self.admission.since();
        since.any(|since| since.elapsed() < time)
    }

    /// A connection that was let in, whatever its first bytes; `None` if there is none within `wait`.
    ///
    /// # Errors
    /// The system's reason why nothing can be waited for, or nobody be accepted.
    pub(crate) fn take_any(&mut self, wait: Duration) -> io::Result<Option<Stream>> {
        self.drop_late();
        let is_admitted = |caller: &Caller, _| caller.admitted;
        if let Some((caller, _)) = self.admission.room.take_first(is_admitted) {
            return Ok(Some(caller.stream));
        }
        self.wait(Vec::with_capacity(4), wait)?;
        self.accept()?;
        // Those that are to show a pass show it, or are turned away.
        while self.pass.is_some()
            && let Some(number) = self.admission.room.next_news()
        {
            self.look(number, None, &mut Vec::new());
            let caller = self.admission.room.get(number);
            if caller.is_some_and(|caller| caller.admitted) {
                // What it states next is looked at by whoever takes it.
                break;
            }
        }
        let admitted = self.admission.room.take_first(is_admitted);
        Ok(admitted.map(|(caller, _)| caller.stream))
    }

    /// A connection of `host` that was let in and has said nothing.
    pub(crate) fn take_silent(&mut self, host: &Host) -> Option<Stream> {
        let is_silent = |caller: &Caller, _| {
            let stream = &caller.stream;
            let says_nothing = matches!(stream.peek(&mut [0]), Ok(None)) && !stream.is_hung_up();
            caller.admitted && says_nothing && host.is_at_the_end_of(stream)
        };
        let silent = self.admission.room.take_first(is_silent);
        silent.map(|(caller, _)| caller.stream)
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
        let mut fds = Vec::with_capacity(watched.len() + 5);
        let watched = watched.iter();
        fds.extend(watched.map(|(stream, flags)| PollFd::new(*stream, *flags)));
        let on_watched = self.wait(fds, wait)?;
        while let Some(number) = self.told.next_news() {
            self.hear(number, asked);
        }
        let mut arrivals = Vec::new();
        // As they have come: the first of a migration says whose the others must be.
        while let Some(number) = self.admission.room.next_news() {
            self.look(number, asked, &mut arrivals);
        }
        self.accept()?;
        Ok((arrivals, on_watched))
    }

    /// Waits for up to `wait` for something to happen here or on `watched`; whether it did there.
    fn wait<'w>(&'w self, mut watched: Vec<PollFd<'w>>, wait: Duration) -> io::Result<bool> {
        let count = watched.len();
        let here = self.admission.polled().chain([self.told.polled()]);
        watched.extend(here.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let now = Instant::now();
        let wait = self
            .told
            .shortened(self.admission.shortened(wait, now), now);
        self.bell.poll(&mut watched, wait)?;
        let mut watched = watched[..count].iter();
        Ok(watched.any(|fd| !fd.revents().is_empty()))
    }

    /// Whoever has ended its handshake may say what it is.
    fn accept(&mut self) -> io::Result<()> {
        let admitted = self.pass.is_none();
        let caller = |stream| Caller { stream, admitted };
        for entered in self.admission.accept(caller)? {
            match entered {
                Entered::Refused(refused) => self.strangers.turn_away(&error_line(&refused)),
                Entered::Left(_) => self.strangers.turn_away("more connections than may wait"),
            }
        }
        Ok(())
    }

    /// Drops whoever has been silent for too long.
    fn drop_late(&mut self) {
        let now = Instant::now();
        while self.admission.room.take_late(now).is_some() {
            self.strangers
                .turn_away("a connection that did not say what it is in time");
        }
        while self.told.take_late(now).is_some() {}
    }

    /// Looks at what a caller says.
    fn look(&mut self, number: u64, asked: Option<&Asked<'_>>, arrivals: &mut Vec<Arrival>) {
        let room = &mut self.admission.room;
        let Some(caller) = room.get(number) else {
            return;
        };
        let (head, admitted) = (peek_head(&caller.stream), caller.admitted);
        if head == Head::Partial {
            return;
        }
        let pass = self.pass.as_ref();
        if let Head::Token(token) = head
            && !admitted
            && pass.is_some_and(|pass| pass.token_on(&caller.stream) == token)
        {
            caller.admitted = true;
            if (&caller.stream).read_exact(&mut [0; TOKEN_LEN]).is_ok() {
                room.look_again(number);
                return;
            }
        }
        let Some((Caller { stream, .. }, since)) = room.remove(number) else {
            return;
        };
        let kind = match head {
            Head::Main if admitted => Kind::Main,
            Head::Channel(packet) if admitted => Kind::Channel(packet),
            Head::OtherVersion(version) if admitted => Kind::OtherVersion(version),
            Head::Token(token)
                if asked.is_some_and(|asked| asked.id.0 == token)
                    && (&stream).read_exact(&mut [0; TOKEN_LEN]).is_ok() =>
            {
                Kind::Named
            }
            Head::Question(id) => return self.reply(stream, MigrationId(id), asked),
            Head::Main | Head::Channel(_) | Head::OtherVersion(_) => {
                let why = "a connection without this migration's token";
                return self.strangers.turn_away(why);
            }
            Head::Token(_) => {
                let why = "a connection with another migration's token";
                return self.strangers.turn_away(why);
            }
            Head::Other(why) | Head::Gone(why) => return self.strangers.turn_away(why),
            Head::Partial => return,
        };
        arrivals.push(Arrival {
            stream,
            since,
            kind,
        });
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
            // One for which there is no room is not waited for.
            let _ = self.told.enter(stream, Instant::now());
        }
    }

    /// Somebody who was told an outcome says something, or has gone.
    fn hear(&mut self, number: u64, asked: Option<&Asked<'_>>) {
        let mut bytes = [0; HEARD_LEN];
        let stream = self.told.get(number);
        let seen = stream.map(|stream| stream.peek(&mut bytes));
        let complete = matches!(seen, Some(Ok(Some(HEARD_LEN))));
        if complete
            && let Some(asked) = asked
            && bytes == heard(asked.id)
        {
            asked.taking.note_heard();
        }
        if complete || !matches!(seen, Some(Ok(Some(1..) | None))) {
            self.told.remove(number);
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
        let is_admitted = |caller: &Caller, _| caller.admitted;
        while let Some((caller, _)) = self.admission.room.take_first(is_admitted) {
            self.others.push(caller.stream);
        }
        let listener = self.admission.listener();
        self.others
            .drain(..)
            .for_each(|stream| listener.put_back(stream));
    }
}

impl Arrival {
    /// Takes a channel's opening off its connection; false if that has broken meanwhile.
    pub(crate) fn take_opening(&self) -> bool {
        let mut opening = [0; INITIAL_PACKET_LEN];
        (&self.stream).read_exact(&mut opening).is_ok()
    }
}
