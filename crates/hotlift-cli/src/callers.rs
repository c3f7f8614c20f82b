//! Those who have connected to `serve` and have not said yet what they want: heard all at once, so that one who says
//! nothing holds up nobody.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hotlift::Listener;
use hotlift::tls::Tls;
use hotlift::transport::Acceptor;
use hotlift_console::conversation::Conversation;
use hotlift_console::error::{ConsoleError, error_line};
use hotlift_console::output::complain;
use hotlift_console::signals::TICK;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::CommandError;
use crate::peer::Hello;

/// How long one who has connected may take to say what he wants.
const HELLO: Duration = Duration::from_secs(10);

/// Most that are heard at once. For one more the one who has waited longest is sent away: whoever has something to say
/// says it at once.
const MOST: usize = 64;

/// Who has connected to a listener.
pub struct Callers<'a> {
    acceptor: Acceptor<'a>,
    waiting: VecDeque<Caller>,
    /// Why no connection could be taken, as it was last said.
    trouble: String,
}

struct Caller {
    conversation: Conversation,
    deadline: Instant,
}

/// One who has said what he wants, or will not.
pub struct Call {
    pub conversation: Conversation,
    pub hello: Result<Hello, CommandError>,
}

impl<'a> Callers<'a> {
    /// Nobody yet. With `tls`, only who has a certificate is heard.
    ///
    /// # Errors
    /// The system gives no file descriptors.
    pub fn new(listener: &'a Listener, tls: Option<Arc<Tls>>) -> Result<Self, ConsoleError> {
        let acceptor = Acceptor::new(listener, tls);
        Ok(Self {
            acceptor: acceptor.map_err(|source| ConsoleError::Process {
                what: "listener",
                source,
            })?,
            waiting: VecDeque::new(),
            trouble: String::new(),
        })
    }

    /// The next call, or `None` if there is none within a tick.
    pub fn next(&mut self) -> Option<Call> {
        let (is_called, speaks) = self.wait();
        let now = Instant::now();
        let heard = (0..self.waiting.len()).find_map(|index| {
            let caller = &mut self.waiting[index];
            let hello = match speaks[index] {
                true => Hello::hear(&mut caller.conversation, Duration::ZERO),
                false => Ok(None),
            };
            let hello = match hello {
                Ok(Some(hello)) => Ok(hello),
                Ok(None) if now < caller.deadline => return None,
                Ok(None) => Err(ConsoleError::Silent { waited: HELLO }.into()),
                Err(error) => Err(error.into()),
            };
            Some((index, hello))
        });
        if let Some((index, hello)) = heard {
            return self.take(index, hello);
        }
        if is_called {
            self.accept();
        }
        let is_one_too_many = self.waiting.len() > MOST;
        is_one_too_many.then(|| self.take(0, Err(CommandError::Crowd { most: MOST })))?
    }

    /// Waits for a tick: whether somebody connects, and who of those that are here says something.
    fn wait(&self) -> (bool, Vec<bool>) {
        let decrypted = self.waiting.iter().map(|it| it.conversation.has_received());
        let decrypted: Vec<bool> = decrypted.collect();
        let at_once = self.acceptor.is_ready() || decrypted.contains(&true);
        let callers = self.waiting.iter();
        let callers = callers.map(|caller| PollFd::new(&caller.conversation, PollFlags::IN));
        let mut polled: Vec<_> = callers.collect();
        let called = self.acceptor.polled();
        polled.extend(called.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        // Of a constant that is in range. A signal ends the tick early.
        let tick = Timespec::try_from(if at_once { Duration::ZERO } else { TICK }).ok();
        let _ = poll(&mut polled, tick.as_ref());
        let ready = polled.iter().map(|one| !one.revents().is_empty());
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

    fn take(&mut self, index: usize, hello: Result<Hello, CommandError>) -> Option<Call> {
        let caller = self.waiting.remove(index)?;
        Some(Call {
            conversation: caller.conversation,
            hello,
        })
    }

    fn accept(&mut self) {
        let accepted = match self.acceptor.take() {
            Ok(accepted) => accepted,
            // Of one connection, or for want of descriptors: neither is an end of the others.
            Err(error) => {
                self.complain(&error);
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
                Err(refused) => self.complain(&refused),
            }
        }
    }

    /// Says why a connection was not taken, once as long as the reason stays.
    fn complain(&mut self, error: &dyn std::error::Error) {
        let trouble = error_line(error);
        if trouble != self.trouble {
            complain!("hotlift: a connection was not taken: {trouble}");
            self.trouble = trouble;
        }
    }
}
