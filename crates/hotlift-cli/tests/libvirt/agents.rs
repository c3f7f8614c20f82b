//! Runs an agent on each of the two hosts, and checks that the agents leave no file or rule.

use std::fs;

use hotlift_testkit::libvirt::{Host, Hosts};
use hotlift_testkit::pki::Pki;
use hotlift_testkit::process::Process;
use rustix::process::Signal;
use serde_json::Value;

use crate::{DEADLINE, HOTLIFT, until};

/// Control socket of an agent, on its host.
pub const CONTROL: &str = "/run/agent.sock";

/// Number of equal polls that count as a stable state.
const ALIKE: usize = 10;

/// The agent of a host.
pub struct Agent<'a> {
    host: &'a Host,
    process: Process,
    /// `--config` with its file.
    config: String,
    /// Its threads and open files before it carried anything.
    idle: [usize; 2],
}

impl<'a> Agent<'a> {
    /// Starts an agent with certificates of `pki` and these lines of configuration.
    pub fn start(hosts: &'a Hosts, host: &'a Host, pki: &Pki, config: &str) -> Self {
        let name = host.name();
        let certificates = hosts.folder().join(format!("{name}.hotlift"));
        let number = if name == "a" { 1 } else { 2 };
        let addresses = [format!("192.0.2.{number}"), format!("2001:db8::{number}")];
        pki.host_in(&certificates, &[name, &addresses[0], &addresses[1]]);
        let file = hosts.folder().join(format!("{name}.toml"));
        let text = format!(
            "tls = \"{}\"\ncontrol = \"{CONTROL}\"\n{config}\n",
            certificates.display()
        );
        fs::write(&file, text).expect("a configuration");
        let flag = format!("--config={}", file.display());
        let process = host.start(HOTLIFT, &["agent", "run", &flag]);
        let mut process = process.expect("an agent");
        let listens = process.wait_for("listening on ", DEADLINE);
        listens.expect("it listens");
        let mut this = Self {
            host,
            process,
            config: flag,
            idle: [0, 0],
        };
        this.idle = this.settled();
        this
    }

    /// Returns its report of running and ended migrations and tunnels.
    pub fn rows(&self) -> Vec<Value> {
        let control = format!("--control={CONTROL}");
        let output = self
            .host
            .tool(HOTLIFT, &["agent", "list", "--json", &control]);
        serde_json::from_str(&output.expect("an answer")).expect("JSON")
    }

    /// Returns the number of successful ones of a kind.
    pub fn completed(&self, kind: &str) -> usize {
        let is = |row: &&Value| row["kind"] == kind && row["status"] == "completed";
        self.rows().iter().filter(is).count()
    }

    /// Waits until exactly `migrations` have succeeded: libvirt may finish before the agent knows.
    pub fn has_carried(&self, migrations: usize) {
        until(
            &format!("{migrations} migrations: {}", self.output()),
            || {
                let is_over = self.rows().iter().all(|row| row["status"] != "active");
                (is_over && self.completed("migration") == migrations).then_some(())
            },
        );
    }

    /// Returns the result of `agent check` on its host.
    pub fn check(&self) -> Result<String, String> {
        let checked = self.host.tool(HOTLIFT, &["agent", "check", &self.config]);
        checked.map_err(|error| error.to_string())
    }

    /// Returns all its output.
    pub fn output(&self) -> String {
        self.process.output_lines().join("\n")
    }

    /// Kills its process.
    pub fn kill(&self) {
        let killed = self.host.signal(&self.process, Signal::KILL);
        killed.expect("it runs");
    }

    /// Returns its resources once they are stable: it listens before all its threads exist.
    fn settled(&self) -> [usize; 2] {
        let mut alike = (self.in_use(), 0);
        until("an agent has nothing to do", || {
            let now = self.in_use();
            alike = (now, if now == alike.0 { alike.1 + 1 } else { 0 });
            (alike.1 == ALIKE).then_some(now)
        })
    }

    fn in_use(&self) -> [usize; 2] {
        let pid = self.host.pid(&self.process).expect("it runs");
        ["task", "fd"].map(|what| {
            let folder = format!("/proc/{}/{what}", pid.as_raw_nonzero());
            fs::read_dir(folder).expect("it runs").count()
        })
    }

    /// Waits until it has no more threads and files than at first.
    pub fn is_idle_again(&self) {
        until("threads and files are given back", || {
            let now = self.in_use();
            let mut both = now.iter().zip(&self.idle);
            both.all(|(now, idle)| now <= idle).then_some(())
        });
    }

    /// Ends it once it is idle: only its table remains, which is then removed as an operator does.
    pub fn end(mut self) {
        self.is_idle_again();
        let signalled = self.host.signal(&self.process, Signal::TERM);
        signalled.expect("it runs");
        let status = self.process.wait(DEADLINE).expect("it ends");
        assert!(status.success(), "{}", self.output());
        let removed = self.host.tool(HOTLIFT, &["agent", "rules", "--remove"]);
        removed.expect("the table is removed");
        let tables = self.host.tool("nft", &["list", "tables"]);
        assert_eq!(tables.expect("an answer"), "");
    }
}

/// Starts both with one CA and these lines of configuration.
pub fn both<'a>(hosts: &'a Hosts, config: &str) -> [Agent<'a>; 2] {
    let pki = Pki::new();
    [&hosts.source, &hosts.destination].map(|host| Agent::start(hosts, host, &pki, config))
}

/// Ends both.
pub fn end(agents: [Agent<'_>; 2]) {
    agents.into_iter().for_each(Agent::end);
}

/// Waits until an agent carries pages of a migration.
pub fn carries(agent: &Agent<'_>) {
    until("an agent carries a migration", || {
        let moves =
            |row: &Value| row["status"] == "active" && row["normal-pages"].as_u64() > Some(0);
        agent.rows().iter().any(moves).then_some(())
    });
}
