//! All sessions (migrations and tunnels) of the agent: running, waiting and ended ones, and their totals.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hotlift_mem::lock;

use crate::error::CarryError;
use crate::messages::{Id, Kind};
use crate::session::{Direction, Session, SessionInfo};
use crate::snapshot::State;
use crate::totals::Totals;

/// Number of ended migrations that are kept for queries.
const REMEMBERED: usize = 32;

/// Limit of concurrent outgoing sessions: each needs a thread and some connections.
const OUTGOING: usize = 512;

/// Limit of concurrent incoming sessions from all other hosts.
const INCOMING: usize = 512;

/// Limit of incoming sessions from one other host: it keeps slots free for other hosts. The value allows two sessions for each
/// of libvirt's migration ports, since disks are copied, too.
const OF_ONE_HOST: usize = 128;

/// Limit of connections from one host that wait for the message `Source` of that host's agent, which follows soon. The value
/// allows two migrations with the maximum of channels.
const MAX_WAITING_CONNECTIONS: usize = 512;

/// Interval at which a waiting migration checks its source. Polling is necessary: no event reports the end of a connection with
/// unread bytes.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// All sessions of the agent.
#[derive(Default)]
pub struct Sessions {
    all: Mutex<SessionTable>,
    changed: Condvar,
}

#[derive(Default)]
struct SessionTable {
    running: Vec<Arc<Session>>,
    /// Ended migrations, oldest first.
    ended: VecDeque<Arc<Session>>,
    slots: MigrationSlots,
    /// True if new sessions are refused.
    is_ending: bool,
    totals: Totals,
}

/// Limits the number of migrations that run at the same time; the others wait in a queue.
#[derive(Default)]
struct MigrationSlots {
    /// Waiting migrations, in order of arrival.
    queue: VecDeque<Id>,
    taken: u32,
}

impl MigrationSlots {
    /// Takes a slot for the migration `id` if this migration is first in the queue, and a slot is free. `most` is the number of
    /// slots; 0 is unlimited. Returns false if the migration must wait.
    fn take(&mut self, id: Id, most: u32) -> bool {
        let is_free = most == 0 || self.taken < most;
        let may = is_free && self.queue.front() == Some(&id);
        if may {
            self.leave(id);
            self.taken += 1;
        }
        may
    }

    /// Removes a migration from the queue.
    fn leave(&mut self, id: Id) {
        self.queue.retain(|other| *other != id);
    }
}

/// Slot of a running migration; the drop frees the slot.
pub struct SlotGuard<'a>(&'a Sessions);

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        self.0.lock().slots.taken -= 1;
        self.0.changed.notify_all();
    }
}

