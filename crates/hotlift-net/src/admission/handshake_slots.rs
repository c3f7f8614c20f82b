//! Slots that limit the number of concurrent TLS handshakes. No I/O, no clock.

use std::time::{Duration, Instant};

use super::limits::HANDSHAKES;

/// Age from which a handshake may be interrupted for a new connection when all slots are taken. This time suffices for two
/// round trips on any network, and for the computation. Without interruption, [`HANDSHAKES`] silent connections would block all
/// others for ten seconds.
const PROTECTED_TIME: Duration = Duration::from_secs(1);

/// Age from which a handshake may be interrupted if its host has more than half of the slots. This time may be short: a Hotlift
/// opens its connections one after another, and needs one slot.
const PROTECTED_TIME_CROWDED: Duration = Duration::from_millis(100);

/// Handshakes in progress, each with a handle of type `T` that interrupts it.
pub(super) struct HandshakeSlots<T> {
    /// Taken slots, the oldest first.
    taken: Vec<HandshakeSlot<T>>,
    /// Number of the last handshake.
    next: u64,
}

struct HandshakeSlot<T> {
    number: u64,
    since: Instant,
    from: String,
    handshake: T,
}

impl<T> HandshakeSlots<T> {
    pub(super) fn new() -> Self {
        Self {
            taken: Vec::with_capacity(HANDSHAKES),
            next: 0,
        }
    }

    /// Returns the times at which the connections in the slots were accepted.
    pub(super) fn since(&self) -> impl Iterator<Item = Instant> + '_ {
        self.taken.iter().map(|slot| slot.since)
    }

    /// Returns true if a slot is free, or a handshake may be interrupted for a new connection.
    pub(super) fn has_room(&self, now: Instant) -> bool {
        self.until_room(now).is_zero()
    }

    /// Returns the time until a handshake may be interrupted for a new connection; zero if a slot is available now.
    pub(super) fn until_room(&self, now: Instant) -> Duration {
        if self.taken.len() < HANDSHAKES {
            return Duration::ZERO;
        }
        let ends = self.taken.iter().map(|slot| self.protected_until(slot));
        let first = ends.min().unwrap_or(now);
        first.saturating_duration_since(now)
    }

    /// Chooses the handshake to interrupt for a new connection, and frees its slot. Prefers a host with more than half of the
    /// slots. Returns `None` if a slot is free.
    pub(super) fn make_room(&mut self, now: Instant) -> Option<T> {
        if self.taken.len() < HANDSHAKES {
            return None;
        }
        let may_go = |slot: &HandshakeSlot<T>| self.protected_until(slot) <= now;
        let of_crowded_host =
            |slot: &HandshakeSlot<T>| self.is_of_crowded_host(slot) && may_go(slot);
        let crowd = self.taken.iter().position(of_crowded_host);
        let slot = crowd.or_else(|| self.taken.iter().position(may_go));
        Some(self.taken.remove(slot.unwrap_or(0)).handshake)
    }

    fn protected_until(&self, slot: &HandshakeSlot<T>) -> Instant {
        let max_wait = match self.is_of_crowded_host(slot) {
            true => PROTECTED_TIME_CROWDED,
            false => PROTECTED_TIME,
        };
        slot.since + max_wait
    }

    fn is_of_crowded_host(&self, slot: &HandshakeSlot<T>) -> bool {
        let same = self.taken.iter().filter(|other| other.from == slot.from);
        same.count() > HANDSHAKES / 2
    }

    /// Returns the number for the next handshake.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Occupies a slot for the handshake `number`, whose connection comes from the host `from`.
    pub(super) fn take(&mut self, number: u64, from: String, since: Instant, handshake: T) {
        self.taken.push(HandshakeSlot {
            number,
            since,
            from,
            handshake,
        });
    }

    /// Frees the slot of the handshake `number`. Returns `None` if the handshake was interrupted before.
    pub(super) fn free(&mut self, number: u64) -> Option<T> {
        let slot = self.taken.iter().position(|it| it.number == number)?;
        Some(self.taken.remove(slot).handshake)
    }

    /// Frees all slots.
    pub(super) fn free_all(&mut self) -> impl Iterator<Item = T> + '_ {
        self.taken.drain(..).map(|slot| slot.handshake)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(slots: &mut HandshakeSlots<u64>, from: &str, now: Instant) -> Option<u64> {
        let gone = slots.make_room(now);
        let number = slots.number();
        slots.take(number, from.to_owned(), now, number);
        gone
    }

    #[test]
    fn ten_thousand_stalled_handshakes_never_exceed_the_slots() {
        for hosts in [1, 2, 10_000] {
            let mut slots = HandshakeSlots::new();
            let mut now = Instant::now();
            for stranger in 0..10_000 {
                // The caller also waits until a slot is available.
                now += slots.until_room(now);
                assert!(slots.has_room(now));
                enter(&mut slots, &format!("host {}", stranger % hosts), now);
                assert!(slots.taken.len() <= HANDSHAKES);
                now += Duration::from_millis(1);
            }
        }
    }

    #[test]
    fn no_handshake_is_evicted_early_and_hosts_with_many_lose_theirs_first() {
        let mut slots = HandshakeSlots::new();
        let begun = Instant::now();
        let long = Duration::from_secs(600);
        for slot in 0..HANDSHAKES {
            assert!(slots.until_room(begun).is_zero());
            let from = if slot == 0 {
                "alone".to_owned()
            } else {
                format!("host {slot}")
            };
            assert_eq!(enter(&mut slots, &from, begun), None);
        }
        assert_eq!(slots.until_room(begun), PROTECTED_TIME);
        assert_eq!(
            slots.until_room(begun + PROTECTED_TIME / 2),
            PROTECTED_TIME / 2
        );
        assert!(slots.has_room(begun + long));
        assert_eq!(
            enter(&mut slots, "late", begun + PROTECTED_TIME),
            Some(1),
            "the oldest"
        );
        assert_eq!(slots.free(2), Some(2));
        assert_eq!(slots.free(1), None, "it had to give way");
        assert!(slots.has_room(begun));

        let mut slots = HandshakeSlots::new();
        for slot in 0..HANDSHAKES {
            let from = if slot == 0 { "alone" } else { "crowd" };
            enter(&mut slots, from, begun);
        }
        assert_eq!(slots.until_room(begun), PROTECTED_TIME_CROWDED);
        assert_eq!(enter(&mut slots, "late", begun + long), Some(2));
        assert_eq!(slots.taken[0].from, "alone");
    }
}
