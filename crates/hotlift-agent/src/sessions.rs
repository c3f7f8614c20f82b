//! All that the agent carries: what is under way, what waits for a place, and what it all came to.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::CarryError;
use crate::messages::{Id, Kind};
use crate::metrics::Totals;
use crate::session::{Direction, Session};

/// Sessions that have ended and are still shown.
const REMEMBERED: usize = 32;

/// Sessions at once: what one peer can make this host keep, a thread and some connections each.
const MOST: usize = 512;

/// How often one that waits for a place looks whether its source is still there.
const LOOK: Duration = Duration::from_millis(250);

/// All of them.
#[derive(Default)]
pub struct Sessions {
    all: Mutex<All>,
    changed: Condvar,
}

#[derive(Default)]
struct All {
    under_way: Vec<Arc<Session>>,
    /// The latest is last.
    ended: VecDeque<Arc<Session>>,
    /// Those that wait for a place; the first is served first.
    queue: VecDeque<Id>,
    /// Places that are taken.
    placed: u32,
    /// Nothing new is taken.
    is_ending: bool,
    totals: Totals,
}

/// A place among the migrations that may go on at once.
pub struct Place<'a>(&'a Sessions);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.lock().placed -= 1;
        self.0.changed.notify_all();
    }
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds one.
    ///
    /// # Errors
    /// If nothing new is taken, there are too many, or one has its id.
    pub fn add(&self, session: &Arc<Session>) -> Result<(), CarryError> {
        let mut all = self.lock();
        let subject = &session.subject;
        let is_there = |other: &Arc<Session>| {
            other.subject.id == subject.id && other.subject.direction == subject.direction
        };
        let refused = |reason: &str| CarryError::Refused {
            reason: reason.to_owned(),
        };
        if all.is_ending {
            return Err(CarryError::Ending);
        }
        if all.under_way.iter().any(is_there) {
            return Err(refused("a migration with this id is under way"));
        }
        if all.under_way.len() >= MOST {
            return Err(refused("too many migrations are under way"));
        }
        all.under_way.push(Arc::clone(session));
        self.changed.notify_all();
        Ok(())
    }

    /// It has ended.
    pub fn remove(&self, session: &Arc<Session>) {
        let mut all = self.lock();
        all.under_way.retain(|other| !Arc::ptr_eq(other, session));
        all.totals.add(session);
        if session.subject.kind == Kind::Migration {
            all.ended.push_back(Arc::clone(session));
            if all.ended.len() > REMEMBERED {
                all.ended.pop_front();
            }
        }
        self.changed.notify_all();
    }

    /// What is under way.
    #[must_use]
    pub fn under_way(&self) -> Vec<Arc<Session>> {
        self.lock().under_way.clone()
    }

    /// The last that have ended; the latest is last.
    #[must_use]
    pub fn ended(&self) -> Vec<Arc<Session>> {
        self.lock().ended.iter().cloned().collect()
    }

    /// What is under way and fits.
    pub fn find(&self, fits: impl Fn(&Session) -> bool) -> Option<Arc<Session>> {
        let all = self.lock();
        all.under_way.iter().find(|session| fits(session)).cloned()
    }

    /// What all that has ended came to.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.lock().totals.clone()
    }

    /// Counts something that is no session.
    pub fn count(&self, what: impl FnOnce(&mut Totals)) {
        what(&mut self.lock().totals);
    }

    /// Waits for a place among `most()` migrations, which is asked again when something has changed; 0 is unlimited.
    ///
    /// # Errors
    /// If the agent is to end, or the migration was cancelled, here or at its source.
    pub fn place(
        &self,
        session: &Session,
        most: impl Fn() -> u32,
    ) -> Result<Place<'_>, CarryError> {
        let id = session.subject.id;
        let mut all = self.lock();
        all.queue.push_back(id);
        loop {
            let most = most();
            let is_free = most == 0 || all.placed < most;
            let refused = if session.control.is_cancelled() {
                Some(CarryError::Cancelled)
            } else if all.is_ending {
                Some(CarryError::Ending)
            } else if session.is_deserted() {
                Some(CarryError::Deserted)
            } else {
                None
            };
            let is_next = all.queue.front() == Some(&id);
            if refused.is_some() || (is_free && is_next) {
                all.queue.retain(|other| *other != id);
                if let Some(error) = refused {
                    self.changed.notify_all();
                    return Err(error);
                }
                all.placed += 1;
                self.changed.notify_all();
                return Ok(Place(self));
            }
            if session.moment().state != "waiting" {
                session.enter("waiting");
            }
            let waited = self.changed.wait_timeout(all, LOOK);
            (all, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Nothing new is taken from now on.
    pub fn end(&self) {
        self.lock().is_ending = true;
        self.changed.notify_all();
    }

    /// Whether nothing new is taken.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.lock().is_ending
    }

    /// Looks again whether those that wait may go on: a limit or a migration was changed.
    pub fn wake(&self) {
        // With the lock that they look under.
        let _all = self.lock();
        self.changed.notify_all();
    }

    /// Waits until nothing is under way, for up to `time`; true if so.
    pub fn wait_until_empty(&self, time: Duration) -> bool {
        let all = self.lock();
        let is_busy = |all: &mut All| !all.under_way.is_empty();
        let waited = self.changed.wait_timeout_while(all, time, is_busy);
        let (all, _) = waited.unwrap_or_else(PoisonError::into_inner);
        all.under_way.is_empty()
    }

    /// Waits until an outgoing migration is under way; false once nothing new is taken and none is.
    pub fn wait_for_outgoing(&self) -> bool {
        let mut all = self.lock();
        loop {
            let is_outgoing = |session: &Arc<Session>| {
                session.subject.direction == Direction::Outgoing
                    && session.subject.kind == Kind::Migration
            };
            if all.under_way.iter().any(is_outgoing) {
                return true;
            }
            if all.is_ending {
                return false;
            }
            all = self
                .changed
                .wait(all)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{connection, session, subject, until};

    fn outgoing(id: u32) -> (Arc<Session>, hotlift::Listener) {
        session(subject(id, Direction::Outgoing, Kind::Migration))
    }

    #[test]
    fn a_migration_whose_source_goes_while_it_waits_for_a_place_ends() {
        let sessions = Sessions::default();
        let (first, _listener) = outgoing(1);
        let place = sessions.place(&first, || 1).unwrap();
        let (second, _listener) = outgoing(2);
        let (stream, source) = connection();
        second.give(stream).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| sessions.place(&second, || 1).err());
            until("it waits", || second.moment().state == "waiting");
            drop(source);
            until("it has ended", || waits.is_finished());
            let error = waits.join().unwrap();
            assert!(matches!(error, Some(CarryError::Deserted)), "{error:?}");
        });
        drop(place);
        let (third, _listener) = outgoing(3);
        assert!(sessions.place(&third, || 1).is_ok(), "it holds up nobody");
    }
}
