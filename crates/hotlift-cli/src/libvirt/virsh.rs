//! Queries and migrates domains of libvirt, through its command `virsh`.
//!
//! The command has advantages over libvirt's library. The operator's authentication, URIs and options apply. This process does
//! not depend on the ABI of a libvirt release. A call that hangs blocks a child process, not a thread of this process.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use hotlift_qemu::downtime_ramp::Figures;
use hotlift_qmp::one_line;

use crate::libvirt::virsh_run::Run;

/// Timeout for libvirt's answer: over SSH, and while libvirt works on the domain.
const ANSWER: Duration = Duration::from_secs(40);

/// Interval of queries while libvirt ends a QEMU.
const ENDING_POLL: Duration = Duration::from_millis(200);

/// Interval of attempts to abort a migration, until libvirt can abort it.
pub const ABORT_AGAIN: Duration = Duration::from_millis(200);

/// Limit of the output of `virsh` that is stored, in bytes.
const MAX_OUTPUT: usize = 1 << 20;

/// Length of a UUID in libvirt's output, in characters.
const UUID: usize = 36;

/// Error of a query to libvirt.
#[derive(Debug, thiserror::Error)]
pub enum VirshError {
    /// `virsh` cannot be run.
    #[error("cannot run 'virsh'")]
    Run(#[source] io::Error),
    /// libvirt answered with an error.
    #[error("libvirt at {at}: {output}")]
    Refused { at: String, output: String },
    /// libvirt did not answer in time.
    #[error("libvirt at {at} did not answer within {ANSWER:?}")]
    Silent { at: String },
    /// The output is longer than the limit.
    #[error("libvirt at {at} answered with more than {MAX_OUTPUT} bytes")]
    TooLong { at: String },
    /// The output has an unexpected form.
    #[error("libvirt at {at} sent '{output}' instead of {what}")]
    Garbage {
        at: String,
        what: &'static str,
        output: String,
    },
}

/// State of a domain on a host, reduced to what a migration needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The guest of the domain runs.
    Running,
    /// The guest of the domain is paused.
    Paused,
    /// The guest has ended, and libvirt is ending the QEMU.
    Ending,
    /// The domain does not exist on this host, or has no guest.
    Gone,
}

/// Prefixes of the output of `virsh domstate --reason` if the guest has ended, but its QEMU has not.
const ENDING: [&str; 2] = ["in shutdown", "paused (shutting down)"];

/// A domain (VM of libvirt), with the UUID and name that it has on every host. virsh tries an argument as an ID first, then as
/// a UUID, then as a name: a name of digits could select another domain. So queries use only the UUID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Domain {
    /// Name, for messages to the operator.
    #[serde(rename = "domain")]
    pub name: String,
    /// UUID, in libvirt's notation.
    pub uuid: String,
}

impl Domain {
    /// Returns the domain of `domains` with the UUID or name `typed`; `None` if there is none. As in virsh, UUIDs have
    /// precedence.
    pub fn find<'a>(domains: &'a [Self], typed: &str) -> Option<&'a Self> {
        let has_uuid = |domain: &&Self| domain.uuid.eq_ignore_ascii_case(typed);
        let has_name = |domain: &&Self| domain.name == typed;
        let mut all = domains.iter();
        all.clone().find(has_uuid).or_else(|| all.find(has_name))
    }

    /// Parses a line of `virsh list --uuid --name`; `None` if it has another form.
    fn of_line(line: &str) -> Option<Self> {
        let (uuid, rest) = line.split_at_checked(UUID)?;
        // Spaces at the start and end belong to the name.
        let name = rest.strip_prefix(' ')?;
        Some(Self {
            name: name.to_owned(),
            uuid: uuid.to_owned(),
        })
    }
}

/// The libvirt of a host, addressed by its URI.
#[derive(Debug, Clone)]
pub struct Libvirt {
    uri: String,
}

/// Returns the host in a URI of libvirt; `None` if the URI contains no host.
pub fn host_of(uri: &str) -> Option<&str> {
    let (_, rest) = uri.split_once("://")?;
    let authority = rest.split(['/', '?']).next()?;
    let host = authority.rsplit('@').next()?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next()?,
        None => host.split(':').next()?,
    };
    (!host.is_empty()).then_some(host)
}

