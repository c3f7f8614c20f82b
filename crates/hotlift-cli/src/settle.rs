//! `hotlift settle`: the operator decides which host runs a guest that a migration left paused (exit code 3).

use std::time::Duration;

use clap::Args;
use hotlift_qemu::connect::connect;
use hotlift_qemu::error::{Side, at_source};
use hotlift_qemu::settings;
use hotlift_qmp::{MigrationInfo, QmpAddress, QmpError, StatusInfo};
use hotlift_terminal::error::error_line;
use hotlift_terminal::output::warn;

use crate::error::CommandError;

/// Time without a connection to the QMP socket after which the operator sees that the command waits.
const SILENCE: Duration = Duration::from_secs(2);

/// Longest time for the second attempt to connect to the QMP socket, after the operator was informed.
const CONNECT: Duration = Duration::from_secs(10);

/// Warning before the guest is run here, although its migration may have completed.
const COMPLETED: &str = "hotlift: QEMU's migration is 'completed': if the destination runs the guest too, both write to the \
                         same disks from now on; end one of them at once";

/// Flags of `settle`.
#[derive(Debug, Args)]
pub struct SettleArgs {
    /// QMP socket of the QEMU or of the 'hotlift guest run' that keeps the paused guest: PATH, unix:PATH or
    /// tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    qmp: QmpAddress,
    #[command(flatten)]
    location: GuestLocation,
}

/// Host that has the guest from now on. Exactly one flag is given.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct GuestLocation {
    /// Run the guest here, because the destination does not run it and never will
    #[arg(long)]
    here: bool,
    /// End the paused copy here, because the destination has the guest
    #[arg(long)]
    there: bool,
}

/// Runs `hotlift settle`.
pub fn run(args: &SettleArgs) -> Result<(), CommandError> {
    let connected = match connect(&args.qmp, SILENCE) {
        Err(QmpError::Timeout { .. }) => {
            warn!(
                "waiting for an answer of QEMU at {}: another command may hold this socket",
                args.qmp
            );
            connect(&args.qmp, CONNECT)
        }
        connected => connected,
    };
    let mut qemu = connected.map_err(at_source)?;
    let state = qemu.query_status().map_err(at_source)?;
    let migration = qemu.query_migrate().map_err(at_source)?;
    if let Some(problem) = problem(&state, &migration) {
        return Err(CommandError::NothingToSettle { problem });
    }
    if args.location.there {
        qemu.quit().map_err(at_source)?;
        warn!("ended the paused copy here; the guest stays at the destination");
        return Ok(());
    }
    // QEMU reports 'completed' also for a migration in doubt: it has sent the whole guest.
    if migration.is_completed() {
        warn!("{COMPLETED}");
    }
    // For a guest in doubt, 'hotlift guest run' ignores a 'cont' without a preceding 'stop', as a mistake. A QEMU whose guest
    // is already paused ignores 'stop'.
    qemu.stop().map_err(at_source)?;
    qemu.cont().map_err(at_source)?;
    let state = qemu.query_status().map_err(at_source)?;
    match state.running {
        true => {
            warn!("the guest runs here");
            if let Err(error) = settings::restore_left(&mut qemu, Side::Source, |_| Ok(())) {
                let error = error_line(&error);
                warn!(
                    "hotlift: cannot restore QEMU's settings that an earlier command left changed: {error}"
                );
            }
        }
        false => {
            return Err(CommandError::NothingToSettle {
                problem: format!("it is in state '{}' after 'cont'", state.status),
            });
        }
    }
    Ok(())
}

/// Returns the reason why this guest must not be settled; `None` if it may be settled. The command must not change a guest that
/// an operator paused, or whose migration is running.
fn problem(state: &StatusInfo, migration: &MigrationInfo) -> Option<String> {
    match state.status.as_str() {
        "postmigrate" => None,
        "paused" if migration.is_completed() || migration.has_failed() => None,
        status => Some(format!(
            "it is in state '{status}', and its migration in state '{}'",
            migration.status()
        )),
    }
}
