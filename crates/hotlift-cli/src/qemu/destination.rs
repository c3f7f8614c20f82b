//! The QEMU that is to get a guest: given by its QMP socket, or started here for the purpose.

use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use hotlift_qmp::{Qemu, QmpAddress, QmpError};
use serde_json::{Map, Value};

use super::control::Guest;
use super::process::Started;
use super::settings::Changed;
use super::uuid::Uuid;
use crate::error::CommandError;
use crate::output::complain;
use crate::signals::{Interrupt, TICK};

/// How long the QMP socket of a waiting QEMU is tried.
const CONNECT: Duration = Duration::from_secs(10);

/// How long QEMU may take from the last byte until it says that it has the guest.
const TAKE: Duration = Duration::from_secs(30);

/// A QEMU that waits with `-incoming defer`.
pub struct Destination {
    qemu: Qemu,
    process: Option<Started>,
    changed: Option<Changed>,
}

impl Destination {
    /// One that somebody else has started.
    pub fn held(address: &QmpAddress) -> Result<Self, CommandError> {
        let qemu = Qemu::connect(address, CONNECT).map_err(at_destination)?;
        Self::waiting(qemu, None)
    }

    /// One that is started now.
    pub fn start(command: &[OsString], interrupt: &Interrupt) -> Result<Self, CommandError> {
        let (process, qemu) = Started::start(command, interrupt)?;
        Self::waiting(qemu, Some(process))
    }

    fn waiting(mut qemu: Qemu, process: Option<Started>) -> Result<Self, CommandError> {
        let state = qemu.query_status().map_err(at_destination)?;
        let migration = qemu.query_migrate().map_err(at_destination)?;
        if state.status != "inmigrate" || migration.status != "none" {
            return Err(CommandError::NotWaiting {
                status: state.status,
                migration: migration.status,
            });
        }
        Ok(Self {
            qemu,
            process,
            changed: None,
        })
    }

    /// This QEMU.
    pub fn qemu(&mut self) -> &mut Qemu {
        &mut self.qemu
    }

    /// UUID of its machine.
    pub fn uuid(&mut self) -> Result<Uuid, CommandError> {
        self.qemu.query_uuid().map(Uuid).map_err(at_destination)
    }

    /// Sets capabilities and parameters and listens on a UNIX socket.
    pub fn listen(
        &mut self,
        capabilities: &[(&str, bool)],
        parameters: &Map<String, Value>,
        socket: &Path,
    ) -> Result<(), CommandError> {
        let changed = Changed::apply(&mut self.qemu, capabilities, parameters);
        self.changed = Some(changed.map_err(at_destination)?);
        // One that was started here is to end by itself if this process does; one that is held is to
        // stay and say what went wrong.
        let stay_on_error = self.process.is_none();
        let uri = format!("unix:{}", socket.display());
        let listening = self.qemu.migrate_incoming(&uri, stay_on_error);
        listening.map_err(at_destination)
    }

    /// Waits until QEMU says that it has the guest; true if it runs it.
    pub fn wait_taken(&mut self) -> Result<bool, CommandError> {
        let deadline = Instant::now() + TAKE;
        loop {
            let info = self.qemu.query_migrate().map_err(at_destination)?;
            if info.is_completed() {
                let state = self.qemu.query_status().map_err(at_destination)?;
                return Ok(state.running);
            }
            if info.has_failed() || Instant::now() >= deadline {
                return Err(CommandError::NotTaken {
                    status: info.status,
                    reason: info.error_desc.unwrap_or_else(|| "no reason".to_owned()),
                });
            }
            std::thread::sleep(TICK);
        }
    }

    /// After a relay that failed: whether QEMU has the guest, and what it says of the failure. Unless
    /// the relay is `in_doubt`, it has not told QEMU that the stream was at its end, and a QEMU that
    /// is gone by now never ran the guest.
    pub fn after_failure(&mut self, in_doubt: bool) -> (Guest, Option<String>) {
        let untold = if in_doubt {
            Guest::Unknown
        } else {
            Guest::NotHere
        };
        match self.qemu.query_migrate() {
            Ok(info) if info.is_completed() => (Guest::Here, None),
            Ok(info) => (Guest::NotHere, info.error_desc),
            Err(error) => {
                let ended = self.process.as_mut().and_then(Started::wait_end);
                let how = match ended {
                    Some(status) => format!("it ended ({status})"),
                    None => crate::args::error_line(&error),
                };
                (untold, Some(how))
            }
        }
    }

    /// True if it was started here and has ended.
    pub fn has_ended(&mut self) -> bool {
        let process = self.process.as_mut();
        process.is_some_and(|process| process.has_ended().is_some())
    }

    /// QEMU has the guest: its settings are put back, and it is left running. Says where it is.
    pub fn leave(mut self) -> String {
        if let Some(changed) = self.changed.take()
            && let Err(error) = changed.undo(&mut self.qemu)
            && !error.is_disconnected()
        {
            let error = crate::args::error_line(&error);
            complain!("hotlift: the destination's migration settings were not put back: {error}");
        }
        match self.process {
            Some(process) => process.leave(),
            None => format!("QMP socket {}", self.qemu.client().address()),
        }
    }
}

/// An error of the destination's QEMU.
pub fn at_destination(error: QmpError) -> CommandError {
    CommandError::qmp("destination", error)
}
