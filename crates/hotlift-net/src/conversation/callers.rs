//! Clients of a listener that have not sent a complete request. All are read concurrently, so that a silent client cannot block
//! others.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::{error_line, wait_readable};
use hotlift_tls::Tls;

use super::{Conversation, ConversationError};
use crate::admission::limits::CALLERS;
use crate::admission::{Admission, Listener, Rejected};

/// Delay after an accept failed.
const RETRY: Duration = Duration::from_millis(50);

/// Function that reads a client's request without waiting. Returns `None` if the request is incomplete.
pub type ReadRequest<'a, T> =
    &'a mut dyn FnMut(&mut Conversation) -> Result<Option<T>, ConversationError>;

/// Function that receives the reasons why connections failed or were refused.
pub type ReportFailure<'a> = &'a (dyn Fn(&str) + Sync);

/// Clients of a listener that have not sent a complete request.
pub struct Callers<'a> {
    admission: Admission<'a, Conversation>,
    /// Clients that were replaced by newer ones.
    left: Vec<Conversation>,
    report_failure: ReportFailure<'a>,
}

/// Reason why a client was dropped without a request.
#[derive(Debug, thiserror::Error)]
pub enum DropReason {
    /// The client sent no complete request in time.
    #[error(
        "the client sent no complete request within {waited:?}; it may be stopped, or the path drops full-size packets (check \
         the MTU)"
    )]
    Silent {
        /// Time since the client connected.
        waited: Duration,
    },
    /// Too many clients are pending, and this one was the oldest.
    #[error("too many pending connections (limit {most}); closed the oldest idle one")]
    Crowd {
        /// Maximum number of pending clients.
        most: usize,
    },
    /// The conversation with the client failed.
    #[error(transparent)]
    Conversation(#[from] ConversationError),
}

/// A client with its complete request, or with the reason why it was dropped.
pub struct Call<T> {
    /// The conversation with the client.
    pub conversation: Conversation,
    /// The request, or the reason why there is none.
    pub request: Result<T, DropReason>,
}

impl<'a> Callers<'a> {
    /// Starts without clients. With `tls`, only clients with a certificate are admitted. `report_failure` receives the reason
    /// of each refusal.
    ///
    /// # Errors
    /// If the system has no file descriptors left.
    pub fn new(
        listener: &'a Listener,
        tls: Option<Arc<Tls>>,
        report_failure: ReportFailure<'a>,
    ) -> io::Result<Self> {
        Ok(Self {
            admission: Admission::new(listener, tls, CALLERS)?,
            left: Vec::new(),
            report_failure,
        })
    }

    /// Returns the next client with its request, or with the reason why it was dropped. Waits up to `time` (`None`: no limit)
    /// for a connection or for bytes, or until one of `others` is readable. Returns `None` if no request is complete.
    /// `read_request` reads a request.
    pub fn next<T>(
        &mut self,
        time: Option<Duration>,
        others: &[BorrowedFd<'_>],
        read_request: ReadRequest<'_, T>,
    ) -> Option<Call<T>> {
        self.wait(time.unwrap_or(Duration::MAX), others);
        if let Some(call) = self.read_request(read_request) {
            return Some(call);
        }
        if let Some(conversation) = self.admission.pending.take_late(Instant::now()) {
            let waited = CALLERS.max_wait;
            let request = Err(DropReason::Silent { waited });
            return Some(Call {
                conversation,
                request,
            });
        }
        self.accept();
        let conversation = self.left.pop()?;
        let request = Err(DropReason::Crowd { most: CALLERS.most });
        Some(Call {
            conversation,
            request,
        })
    }

    /// Returns a client that has sent a complete request, or whose conversation failed; `None` if there is none.
    fn read_request<T>(&mut self, read_request: ReadRequest<'_, T>) -> Option<Call<T>> {
        let pending = &mut self.admission.pending;
        loop {
            let number = pending.next_ready()?;
            let conversation = pending.get(number)?;
            let buffered_len = conversation.buffered_len();
            let request = match read_request(conversation) {
                Ok(Some(request)) => Ok(request),
                Ok(None) => {
                    if conversation.buffered_len() != buffered_len {
                        pending.recheck(number);
                    }
                    continue;
                }
                Err(error) => Err(error.into()),
            };
            let (conversation, _) = pending.remove(number)?;
            return Some(Call {
                conversation,
                request,
            });
        }
    }

    /// Waits for a connection, for bytes, for `time`, or until one of `others` is readable.
    fn wait(&self, time: Duration, others: &[BorrowedFd<'_>]) {
        let now = Instant::now();
        let polled = self.admission.polled(now).chain(others.iter().copied());
        let time = match self.left.is_empty() {
            true => self.admission.shortened(time, now),
            false => Duration::ZERO,
        };
        // If the sum overflows, the wait has no limit.
        wait_readable(&polled.collect::<Vec<_>>(), now.checked_add(time));
    }

    fn accept(&mut self) {
        match (self.admission).accept(Instant::now(), |one| Conversation::new(one.stream)) {
            Ok(rejected) => {
                for entered in rejected {
                    match entered {
                        Rejected::Replaced(conversation) => self.left.push(conversation),
                        Rejected::Refused(refused) => (self.report_failure)(&error_line(&refused)),
                    }
                }
            }
            // Either one connection failed, or no file descriptor is left. Pending clients are kept.
            Err(error) => {
                (self.report_failure)(&error_line(&error));
                thread::sleep(RETRY);
            }
        }
    }
}
