//! A QEMU process with one of the test guests. It is controlled over QMP, and killed on drop.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotlift_qmp::{MigrationInfo, Qemu};
use hotlift_testkit::qemu::{self, Launched, lower_vcpu_priority};
pub use hotlift_testkit::qemu::{Memory, PC_7, PC_10, PC_11, Release, UUID};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::guest::{Guest, NOTHING_TO_BOOT};

/// Far above the duration of any step here on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Polls `look` until it returns a value, or panics with the current message of `what`.
pub fn until<T>(what: impl Fn() -> String, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < DEADLINE, "{}", what());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Lists the names of a process's threads.
pub fn threads_of(pid: Pid) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).expect("it runs");
    // A thread that ends at the same time has no name.
    tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok())
        .map(|name| name.trim_end().to_owned())
        .collect()
}

/// Engine that runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Accelerator {
    Kvm,
    Tcg,
}

impl Accelerator {
    /// Returns true if it exists, else marks a skip.
    fn is_there(self) -> bool {
        self == Self::Tcg || qemu::has_kvm()
    }

    /// Returns its name in QEMU.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// Machine that both ends of a migration have, in any QEMU.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Versioned machine type: the stream contains it.
    pub name: &'static str,
    pub accelerator: Accelerator,
    pub memory: Memory,
    pub guest: Arc<Guest>,
}

/// A running QEMU.
pub struct Vm {
    process: Launched,
    /// Receives the events of every migration.
    pub qmp: Qemu,
    pub machine: Machine,
    pub release: Release,
}

impl Vm {
    /// Starts a machine that runs its guest, or prints why it cannot.
    pub fn running(release: Release, machine: &Machine) -> Option<Self> {
        Self::running_with(release, machine, &[])
    }

    /// Starts a machine that waits for a migration, or prints why it cannot.
    pub fn waiting(release: Release, machine: &Machine) -> Option<Self> {
        Self::waiting_with(release, machine, &[])
    }

    /// Starts a running machine with additional `devices`, as in QEMU's command line.
    pub fn running_with(release: Release, machine: &Machine, devices: &[String]) -> Option<Self> {
        Self::start(release, machine, devices, false)
    }

    /// Starts a waiting machine with additional `devices`.
    pub fn waiting_with(release: Release, machine: &Machine, devices: &[String]) -> Option<Self> {
        Self::start(release, machine, devices, true)
    }

    fn start(release: Release, machine: &Machine, devices: &[String], waits: bool) -> Option<Self> {
        if !machine.accelerator.is_there() || !machine.memory.is_there() {
            return None;
        }
        let program = release.program()?;
        let folder = folder();
        let mut line = command_line(machine, folder.path());
        match machine.memory {
            _ if waits => {}
            Memory::File => machine.guest.fill(&folder.path().join("ram")),
            Memory::HugePages => line.extend(machine.guest.load(folder.path())),
        }
        // The other socket is for the tested command.
        let free = folder.path().join("qmp").display().to_string();
        let free = format!("unix:{free},server=on,wait=off");
        line.extend(["-qmp", &free].map(str::to_owned));
        line.extend_from_slice(devices);
        if waits {
            line.extend(["-incoming", "defer"].map(str::to_owned));
        }
        let started = Launched::start(&program, &line, folder);
        let process = started.unwrap_or_else(|error| panic!("{error}"));
        let mut qmp = process.connect().unwrap_or_else(|error| panic!("{error}"));
        qmp.set_capabilities(&[("events", true)]).expect("events");
        if matches!(&*machine.guest, Guest::Program(program) if !program.keeps_rate()) {
            lower_vcpu_priority(&mut qmp);
        }
        let vm = Self {
            process,
            qmp,
            machine: machine.clone(),
            release,
        };
        if !waits {
            until(|| vm.explain("the guest prints nothing"), || vm.begins());
        }
        Some(vm)
    }

    /// Returns the path of one of its files and sockets.
    pub fn path(&self, name: &str) -> PathBuf {
        self.process.path(name)
    }

    /// Returns a URI of a UNIX socket in its folder.
    pub fn uri(&self, name: &str) -> String {
        format!("unix:{}", self.path(name).display())
    }

    /// Returns the QMP socket without a client.
    pub fn free_qmp(&self) -> String {
        self.path("qmp").display().to_string()
    }

    /// Returns all of the guest's RAM.
    pub fn ram(&self) -> Vec<u8> {
        let file = match self.machine.memory {
            Memory::File => self.path("ram"),
            Memory::HugePages => self.memfds().pop().expect("a memfd"),
        };
        fs::read(file).expect("the guest's RAM")
    }

    /// Returns the memfds of its memory.
    pub fn memfds(&self) -> Vec<PathBuf> {
        let open = fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("it runs");
        let open = open.flatten().map(|file| file.path());
        let is_memory = |file: &PathBuf| {
            // QEMU's name of it; some files are closed in the meantime.
            fs::read_link(file)
                .is_ok_and(|to| to.starts_with("/memfd:memory-backend-memfd (deleted)"))
        };
        open.filter(is_memory).collect()
    }