/// libvirt's statistics of a migration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Job {
    /// Time since the start of the migration, in milliseconds.
    pub total_ms: u64,
    /// Downtime of the guest, in milliseconds; `null` while the guest runs.
    pub downtime_ms: Option<u64>,
    /// Size of the guest's memory, in bytes.
    pub memory_bytes: u64,
    /// Memory that is not sent yet, in bytes.
    pub remaining_bytes: u64,
}

impl Job {
    /// Parses the output of `virsh domjobinfo --rawstats`; `None` if it has no migration.
    fn parse(output: &str) -> Option<Self> {
        Some(Self {
            total_ms: number(output, "time_elapsed:")?,
            downtime_ms: number(output, "downtime:"),
            memory_bytes: number(output, "memory_total:").unwrap_or(0),
            remaining_bytes: number(output, "memory_remaining:").unwrap_or(0),
        })
    }
}

/// A running migration, as libvirt reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Statistics for the operator.
    pub job: Option<Job>,
    /// QEMU's figures; `None` before the memory moves.
    pub figures: Option<Figures>,
    /// Downtime limit of the domain's QEMU in milliseconds.
    pub downtime_limit: Option<u64>,
}

impl Progress {
    /// Parses the output of `virsh domjobinfo --rawstats`, then of `migrate-getmaxdowntime`, which is a number.
    fn parse(output: &str) -> Self {
        let of = |name| number(output, name);
        // 0 until QEMU has begun the migration.
        let rounds = of("memory_iteration:").filter(|rounds| *rounds > 0);
        let figures = rounds.map(|rounds| Figures {
            rounds,
            remaining: of("memory_remaining:").unwrap_or(0),
            dirty: of("memory_dirty_rate:")
                .unwrap_or(0)
                .saturating_mul(of("memory_page_size:").unwrap_or(1)),
            sent: of("memory_bps:").unwrap_or(0),
            is_throttled: of("auto_converge_throttle:").is_some_and(|percent| percent > 0),
        });
        let last = output.trim_end().lines().next_back();
        Self {
            job: Job::parse(output),
            figures,
            downtime_limit: last.and_then(|line| line.trim().parse().ok()),
        }
    }
}

/// libvirt's figures of a domain's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Size of the memory, in bytes.
    pub bytes: u64,
    /// Write rate of the guest, in bytes a second; `None` without a complete sample.
    pub written: Option<u64>,
    /// True while libvirt samples the writes.
    pub is_sampled_now: bool,
}

impl Libvirt {
    /// Returns the libvirt at the URI `uri`; does not connect.
    pub fn at(uri: &str) -> Self {
        Self {
            uri: uri.to_owned(),
        }
    }

