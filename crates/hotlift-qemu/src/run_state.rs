//! Checks the run state of a guest at its destination; no I/O.

use hotlift_qmp::RunState;

/// State of a guest at its source, before it was migrated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreviousState {
    /// Run state of the guest.
    pub state: RunState,
    /// True if the state was read at the switchover. False if it was read at the start of the migration: an operator may have
    /// stopped the guest later.
    pub is_last: bool,
}

/// Result of [`check`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunStateCheck {
    /// The guest is in the expected state.
    Right,
    /// QEMU does not run the guest and never ran it, though the guest ran at its source. (For example, QEMU cannot lock a
    /// disk.)
    DoesNotRun,
    /// QEMU does not run the guest, and it is unknown if this is intended: QEMU may have been started with `-S`, or an operator
    /// may have stopped the guest before the switchover.
    MayNotRun,
}

/// Checks the state `now` of a guest at the destination. The guest was in state `before` at the source. `has_run` is true if
/// the guest has run in the destination's QEMU. `waits` is true if that QEMU was started with `-S`; `None` if unknown.
///
/// If QEMU cannot lock the disks, the guest stays in state `paused` (QEMU before 10.0) or `inmigrate`. All other states are
/// caused by the guest itself.
#[must_use]
pub fn check(
    before: &PreviousState,
    now: &RunState,
    has_run: bool,
    waits: Option<bool>,
) -> RunStateCheck {
    match (now, waits) {
        _ if has_run => RunStateCheck::Right,
        (RunState::InMigrate, _) => RunStateCheck::DoesNotRun,
        (RunState::Paused, _) if !before.state.is_live() => RunStateCheck::Right,
        (RunState::Paused, Some(true)) => RunStateCheck::Right,
        (RunState::Paused, Some(false)) if before.is_last => RunStateCheck::DoesNotRun,
        (RunState::Paused, _) => RunStateCheck::MayNotRun,
        _ => RunStateCheck::Right,
    }
}

/// Returns a clause about this state. The clause follows the words "the guest".
#[must_use]
pub fn state_clause(state: &RunState) -> String {
    match state {
        RunState::Running => "runs".to_owned(),
        RunState::Paused => "is paused".to_owned(),
        RunState::Shutdown => "has powered off".to_owned(),
        RunState::GuestPanicked => "has panicked".to_owned(),
        RunState::Suspended => "sleeps".to_owned(),
        RunState::InMigrate | RunState::Other(_) => format!("is in state '{}'", state.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_guest_that_ran_at_the_source_and_not_here_is_an_error() {
        use RunStateCheck::{DoesNotRun, MayNotRun, Right};
        let other = RunState::Other("io-error".to_owned());
        let ended = [RunState::Shutdown, RunState::GuestPanicked, other];
        let live = [RunState::Running, RunState::Suspended];
        let judge = |was: &RunState, now: &RunState, has_run, waits| {
            let [last, first] = [true, false].map(|is_last| {
                let state = was.clone();
                super::check(&PreviousState { state, is_last }, now, has_run, waits)
            });
            // If an operator may have stopped the guest during the migration, 'paused' proves nothing.
            match last {
                DoesNotRun if *now == RunState::Paused => assert_eq!(first, MayNotRun, "{was:?}"),
                _ => assert_eq!(first, last, "{was:?} {now:?} {waits:?}"),
            }
            last
        };
        let all = |states: &[RunState]| states.to_vec();
        let every = [all(&live), all(&ended), vec![RunState::Paused]].concat();
        let waits = [None, Some(false), Some(true)];
        for was in &every {
            // States that the guest itself causes, and every state of a guest that has run at the destination, are accepted.
            for now in every.iter().filter(|now| **now != RunState::Paused) {
                for waits in waits {
                    assert_eq!(judge(was, now, false, waits), Right, "{was:?} {now:?}");
                }
            }
            for now in [RunState::Paused, RunState::InMigrate] {
                assert_eq!(judge(was, &now, true, Some(false)), Right, "{was:?}");
            }
            for waits in waits {
                let judged = judge(was, &RunState::InMigrate, false, waits);
                assert_eq!(judged, DoesNotRun, "{was:?} {waits:?}");
            }
        }
        for was in &live {
            let paused = |waits| judge(was, &RunState::Paused, false, waits);
            assert_eq!(paused(Some(true)), Right, "{was:?} with -S");
            assert_eq!(paused(Some(false)), DoesNotRun, "{was:?}");
            assert_eq!(paused(None), MayNotRun, "{was:?}");
        }
        for was in ended.iter().chain([&RunState::Paused]) {
            for waits in waits {
                let judged = judge(was, &RunState::Paused, false, waits);
                assert_eq!(judged, Right, "{was:?} {waits:?}");
            }
        }
    }
}
