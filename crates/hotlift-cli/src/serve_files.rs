//! `hotlift serve --files`: hands save files out to those who restore from them.

use std::path::Path;
use std::sync::Mutex;

use hotlift::Control;
use hotlift::file::{self, ServerEvent};
use hotlift_console::error::error_line;
use hotlift_console::output::{complain, say};
use hotlift_console::progress::bytes;
use hotlift_console::security;
use hotlift_console::signals::Interrupt;

use crate::error::CommandError;
use crate::serve::{ServeArgs, address_of};

/// Serves the files of `folder` until a signal comes, which is the end that is meant for it.
pub fn run(args: &ServeArgs, folder: &Path, interrupt: &Interrupt) -> Result<(), CommandError> {
    let tls = security::tls(&args.limits.options(), &args.listen)?;
    let listener = args.listen.listen()?;
    say!("listening on {}", address_of(&listener)?);
    // Why no connection could be taken, as it was last said.
    let trouble = Mutex::new(String::new());
    let on_event = |event: ServerEvent| match event {
        ServerEvent::Begun(visit) if !args.quiet => {
            complain!("{} reads {}", visit.host, visit.name.escape_debug());
        }
        ServerEvent::Ended(visit) if !args.quiet => {
            let (read, name) = (bytes(visit.bytes), visit.name.escape_debug());
            let seconds = visit.time.as_secs_f64();
            complain!("{} has read {read} of {name} in {seconds:.1} s", visit.host);
        }
        ServerEvent::Refused { host, reason } => {
            complain!("hotlift: {host} was sent away: {reason}");
        }
        ServerEvent::Trouble(error) => {
            let reason = error_line(&error);
            if let Ok(mut said) = trouble.lock()
                && *said != reason
            {
                complain!("hotlift: a connection was not taken: {reason}");
                *said = reason;
            }
        }
        _ => {}
    };
    let control = Control::new();
    let served = interrupt.cancelling(&control, || {
        file::serve(&listener, tls, folder, &control, &on_event)
    });
    served.map_err(|error| CommandError::Files {
        reason: error_line(&error),
    })
}
