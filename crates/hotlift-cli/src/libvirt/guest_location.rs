//! Determines where a domain is after a failed migration, from the libvirt of both hosts.

use crate::libvirt::virsh::{Domain, Libvirt, State, VirshError};

/// Host of a domain after a failed migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestLocation {
    /// The domain is on this host, as before the migration.
    Here,
    /// The domain is at the destination, although the migration failed.
    There,
    /// The domain has ended, and is on neither host.
    Ended,
    /// The host is unknown, or the domain is on both hosts.
    Unknown {
        /// State of the domain on each host, as libvirt reports it.
        seen: String,
    },
}

/// Texts in errors of the source's libvirt (libvirt 9, and before 8). They show that the source's libvirt ended the migration
/// before it ordered the destination to run the guest.
const ENDED_HERE: &[&str] = &["job 'migration out'", "migration out job", "migration job"];

/// Text in the error of `virsh` if it could not connect to the destination's libvirt.
const NOT_BEGUN: &str = "unable to connect to server";

/// Determines where `domain` is after its migration failed with the error `reason`. Queries both libvirts. `was` is the state
/// of the domain before the migration.
pub fn guest_location(
    here: &Libvirt,
    to: &Libvirt,
    domain: &Domain,
    was: State,
    reason: &str,
) -> GuestLocation {
    location_from(
        was,
        &here.settled_state(domain),
        &to.settled_state(domain),
        is_ended_here(reason),
    )
}

/// Returns true if the error `reason` proves that the destination's libvirt got no order to run the guest. A broken connection
/// to the destination at the end of a migration proves nothing. This host's libvirt then continues the guest, but the order may
/// still arrive later. Seen with a destination's libvirtd that was stopped for a minute, and then also ran the guest.
fn is_ended_here(reason: &str) -> bool {
    let mut words = ENDED_HERE.iter().chain([&NOT_BEGUN]);
    words.any(|words| reason.contains(words))
}

fn location_from(
    was: State,
    here: &Result<State, VirshError>,
    there: &Result<State, VirshError>,
    is_ended_here: bool,
) -> GuestLocation {
    match (here, there) {
        (Ok(State::Gone), Ok(State::Gone)) => GuestLocation::Ended,
        (Ok(State::Gone), Ok(there)) if *there == was => GuestLocation::There,
        (Ok(here), Ok(State::Gone)) if *here == was => GuestLocation::Here,
        // The destination does not answer, or has not removed the prepared domain yet.
        (Ok(State::Running), Ok(State::Paused | State::Ending) | Err(_))
            if was == State::Running && is_ended_here =>
        {
            GuestLocation::Here
        }
        (Ok(State::Running), Ok(State::Running)) => GuestLocation::Unknown {
            seen: "it runs on both hosts, and both guests write to its disks".to_owned(),
        },
        (here, there) => GuestLocation::Unknown {
            seen: format!("here it {}, there it {}", describe(here), describe(there)),
        },
    }
}

fn describe(state: &Result<State, VirshError>) -> &'static str {
    match state {
        Ok(State::Running) => "runs",
        Ok(State::Paused) => "is paused",
        Ok(State::Ending) => "is being shut down",
        Ok(State::Gone) => "does not exist or is shut off",
        Err(_) => "is unknown, as libvirt does not answer",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_ANSWER: Option<State> = None;

    fn located(
        was: State,
        here: Option<State>,
        there: Option<State>,
        is_ended_here: bool,
    ) -> GuestLocation {
        let answer = |state: Option<State>| {
            state.ok_or(VirshError::Silent {
                at: "qemu:///system".to_owned(),
            })
        };
        location_from(was, &answer(here), &answer(there), is_ended_here)
    }

    #[test]
    fn a_domain_is_located_only_where_one_guest_certainly_is() {
        use GuestLocation::{Ended, Here, There};
        use State::{Gone, Paused, Running};
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
            let found = located(was, here, there, true);
            let is_expected = match &expected {
                Some(expected) => found == *expected,
                None => matches!(found, GuestLocation::Unknown { .. }),
            };
            assert!(
                is_expected,
                "{was:?}, then {here:?} and {there:?}: {found:?}"
            );
        }
    }

    #[test]
    fn a_destination_that_may_have_started_the_guest_makes_the_location_uncertain() {
        use State::{Gone, Paused, Running};
        for (reason, is_certain) in [
            (
                "operation aborted: job 'migration out' canceled by client",
                true,
            ),
            (
                "operation failed: migration out job: unexpectedly failed",
                true,
            ),
            ("unable to connect to server at 'b:16509': No route", true),
            (
                "internal error: connection closed due to keepalive timeout",
                false,
            ),
            ("End of file while reading data: Input/output error", false),
        ] {
            let of = |there| located(Running, Some(Running), there, is_ended_here(reason));
            for there in [NO_ANSWER, Some(Paused)] {
                let found = of(there);
                assert_eq!(
                    found == GuestLocation::Here,
                    is_certain,
                    "{reason}: {found:?}"
                );
            }
            assert_eq!(of(Some(Gone)), GuestLocation::Here, "{reason}");
        }
    }

    #[test]
    fn two_guests_are_reported_as_two() {
        let running = Some(State::Running);
        let found = located(State::Running, running, running, true);
        let GuestLocation::Unknown { seen } = found else {
            panic!("{found:?}")
        };
        assert!(seen.contains("on both hosts"), "{seen}");
    }
}
