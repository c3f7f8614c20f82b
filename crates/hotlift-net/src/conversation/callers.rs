//! Those who have connected and not said yet what they want: heard all at once, so that one who says nothing holds up
//! nobody.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::{error_line, wait_readable};
use hotlift_tls::Tls;

use super::{Conversation, ConversationError};
use crate::admission::limits::CALLERS;
use crate::admission::{Admission, Entered, Listener};

/// After a connection that could not be accepted.
const RETRY: Duration = Duration::from_millis(50);

/// Takes what one who has connected says, without waiting; `None` if that is not enough.
pub type Hear<'a, T> = &'a mut dyn FnMut(&mut Conversation) -> Result<Option<T>, ConversationError>;

/// Told why a connection could not be taken.
pub type Complain<'a> = &'a (dyn Fn(&str) + Sync);

/// Who has connected to a listener.
pub struct Callers<'a> {
    admission: Admission<'a, Conversation>,
    /// Those who have left for others.
    left: Vec<Conversation>,
    complain: Complain<'a>,
}

/// Why one who has connected is not heard.
#[derive(Debug, thiserror::Error)]
pub enum Unheard {
    /// A client without a request.
    #[error(
        "the client sent no complete request within {waited:?}: it may be stopped, or the path drops packets of the full size \
         (check the MTU)"
    )]
    Silent {
        /// Time since it has connected.
        waited: Duration,
    },
    /// Too many have connected.
    #[error("too many pending connections (limit {most}); closed the oldest idle one")]
    Crowd {
        /// How many may wait.
        most: usize,
    },
    /// The conversation has ended.
    #[error(transparent)]
    Conversation(#[from] ConversationError),
}

/// One who has said what he wants, or will not.
pub struct Call<T> {
    /// What he is spoken with over.
    pub conversation: Conversation,
    /// What he wants.
    pub said: Result<T, Unheard>,
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
    ) -> io::Result<Self> {
        Ok(Self {
            admission: Admission::new(listener, tls, CALLERS)?,
            left: Vec::new(),
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
        self.wait(time.unwrap_or(Duration::MAX), others);
        if let Some(call) = self.hear(hear) {
            return Some(call);
        }
        if let Some(conversation) = self.admission.room.take_late(Instant::now()) {
            let waited = CALLERS.patience;
            let said = Err(Unheard::Silent { waited });
            return Some(Call { conversation, said });
        }
        self.accept();
        let conversation = self.left.pop()?;
        let said = Err(Unheard::Crowd { most: CALLERS.most });
        Some(Call { conversation, said })
    }

    /// The first of those who have said something that is enough.
    fn hear<T>(&mut self, hear: Hear<'_, T>) -> Option<Call<T>> {
        let room = &mut self.admission.room;
        loop {
            let number = room.next_news()?;
            let conversation = room.get(number)?;
            let begun = conversation.begun();
            let said = match hear(conversation) {
                Ok(Some(said)) => Ok(said),
                Ok(None) => {
                    if conversation.begun() != begun {
                        room.look_again(number);
                    }
                    continue;
                }
                Err(error) => Err(error.into()),
            };
            let (conversation, _) = room.remove(number)?;
            return Some(Call { conversation, said });
        }
    }

    /// Waits until somebody connects or says something.
    fn wait(&self, time: Duration, others: &[BorrowedFd<'_>]) {
        let now = Instant::now();
        let polled = self.admission.polled(now).chain(others.iter().copied());
        let time = match self.left.is_empty() {
            true => self.admission.shortened(time, now),
            false => Duration::ZERO,
        };
        // A time that does not fit is as good as none.
        wait_readable(&polled.collect::<Vec<_>>(), now.checked_add(time));
    }

    fn accept(&mut self) {
        match (self.admission).accept(Instant::now(), |one| Conversation::new(one.stream)) {
            Ok(not_in) => {
                for entered in not_in {
                    match entered {
                        Entered::Left(conversation) => self.left.push(conversation),
                        Entered::Refused(refused) => (self.complain)(&error_line(&refused)),
                    }
                }
            }
            // Of one connection, or for want of descriptors: neither is an end of the others.
            Err(error) => {
                (self.complain)(&error_line(&error));
                thread::sleep(RETRY);
            }
        }
    }
}