    /// Returns the URI of this libvirt.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    fn command<S: AsRef<OsStr>>(&self, words: &[S]) -> Command {
        let mut command = Command::new("virsh");
        command
            .env("LC_ALL", "C")
            .args(["--quiet", "--connect", &self.uri])
            .args(words)
            .stdin(Stdio::null());
        // A separate process group: Ctrl-C in a terminal signals only this process, which handles it.
        command.process_group(0);
        command
    }

    /// Runs `virsh` with the arguments `words`, and returns its output.
    ///
    /// # Errors
    /// [`VirshError`] if `virsh` cannot run, fails, does not answer in time, or prints too much.
    pub fn ask(&self, words: &[&str]) -> Result<String, VirshError> {
        let mut command = self.command(words);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut run = Run::start(command, MAX_OUTPUT).map_err(VirshError::Run)?;
        let Some(status) = run
            .wait(&[], Some(Instant::now() + ANSWER))
            .map_err(VirshError::Run)?
        else {
            return Err(VirshError::Silent {
                at: self.uri.clone(),
            });
        };
        let (out, err) = run.output();
        if out.len() >= MAX_OUTPUT {
            return Err(VirshError::TooLong {
                at: self.uri.clone(),
            });
        }
        match status.success() {
            true => Ok(out),
            false => Err(VirshError::Refused {
                at: self.uri.clone(),
                output: errors(&err),
            }),
        }
    }

    /// Returns the state of a domain on this libvirt's host.
    ///
    /// # Errors
    /// [`VirshError`] if libvirt fails. A missing domain is [`State::Gone`], not an error.
    pub fn state(&self, domain: &Domain) -> Result<State, VirshError> {
        match self.ask(&["domstate", "--reason", "--domain", &domain.uuid]) {
            Ok(output) => Ok(state(output.trim())),
            // For a missing domain, a missing permission and a broken connection, virsh prints the same error. Only a list
            // without the domain proves that it is gone.
            Err(refused @ VirshError::Refused { .. }) => {
                let all = self.domains(&["--all"])?;
                match all.iter().any(|one| one.uuid == domain.uuid) {
                    true => Err(refused),
                    false => Ok(State::Gone),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the state of a domain. If its guest has ended, first waits until libvirt has ended the QEMU, with the timeout of
    /// an answer.
    ///
    /// # Errors
    /// [`VirshError`] if libvirt fails.
    pub fn settled_state(&self, domain: &Domain) -> Result<State, VirshError> {
        let deadline = Instant::now() + ANSWER;
        loop {
            match self.state(domain)? {
                State::Ending if Instant::now() < deadline => thread::sleep(ENDING_POLL),
                state => return Ok(state),
            }
        }
    }

    /// Returns `reason`, with the cause of the domain's end as a prefix if libvirt reports one.
    pub fn with_end(&self, domain: &Domain, reason: String) -> String {
        let words = ["domstate", "--reason", "--domain", &domain.uuid];
        match self.ask(&words).ok().and_then(|output| end(output.trim())) {
            Some(how) => format!("{how}: {reason}"),
            None => reason,
        }
    }

    /// Returns true if the host has a definition of the domain; false if the domain only runs (transient).
    ///
    /// # Errors
    /// [`VirshError`] if libvirt fails.
    pub fn is_persistent(&self, domain: &Domain) -> Result<bool, VirshError> {
        // From the list, since `dominfo` queries QEMU: this took 0.9 s while QEMU sampled writes.
        let persistent = self.domains(&["--all", "--persistent"])?;
        Ok(persistent.iter().any(|one| one.uuid == domain.uuid))
    }

    /// Returns the domains of the host that the flags `which` of `virsh list` select.
    ///
    /// # Errors
    /// [`VirshError`] if libvirt fails.
    pub fn domains(&self, which: &[&str]) -> Result<Vec<Domain>, VirshError> {
        let output = self.ask(&[&["list", "--uuid", "--name"], which].concat())?;
        let lines = output.lines().filter(|line| !line.is_empty());
        let domain = |line| {
            Domain::of_line(line).ok_or_else(|| self.garbage("UUIDs and names of domains", line))
        };
        lines.map(domain).collect()
    }

    /// Returns the running or stopped domain with the UUID or name `typed`; `None` if the host has no such domain.
    ///
    /// # Errors
    /// [`VirshError`] if libvirt fails.
    pub fn find(&self, typed: &str) -> Result<Option<Domain>, VirshError> {
        let all = self.domains(&["--all"])?;
        Ok(Domain::find(&all, typed).cloned())
    }

    /// Starts a sample of the guests' memory writes, for one second. Skips domains that cannot be sampled.
    ///
    /// # Errors
    /// [`VirshError`] if `virsh` fails as a whole.
    pub fn sample_writes(&self, domains: &[&Domain]) -> Result<(), VirshError> {
        let sample = |domain: &&Domain| {
            let uuid = &domain.uuid;
            format!("domdirtyrate-calc --seconds 1 --domain {uuid}; ")
        };
        let lines: String = domains.iter().map(sample).collect();
        self.ask(&[&format!("{lines}echo")]).map(drop)
    }

    /// Returns the memory figures of one domain, or of all active domains if `of` is `None`, by domain name.
    ///
    /// # Errors
    /// [`VirshError`] if libvirt fails, or if the domain does not exist.
    pub fn memory(&self, of: Option<&Domain>) -> Result<BTreeMap<String, Memory>, VirshError> {
        let which = of.map_or("--list-active", |domain| &domain.uuid);
        let output = self.ask(&["domstats", "--balloon", "--dirtyrate", which])?;
        let found = memory(&output);
        found.ok_or_else(|| self.garbage("the memory of domains", &output))
    }

    /// Returns the host's memory that is available for guests, in bytes: free and cached memory.
    ///
    /// # Errors
    /// [`VirshError`] if libvirt fails.
    pub fn free_memory(&self) -> Result<u64, VirshError> {
        let output = self.ask(&["nodememstats"])?;
        let of = |name| {
            value(&output, name).and_then(|value| value.split_whitespace().next()?.parse().ok())
        };
        let kib: Option<u64> = of("free");
        let cached: u64 = of("cached").unwrap_or(0);
        let kib = kib.ok_or_else(|| self.garbage("free memory", &output))?;
        Ok(kib.saturating_add(cached).saturating_mul(1 << 10))
    }

    /// Returns the statistics of the domain's running migration or, with `completed`, of the migration that brought it to this
    /// host. `None` if libvirt reports none.
    pub fn job(&self, domain: &Domain, completed: bool) -> Option<Job> {
        let mut line = vec!["domjobinfo", "--rawstats", "--domain", &domain.uuid];
        if completed {
            // Keeps the statistics in libvirt, for later queries.
            line.extend(["--completed", "--keep-completed"]);
        }
        Job::parse(&self.ask(&line).ok()?)
    }

    /// Returns the progress of a domain's migration.
    ///
    /// # Errors
    /// [`VirshError`].
    pub fn progress(&self, domain: &Domain) -> Result<Progress, VirshError> {
        // One process for both. It also ends without an error if only one of them has an answer.
        let uuid = &domain.uuid;
        let lines = [
            format!("domjobinfo --rawstats --domain {uuid}"),
            format!("migrate-getmaxdowntime --domain {uuid}"),
            "echo".to_owned(),
        ];
        Ok(Progress::parse(&self.ask(&[&lines.join("; ")])?))
    }

    /// Returns the downtime limit of an active domain's QEMU in milliseconds.
    ///
    /// # Errors
    /// [`VirshError`].
    pub fn downtime_limit(&self, domain: &Domain) -> Result<u64, VirshError> {
        let output = self.ask(&["migrate-getmaxdowntime", "--domain", &domain.uuid])?;
        let limit = output.trim().parse();
        limit.map_err(|_| self.garbage("a downtime limit", &output))
    }

    /// Sets that limit in milliseconds.
    ///
    /// # Errors
    /// [`VirshError`].
    pub fn set_downtime_limit(&self, domain: &Domain, limit: u64) -> Result<(), VirshError> {
        let (uuid, limit) = (&domain.uuid, limit.to_string());
        let line = [
            "migrate-setmaxdowntime",
            "--domain",
            uuid,
            "--downtime",
            &limit,
        ];
        self.ask(&line).map(drop)
    }

    /// Starts `virsh migrate --live` of `domain` to the libvirt `to`, with the further options `options`.
    ///
    /// # Errors
    /// [`VirshError::Run`] if `virsh` cannot be started.
    pub fn migrate(
        &self,
        domain: &Domain,
        to: &Libvirt,
        options: &[OsString],
    ) -> Result<Migrating, VirshError> {
        let mut words: Vec<OsString> = [
            "migrate",
            "--live",
            "--domain",
            &domain.uuid,
            "--desturi",
            &to.uri,
        ]
        .map(OsString::from)
        .into();
        words.extend_from_slice(options);
        let mut command = self.command(&words);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let run = Run::start(command, MAX_OUTPUT).map_err(VirshError::Run)?;
        Ok(Migrating(run))
    }

    /// Aborts the migration of a domain: the migration fails, and the guest stays on the source host. (A signal to `virsh
    /// migrate` has no effect without a terminal.)
    ///
    /// # Errors
    /// [`VirshError`] if libvirt fails, or if no migration can be aborted.
    pub fn abort(&self, domain: &Domain) -> Result<(), VirshError> {
        self.ask(&["domjobabort", "--domain", &domain.uuid])
            .map(drop)
    }

    fn garbage(&self, what: &'static str, output: &str) -> VirshError {
        VirshError::Garbage {
            at: self.uri.clone(),
            what,
            output: one_line(output),
        }
    }
}

/// A running `virsh migrate`.
#[derive(Debug)]
pub struct Migrating(Run);

impl Migrating {
    /// Waits for the end of the migration, and returns its result; the error is libvirt's message. Returns `None` at
    /// `deadline`, or if one of `others` is readable first.
    ///
    /// # Errors
    /// [`VirshError::Run`] if the child process cannot be checked.
    pub fn wait(
        &mut self,
        others: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<Option<Result<(), String>>, VirshError> {
        let status = self.0.wait(others, deadline).map_err(VirshError::Run)?;
        Ok(status.map(|status| match status.success() {
            true => Ok(()),
            false => Err(errors(&self.0.output().1)),
        }))
    }
}

/// Parses the state in `output`, of `virsh domstate --reason`.
fn state(output: &str) -> State {
    let (state, _) = output.split_once(" (").unwrap_or((output, ""));
    match state {
        _ if ENDING.iter().any(|ending| output.starts_with(ending)) => State::Ending,
        "running" | "idle" => State::Running,
        "shut off" | "crashed" => State::Gone,
        _ => State::Paused,
    }
}

/// Parses the cause of the domain's end in `output`, of `virsh domstate --reason`; `None` if it contains none.
fn end(output: &str) -> Option<&'static str> {
    match output {
        "shut off (shutdown)" => Some("the guest powered off"),
        "shut off (crashed)" => Some("its QEMU crashed"),
        "shut off (destroyed)" => Some("it was destroyed"),
        _ if output.starts_with("crashed") => Some("the guest panicked"),
        _ => None,
    }
}

/// Returns the error messages in the output of `virsh`, joined to one line.
fn errors(output: &str) -> String {
    let lines = output
        .lines()
        .map(|line| line.trim_start_matches("error: "));
    let lines: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
    match lines.is_empty() {
        true => "it reports no reason".to_owned(),
        false => one_line(&lines.join("; ")),
    }
}

/// Returns the text after `name` on the first line that begins with it; `None` without such a line.
fn value<'a>(output: &'a str, name: &str) -> Option<&'a str> {
    let rest = output
        .lines()
        .find_map(|line| line.trim().strip_prefix(name))?;
    Some(rest.trim_start_matches([' ', ':']).trim())
}

/// Parses the memory figures in `output`, of `virsh domstats`, by domain name; `None` if a domain has no figures.
fn memory(output: &str) -> Option<BTreeMap<String, Memory>> {
    let mut domains = output.split("Domain: '");
    domains.next()?;
    let domain = |text: &str| {
        let (name, figures) = text.split_once("'\n")?;
        // Values of virDomainDirtyRateStatus: 0 unstarted, 1 measuring, 2 measured.
        let status = number(figures, "dirtyrate.calc_status=");
        let mib = number(figures, "dirtyrate.megabytes_per_second=").filter(|_| status == Some(2));
        let memory = Memory {
            bytes: number(figures, "balloon.current=")?.saturating_mul(1 << 10),
            written: mib.map(|mib| mib.saturating_mul(1 << 20)),
            is_sampled_now: status == Some(1),
        };
        Some((name.to_owned(), memory))
    };
    domains.map(domain).collect()
}

fn number(output: &str, name: &str) -> Option<u64> {
    value(output, name)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_parsed_from_the_output_of_virsh() {
        let output = "total  :  24684096 KiB\nfree   :  20000000 KiB\ncached :         17 KiB";
        assert_eq!(value(output, "free"), Some("20000000 KiB"));
        assert_eq!(value("Persistent:     yes", "Persistent:"), Some("yes"));
    }

    #[test]
    fn figures_of_a_migration_are_parsed_once_its_memory_moves() {
        let begun = "Job type: 2\n\noperation: 5\ntime_elapsed: 64\nmemory_total: 0\n\
            memory_remaining: 0\nmemory_dirty_rate: 0\nmemory_iteration: 0\n\n300\n\n";
        let found = Progress::parse(begun);
        assert_eq!((found.figures, found.downtime_limit), (None, Some(300)));
        assert_eq!(found.job.map(|job| job.total_ms), Some(64));
        let moves = "Job type: 2\n\noperation: 5\ntime_elapsed: 749\ndowntime: 9\n\
            memory_total: 67444736\nmemory_remaining: 61005824\nmemory_bps: 9659562\n\
            memory_dirty_rate: 500\nmemory_iteration: 2\nmemory_page_size: 4096\n\
            auto_converge_throttle: 20\n\n9\n\n";
        let figures = Figures {
            rounds: 2,
            remaining: 61_005_824,
            dirty: 500 * 4096,
            sent: 9_659_562,
            is_throttled: true,
        };
        let found = Progress::parse(moves);
        assert_eq!(
            (found.figures, found.downtime_limit),
            (Some(figures), Some(9))
        );
        assert_eq!(Progress::parse("Job type: 0\n\n\n"), Progress::default());
    }

    #[test]
    fn memory_of_each_domain_is_parsed_and_its_dirty_rate_once_sampled() {
        let figures = |status| {
            let rate = "dirtyrate.megabytes_per_second=3";
            format!("  balloon.current=64\n  dirtyrate.calc_status={status}\n  {rate}\n")
        };
        let output = format!(
            "Domain: 'a's'\n{}\nDomain: ' b'\n{}\n",
            figures(2),
            figures(1)
        );
        let of = |written: Option<u64>| Memory {
            bytes: 64 << 10,
            written,
            is_sampled_now: written.is_none(),
        };
        let found = memory(&output).unwrap();
        let expected = [("a's", of(Some(3 << 20))), (" b", of(None))];
        assert_eq!(
            found,
            expected.map(|(name, of)| (name.to_owned(), of)).into()
        );
        assert_eq!(memory("Domain: 'a'\n  balloon.maximum=64\n"), None);
    }

    #[test]
    fn a_name_keeps_its_spaces_and_is_distinct_from_other_names_and_ids() {
        let line = "6695eb01-f6a4-8304-79aa-97f2502e193f  101 ";
        let domain = Domain::of_line(line).unwrap();
        assert_eq!(domain.name, " 101 ");
        let domains = [domain];
        for (typed, is_found) in [
            (" 101 ", true),
            ("6695EB01-f6a4-8304-79aa-97f2502e193f", true),
            ("101", false),
            ("", false),
        ] {
            assert_eq!(Domain::find(&domains, typed).is_some(), is_found, "{typed}");
        }
        for line in [
            "",
            "web1",
            "6695eb01-f6a4-8304-79aa-97f2502e193f",
            &"\u{e9}".repeat(40),
        ] {
            assert_eq!(Domain::of_line(line), None, "{line}");
        }
    }

    #[test]
    fn the_host_is_found_in_every_form_of_a_uri() {
        for (uri, host) in [
            ("qemu+ssh://b.example/system", Some("b.example")),
            (
                "qemu+ssh://root@b.example:2222/system?no_tty=1",
                Some("b.example"),
            ),
            ("qemu+tcp://[2001:db8::2]:16509/system", Some("2001:db8::2")),
            ("qemu:///system", None),
            ("tcp:b:4444", None),
        ] {
            assert_eq!(host_of(uri), host, "{uri}");
        }
    }

    #[test]
    fn states_and_ends_are_found_with_and_without_a_reason() {
        for (output, expected, how) in [
            ("running (booted)", State::Running, None),
            ("idle", State::Running, None),
            ("paused (user)", State::Paused, None),
            ("pmsuspended (unknown)", State::Paused, None),
            ("paused (shutting down)", State::Ending, None),
            ("in shutdown (user)", State::Ending, None),
            ("in shutdown", State::Ending, None),
            (
                "shut off (shutdown)",
                State::Gone,
                Some("the guest powered off"),
            ),
            ("shut off (migrated)", State::Gone, None),
            (
                "crashed (panicked)",
                State::Gone,
                Some("the guest panicked"),
            ),
        ] {
            assert_eq!((state(output), end(output)), (expected, how), "{output}");
        }
    }

    #[test]
    fn errors_are_one_line_without_the_prefix() {
        let output = "error: failed to connect\nerror: no route\n\n";
        assert_eq!(errors(output), "failed to connect; no route");
        assert_eq!(errors(""), "it reports no reason");
    }
}
