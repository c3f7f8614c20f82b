//! Accepts and classifies the connections to a Hotlift listener: channels of a migration, outcome queries, unknown clients.
//!
//! Unknown clients cannot exhaust resources: a limited number of connections is pending ([`hotlift_net::admission::limits`]),
//! each for a limited time. A connection that belongs to no migration is dropped and counted.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotlift_net::admission::limits::{CHANNELS, CONFIRMATIONS, channels};
use hotlift_net::admission::{
    Admission, Admitted, ConnectionClass, ConnectionToken, Listener, NO_STREAM, PendingConnections,
    Rejected,
};
use hotlift_net::transport::{Host, Stream};
use hotlift_wire::settle::{
    CONFIRMATION_LEN, GuestActivity, MigrationId, Outcome, QUESTION_LEN, answer, confirmation,
};
use rustix::event::{PollFd, PollFlags};

use crate::error::{MigrationError, error_line};
use crate::handover::DestinationHandover;
use crate::life::Life;
use crate::life::wake_fd::WakeFd;
use crate::stream::rejections::Rejections;
use crate::tls::Tls;

/// Time limit to send the answer to a query, if the socket buffer is full.
const ANSWERING: Duration = Duration::from_secs(1);

/// The migration that outcome queries refer to.
pub(crate) struct QuerySubject<'a> {
    pub id: MigrationId,
    pub destination_handover: &'a DestinationHandover,
    /// Aborts the migration. Called with the answer "never", which promises that the guest will not run here.
    pub refuse: &'a (dyn Fn() + Sync),
}

/// Accepts connections and classifies them by their first bytes.
pub(crate) struct AcceptLoop<'a> {
    admission: Admission<'a, Admitted>,
    rejections: Rejections,
    life: Life,
    wake_fd: WakeFd,
    /// Token that each connection must begin with. Set if a conversation has announced the migration.
    pass: Option<ConnectionToken>,
    /// Connections of peers that have received an outcome, but have not confirmed it yet.
    unconfirmed: PendingConnections<Stream>,
    /// Connections that belong to a later migration.
    others: Vec<Admitted>,
}

impl<'a> AcceptLoop<'a> {
    /// Creates the accept loop for `listener`. With `tls`, connections use TLS. A connection must identify itself within
    /// `timeout`. Changes of `life` end the waits.
    ///
    /// # Errors
    /// The system's error if it cannot create a descriptor.
    pub(crate) fn new(
        listener: &'a Listener,
        tls: Option<Arc<Tls>>,
        pass: Option<ConnectionToken>,
        timeout: Duration,
        (rejections, life): (&Rejections, &Life),
    ) -> Result<Self, MigrationError> {
        let made = || {
            Ok(Self {
                admission: Admission::new(listener, tls, channels(timeout))?,
                rejections: rejections.clone(),
                life: life.clone(),
                wake_fd: WakeFd::new(life)?,
                pass,
                unconfirmed: PendingConnections::new(CONFIRMATIONS)?,
                others: Vec::new(),
            })
        };
        made().map_err(MigrationError::opening)
    }

