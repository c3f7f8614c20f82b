//! Announces the guest's new host to the network (QEMU's self-announcement), in a separate thread that no thread waits for.

use std::thread;
use std::time::Duration;

use crate::guest::{Announcer, Guest};
use crate::options::AnnounceOptions;

/// Starts the announcements of a guest that has just started. Does nothing for a guest without an announcer, or if the options
/// set 0 rounds.
pub(crate) fn start(guest: &dyn Guest, options: &AnnounceOptions) {
    let pauses = pauses(options);
    let (Some(mut announce), true) = (guest.announcer(), options.rounds > 0) else {
        return;
    };
    // An error is ignored: without the thread there are no announcements, and the guest's own packets update the network later.
    let _ = thread::Builder::new()
        .name("announce".to_owned())
        .spawn(move || run(&mut announce, &pauses, thread::sleep));
}

fn run(announce: &mut Announcer, pauses: &[Duration], sleep: impl Fn(Duration)) {
    announce();
    for pause in pauses {
        sleep(*pause);
        announce();
    }
}

/// Returns the pauses between the announcements, computed as in QEMU's `self_announce_delay`.
fn pauses(options: &AnnounceOptions) -> Vec<Duration> {
    (0..u64::from(options.rounds).saturating_sub(1))
        .map(|number| {
            let pause = u64::from(options.initial) + number * u64::from(options.step);
            Duration::from_millis(pause.min(options.max.into()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_ms(initial: u32, step: u16, max: u32, rounds: u16) -> Vec<u128> {
        let options = AnnounceOptions {
            initial,
            step,
            max,
            rounds,
        };
        let pauses = pauses(&options);
        pauses.iter().map(Duration::as_millis).collect()
    }

    #[test]
    fn pauses_grow_by_a_step_up_to_the_longest() {
        assert_eq!(in_ms(50, 100, 550, 5), [50, 150, 250, 350]);
        assert_eq!(in_ms(50, 100, 200, 5), [50, 150, 200, 200]);
        assert_eq!(in_ms(50, 100, 10, 3), [10, 10]);
        assert!(in_ms(50, 100, 550, 1).is_empty());
        assert!(in_ms(50, 100, 550, 0).is_empty());
        assert_eq!(in_ms(100_000, 10_000, 100_000, 1000).len(), 999);
    }

    #[test]
    fn it_announces_first_and_after_each_pause() {
        let (sender, received) = std::sync::mpsc::channel();
        let paused = sender.clone();
        let pauses = [Duration::from_millis(1), Duration::from_millis(2)];
        let mut announce: Announcer = Box::new(move || sender.send(0).unwrap());
        run(&mut announce, &pauses, |pause| {
            paused.send(pause.as_millis()).unwrap();
        });
        assert_eq!(received.try_iter().collect::<Vec<_>>(), [0, 1, 0, 2, 0]);
    }
}
