//! A guest in its process (QEMU or `hotlift guest run`), with queries and commands.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotlift_qmp::{MigrationInfo, Qemu, QmpAddress, QmpError};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Map, Value, json};

use crate::error::KitError;
use crate::namespace::Namespace;
use crate::process::{Process, Stream};
use crate::program::Program;
use crate::qemu::{self, PATIENCE};

/// Timeout for a query of a guest's state. Without an answer the state is [`GuestState::Silent`], and the query is repeated.
const GLANCE: Duration = Duration::from_millis(300);

/// Migration capabilities and parameters of a QEMU, as QMP reports them.
pub type Settings = (Vec<(String, bool)>, Map<String, Value>);

/// State of a guest, as observed by the test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestState {
    /// The guest's vCPUs run.
    Running,
    /// The guest's vCPUs are paused; the string is QEMU's run state.
    Paused(String),
    /// The guest has not arrived yet.
    Waiting,
    /// The process exists, but does not answer.
    Silent,
    /// The guest's process has ended.
    Ended,
}

impl GuestState {
    /// Returns a one-word name of the state. For a paused guest, the name is QEMU's run state.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Running => "running",
            Self::Paused(state) => state,
            Self::Waiting => "waiting",
            Self::Silent => "silent",
            Self::Ended => "ended",
        }
    }
}

/// How the memory of a guest can be proven to match its writes.
#[derive(Debug)]
enum Proof {
    /// Compute the expected memory from the registers, and compare the RAM file.
    Replay { program: Arc<Program>, ram: PathBuf },
    /// The process checks its own memory when it ends.
    AtEnd,
    /// The process has already checked its own memory, and reported success.
    Said,
}

/// A guest in its process: a QEMU or `hotlift guest run`.
#[derive(Debug)]
pub struct Machine {
    /// The guest's process; `None` if another process has started it.
    process: Option<Process>,
    /// File with the guest's process ID, if another process has started it.
    pid_file: PathBuf,
    /// QMP socket that only the test uses; `None` without a monitor.
    socket: Option<PathBuf>,
    qmp: Option<Qemu>,
    proof: Proof,
    /// True if the guest was reset while it ran, on either side.
    was_reset: bool,
}