/// Checks that a session with the properties `subject` may start; `running` are the running sessions. Returns an error if the
/// agent is ending, a limit is reached, or the session's id is in use.
fn may_begin<'s>(
    subject: &SessionInfo,
    running: impl Iterator<Item = &'s SessionInfo>,
    is_ending: bool,
) -> Result<(), CarryError> {
    let refused = |reason: &str| {
        Err(CarryError::Refused {
            reason: reason.to_owned(),
        })
    };
    let (mut all, mut of_this_host, mut is_there) = (0, 0, false);
    for other in running.filter(|other| other.direction == subject.direction) {
        all += 1;
        of_this_host += usize::from(other.is_of_one_announcer(subject));
        is_there |= other.id == subject.id;
    }
    // Each connection of a tunnel arrives as a session, with the same id.
    let is_another = is_there && subject.kind == Kind::Tunnel;
    if is_ending && !is_another {
        return Err(CarryError::Ending);
    }
    if is_there && !is_another {
        return refused("a migration with this id already runs");
    }
    let is_incoming = subject.direction == Direction::Incoming;
    if all >= if is_incoming { INCOMING } else { OUTGOING } {
        return refused("too many running migrations");
    }
    if is_incoming && of_this_host >= OF_ONE_HOST {
        return refused("too many running migrations of this peer");
    }
    Ok(())
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, SessionTable> {
        lock(&self.all)
    }

    /// Adds a session to the running ones.
    ///
    /// # Errors
    /// If the agent is ending, a limit of sessions is reached, or the session's id is in use.
    pub fn add(&self, session: &Arc<Session>) -> Result<(), CarryError> {
        let mut all = self.lock();
        let subjects = all.running.iter().map(|other| &other.subject);
        may_begin(&session.subject, subjects, all.is_ending)?;
        all.running.push(Arc::clone(session));
        self.changed.notify_all();
        Ok(())
    }

    /// Returns true if one more connection of `session` may wait until the session opens. The limit applies to all sessions of
    /// the same host together.
    pub fn may_hold(&self, session: &Session) -> bool {
        let all = self.lock();
        let same = |other: &&Arc<Session>| other.subject.is_of_one_announcer(&session.subject);
        let held = all.running.iter().filter(same).map(|other| other.held());
        held.sum::<usize>() < MAX_WAITING_CONNECTIONS
    }

    /// Removes an ended session from the running sessions, and adds its traffic and outcome to the totals.
    pub fn remove(&self, session: &Arc<Session>) {
        let mut all = self.lock();
        all.running.retain(|other| !Arc::ptr_eq(other, session));
        all.totals.add(session);
        if session.subject.kind == Kind::Migration {
            all.ended.push_back(Arc::clone(session));
            if all.ended.len() > REMEMBERED {
                all.ended.pop_front();
            }
        }
        self.changed.notify_all();
    }

    /// Returns the running sessions, including those that wait for a slot.
    #[must_use]
    pub fn running(&self) -> Vec<Arc<Session>> {
        self.lock().running.clone()
    }

    /// Returns the last ended migrations, oldest first.
    #[must_use]
    pub fn ended(&self) -> Vec<Arc<Session>> {
        self.lock().ended.iter().cloned().collect()
    }

    /// Returns the first running session for which `fits` returns true.
    pub fn find(&self, fits: impl Fn(&Session) -> bool) -> Option<Arc<Session>> {
        let all = self.lock();
        all.running.iter().find(|session| fits(session)).cloned()
    }

    /// Returns the totals of all ended sessions.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.lock().totals.clone()
    }

    /// Returns the totals of ended sessions, and the running sessions. No session is in both, or in neither.
    pub fn snapshot(&self) -> (Totals, Vec<Arc<Session>>) {
        let all = self.lock();
        (all.totals.clone(), all.running.clone())
    }

    /// Changes the totals for an event outside of sessions.
    pub fn count(&self, what: impl FnOnce(&mut Totals)) {
        what(&mut self.lock().totals);
    }

    /// Waits until fewer than `most()` migrations run (0: unlimited), and takes a slot. Calls `most` again after each change.
    ///
    /// # Errors
    /// [`CarryError`] if the agent is ending, if the migration was cancelled, or if its source closed all connections.
    pub fn wait_for_slot(
        &self,
        session: &Session,
        most: impl Fn() -> u32,
    ) -> Result<SlotGuard<'_>, CarryError> {
        let id = session.subject.id;
        let mut all = self.lock();
        all.slots.queue.push_back(id);
        loop {
            let outcome = if session.control.is_cancelled() {
                Some(Err(CarryError::Cancelled))
            } else if all.is_ending {
                Some(Err(CarryError::Ending))
            } else if all.slots.take(id, most()) {
                // A free slot has precedence over `is_deserted`. Without a return path, QEMU closes its connections once the
                // kernel has the last byte, and a small VM fits into the socket buffers.
                Some(Ok(SlotGuard(self)))
            } else if session.is_deserted() {
                Some(Err(CarryError::Deserted))
            } else {
                None
            };
            if let Some(outcome) = outcome {
                all.slots.leave(id);
                self.changed.notify_all();
                return outcome;
            }
            session.enter(State::Waiting);
            let waited = self.changed.wait_timeout(all, POLL_INTERVAL);
            (all, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Refuses new sessions from now on, since the agent is ending.
    pub fn end(&self) {
        self.lock().is_ending = true;
        self.changed.notify_all();
    }

    /// Returns true if the agent is ending, and refuses new sessions.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.lock().is_ending
    }

    /// Wakes the threads in [`Self::wait_for_slot`]: a limit or a migration has changed.
    pub fn wake(&self) {
        // Holds the lock under which these threads check the change, so that no thread misses the wake-up.
        let _all = self.lock();
        self.changed.notify_all();
    }

    /// Waits for at most `time` until `condition` is true for the running sessions; returns true if it is.
    pub fn wait_until(&self, time: Duration, condition: impl Fn(&[Arc<Session>]) -> bool) -> bool {
        let all = self.lock();
        let is_not = |all: &mut SessionTable| !condition(&all.running);
        let waited = self.changed.wait_timeout_while(all, time, is_not);
        let (all, _) = waited.unwrap_or_else(PoisonError::into_inner);
        condition(&all.running)
    }

    /// Waits until a session shares the bandwidth. Returns false once the agent is ending and no session shares it.
    pub fn wait_for_budget_users(&self) -> bool {
        let mut all = self.lock();
        loop {
            if all.running.iter().any(|session| session.shares_budget()) {
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
    use crate::fixture::{admitted, becomes, fill, session, subject, until};

    fn outgoing(id: u32) -> (Arc<Session>, hotlift::Listener) {
        session(subject(id, Direction::Outgoing, Kind::Migration))
    }

    fn incoming(id: u32, kind: Kind, host: &str) -> (Arc<Session>, hotlift::Listener) {
        session(crate::session::SessionInfo {
            peer: host.to_owned(),
            ..subject(id, Direction::Incoming, kind)
        })
    }

    fn of_host(id: u32, host: &str) -> SessionInfo {
        SessionInfo {
            peer: host.to_owned(),
            ..subject(id, Direction::Incoming, Kind::Migration)
        }
    }

    #[test]
    fn one_host_cannot_take_the_slots_of_others_or_of_outgoing_migrations() {
        let mut running: Vec<SessionInfo> = Vec::new();
        let mut add = |subject: SessionInfo| {
            let may = may_begin(&subject, running.iter(), false).is_ok();
            running.extend(may.then_some(subject));
            may
        };
        let of_one = u32::try_from(OF_ONE_HOST).unwrap();
        let taken = (0..).take_while(|id| add(of_host(*id, "greedy"))).count();
        assert_eq!(taken, OF_ONE_HOST);
        assert!(add(of_host(of_one, "another")), "other hosts have theirs");
        let full = (of_one + 1..).take_while(|id| add(of_host(*id, &format!("host {id}"))));
        assert_eq!(full.count() + OF_ONE_HOST + 1, INCOMING);
        let leaves = |id| subject(id, Direction::Outgoing, Kind::Migration);
        let left = (0..).take_while(|id| add(leaves(*id)));
        assert_eq!(left.count(), OUTGOING, "this host has its own");
    }

    #[test]
    fn slots_are_given_in_order_and_never_exceed_the_limit() {
        for seed in 0..5000 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut slots = MigrationSlots::default();
            let (mut waits, mut most) = (VecDeque::new(), 2);
            for id in 0..60 {
                match rng.u8(0..8) {
                    0..3 => {
                        slots.queue.push_back(Id(id));
                        waits.push_back(Id(id));
                    }
                    // Any waiting migration may check at any time.
                    3..6 if !waits.is_empty() => {
                        let checked = waits[rng.usize(0..waits.len())];
                        let before = slots.taken;
                        let is_next = checked == waits[0] && (most == 0 || before < most);
                        assert_eq!(slots.take(checked, most), is_next, "seed {seed}");
                        assert_eq!(slots.taken, before + u32::from(is_next));
                        if is_next {
                            waits.pop_front();
                        }
                    }
                    // A cancel of a waiting migration.
                    6 if !waits.is_empty() => {
                        let left = waits.remove(rng.usize(0..waits.len())).unwrap();
                        slots.leave(left);
                        assert!(!slots.take(left, 0), "seed {seed}: it has gone");
                    }
                    7 => most = rng.u32(0..4),
                    _ => slots.taken = slots.taken.saturating_sub(1),
                }
            }
            // Each remaining migration gets a slot.
            most = 1;
            slots.taken = 0;
            while let Some(next) = waits.pop_front() {
                assert!(slots.take(next, most), "seed {seed}: {next} waits for ever");
                slots.taken -= 1;
            }
            assert!(slots.queue.is_empty(), "seed {seed}");
        }
    }

    #[test]
    fn the_number_of_pending_connections_of_one_host_is_limited() {
        let sessions = Sessions::default();
        let of = |id, host: &str| {
            let (session, listener) = incoming(id, Kind::Migration, host);
            sessions.add(&session).unwrap();
            (session, listener)
        };
        let all = [of(1, "greedy"), of(2, "greedy"), of(3, "another")];
        let mut others = Vec::new();
        for number in 0..MAX_WAITING_CONNECTIONS {
            assert!(sessions.may_hold(&all[0].0), "{number} wait");
            let (stream, other) = admitted();
            all[number % 2].0.deliver(stream).unwrap();
            others.push(other);
        }
        assert!(!sessions.may_hold(&all[0].0));
        assert!(sessions.may_hold(&all[2].0), "another host has its own");
        all[1].0.open();
        assert!(sessions.may_hold(&all[0].0), "those are accepted");
    }

    #[test]
    fn connections_of_a_tunnel_share_its_id_and_are_accepted_until_it_ends() {
        let sessions = Sessions::default();
        let add = |id, kind| sessions.add(&incoming(id, kind, "a.example").0);
        add(1, Kind::Tunnel).unwrap();
        add(1, Kind::Tunnel).unwrap();
        add(2, Kind::Migration).unwrap();
        assert!(add(2, Kind::Migration).is_err(), "a migration has one");
        sessions.end();
        add(1, Kind::Tunnel).unwrap();
        for kind in [Kind::Tunnel, Kind::Migration] {
            assert!(matches!(add(3, kind), Err(CarryError::Ending)));
        }
    }

    #[test]
    fn a_queued_migration_ends_when_its_source_disconnects() {
        let sessions = Sessions::default();
        let (first, _listener) = outgoing(1);
        let place = sessions.wait_for_slot(&first, || 1).unwrap();
        let (stream, source) = admitted();
        let (second, _listener) = session(crate::session::SessionInfo {
            to: source.peer_addr().unwrap(),
            ..subject(2, Direction::Outgoing, Kind::Migration)
        });
        // The kernel queues the FIN after unread bytes.
        fill(&source);
        second.deliver(stream).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| sessions.wait_for_slot(&second, || 1).err());
            until("it waits", || second.snapshot().state == State::Waiting);
            drop(source);
            becomes(|| waits.is_finished());
            // Without this cancel, the test would not end if the session missed the close.
            second.control.cancel();
            sessions.wake();
            let error = waits.join().unwrap();
            assert!(matches!(error, Some(CarryError::Deserted)), "{error:?}");
        });
        drop(place);
        let (gone, _listener) = outgoing(4);
        let (stream, source) = admitted();
        gone.deliver(stream).unwrap();
        drop(source);
        assert!(becomes(|| gone.is_deserted()));
        let at_once = sessions.wait_for_slot(&gone, || 1);
        assert!(at_once.is_ok(), "a small VM may be whole in the socket");
        drop(at_once);
        let (third, _listener) = outgoing(3);
        assert!(
            sessions.wait_for_slot(&third, || 1).is_ok(),
            "it blocks no other session"
        );
    }
}
