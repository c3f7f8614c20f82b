//! The agents of the two hosts, and what they leave behind: nothing.

use std::fs;

use hotlift_testkit::libvirt::{Host, Hosts};
use hotlift_testkit::pki::Pki;
use hotlift_testkit::process::Process;
use rustix::process::Signal;
use serde_json::Value;

use crate::{DEADLINE, HOTLIFT, until};

/// Where an agent is asked, on its host.
pub const CONTROL: &str = "/run/agent.sock";

/// Looks between which nothing changes.
const ALIKE: usize = 10;

/// The agent of a host.
pub struct Agent<'a> {
    host: &'a Host,
    process: Process,
    /// `--config` with its file.
    config: String,
    /// Its threads and open files before it had anything to carry.
    idle: [usize; 2],
}

impl<'a> Agent<'a> {
    /// Starts one with certificates of `pki`, and these lines in its configuration.
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

    /// What it says of migrations and tunnels that are under way or have ended.
    pub fn rows(&self) -> Vec<Value> {
        let control = format!("--control={CONTROL}");
        let said = self
            .host
            .tool(HOTLIFT, &["agent", "list", "--json", &control]);
        serde_json::from_str(&said.expect("an answer")).expect("JSON")
    }

    /// How many of a kind have ended well.
    pub fn completed(&self, kind: &str) -> usize {
        let is = |row: &&Value| row["kind"] == kind && row["status"] == "completed";
        self.rows().iter().filter(is).count()
    }

    /// Waits until so many migrations have ended well, and no other has: libvirt may be done before it is told of.
    pub fn has_carried(&self, migrations: usize) {
        until(&format!("{migrations} migrations: {}", self.said()), || {
            let is_over = self.rows().iter().all(|row| row["status"] != "active");
            (is_over && self.completed("migration") == migrations).then_some(())
        });
    }

    /// What `agent check` finds on its host.
    pub fn check(&self) -> Result<String, String> {
        let checked = self.host.tool(HOTLIFT, &["agent", "check", &self.config]);
        checked.map_err(|error| error.to_string())
    }

    /// All that it has said.
    pub fn said(&self) -> String {
        self.process.said().join("\n")
    }

    /// Its process, to be killed.
    pub fn kill(&self) {
        let killed = self.host.signal(&self.process, Signal::KILL);
        killed.expect("it runs");
    }

    /// What it has in use once that does not change any more: it listens before all its threads are there.
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

    /// Ends it, once it is idle: it leaves no rule but its table, which is removed as an operator does.
    pub fn end(mut self) {
        self.is_idle_again();
        let signalled = self.host.signal(&self.process, Signal::TERM);
        signalled.expect("it runs");
        let status = self.process.wait(DEADLINE).expect("it ends");
        assert!(status.success(), "{}", self.said());
        let removed = self.host.tool(HOTLIFT, &["agent", "rules", "--remove"]);
        removed.expect("the table is removed");
        let tables = self.host.tool("nft", &["list", "tables"]);
        assert_eq!(tables.expect("an answer"), "");
    }
}

/// Both, of one CA, with these lines in their configurations.
pub fn both<'a>(hosts: &'a Hosts, config: &str) -> [Agent<'a>; 2] {
    let pki = Pki::new();
    [&hosts.source, &hosts.destination].map(|host| Agent::start(hosts, host, &pki, config))
}

/// Ends both.
pub fn end(agents: [Agent<'_>; 2]) {
    agents.into_iter().for_each(Agent::end);
}

/// Waits until an agent carries something whose pages are on their way.
pub fn carries(agent: &Agent<'_>) {
    until("an agent carries a migration", || {
        let moves =
            |row: &Value| row["status"] == "active" && row["normal-pages"].as_u64() > Some(0);
        agent.rows().iter().any(moves).then_some(())
    });
}
