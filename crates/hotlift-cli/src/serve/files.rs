//! `hotlift serve --files`: serves save files to `hotlift restore` on other hosts.

use std::path::Path;
use std::sync::Mutex;

use hotlift::Control;
use hotlift::file::{self, ServerEvent};
use hotlift_command::security;
use hotlift_mem::FileError;
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::output::{print_line, warn};
use hotlift_terminal::progress::bytes;
use hotlift_terminal::signals::Interrupt;
use serde::Serialize;

use super::{ServeArgs, address_of};
use crate::error::CommandError;

/// Event in the output: printed as text, or as a line of JSON with these fields.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event {
    Listening {
        address: String,
    },
    Begun {
        host: String,
        name: String,
    },
    Ended {
        host: String,
        name: String,
        bytes: u64,
        seconds: f64,
    },
    Refused {
        host: String,
        reason: String,
    },
    Trouble {
        reason: String,
    },
}

impl Event {
    fn of(event: ServerEvent) -> Option<Self> {
        Some(match event {
            ServerEvent::Begun(visit) => Self::Begun {
                host: visit.host,
                name: visit.name,
            },
            ServerEvent::Ended(visit) => Self::Ended {
                host: visit.host,
                name: visit.name,
                bytes: visit.bytes,
                seconds: visit.time.as_secs_f64(),
            },
            ServerEvent::Refused { host, reason } => Self::Refused { host, reason },
            ServerEvent::AcceptFailed(error) => Self::Trouble {
                reason: error_line(&error),
            },
            _ => return None,
        })
    }

    /// Returns true for an event that only shows progress; `--quiet` suppresses it.
    fn is_progress(&self) -> bool {
        matches!(self, Self::Begun { .. } | Self::Ended { .. })
    }

    fn print(&self, as_json: bool) {
        if as_json {
            // Serialization cannot fail: the event contains no maps, and no numbers without a JSON form.
            if let Ok(line) = serde_json::to_string(self) {
                print_line!("{line}");
            }
            return;
        }
        match self {
            Self::Listening { address } => print_line!("listening on {address}"),
            Self::Begun { host, name } => warn!("{host} reads {}", name.escape_debug()),
            Self::Ended {
                host,
                name,
                bytes: read,
                seconds,
            } => {
                let (read, name) = (bytes(*read), name.escape_debug());
                warn!("{host} read {read} of {name} in {seconds:.1} s");
            }
            Self::Refused { host, reason } => warn!("hotlift: refused {host}: {reason}"),
            Self::Trouble { reason } => {
                warn!("hotlift: refused a connection: {reason}");
            }
        }
    }
}

/// Serves the files in `folder` until a signal, which ends the command without an error.
pub fn run(args: &ServeArgs, folder: &Path, interrupt: &Interrupt) -> Result<(), CommandError> {
    // Checked before the first client can connect.
    std::fs::read_dir(folder)
        .map_err(FileError::of("inspect", folder))
        .map_err(TerminalError::from)?;
    let tls = security::tls(&args.limits.tls, &args.listen)?;
    let listener = args.listen.listen()?;
    let address = address_of(&listener)?.to_string();
    Event::Listening { address }.print(args.json);
    // Last printed reason of a failed accept: repetitions are not printed.
    let trouble = Mutex::new(String::new());
    let on_event = |event: ServerEvent| {
        let Some(event) = Event::of(event).filter(|event| !args.quiet || !event.is_progress())
        else {
            return;
        };
        if let Event::Trouble { reason } = &event
            && let Ok(mut last) = trouble.lock()
            && std::mem::replace(&mut *last, reason.clone()) == *reason
        {
            return;
        }
        event.print(args.json);
    };
    let control = Control::new();
    let served = interrupt.cancelling(&control, || {
        file::serve(&listener, tls, folder, &control, &on_event)
    });
    served.map_err(|error| CommandError::Files {
        reason: error_line(&error),
    })
}
