//! Those who have connected to `serve` and have not said yet what they want: heard all at once, so that one who says
//! nothing holds up nobody.

use std::collections::VecDeque;
use std::net::{IpAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use hotlift::Listener;
use hotlift::transport::Stream;
use hotlift_console::conversation::{Conversation, ConversationError};
use hotlift_console::error::{ConsoleError, error_line};
use hotlift_console::output::complain;
use hotlift_console::signals::TICK;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::CommandError;
use crate::peer::Opening;

/// How long one who has connected may take to say what he wants.
const HELLO: Duration = Duration::from_secs(10);

/// Most that are heard at once. For one more the one who has waited longest is sent away: whoever has something to say
/// says it at once.
const MOST: usize = 64;

/// Who has connected to a listener.
pub struct Callers<'a> {
    listener: &'a Listener,
    waiting: VecDeque<Caller>,
    /// Why no connection could be taken, as it was last said.
    trouble: String,
}

struct Caller {
    conversation: Conversation,
    /// The same connection.
    stream: TcpStream,
    here: IpAddr,
    deadline: Instant,
}

/// One who has said what he wants, or will not.
pub struct Call {
    pub conversation: Conversation,
    /// The address that he has connected to.
    pub here: IpAddr,
    pub opening: Result<Opening, CommandError>,
}

impl<'a> Callers<'a> {
    /// Nobody yet.
    pub fn new(listener: &'a Listener) -> Self {
        Self {
            listener,
            waiting: VecDeque::new(),
            trouble: String::new(),
        }
    }

    /// The next call, or `None` if there is none within a tick.
    pub fn next(&mut self) -> Option<Call> {
        let (is_called, speaks) = self.wait();
        let now = Instant::now();
        let heard = (0..self.waiting.len()).find_map(|index| {
            let caller = &mut self.waiting[index];
            let opening = match speaks[index] {
                true => Opening::hear(&mut caller.conversation, Duration::ZERO),
                false => Ok(None),
            };
            let opening = match opening {
                Ok(Some(opening)) => Ok(opening),
                Ok(None) if now < caller.deadline => return None,
                Ok(None) => Err(ConsoleError::Silent { waited: HELLO }.into()),
                Err(error) => Err(error.into()),
            };
            Some((index, opening))
        });
        if let Some((index, opening)) = heard {
            return self.take(index, opening);
        }
        if is_called {
            match self.accept() {
                Ok(Some(caller)) => self.waiting.push_back(caller),
                Ok(None) => {}
                // Of one connection, or for want of descriptors: neither is an end of the others.
                Err(error) => {
                    let trouble = error_line(&error);
                    if trouble != self.trouble {
                        complain!("hotlift: a connection was not taken: {trouble}");
                        self.trouble = trouble;
                    }
                    thread::sleep(TICK);
                }
            }
        }
        let is_one_too_many = self.waiting.len() > MOST;
        is_one_too_many.then(|| self.take(0, Err(CommandError::Crowd { most: MOST })))?
    }

    /// Waits for a tick: whether somebody connects, and who of those that are here says something.
    fn wait(&self) -> (bool, Vec<bool>) {
        let mut polled = vec![PollFd::new(self.listener, PollFlags::IN)];
        let callers = self.waiting.iter();
        polled.extend(callers.map(|caller| PollFd::new(&caller.stream, PollFlags::IN)));
        // Of a constant that is in range. A signal ends the tick early.
        let tick = Timespec::try_from(TICK).ok();
        let _ = poll(&mut polled, tick.as_ref());
        let mut ready = polled.iter().map(|one| !one.revents().is_empty());
        (ready.next().unwrap_or_default(), ready.collect())
    }

    fn take(&mut self, index: usize, opening: Result<Opening, CommandError>) -> Option<Call> {
        let caller = self.waiting.remove(index)?;
        Some(Call {
            conversation: caller.conversation,
            here: caller.here,
            opening,
        })
    }

    fn accept(&self) -> Result<Option<Caller>, ConversationError> {
        let Some(Stream::Tcp(stream)) = self.listener.accept(Duration::ZERO)? else {
            return Ok(None);
        };
        Ok(Some(Caller {
            here: stream.local_addr()?.ip(),
            conversation: Conversation::new(stream.try_clone()?)?,
            stream,
            deadline: Instant::now() + HELLO,
        }))
    }
}
