//! The end of a migration through a relay: the transfer of the guest's ownership.

use std::time::{Duration, Instant};

use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::GuestActivity;

use crate::ends::stream_source::upstream::Upstream;
use crate::error::MigrationError;
use crate::handover::DestinationStatement;
use crate::pipe::hooks::{Hooks, Ownership};
use crate::pipe::session::Session;
use crate::stream::main_channel::{RELEASE, not_released};
use crate::stream::main_recv::WaitCondition;
use crate::stream::return_path::encode;

/// Interval of the queries whether the source has released the guest.
const ASK: Duration = Duration::from_millis(1);

/// Sends EOF and the data after it, and waits for the outcome. Returns the guest's state at the destination.
pub(crate) fn hand_over(
    session: &Session<'_>,
    end: &[u8],
    hooks: Hooks<'_>,
) -> Result<GuestActivity, MigrationError> {
    let outcome = session.sink.commit(end, hooks.has_taken);
    session.settle(match &outcome {
        Ok(_) => Some(DestinationStatement::Runs),
        // No guest ever runs from an incomplete file.
        Err(MigrationError::Destination { .. } | MigrationError::File(_)) => {
            Some(DestinationStatement::Never)
        }
        Err(_) => None,
    });
    if let (Ok(activity), Some(on_run)) = (&outcome, hooks.on_run) {
        on_run(*activity);
    }
    outcome
}

/// Reports to the source that the destination has the guest, and the state of the guest there.
pub(crate) fn report_run(session: &Session<'_>, upstream: &Upstream, activity: GuestActivity) {
    let shut = ReturnMessage::Shut(0);
    let messages = if upstream.takes_activity && activity != GuestActivity::Unknown {
        session.destination_handover.record_activity(activity);
        encode(&[ReturnMessage::GuestActivity(activity), shut])
    } else {
        encode(&[shut])
    };
    session.destination_handover.record_run();
    upstream.answer(&messages);
}

/// Waits until the source's QEMU has released the guest, which the hook `ownership` reports.
pub(crate) fn await_release(
    session: &Session<'_>,
    ownership: &dyn Fn() -> Ownership,
) -> Result<(), MigrationError> {
    let deadline = Instant::now() + RELEASE;
    let call = session.call();
    while Instant::now() < deadline {
        call.check()?;
        match ownership() {
            Ownership::Released => return Ok(()),
            Ownership::Kept => {
                session.record_taken_back();
                return Err(MigrationError::Cancelled);
            }
            Ownership::Unknown => std::thread::sleep(ASK),
        }
    }
    Err(not_released())
}
