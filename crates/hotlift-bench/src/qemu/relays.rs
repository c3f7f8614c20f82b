//! Two relays between two QEMUs: the processes `hotlift relay source` and `hotlift relay destination`.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{ChildStdout, Stdio};
use std::time::{Duration, Instant};

use hotlift::options::Role;
use hotlift_command::migration_args::MigrationArgs;
use hotlift_command::pair::ProcessPlace;
use hotlift_mem::{end_of_process, wait_readable};
use hotlift_terminal::error::TerminalError;
use serde::Deserialize;
use tempfile::TempDir;

use super::Stop;
use crate::cell::Cell;
use crate::certificates;
use crate::child_process::ChildProcess;
use crate::error::BenchError;

/// Time limit for the relays to end after both QEMUs have completed.
const END: Duration = Duration::from_secs(10);

/// Prefix of the line in which a relay prints its listening address.
const LISTENS: &str = "listening on ";

/// Returns `cell` as settings for two QEMUs with relays between them: without compression and TLS, which the relays do.
pub fn of_qemus(cell: &Cell) -> Result<Cell, Stop> {
    let options = cell.migration.options().map_err(BenchError::from)?;
    if !options.stream.multifd() {
        return Err(Stop::Lacks("a relay sends by multifd".to_owned()));
    }
    let plain = cell.migration.with("multifd-compression", "none");
    let plain = plain.and_then(|plain| plain.with(certificates::OPTION, ""));
    let plain = plain.and_then(|plain| plain.without_ineffective());
    Ok(Cell {
        migration: plain.map_err(BenchError::from)?,
        ..cell.clone()
    })
}

/// The relay of the source and the relay of the destination; killed on drop.
pub struct Relays {
    source: Relay,
    destination: Relay,
    folder: TempDir,
}

/// Fields of a relay's final report that the bench uses.
#[derive(Debug, Deserialize)]
struct Report {
    sent_bytes: u64,
}

impl Relays {
    /// Starts both relays for `cell`. The destination's QEMU must already listen on [`Relays::destination_address`] in
    /// `folder`.
    ///
    /// # Errors
    /// If a relay does not start. The error contains the relay's last message.
    pub fn start(cell: &Cell, place: &ProcessPlace, folder: TempDir) -> Result<Self, BenchError> {
        let host = place.address.as_deref().unwrap_or("127.0.0.1");
        let channels = cell.migration.options()?.stream.channels();
        let mut plain = MigrationArgs::default();
        plain = plain.with("multifd-channels", &channels.to_string())?;
        let given = cell.migration.given().iter();
        for given in given.filter(|given| given.option.name.starts_with("tls-")) {
            plain.set(given.clone());
        }
        let destination = Relay::start(
            "destination",
            place,
            &format!("tcp:{host}:0"),
            &Self::destination_address(&folder),
            &plain,
            folder.path(),
        )?;
        let source = Relay::start(
            "source",
            place,
            &Self::source_address(&folder),
            &destination.address,
            &of_relay(&cell.migration),
            folder.path(),
        )?;
        Ok(Self {
            source,
            destination,
            folder,
        })
    }

    /// Returns the address on which the destination's QEMU listens.
    pub fn destination_address(folder: &TempDir) -> String {
        format!("unix:{}", folder.path().join("destination").display())
    }

    fn source_address(folder: &TempDir) -> String {
        format!("unix:{}", folder.path().join("source").display())
    }

    /// Returns the address that the source's QEMU migrates to.
    pub fn uri(&self) -> String {
        Self::source_address(&self.folder)
    }

    /// Returns the process IDs: the source's relay, then the destination's relay.
    pub fn pids(&self) -> [u32; 2] {
        [&self.source, &self.destination].map(|relay| relay.process.child.id())
    }

    /// Waits until both relays have ended, or the time limit `END`. Does not reap the processes: the kernel's CPU
    /// counts remain readable.
    pub fn await_end(&self) {
        let deadline = Instant::now() + END;
        for relay in [&self.source, &self.destination] {
            if let Ok(end) = end_of_process(&relay.process.child) {
                wait_readable(&[end.as_fd()], Some(deadline));
            }
        }
    }

    /// Returns the last messages of the relays on standard error; empty without messages.
    pub fn output(&self) -> String {
        let output = [&self.source, &self.destination].map(|relay| {
            let line = relay.process.last_line()?;
            Some(format!("relay {}: {line}", relay.side))
        });
        output.into_iter().flatten().collect::<Vec<_>>().join("; ")
    }

    /// Returns the bytes that the source's relay has sent. Must be called after the relay has ended.
    ///
    /// # Errors
    /// If a relay failed. The error contains the relay's last message.
    pub fn sent_bytes(mut self) -> Result<u64, BenchError> {
        self.destination.report()?;
        Ok(self.source.report()?.sent_bytes)
    }
}

/// Returns the options in `all` that a relay accepts.
fn of_relay(all: &MigrationArgs) -> MigrationArgs {
    let mut taken = MigrationArgs::default();
    for given in all.given() {
        let info = given.option;
        let refusal = info.refusal(Role::Relay);
        // Zero page detection is done by the source's QEMU.
        let is_qemus = info.name == "zero-page-detection";
        let refusal = refusal.or(info.value_refusal(Role::Relay, &given.text));
        if !is_qemus && refusal.is_none() {
            taken.set(given.clone());
        }
    }
    taken
}

/// A relay process and its address.
struct Relay {
    side: &'static str,
    process: ChildProcess,
    output: BufReader<ChildStdout>,
    address: String,
}

impl Relay {
    fn start(
        side: &'static str,
        place: &ProcessPlace,
        listen: &str,
        connect: &str,
        migration: &MigrationArgs,
        folder: &Path,
    ) -> Result<Self, BenchError> {
        let failed = TerminalError::process("hotlift relay");
        let prefix = match side {
            "source" => &place.source_prefix,
            _ => &place.destination_prefix,
        };
        let words = [
            "relay",
            side,
            "--json",
            "--quiet",
            "--listen",
            listen,
            "--connect",
            connect,
        ];
        let mut all = vec![place.program.clone().into_os_string()];
        all.extend(words.map(OsString::from));
        all.extend(migration.to_flags().into_iter().map(OsString::from));
        all.extend(place.flags(migration).into_iter().map(OsString::from));
        let errors = folder.join(side).with_extension("stderr");
        let mut process =
            ChildProcess::start(prefix, all, Stdio::piped(), &errors).map_err(failed)?;
        let output = process.child.stdout.take().map(BufReader::new);
        let output = output.ok_or_else(|| failed(std::io::ErrorKind::BrokenPipe.into()))?;
        let mut relay = Self {
            side,
            process,
            output,
            address: String::new(),
        };
        let mut line = String::new();
        relay.output.read_line(&mut line).map_err(failed)?;
        match line.trim_end().strip_prefix(LISTENS) {
            Some(address) => relay.address = address.to_owned(),
            None => return Err(relay.problem()),
        }
        Ok(relay)
    }

    fn report(&mut self) -> Result<Report, BenchError> {
        let mut output = String::new();
        // A relay that is still running at this point hangs.
        let _ = self.process.child.kill();
        let read = self.output.read_to_string(&mut output);
        let line = output.lines().last().unwrap_or_default();
        match (read, serde_json::from_str(line)) {
            (Ok(_), Ok(report)) => Ok(report),
            _ => Err(self.problem()),
        }
    }

    fn problem(&self) -> BenchError {
        let line = self.process.last_line();
        BenchError::Relay {
            side: self.side,
            problem: line.unwrap_or_else(|| "it ended without a message".to_owned()),
        }
    }
}