    pub(crate) fn listener(&self) -> &'a Listener {
        self.admission.listener()
    }

    pub(crate) fn now(&self) -> Instant {
        self.life.now()
    }

    /// Returns true if a pending connection was accepted less than `time` ago.
    pub(crate) fn has_unidentified(&self, time: Duration) -> bool {
        let now = self.life.now();
        let mut since = self.admission.since();
        since.any(|since| now.saturating_duration_since(since) < time)
    }

    /// Returns an accepted connection, without regard to its first bytes. Returns `None` if there is none after one wait of up
    /// to `wait`.
    ///
    /// # Errors
    /// The system's error if it cannot wait or accept.
    pub(crate) fn take_any(&mut self, wait: Duration) -> io::Result<Option<Stream>> {
        self.drop_late();
        if let Some(one) = self.take_first(|_| true) {
            return Ok(Some(one.stream));
        }
        self.wait(Vec::with_capacity(4), wait)?;
        self.accept()?;
        // If a token is required, a connection that does not begin with it is rejected.
        while self.pass.is_some()
            && let Some(number) = self.admission.pending.next_ready()
        {
            self.poll(number, None, &mut Vec::new());
            let one = self.admission.pending.get(number);
            if one.is_some_and(|one| one.has_passed) {
                // The caller reads the next bytes of this connection.
                break;
            }
        }
        Ok(self.take_first(|_| true).map(|one| one.stream))
    }

    /// Takes the first pending connection for which `fits` is true. If a token is required, the connection must have sent it.
    /// Returns `None` if there is no such connection.
    fn take_first(&mut self, fits: impl Fn(&Stream) -> bool) -> Option<Admitted> {
        let is_it = |one: &Admitted, _| one.has_passed && fits(&one.stream);
        let first = self.admission.pending.take_first(is_it);
        first.map(|(one, _)| one)
    }

    /// Takes an accepted connection from `host` on which nothing was sent. Returns `None` if there is none.
    pub(crate) fn take_silent(&mut self, host: &Host) -> Option<Stream> {
        let is_silent = |stream: &Stream| {
            let has_sent_nothing = matches!(stream.peek(&mut [0]), Ok(None));
            has_sent_nothing && !stream.is_hung_up() && host.is_at_the_end_of(stream)
        };
        self.take_first(is_silent).map(|one| one.stream)
    }

    /// Waits, for at most `wait`, for an event on the listener, on a pending connection or on `watched`, or for a change of the
    /// lifetime. Answers queries about the migration `asked`. Returns the classified connections, and true if `watched` had an
    /// event. Each entry of `watched` has the poll flags of its event.
    ///
    /// # Errors
    /// The system's error if it cannot wait.
    pub(crate) fn step(
        &mut self,
        wait: Duration,
        watched: &[(&Stream, PollFlags)],
        asked: Option<&QuerySubject<'_>>,
    ) -> io::Result<(Vec<Admitted>, bool)> {
        self.drop_late();
        let mut fds = Vec::with_capacity(watched.len() + 5);
        let watched = watched.iter();
        fds.extend(watched.map(|(stream, flags)| PollFd::new(*stream, *flags)));
        let on_watched = self.wait(fds, wait)?;
        while let Some(number) = self.unconfirmed.next_ready() {
            self.receive(number, asked);
        }
        let mut arrivals = Vec::new();
        // In the order of arrival, because the first connection of a migration determines the host of all later connections.
        while let Some(number) = self.admission.pending.next_ready() {
            self.poll(number, asked, &mut arrivals);
        }
        self.accept()?;
        Ok((arrivals, on_watched))
    }

    /// Waits, for at most `wait`, for an event on the listener, on a pending connection or on `watched`. Returns true if
    /// `watched` had an event.
    fn wait<'w>(&'w self, mut watched: Vec<PollFd<'w>>, wait: Duration) -> io::Result<bool> {
        let count = watched.len();
        let now = self.life.now();
        let here = self
            .admission
            .polled(now)
            .chain([self.unconfirmed.polled()]);
        watched.extend(here.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let wait = self
            .unconfirmed
            .shortened(self.admission.shortened(wait, now), now);
        self.wake_fd.poll(&mut watched, wait)?;
        let mut watched = watched[..count].iter();
        Ok(watched.any(|fd| !fd.revents().is_empty()))
    }

    /// Accepts new connections, and admits connections whose TLS handshake is complete.
    fn accept(&mut self) -> io::Result<()> {
        let needs_pass = self.pass.is_some();
        let enter = |mut one: Admitted| {
            one.has_passed |= !needs_pass;
            one
        };
        for entered in self.admission.accept(self.life.now(), enter)? {
            match entered {
                Rejected::Refused(refused) => self.rejections.reject(&error_line(&refused)),
                Rejected::Replaced(_) => self.rejections.reject("too many waiting connections"),
            }
        }
        Ok(())
    }

    /// Drops connections that have not identified themselves in time.
    fn drop_late(&mut self) {
        let now = self.life.now();
        while self.admission.pending.take_late(now).is_some() {
            self.rejections
                .reject("a connection that sent no complete opening in time");
        }
        while self.unconfirmed.take_late(now).is_some() {}
    }

    /// Classifies a pending connection by its first bytes, as soon as enough bytes have arrived.
    fn poll(
        &mut self,
        number: u64,
        asked: Option<&QuerySubject<'_>>,
        arrivals: &mut Vec<Admitted>,
    ) {
        let pending = &mut self.admission.pending;
        let Some(one) = pending.get(number) else {
            return;
        };
        let head = one.classify();
        if head == ConnectionClass::Partial {
            return;
        }
        let shows_pass =
            !one.has_passed && self.pass.as_ref().is_some_and(|it| it.is_presented_by(one));
        if shows_pass && one.consume_token() {
            return pending.recheck(number);
        }
        let Some((one, _)) = pending.remove(number) else {
            return;
        };
        let why = match head {
            ConnectionClass::Main
            | ConnectionClass::Resumed
            | ConnectionClass::Channel(_)
            | ConnectionClass::OtherVersion(_)
                if one.has_passed =>
            {
                return arrivals.push(one);
            }
            ConnectionClass::Main
            | ConnectionClass::Resumed
            | ConnectionClass::Channel(_)
            | ConnectionClass::OtherVersion(_) => "a connection without this migration's token",
            ConnectionClass::Token(token)
                if asked.is_some_and(|asked| asked.id.0 == token) && one.take_token() =>
            {
                return arrivals.push(one);
            }
            ConnectionClass::Token(_) => "a connection with another migration's token",
            ConnectionClass::Question(id) => return self.reply(one.stream, MigrationId(id), asked),
            ConnectionClass::Hello => NO_STREAM,
            ConnectionClass::Other(why) | ConnectionClass::Gone(why) => why,
            ConnectionClass::Partial => return,
        };
        self.rejections.reject(why);
    }

    /// Answers a query about the migration `id`. The answer is "unknown" unless `id` is the migration `asked`.
    fn reply(&mut self, stream: Stream, id: MigrationId, asked: Option<&QuerySubject<'_>>) {
        let (outcome, doing) = match asked {
            Some(asked) if asked.id == id => {
                let outcome = asked.destination_handover.ask();
                if outcome == Outcome::Never {
                    (asked.refuse)();
                }
                (outcome, asked.destination_handover.activity())
            }
            _ => (Outcome::Unknown, GuestActivity::Unknown),
        };
        let mut question = [0; QUESTION_LEN];
        let unconfirmed = (&stream)
            .read_exact(&mut question)
            .and_then(|()| stream.set_timeouts(ANSWERING))
            .and_then(|()| (&stream).write_all(&answer(id, outcome, doing)));
        if unconfirmed.is_ok() {
            // The connection is dropped if too many connections are pending.
            let _ = self.unconfirmed.enter(stream, self.life.now());
        }
    }

    /// Reads from a peer that has received an outcome: the peer confirms the outcome, or closes the connection.
    fn receive(&mut self, number: u64, asked: Option<&QuerySubject<'_>>) {
        let mut bytes = [0; CONFIRMATION_LEN];
        let stream = self.unconfirmed.get(number);
        let seen = stream.map(|stream| stream.peek(&mut bytes));
        let complete = matches!(seen, Some(Ok(Some(CONFIRMATION_LEN))));
        if complete
            && let Some(asked) = asked
            && bytes == confirmation(asked.id)
        {
            asked.destination_handover.record_confirmation();
        }
        if complete || !matches!(seen, Some(Ok(Some(1..) | None))) {
            self.unconfirmed.remove(number);
        }
    }

    /// Keeps connections for the next migration at this listener.
    pub(crate) fn keep(&mut self, arrivals: Vec<Admitted>) {
        let room = CHANNELS.saturating_sub(self.others.len());
        // A connection whose token was consumed belongs to this migration.
        let arrivals = arrivals.into_iter();
        let mut others = arrivals.filter(|one| !matches!(one.head(), ConnectionClass::Token(_)));
        self.others.extend(others.by_ref().take(room));
        for _ in others {
            self.rejections.reject("too many waiting connections");
        }
    }
}

impl Drop for AcceptLoop<'_> {
    fn drop(&mut self) {
        while let Some(one) = self.take_first(|_| true) {
            self.others.push(one);
        }
        let listener = self.admission.listener();
        self.others.drain(..).for_each(|one| listener.put_back(one));
    }
}

#[cfg(test)]
mod tests;
