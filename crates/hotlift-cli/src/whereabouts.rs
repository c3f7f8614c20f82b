//! Where a domain is after its migration has failed, by what both libvirts say.

use crate::virsh::{Domain, Libvirt, State, VirshError};

/// Where a domain is after a migration that has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whereabouts {
    /// As it was before.
    Here,
    /// The destination has it all the same.
    There,
    /// It has ended, on both hosts.
    Ended,
    /// Nobody knows, or it is on both hosts.
    Unknown {
        /// What libvirt says of it.
        seen: String,
    },
}

/// Asks both libvirts where a domain is that was `was` before.
pub fn whereabouts(here: &Libvirt, to: &Libvirt, domain: &Domain, was: State) -> Whereabouts {
    verdict(was, &here.state(domain), &to.state(domain))
}

fn verdict(
    was: State,
    here: &Result<State, VirshError>,
    there: &Result<State, VirshError>,
) -> Whereabouts {
    match (here, there) {
        (Ok(State::Gone), Ok(State::Gone)) => Whereabouts::Ended,
        (Ok(State::Gone), Ok(there)) if *there == was => Whereabouts::There,
        (Ok(here), Ok(State::Gone)) if *here == was => Whereabouts::Here,
        // What was prepared there is not taken away yet, or nobody answers there: libvirt lets the guest go on here before it
        // says that a migration has failed, and never one that it has let go on there.
        (Ok(State::Running), Ok(State::Paused) | Err(_)) if was == State::Running => {
            Whereabouts::Here
        }
        (Ok(State::Running), Ok(State::Running)) => Whereabouts::Unknown {
            seen: "it runs on both hosts at once, and both guests write to its disks".to_owned(),
        },
        (here, there) => Whereabouts::Unknown {
            seen: format!("here it {}, there it {}", said(here), said(there)),
        },
    }
}

fn said(state: &Result<State, VirshError>) -> &'static str {
    match state {
        Ok(State::Running) => "runs",
        Ok(State::Paused) => "is paused",
        Ok(State::Gone) => "is not, or is shut off",
        Err(_) => "is not known, for libvirt does not say",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_ANSWER: Option<State> = None;

    fn verdict_of(was: State, here: Option<State>, there: Option<State>) -> Whereabouts {
        let answer = |state: Option<State>| {
            state.ok_or(VirshError::Silent {
                at: "qemu:///system".to_owned(),
            })
        };
        verdict(was, &answer(here), &answer(there))
    }

    #[test]
    fn a_domain_is_where_one_guest_is_for_certain_and_nowhere_else() {
        use State::{Gone, Paused, Running};
        use Whereabouts::{Ended, Here, There};
        for (was, here, there, expected) in [
            (Running, Some(Running), Some(Gone), Some(Here)),
            (Running, Some(Running), Some(Paused), Some(Here)),
            (Running, Some(Running), NO_ANSWER, Some(Here)),
            (Running, Some(Gone), Some(Running), Some(There)),
            (Running, Some(Gone), Some(Gone), Some(Ended)),
            (Running, Some(Running), Some(Running), None),
            (Running, Some(Paused), Some(Gone), None),
            (Running, Some(Paused), Some(Running), None),
            (Running, Some(Gone), Some(Paused), None),
            (Running, Some(Gone), NO_ANSWER, None),
            (Running, NO_ANSWER, Some(Running), None),
            (Paused, Some(Paused), Some(Gone), Some(Here)),
            (Paused, Some(Gone), Some(Paused), Some(There)),
            (Paused, Some(Paused), Some(Paused), None),
            (Paused, Some(Paused), Some(Running), None),
            (Paused, Some(Paused), NO_ANSWER, None),
        ] {
            let found = verdict_of(was, here, there);
            let is_expected = match &expected {
                Some(expected) => found == *expected,
                None => matches!(found, Whereabouts::Unknown { .. }),
            };
            assert!(
                is_expected,
                "{was:?}, then {here:?} and {there:?}: {found:?}"
            );
        }
    }

    #[test]
    fn two_guests_are_called_two_guests() {
        let found = verdict_of(State::Running, Some(State::Running), Some(State::Running));
        let Whereabouts::Unknown { seen } = found else {
            panic!("{found:?}")
        };
        assert!(seen.contains("on both hosts at once"), "{seen}");
    }
}