    /// Returns the guest's output so far.
    pub fn console(&self) -> String {
        let bytes = fs::read(self.path("console")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the count in the last line that the guest printed here; panics if the guest found an error.
    pub fn count(&self) -> Option<u64> {
        match *self.machine.guest {
            Guest::Firmware => self.machine.guest.ticks(&self.path("ram")),
            _ => count_in(&self.console(), &self.machine.guest),
        }
    }

    /// Returns the count of a guest that has booted here.
    fn begins(&self) -> Option<u64> {
        let boots = matches!(*self.machine.guest, Guest::Firmware)
            && !self.console().contains(NOTHING_TO_BOOT);
        self.count().filter(|_| !boots)
    }

    /// Waits until the guest's count exceeds `before`, and returns it.
    pub fn continues_from(&self, before: u64) -> u64 {
        until(
            || self.explain(&format!("the guest does not count on from {before}")),
            || self.count().filter(|&count| count > before),
        )
    }

    /// Stops the guest, and verifies that RAM contains all of its writes so far.
    pub fn prove(&mut self) -> u64 {
        self.qmp.stop().expect("stop");
        let guest = Arc::clone(&self.machine.guest);
        guest
            .prove(self)
            .unwrap_or_else(|why| panic!("{}", self.explain(&why)))
    }

    /// Runs a command of the human monitor.
    pub fn hmp(&mut self, line: &str) -> String {
        let arguments = json!({ "command-line": line });
        let answer = self
            .qmp
            .client()
            .execute("human-monitor-command", &arguments);
        match answer.unwrap_or_else(|error| panic!("{}", self.explain(&error.to_string()))) {
            Value::String(text) => text,
            other => panic!("{line}: {other}"),
        }
    }

    /// Returns `query-migrate`.
    pub fn migration(&mut self) -> MigrationInfo {
        let info = self.qmp.query_migrate();
        info.unwrap_or_else(|error| panic!("{}", self.explain(&error.to_string())))
    }

    /// Lets the guest run at the destination before all of its pages are there.
    pub fn start_postcopy(&mut self) {
        let started = self.qmp.client();
        let started = started.execute("migrate-start-postcopy", &Value::Null);
        started.expect("migrate-start-postcopy");
    }

    /// Waits for a status of the migration. Panics at once if it ends with another one.
    pub fn reaches(&mut self, status: &str) -> MigrationInfo {
        let start = Instant::now();
        loop {
            let info = self.migration();
            if info.status() == status {
                return info;
            }
            let has_ended = info.is_completed() || info.has_failed();
            if has_ended || start.elapsed() > DEADLINE {
                panic!(
                    "{}",
                    self.explain(&format!("waited for '{status}', got {info:?}"))
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the migration has had a status: an event reports it, so a past one is not missed.
    pub fn wait_for_status(&mut self, status: &str) {
        let start = Instant::now();
        let mut output = Vec::new();
        while start.elapsed() < DEADLINE {
            let event = self
                .qmp
                .wait_event(DEADLINE)
                .unwrap_or_else(|error| panic!("{error}: {}", self.stderr()));
            let event = event.unwrap_or_else(|| panic!("{}", self.explain("no event")));
            if event.name == "MIGRATION" {
                output.push(event.data["status"].as_str().unwrap_or_default().to_owned());
            }
            if output.last().is_some_and(|last| last == status) {
                return;
            }
        }
        panic!(
            "{}",
            self.explain(&format!("waited for '{status}', got {output:?}"))
        );
    }

    /// Returns true if vCPUs run here.
    pub fn is_running(&mut self) -> bool {
        self.qmp.query_status().is_ok_and(|state| state.running)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("the process is there");
    }

    pub fn pid(&self) -> Pid {
        self.process.process().pid()
    }

    /// Returns true if a thread of the process has a name with this prefix.
    pub fn has_thread(&self, name: &str) -> bool {
        threads_of(self.pid())
            .iter()
            .any(|thread| thread.starts_with(name))
    }

    /// Returns the exit status of the process, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.process_mut().ended()
    }

    /// Reads the last output of an ended process.
    pub fn read_last_output(&self) {
        self.process.process().read_last_output();
    }

    /// Returns QEMU's output on stderr, except for messages about this machine's CPU.
    pub fn stderr(&self) -> String {
        let output = self.process.process().output_lines();
        let output = output.into_iter();
        output
            .filter(|line| !line.contains("host doesn't support requested feature"))
            .collect::<Vec<_>>()
            .join("\n")
    }

    fn explain(&self, what: &str) -> String {
        let (stderr, console) = (self.stderr(), self.console());
        let tail = console.lines().rev().take(5).collect::<Vec<_>>();
        let release = self.release.name();
        format!("QEMU {release}: {what}\nstderr: {stderr}\nconsole, backwards: {tail:#?}")
    }
}

/// Returns the command line of a QEMU for a machine with its files in `folder`.
pub fn command_line(machine: &Machine, folder: &Path) -> Vec<String> {
    let guest = &machine.guest;
    let accelerator = machine.accelerator.name();
    let memory = (machine.memory, guest.ram_bytes());
    let mut line = guest.objects();
    line.extend(qemu::machine(machine.name, accelerator, memory, folder));
    line.extend(guest.boot(folder));
    line
}

/// Returns the count in the last line of a console; panics if any line reports an error.
pub fn count_in(console: &str, guest: &Guest) -> Option<u64> {
    // The last line may be incomplete.
    let (lines, _) = console.rsplit_once('\n')?;
    let counts = lines.lines().filter_map(|line| guest.count(line));
    counts.fold(None, |_, count| Some(count))
}

/// Creates a folder for a QEMU's files.
pub fn folder() -> TempDir {
    qemu::folder().expect("a folder")
}
