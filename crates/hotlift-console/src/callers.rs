//! Those who have connected and have not said yet what they want: heard all at once, so that one who says nothing holds up
//! nobody.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hotlift::Listener;
use hotlift::error::error_line;
use hotlift::tls::Tls;
use hotlift::transport::Acceptor;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::conversation::{Conversation, ConversationError};
use crate::error::ConsoleError;
use crate::signals::TICK;

/// How long one who has connected may take to say what he wants.
const HELLO: Duration = Duration::from_secs(10);

/// Most that are heard at once. For one more the one who has waited longest is sent away: whoever has something to say
/// says it at once.
const MOST: usize = 64;

/// Takes what one who has connected says, without waiting; `None` if that is not enough.
pub type Hear<'a, T> = &'a mut dyn FnMut(&mut Conversation) -> Result<Option<T>, ConversationError>;

/// Told why a connection could not be taken.
pub type Complain<'a> = &'a (dyn Fn(&str) + Sync);

/// Who has connected to a listener.
pub struct Callers<'a> {
    acceptor: Acceptor<'a>,
    waiting: VecDeque<Caller>,
    complain: Complain<'a>,
}

struct Caller {
    conversation: Conversation,
    deadline: Instant,
}

/// One who has said what he wants, or will not.
pub struct Call<T> {
    /// What he is spoken with over.
    pub conversation: Conversation,
    /// What he wants.
    pub said: Result<T, ConsoleError>,
}

impl<'a> Callers<'a> {
    /// Nobody yet. With `tls`, only who has a certificate is heard. `complain` is told of each who was not let in.
    ///
    /// # Errors
    /// The system gives no file descriptors.
    pub fn new(
        listener: &'a Listener,
        tls: Option<Arc<Tls>>,
        complain: Complain<'a>,
    ) -> Result<Self, ConsoleError> {
        let acceptor = Acceptor::new(listener, tls);
        Ok(Self {
            acceptor: acceptor.map_err(|source| ConsoleError::Process {
                what: "listener",
                source,
            })?,
            waiting: VecDeque::new(),
            complain,
        })
    }

    /// The next call, by `hear`; `None` if there is none within `time` (without end if there is none), or if one of `others`
    /// is readable.
    pub fn next<T>(
        &mut self,
        time: Option<Duration>,
        others: &[BorrowedFd<'_>],
        hear: Hear<'_, T>,
    ) -> Option<Call<T>> {
        let (is_called, speaks) = self.wait(time, others);
        let now = Instant::now();
        let heard = (0..self.waiting.len()).find_map(|index| {
            let caller = &mut self.waiting[index];
            let said = match speaks[index] {
                true => hear(&mut caller.conversation),
                false => Ok(None),
            };
            let said = match said {
                Ok(Some(said)) => Ok(said),
                Ok(None) if now < caller.deadline => return None,
                Ok(None) => Err(ConsoleError::Silent { waited: HELLO }),
                Err(error) => Err(error.into()),
            };
            Some((index, said))
        });
        if let Some((index, said)) = heard {
            return self.take(index, said);
        }
        if is_called {
            self.accept();
        }
        let is_one_too_many = self.waiting.len() > MOST;
        is_one_too_many.then(|| self.take(0, Err(ConsoleError::Crowd { most: MOST })))?
    }

    /// Waits: whether somebody connects, and who of those that are here says something.
    fn wait(&self, time: Option<Duration>, others: &[BorrowedFd<'_>]) -> (bool, Vec<bool>) {
        let decrypted = self.waiting.iter().map(|it| it.conversation.has_received());
        let decrypted: Vec<bool> = decrypted.collect();
        let at_once = self.acceptor.is_ready() || decrypted.contains(&true);
        let callers = self.waiting.iter();
        let callers = callers.map(|caller| PollFd::new(&caller.conversation, PollFlags::IN));
        let mut polled: Vec<_> = callers.collect();
        let called = self.acceptor.polled();
        polled.extend(called.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let called = polled.len();
        let others = others.iter().copied();
        polled.extend(others.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let now = Instant::now();
        let deadlines = self.waiting.iter().map(|caller| caller.deadline);
        let deadlines = deadlines.map(|deadline| deadline.saturating_duration_since(now));
        // A handshake that has to give way is found by looking.
        let look = (!self.acceptor.has_room()).then_some(TICK);
        let time = match at_once {
            true => Some(Duration::ZERO),
            false => deadlines.chain(time).chain(look).min(),
        };
        // Of times that are in range. A signal ends the wait early.
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        let _ = poll(&mut polled, time.as_ref());
        let ready = polled[..called].iter().map(|one| !one.revents().is_empty());
        let ready: Vec<bool> = ready.collect();
        let (speaks, called) = ready.split_at(decrypted.len());
        let speaks = speaks.iter().zip(decrypted);
        (
            self.acceptor.is_ready() || called.contains(&true),
            speaks
                .map(|(polled, decrypted)| *polled || decrypted)
                .collect(),
        )
    }

    fn take<T>(&mut self, index: usize, said: Result<T, ConsoleError>) -> Option<Call<T>> {
        let caller = self.waiting.remove(index)?;
        Some(Call {
            conversation: caller.conversation,
            said,
        })
    }

    fn accept(&mut self) {
        let accepted = match self.acceptor.take() {
            Ok(accepted) => accepted,
            // Of one connection, or for want of descriptors: neither is an end of the others.
            Err(error) => {
                (self.complain)(&error_line(&error));
                thread::sleep(TICK);
                return;
            }
        };
        for (stream, _) in accepted {
            match stream {
                Ok(stream) => self.waiting.push_back(Caller {
                    conversation: Conversation::new(stream),
                    deadline: Instant::now() + HELLO,
                }),
                Err(refused) => (self.complain)(&error_line(&refused)),
            }
        }
    }
}
