//! Whether a guest is in the state at its destination that it is to be in: without I/O.

use hotlift_qmp::RunState;

/// What a guest did before it came to a QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Before {
    /// Its state.
    pub state: RunState,
    /// The state is that of the switchover. Otherwise it is that of the start of the migration, and an operator may
    /// have stopped the guest since.
    pub is_last: bool,
}

/// What a QEMU does with a guest that it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    /// What it is to do.
    Right,
    /// It does not run the guest, and never ran it, though the guest ran before. (It cannot lock a disk, for one.)
    DoesNotRun,
    /// The same, unless the QEMU was started with `-S`, or the guest was stopped before it came, which is not known.
    MayNotRun,
}

/// Judges the state `now` of a guest that did `before` what it did. `has_run`: it ran in this QEMU at some time. `waits`: this
/// QEMU was started with `-S`; `None`: it is not known.
///
/// A QEMU that cannot take over the disks leaves a guest that ran `paused` (before 10.0) or `inmigrate`. All other states are
/// the guest's own.
#[must_use]
pub fn judge(before: &Before, now: &RunState, has_run: bool, waits: Option<bool>) -> Judgement {
    match (now, waits) {
        _ if has_run => Judgement::Right,
        (RunState::InMigrate, _) => Judgement::DoesNotRun,
        (RunState::Paused, _) if !before.state.is_live() => Judgement::Right,
        (RunState::Paused, Some(true)) => Judgement::Right,
        (RunState::Paused, Some(false)) if before.is_last => Judgement::DoesNotRun,
        (RunState::Paused, _) => Judgement::MayNotRun,
        _ => Judgement::Right,
    }
}

/// What a guest in this state does, behind "the guest".
#[must_use]
pub fn words(state: &RunState) -> String {
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
    fn only_a_guest_that_ran_and_never_runs_here_is_not_right() {
        use Judgement::{DoesNotRun, MayNotRun, Right};
        let other = RunState::Other("io-error".to_owned());
        let ended = [RunState::Shutdown, RunState::GuestPanicked, other];
        let live = [RunState::Running, RunState::Suspended];
        let judge = |was: &RunState, now: &RunState, has_run, waits| {
            let [last, first] = [true, false].map(|is_last| {
                let state = was.clone();
                super::judge(&Before { state, is_last }, now, has_run, waits)
            });
            // Of a guest that may have been stopped since, 'paused' shows nothing.
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
            // The guest's own states, and each state of a guest that has run here.
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
