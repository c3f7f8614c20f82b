//! Pending connections that have sent no complete request. All are read concurrently, so that a silent client cannot block
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

/// Delay after a connection could not be accepted.
const RETRY: Duration = Duration::from_millis(50);

/// Reads a caller's request without waiting; `None` if it is incomplete.
pub type ReadRequest<'a, T> =
    &'a mut dyn FnMut(&mut Conversation) -> Result<Option<T>, ConversationError>;

/// Receives the reasons of failed or refused connections.
pub type ReportFailure<'a> = &'a (dyn Fn(&str) + Sync);

/// Callers of a listener.
pub struct Callers<'a> {
    admission: Admission<'a, Conversation>,
    /// Callers that were replaced by newer ones.
    left: Vec<Conversation>,
    report_failure: ReportFailure<'a>,
}

/// Reason for dropping a caller without its request.
#[derive(Debug, thiserror::Error)]
pub enum DropReason {
    /// The client sent no request.
    #[error(
        "the client sent no complete request within {waited:?}: it may be stopped, or the path drops full-size packets (check \
         the MTU)"
    )]
    Silent {
        /// Time since its connection.
        waited: Duration,
    },
    /// Too many callers.
    #[error("too many pending connections (limit {most}); closed the oldest idle one")]
    Crowd {
        /// Limit of pending callers.
        most: usize,
    },
    /// The conversation failed.
    #[error(transparent)]
    Conversation(#[from] ConversationError),
}

/// A caller with its request, or the error.
pub struct Call<T> {
    /// The conversation with the caller.
    pub conversation: Conversation,
    /// The request.
    pub request: Result<T, DropReason>,
}

impl<'a> Callers<'a> {
    /// Creates it without callers. With `tls`, only clients with a certificate are admitted. `report_failure` receives each
    /// refusal.
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

    /// Waits for a connection, for bytes, or until one of `others` is readable, up to `time` (`None`: no limit). Returns the
    /// next call, read by `read_request`, or `None` if there is none yet.
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
        if let Some(conversation) = self.admission.room.take_late(Instant::now()) {
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

    /// Returns the first caller with a complete request or an error.
    fn read_request<T>(&mut self, read_request: ReadRequest<'_, T>) -> Option<Call<T>> {
        let room = &mut self.admission.room;
        loop {
            let number = room.next_ready()?;
            let conversation = room.get(number)?;
            let begun = conversation.begun();
            let request = match read_request(conversation) {
                Ok(Some(request)) => Ok(request),
                Ok(None) => {
                    if conversation.begun() != begun {
                        room.recheck(number);
                    }
                    continue;
                }
                Err(error) => Err(error.into()),
            };
            let (conversation, _) = room.remove(number)?;
            return Some(Call {
                conversation,
                request,
            });
        }
    }

    /// Waits for a new connection or for bytes.
    fn wait(&self, time: Duration, others: &[BorrowedFd<'_>]) {
        let now = Instant::now();
        let polled = self.admission.polled(now).chain(others.iter().copied());
        let time = match self.left.is_empty() {
            true => self.admission.shortened(time, now),
            false => Duration::ZERO,
        };
        // If the sum overflows, there is no limit.
        wait_readable(&polled.collect::<Vec<_>>(), now.checked_add(time));
    }

    fn accept(&mut self) {
        match (self.admission).accept(Instant::now(), |one| Conversation::new(one.stream)) {
            Ok(not_in) => {
                for entered in not_in {
                    match entered {
                        Rejected::Left(conversation) => self.left.push(conversation),
                        Rejected::Refused(refused) => (self.report_failure)(&error_line(&refused)),
                    }
                }
            }
            // Only one connection failed, or no descriptor is left: the other callers are kept.
            Err(error) => {
                (self.report_failure)(&error_line(&error));
                thread::sleep(RETRY);
            }
        }
    }
}