impl Machine {
    /// Starts a QEMU on `host`, or on the host of the test process without one. The command line is that of
    /// [`qemu_line`], with files in `folder`. With `incoming`, the QEMU waits for a migration.
    ///
    /// # Errors
    /// If QEMU does not start.
    pub fn qemu(
        host: Option<&Namespace>,
        line: &[String],
        guest: &Arc<Program>,
        folder: &Path,
        incoming: bool,
        temporary: &Path,
    ) -> Result<Self, KitError> {
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).env("TMPDIR", temporary);
        if incoming {
            command.args(["-incoming", "defer"]);
        } else {
            guest.fill(&folder.join("ram"))?;
        }
        let qmp = folder.join("qmp").display().to_string();
        command.args(["-qmp", &format!("unix:{qmp},server=on,wait=off")]);
        let process = Process::start("QEMU", host, command, &[])?;
        let mut this = Self::adopted(guest, folder);
        this.process = Some(process);
        this.connect(PATIENCE)?;
        if !guest.keeps_rate() {
            this.qmp.as_mut().map(qemu::lower_vcpu_priority);
        }
        if !incoming {
            this.wait_for_guest(&folder.join("console"))?;
        }
        Ok(this)
    }

    /// Waits until the guest program runs. The memory cannot be proven while the firmware runs.
    fn wait_for_guest(&self, console: &Path) -> Result<(), KitError> {
        let deadline = Instant::now() + PATIENCE;
        while !fs::read_to_string(console).is_ok_and(|output| output.contains("writes=")) {
            if Instant::now() >= deadline {
                return Err(KitError::Late {
                    process: "the guest".to_owned(),
                    what: "counted".to_owned(),
                    waited: PATIENCE,
                    output: self.output_lines().join(" | "),
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Returns the QEMU that another process will start with [`qemu_line`] in `folder`.
    #[must_use]
    pub fn adopted(guest: &Arc<Program>, folder: &Path) -> Self {
        Self {
            process: None,
            pid_file: folder.join("pid"),
            socket: Some(folder.join(qemu::QMP)),
            qmp: None,
            proof: Proof::Replay {
                program: Arc::clone(guest),
                ram: folder.join("ram"),
            },
            was_reset: false,
        }
    }

    /// Connects to `hotlift guest run`. `socket` is the path of its monitor; `None` without a monitor.
    ///
    /// # Errors
    /// If the monitor does not answer.
    pub fn built_in(process: Process, socket: Option<PathBuf>) -> Result<Self, KitError> {
        let mut this = Self {
            proof: match socket {
                Some(_) => Proof::AtEnd,
                None => Proof::Said,
            },
            process: Some(process),
            pid_file: PathBuf::new(),
            socket,
            qmp: None,
            was_reset: false,
        };
        if this.socket.is_some()
            && let Err(error) = this.connect(PATIENCE)
        {
            let output = this.output_lines().join(" | ");
            return Err(match output.is_empty() {
                true => error,
                false => KitError::Memory {
                    problem: format!("it does not start: {output}"),
                },
            });
        }
        Ok(this)
    }

    fn connect(&mut self, timeout: Duration) -> Result<(), KitError> {
        if let Some(socket) = &self.socket {
            let mut qmp = Qemu::connect(&QmpAddress::Unix(socket.clone()), timeout)?;
            qmp.client().set_timeout(GLANCE);
            self.qmp = Some(qmp);
        }
        Ok(())
    }

    /// Sends a query over QMP, and connects first if needed. `None` without an answer.
    fn try_qmp<T>(&mut self, what: impl FnOnce(&mut Qemu) -> Result<T, QmpError>) -> Option<T> {
        if self.qmp.is_none() {
            self.socket.as_ref().filter(|socket| socket.exists())?;
            self.connect(GLANCE).ok()?;
        }
        let answer = what(self.qmp.as_mut()?);
        if answer.as_ref().is_err_and(QmpError::is_disconnected) {
            self.qmp = None;
        }
        answer.ok()
    }

    /// Sends a query or command over QMP, with a timeout for busy hosts.
    ///
    /// # Errors
    /// The error of QMP; also if the guest has no monitor.
    pub fn with_qmp<T>(
        &mut self,
        what: impl FnOnce(&mut Qemu) -> Result<T, QmpError>,
    ) -> Result<T, KitError> {
        if self.qmp.is_none() {
            self.connect(PATIENCE)?;
        }
        let Some(qmp) = self.qmp.as_mut() else {
            let problem = "it has no monitor".to_owned();
            return Err(KitError::Memory { problem });
        };
        qmp.client().set_timeout(PATIENCE);
        let answer = what(qmp);
        qmp.client().set_timeout(GLANCE);
        Ok(answer?)
    }

    /// Returns the ID of the guest's process; `None` before the process has written its ID.
    pub fn pid(&self) -> Option<Pid> {
        match &self.process {
            Some(process) => Some(process.pid()),
            None => {
                let text = fs::read_to_string(&self.pid_file).ok()?;
                Pid::from_raw(text.trim().parse().ok()?)
            }
        }
    }

    /// Returns true if the guest's process has ended, or has not started.
    pub fn has_ended(&mut self) -> bool {
        if let Some(process) = &mut self.process {
            return process.ended().is_some();
        }
        // QEMU removes the file when it ends normally.
        self.pid().is_none_or(|pid| test_kill_process(pid).is_err())
    }

    /// Returns the state of the guest.
    pub fn guest_state(&mut self) -> GuestState {
        if self.has_ended() {
            return GuestState::Ended;
        }
        if self.socket.is_none() {
            return GuestState::Silent;
        }
        match self.try_qmp(Qemu::query_status) {
            None => GuestState::Silent,
            Some(state) if state.running => GuestState::Running,
            Some(state) if state.status == "inmigrate" => GuestState::Waiting,
            Some(state) => GuestState::Paused(state.status),
        }
    }

    /// Returns the guest's migration status; `None` without an answer.
    pub fn migration(&mut self) -> Option<MigrationInfo> {
        self.try_qmp(Qemu::query_migrate)
    }

    /// Returns true if an event has reported that the guest stopped.
    pub fn has_stopped(&mut self) -> bool {
        let stop = |qmp: &mut Qemu| {
            while let Some(event) = qmp.client().poll_event()? {
                if event.name == "STOP" {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        self.try_qmp(stop).unwrap_or(false)
    }

    /// Starts the migration of the guest to `uri`.
    ///
    /// # Errors
    /// If the guest's process rejects the command.
    pub fn migrate(&mut self, uri: &str) -> Result<(), KitError> {
        self.with_qmp(|qmp| qmp.migrate(uri))
    }

    /// Continues the migration that is paused in `pre-switchover`.
    ///
    /// # Errors
    /// If the guest's process rejects the command.
    pub fn proceed(&mut self) -> Result<(), KitError> {
        let arguments = json!({ "state": "pre-switchover" });
        self.with_qmp(|qmp| qmp.client().execute("migrate-continue", &arguments))
            .map(drop)
    }

    /// Sends the command `migrate_cancel`, and ignores the result.
    pub fn cancel(&mut self) {
        let _ = self.try_qmp(Qemu::migrate_cancel);
    }

    /// Resets the guest if it runs. Returns false if it does not run.
    pub fn reset(&mut self) -> bool {
        if self.guest_state() != GuestState::Running {
            return false;
        }
        let reset = self.with_qmp(|qmp| qmp.client().execute("system_reset", &json!({})));
        // With `-no-reboot`, QEMU may end before it answers.
        !matches!(reset, Err(KitError::Qmp(QmpError::Command { .. })))
    }

    /// Records for [`Machine::prove`] that the guest was reset on either side.
    pub fn note_reset(&mut self) {
        self.was_reset = true;
    }

    /// Returns the migration capabilities and parameters of this QEMU.
    ///
    /// # Errors
    /// The error of QMP; also if the guest has no monitor.
    pub fn settings(&mut self) -> Result<Settings, KitError> {
        self.with_qmp(|qmp| Ok((qmp.query_capabilities()?, qmp.query_parameters()?)))
    }

    /// Resumes a paused guest.
    ///
    /// # Errors
    /// If the guest's process rejects the command.
    pub fn resume(&mut self) -> Result<(), KitError> {
        self.with_qmp(|qmp| {
            // The built-in guest requires both commands, in this order.
            qmp.stop()?;
            qmp.cont()
        })
    }

    /// Proves that the guest's memory matches its writes. The proof may end the guest's process.
    ///
    /// # Errors
    /// [`KitError::Memory`] if the memory does not match; other errors if it cannot be read.
    pub fn prove(&mut self) -> Result<(), KitError> {
        match &self.proof {
            Proof::Replay { program, ram } => {
                let (program, file) = (Arc::clone(program), ram.clone());
                let deadline = Instant::now() + PATIENCE;
                loop {
                    let registers = self.with_qmp(|qmp| {
                        qmp.stop()?;
                        let line = json!({ "command-line": "info registers" });
                        qmp.client().execute("human-monitor-command", &line)
                    })?;
                    let registers = registers.as_str().unwrap_or_default();
                    let ram = fs::read(&file).map_err(KitError::system("read the file of RAM"))?;
                    if !self.was_reset {
                        return program.prove(registers, &ram).map(drop);
                    }
                    if program.prove_after_reset(registers, &ram)?.is_some() {
                        return Ok(());
                    }
                    if Instant::now() >= deadline {
                        return Err(KitError::Memory {
                            problem: "the guest does not run its program after the reset"
                                .to_owned(),
                        });
                    }
                    // The guest is still in its firmware, or between the stores of a write.
                    self.with_qmp(Qemu::cont)?;
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
            Proof::AtEnd => {
                self.with_qmp(Qemu::quit)?;
                let Some(process) = &mut self.process else {
                    return Ok(());
                };
                // The output of the process may be closed, so only the exit code is used.
                let status = process.wait(PATIENCE)?;
                process.read_last_output();
                self.well(status.success())
            }
            Proof::Said => self.well(
                self.output_lines()
                    .iter()
                    .any(|line| line.contains("none lost")),
            ),
        }
    }

    /// Returns an error with the last output lines of the process unless `is_well` is true.
    fn well(&self, is_well: bool) -> Result<(), KitError> {
        let lines = self.output_lines();
        match is_well {
            true => Ok(()),
            false => Err(KitError::Memory {
                problem: lines[lines.len().saturating_sub(3)..].join(" | "),
            }),
        }
    }

    /// Returns the output lines of the guest's process.
    #[must_use]
    pub fn output_lines(&self) -> Vec<String> {
        self.process
            .as_ref()
            .map_or(Vec::new(), Process::output_lines)
    }

    /// Returns the guest's process; `None` if another process has started it.
    pub fn process(&mut self) -> Option<&mut Process> {
        self.process.as_mut()
    }

    /// Sends a signal to the guest's process.
    pub fn signal(&mut self, signal: Signal) {
        if !self.has_ended()
            && let Some(pid) = self.pid()
        {
            // The process may have ended in the meantime.
            let _ = kill_process(pid, signal);
        }
    }

    /// Ends the guest's process. Returns true if the process ended without being killed.
    pub fn end(&mut self) -> bool {
        let deadline = Instant::now() + Duration::from_secs(20);
        match self.socket {
            Some(_) => drop(self.try_qmp(Qemu::quit)),
            // The guest has no monitor.
            None => self.signal(Signal::KILL),
        }
        while !self.has_ended() {
            if Instant::now() >= deadline {
                self.signal(Signal::KILL);
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Closes or fills an output of the guest's process, as `output` says.
    pub fn spoil(&self, stream: Stream, output: crate::process::Output) {
        if let Some(process) = &self.process {
            process.spoil(stream, output);
        }
    }
}

/// Returns the command line of a QEMU under KVM with the tests' common machine, files in `folder`, and the arguments
/// `more`.
///
/// # Errors
/// If a file in `folder` cannot be written.
pub fn qemu_line(
    program: &Path,
    guest: &Program,
    folder: &Path,
    more: &[String],
) -> Result<Vec<String>, KitError> {
    let mut line = vec![program.display().to_string()];
    let memory = (qemu::Memory::File, guest.ram_bytes());
    line.extend(qemu::machine(qemu::PC_7, "kvm", memory, folder));
    line.extend(guest.boot(&folder.join("hotlift.elf"))?);
    line.extend_from_slice(more);
    Ok(line)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_guest_that_was_reset_is_proven_and_a_page_that_it_lost_is_found() {
        let Some(release) = qemu::Release::V7.program() else {
            return;
        };
        if !qemu::has_kvm() {
            return;
        }
        let guest = Arc::new(Program::new(64 << 20, 32 << 20, 20).unwrap());
        let folder = qemu::folder().unwrap();
        let line = qemu_line(&release, &guest, folder.path(), &[]).unwrap();
        let (path, temporary) = (folder.path(), folder.path());
        let mut machine = Machine::qemu(None, &line, &guest, path, false, temporary).unwrap();
        assert!(machine.reset());
        machine.note_reset();
        machine.prove().unwrap();
        assert!(!machine.reset(), "it is paused");
        let ram = fs::OpenOptions::new().write(true).open(path.join("ram"));
        let last = guest.ram_bytes() - 1;
        ram.unwrap().write_all_at(&[0xa5], last).unwrap();
        let lost = machine.prove();
        assert!(matches!(lost, Err(KitError::Memory { .. })), "{lost:?}");
    }

    #[test]
    fn a_reset_interrupts_one_write_at_most() {
        let Some(release) = qemu::Release::V7.program() else {
            return;
        };
        if !qemu::has_kvm() {
            return;
        }
        // The first write after the reset goes to page `first`, so the guest counts its error. Page `other` is not
        // written so soon.
        let guest = Arc::new(Program::new(64 << 20, 32 << 20, 20).unwrap());
        let (first, other) = (guest.page(1), guest.page(100_000));
        for (pages, stores, is_proven) in [
            (vec![first], 2, true),
            (vec![other], 1, true),
            (vec![other], 2, true),
            (vec![other], 3, true),
            (vec![first, other], 2, false),
            (vec![other, other + 1], 2, false),
        ] {
            let folder = qemu::folder().unwrap();
            let path = folder.path();
            let line = qemu_line(&release, &guest, path, &[]).unwrap();
            let mut machine = Machine::qemu(None, &line, &guest, path, false, path).unwrap();
            machine.with_qmp(Qemu::stop).unwrap();
            for &page in &pages {
                guest.interrupt(&path.join("ram"), page, stores).unwrap();
            }
            let reset = |qmp: &mut Qemu| qmp.client().execute("system_reset", &json!({}));
            machine.with_qmp(reset).unwrap();
            machine.with_qmp(Qemu::cont).unwrap();
            machine.note_reset();
            let proven = machine.prove();
            let what = format!("{pages:?}, {stores} stores: {proven:?}");
            assert_eq!(proven.is_ok(), is_proven, "{what}");
        }
    }
}
