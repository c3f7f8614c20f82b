//! A Hotlift or QEMU process with a small machine and a QMP socket, killed on drop.

use std::process::Command;
use std::time::{Duration, Instant};

use hotlift_qmp::{Client, QmpAddress, QmpError};
use hotlift_testkit::process::Process;
use hotlift_testkit::qemu::{self, Release};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Far above the duration of any step here on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Program to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    Hotlift,
    Qemu,
}

pub struct Machine {
    process: Process,
    pub folder: TempDir,
    pub qmp: Client,
    /// Names and data of the received events.
    pub events: Vec<(String, Value)>,
}

impl Machine {
    /// Starts a machine with a nearly idle guest.
    pub fn start(program: Program, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qmp");
        let mut command = match program {
            Program::Hotlift => {
                let mut command = Command::new(env!("CARGO_BIN_EXE_hotlift"));
                command.args([
                    "guest",
                    "run",
                    "--guest=threads",
                    "--ram=16M",
                    "--workload=idle",
                ]);
                command.arg(format!("--qmp={}", socket.display()));
                command
            }
            Program::Qemu => {
                let mut command = Command::new(Release::V10.find().expect("was looked for"));
                command.args(qemu::bare(&socket));
                command.args(["-m", "16", "-machine", "pc,accel=tcg"]);
                command
            }
        };
        command.args(flags);
        let process = Process::start("machine", None, command, &[]).expect("it starts");
        let qmp = Client::connect(&QmpAddress::Unix(socket), DEADLINE).expect("QMP");
        Self {
            process,
            folder,
            qmp,
            events: Vec::new(),
        }
    }

    /// Starts a machine that waits for a guest.
    pub fn waiting(program: Program) -> Self {
        match program {
            Program::Qemu => Self::start(program, &["-incoming", "defer"]),
            Program::Hotlift => Self::start(program, &["--incoming=defer"]),
        }
    }

    /// Sends a command; returns its answer, or class and text of its refusal.
    pub fn ask(&mut self, command: &str, arguments: &Value) -> Result<Value, (String, String)> {
        match self.qmp.execute(command, arguments) {
            Ok(value) => Ok(value),
            Err(QmpError::Command { class, desc, .. }) => Err((class, desc)),
            Err(error) => panic!("{command}: {error}"),
        }
    }

    pub fn execute(&mut self, command: &str, arguments: &Value) -> Value {
        self.ask(command, arguments)
            .unwrap_or_else(|(_, desc)| panic!("{command} {arguments}: {desc}"))
    }

    pub fn set_capabilities(&mut self, names: &[&str]) {
        let capabilities: Vec<_> = names
            .iter()
            .map(|name| json!({ "capability": name, "state": true }))
            .collect();
        let arguments = json!({ "capabilities": capabilities });
        self.execute("migrate-set-capabilities", &arguments);
    }

    /// Lets it wait for a guest; returns the address.
    pub fn listen(&mut self) -> String {
        let arguments = json!({ "uri": "tcp:127.0.0.1:0", "exit-on-error": false });
        self.execute("migrate-incoming", &arguments);
        let info = self.execute("query-migrate", &json!({}));
        let port = info["socket-address"][0]["port"].as_str();
        format!("tcp:127.0.0.1:{}", port.expect("a port"))
    }

    pub fn status(&mut self) -> String {
        let info = self.execute("query-migrate", &json!({}));
        info["status"].as_str().unwrap_or("none").to_owned()
    }

    /// Waits for a state of the migration.
    pub fn reaches(&mut self, status: &str) -> Value {
        let start = Instant::now();
        loop {
            let info = self.execute("query-migrate", &json!({}));
            if info["status"] == status {
                return info;
            }
            assert!(start.elapsed() < DEADLINE, "not {status}, but {info}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Reads the events that have arrived so far.
    pub fn take_events(&mut self) -> &[(String, Value)] {
        while let Some(event) = self.qmp.poll_event().expect("QMP") {
            self.events.push((event.name, event.data));
        }
        &self.events
    }

    /// Waits for the end of the process; returns its exit code.
    pub fn wait_end(&mut self) -> Option<i32> {
        self.process.wait(DEADLINE).expect("it ends").code()
    }
}
