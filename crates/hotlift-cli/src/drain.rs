//! `hotlift drain`: moves the domains of this host to others, by a plan.
//!
//! The migrations are libvirt's; the agents of the hosts carry them. A drain keeps no state: what has gone is not here any
//! more, so that the same command again goes on with what is left.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::net::Ipv6Addr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use hotlift_console::args;
use hotlift_console::error::{ConsoleError, error_line};
use hotlift_console::output::{self, complain};
use hotlift_console::output_args::OutputArgs;
use hotlift_console::progress::bytes;
use hotlift_console::signals::{Interrupt, TICK};
use hotlift_console::table::{align_with_words, new_table};
use serde::Serialize;

use crate::agent::{self, ControlArgs};
use crate::drain_choice::{self, Domains};
use crate::drain_plan::{Budget, Plan, Step, short};
use crate::error::CommandError;
use crate::virsh::{Domain, Job, Libvirt, Migrating, State, VirshError};
use crate::whereabouts::{Whereabouts, whereabouts};

/// Between two looks at what libvirt says of migrations under way.
const LOOK: Duration = Duration::from_secs(1);

/// Between two looks whether a destination answers; at the second time that it does not it is lost.
const PEER_LOOK: Duration = Duration::from_secs(3);

/// Flags of `drain`.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// Hosts that take the domains: a name (qemu+ssh://NAME/system) or a URI of libvirt's each
    #[arg(long, value_name = "HOST", required = true, value_delimiter = ',', value_parser = to_uri)]
    to: Vec<String>,
    /// Only this domain, by name or UUID; again for more [default: all that run]
    #[arg(long = "domain", value_name = "NAME")]
    domains: Vec<String>,
    /// libvirt of this host
    #[arg(long, value_name = "URI", default_value = "qemu:///system")]
    connect: String,
    /// Most domains that go at once [default: 2, or as many as this host's agent has places and cores for]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(1..))]
    at_once: Option<u8>,
    /// Bytes a second of the link that the plan is made for, as in 125M [default: as this host's agent allows, or 125000000]
    #[arg(long, value_name = "BYTES", value_parser = to_bytes)]
    bandwidth: Option<u64>,
    /// Connections of each domain's QEMU (virsh migrate --parallel); 0 for none besides its main one
    #[arg(long, value_name = "NUMBER", default_value_t = 2)]
    parallel: u8,
    /// Print the plan, and move nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    output: OutputArgs,
    /// More options of 'virsh migrate'
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<OsString>,
}

fn to_uri(text: &str) -> Result<String, String> {
    match text {
        "" => Err("expected a host".to_owned()),
        uri if uri.contains("://") => Ok(uri.to_owned()),
        host => {
            let (user, name) = match host.rsplit_once('@') {
                Some((user, name)) => (format!("{user}@"), name),
                None => (String::new(), host),
            };
            // In a URI an address of IPv6 stands in brackets.
            let name = match name.parse::<Ipv6Addr>() {
                Ok(address) => format!("[{address}]"),
                Err(_) => name.to_owned(),
            };
            Ok(format!("qemu+ssh://{user}{name}/system"))
        }
    }
}

fn to_bytes(text: &str) -> Result<u64, String> {
    match args::size(text)? {
        0 => Err("expected more than 0".to_owned()),
        bytes => Ok(bytes),
    }
}

/// What has become of a domain.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
enum Fate {
    /// It has not begun.
    Waiting,
    /// It is on its way.
    UnderWay,
    /// The destination has it.
    Moved { job: Option<Job> },
    /// It stayed here, and runs.
    Stayed { reason: String },
    /// It ended before it could move, and is on neither host.
    Ended { reason: String },
    /// It was not begun.
    NotBegun { reason: String },
    /// Nobody knows.
    Unknown { reason: String },
}

/// A domain, and what has become of it.
#[derive(Debug, Clone, Serialize)]
struct Outcome {
    #[serde(flatten)]
    step: Step,
    #[serde(flatten)]
    fate: Fate,
}

/// A domain that is on its way.
struct UnderWay {
    index: usize,
    migrating: Migrating,
    is_aborted: bool,
    job: Option<Job>,
}

/// Runs the command.
pub fn run(args: &DrainArgs) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch()?;
    let here = Libvirt::at(&args.connect);
    let plan = plan(args, &here)?;
    if args.dry_run {
        return Ok(args.output.print(&plan, || plan.table())?);
    }
    let mut drain = Drain {
        outcomes: plan.steps.iter().map(not_begun).collect(),
        plan: &plan,
        here: &here,
        args,
        under_way: Vec::new(),
        stop: None,
        watches: Watch::all(&plan),
        display: Display::new(args.output.quiet),
    };
    drain.run(&interrupt)?;
    let outcomes = drain.outcomes;
    args.output.print(&outcomes, || table(&outcomes))?;
    for outcome in &outcomes {
        if let Fate::Stayed { reason }
        | Fate::Ended { reason }
        | Fate::NotBegun { reason }
        | Fate::Unknown { reason } = &outcome.fate
        {
            complain!("hotlift: {}: {reason}", outcome.step.domain.name);
        }
    }
    verdict(&outcomes, interrupt.is_raised())
}

/// What is worst comes first.
fn verdict(outcomes: &[Outcome], is_interrupted: bool) -> Result<(), CommandError> {
    let of = outcomes.len();
    let count = |is: fn(&Fate) -> bool| outcomes.iter().filter(|one| is(&one.fate)).count();
    let unknown = count(|fate| matches!(fate, Fate::Unknown { .. }));
    let moved = count(|fate| matches!(fate, Fate::Moved { .. }));
    let ended = count(|fate| matches!(fate, Fate::Ended { .. }));
    match (unknown, of - unknown - moved - ended, ended) {
        (1.., _, _) => Err(CommandError::DomainsInDoubt { domains: unknown }),
        (0, 1.., _) if is_interrupted => Err(ConsoleError::Interrupted.into()),
        (0, stayed @ 1.., _) => Err(CommandError::DomainsStayed { stayed, of }),
        (0, 0, 1..) => Err(CommandError::DomainsEnded { ended, of }),
        (0, 0, 0) => Ok(()),
    }
}

fn not_begun(step: &Step) -> Outcome {
    let fate = match step.stays {
        None => Fate::Waiting,
        Some(stays) => Fate::NotBegun {
            reason: stays.reason().to_owned(),
        },
    };
    Outcome {
        step: step.clone(),
        fate,
    }
}

/// Asks this host for what runs, and the others for their memory.
fn plan(args: &DrainArgs, here: &Libvirt) -> Result<Plan, CommandError> {
    let places = drain_choice::places(&args.to)?;
    let domains = Domains::chosen(here, &args.domains, &places)?;
    let agent = agent::of_this_host(&args.control);
    let budget = Budget::new(args.bandwidth, args.at_once, agent.as_ref());
    Ok(Plan::new(domains.measured(here), places, budget))
}

/// A drain at work.
struct Drain<'a> {
    plan: &'a Plan,
    here: &'a Libvirt,
    args: &'a DrainArgs,
    outcomes: Vec<Outcome>,
    under_way: Vec<UnderWay>,
    /// Why nothing more is begun.
    stop: Option<String>,
    watches: Vec<Watch>,
    display: Display,
}

impl Drain<'_> {
    fn run(&mut self, interrupt: &Interrupt) -> Result<(), CommandError> {
        let mut looked = Instant::now();
        loop {
            if interrupt.is_raised() {
                self.abort("interrupted".to_owned(), None);
            }
            for (uri, reason) in lost(&self.watches) {
                self.abort(reason, Some(&uri));
            }
            self.begin();
            if self.under_way.is_empty() {
                break;
            }
            thread::sleep(TICK);
            self.reap()?;
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                for one in &mut self.under_way {
                    let domain = &self.plan.steps[one.index].domain;
                    one.job = self.here.job(domain, false).or(one.job);
                }
                self.display.show(&self.outcomes, &self.under_way);
            }
        }
        if let Some(reason) = &self.stop {
            for outcome in &mut self.outcomes {
                if matches!(outcome.fate, Fate::Waiting) {
                    let reason = reason.clone();
                    outcome.fate = Fate::NotBegun { reason };
                }
            }
        }
        self.display.finish();
        Ok(())
    }

    /// Begins nothing more, and aborts what is on its way, to `to` or anywhere.
    fn abort(&mut self, reason: String, to: Option<&str>) {
        self.stop.get_or_insert(reason);
        for one in &mut self.under_way {
            let step = &self.plan.steps[one.index];
            if !one.is_aborted && to.is_none_or(|to| step.to.as_deref() == Some(to)) {
                // One that is not so far that it could be aborted is tried again.
                one.is_aborted = self.here.abort(&step.domain).is_ok();
            }
        }
    }

    /// Begins what may begin now. The order is kept: what has to wait for the link is not overtaken.
    fn begin(&mut self) {
        while self.stop.is_none() {
            let waits = |outcome: &Outcome| matches!(outcome.fate, Fate::Waiting);
            let Some(index) = self.outcomes.iter().position(waits) else {
                return;
            };
            let step = &self.plan.steps[index];
            let under_way = self.under_way.iter().map(|one| &self.plan.steps[one.index]);
            let under_way: Vec<_> = under_way.collect();
            if !self.plan.may_begin(step, &under_way) {
                return;
            }
            match self.start(step) {
                Ok(migrating) => {
                    self.outcomes[index].fate = Fate::UnderWay;
                    self.under_way.push(UnderWay {
                        index,
                        migrating,
                        is_aborted: false,
                        job: None,
                    });
                }
                Err(error) => {
                    let reason = error_line(&error);
                    let ended = matches!(self.here.state(&step.domain), Ok(State::Gone));
                    self.outcomes[index].fate = match ended {
                        true => Fate::Ended { reason },
                        false => Fate::NotBegun { reason },
                    };
                }
            }
            self.display.note(&self.outcomes[index]);
        }
    }

    fn start(&self, step: &Step) -> Result<Migrating, VirshError> {
        let to = Libvirt::at(step.to.as_deref().unwrap_or_default());
        let mut options = Vec::new();
        if self.args.parallel > 0 {
            options.extend(["--parallel", "--parallel-connections"].map(OsString::from));
            options.push(self.args.parallel.to_string().into());
        }
        // A host that is emptied is to define nothing of what has left it.
        if self.here.is_persistent(&step.domain)? {
            options.extend(["--persistent", "--undefinesource"].map(OsString::from));
        }
        options.extend_from_slice(&self.args.options);
        self.here.migrate(&step.domain, &to, &options)
    }

    /// Takes what has ended.
    fn reap(&mut self) -> Result<(), VirshError> {
        let mut still = Vec::new();
        for mut one in std::mem::take(&mut self.under_way) {
            let Some(ended) = one.migrating.wait(Duration::ZERO)? else {
                still.push(one);
                continue;
            };
            let step = &self.plan.steps[one.index];
            let to = Libvirt::at(step.to.as_deref().unwrap_or_default());
            let fate = fate(self.here, &to, &step.domain, ended);
            if !matches!(fate, Fate::Moved { .. })
                && let Err(error) = to.ask(&["uri"])
            {
                self.stop.get_or_insert(lost_for(&to, &error));
            }
            self.outcomes[one.index].fate = fate;
            self.display.note(&self.outcomes[one.index]);
        }
        self.under_way = still;
        Ok(())
    }
}

fn lost_for(to: &Libvirt, error: &VirshError) -> String {
    format!("{} is lost: {}", short(to.uri()), error_line(error))
}

/// Watches whether a destination answers: a migration to one that does not may go on for ever, and cannot end well.
struct Watch {
    uri: String,
    lost: Arc<Mutex<Option<String>>>,
}

impl Watch {
    /// Of all destinations of a plan.
    fn all(plan: &Plan) -> Vec<Self> {
        let uris: BTreeSet<_> = plan
            .steps
            .iter()
            .filter_map(|step| step.to.as_deref())
            .collect();
        uris.into_iter().map(Self::new).collect()
    }

    fn new(uri: &str) -> Self {
        let lost = Arc::new(Mutex::new(None));
        let (of_thread, to) = (Arc::downgrade(&lost), Libvirt::at(uri));
        // It ends with the command, or when nobody looks any more.
        thread::spawn(move || watch(&of_thread, &to));
        Self {
            uri: uri.to_owned(),
            lost,
        }
    }
}

fn watch(lost: &Weak<Mutex<Option<String>>>, to: &Libvirt) {
    let mut failures = 0;
    while let Some(lost) = lost.upgrade() {
        match to.ask(&["uri"]) {
            Ok(_) => failures = 0,
            Err(error) => {
                failures += 1;
                if failures == 2 {
                    let reason = lost_for(to, &error);
                    *lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason);
                    return;
                }
            }
        }
        drop(lost);
        thread::sleep(PEER_LOOK);
    }
}

/// The destinations that are lost, and why.
fn lost(watches: &[Watch]) -> Vec<(String, String)> {
    let reason = |watch: &Watch| {
        let lost = watch.lost.lock().unwrap_or_else(PoisonError::into_inner);
        Some((watch.uri.clone(), lost.clone()?))
    };
    watches.iter().filter_map(reason).collect()
}

/// Where a domain is whose migration has ended.
fn fate(here: &Libvirt, to: &Libvirt, domain: &Domain, ended: Result<(), String>) -> Fate {
    let Err(reason) = ended else {
        return Fate::Moved {
            job: to.job(domain, true),
        };
    };
    match whereabouts(here, to, domain, State::Running) {
        Whereabouts::Here => Fate::Stayed { reason },
        Whereabouts::There => Fate::Moved {
            job: to.job(domain, true),
        },
        Whereabouts::Ended => Fate::Ended { reason },
        Whereabouts::Unknown { seen } => Fate::Unknown {
            reason: format!("{seen}: {reason}"),
        },
    }
}

fn table(outcomes: &[Outcome]) -> String {
    let mut table = new_table(&["domain", "to", "memory", "state", "seconds", "down ms"]);
    for Outcome { step, fate } in outcomes {
        let (state, job) = match fate {
            Fate::Waiting => ("waiting", None),
            Fate::UnderWay => ("under way", None),
            Fate::Moved { job } => ("moved", *job),
            Fate::Stayed { .. } => ("stayed", None),
            Fate::Ended { .. } => ("ended", None),
            Fate::NotBegun { .. } => ("not begun", None),
            Fate::Unknown { .. } => ("unknown", None),
        };
        let seconds = job.map(|job| format!("{}.{}", job.total_ms / 1000, job.total_ms / 100 % 10));
        let down = job.and_then(|job| job.downtime_ms);
        table.add_row([
            step.domain.name.clone(),
            step.to.as_deref().map_or("-".to_owned(), short),
            bytes(step.memory_bytes),
            state.to_owned(),
            seconds.unwrap_or("-".to_owned()),
            down.map_or("-".to_owned(), |down| down.to_string()),
        ]);
    }
    align_with_words(&mut table, 1);
    table.to_string()
}

/// What is shown while it runs: on a terminal the table, rewritten; elsewhere a line for each change.
struct Display {
    quiet: bool,
    terminal: bool,
    lines: usize,
}

impl Display {
    fn new(quiet: bool) -> Self {
        Self {
            quiet,
            terminal: std::io::stderr().is_terminal(),
            lines: 0,
        }
    }

    fn note(&self, outcome: &Outcome) {
        if self.quiet || self.terminal {
            return;
        }
        let domain = &outcome.step.domain.name;
        let to = outcome.step.to.as_deref().map_or("-".to_owned(), short);
        let text = match &outcome.fate {
            Fate::Waiting => return,
            Fate::UnderWay => "under way".to_owned(),
            Fate::Moved { .. } => "moved".to_owned(),
            Fate::Stayed { reason } => format!("stayed: {reason}"),
            Fate::Ended { reason } => format!("ended: {reason}"),
            Fate::NotBegun { reason } => format!("not begun: {reason}"),
            Fate::Unknown { reason } => format!("unknown: {reason}"),
        };
        output::progress(&format!("{domain} to {to}: {text}\n"));
    }

    fn show(&mut self, outcomes: &[Outcome], under_way: &[UnderWay]) {
        if self.quiet || !self.terminal {
            return;
        }
        self.finish();
        let mut text = table(outcomes);
        for one in under_way {
            // Of one that has only begun libvirt does not know how much it is.
            let Some(job) = one.job.filter(|job| job.memory_bytes > 0) else {
                continue;
            };
            let left = bytes(job.remaining_bytes);
            text += &format!("\n{}: {left} to go", outcomes[one.index].step.domain.name);
        }
        self.lines = text.lines().count();
        output::progress(&format!("{text}\n"));
    }

    /// Takes the table away.
    fn finish(&mut self) {
        if self.lines > 0 {
            // Up by so many lines, and all behind emptied.
            output::progress(&format!("\x1b[{}A\x1b[J", self.lines));
            self.lines = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virsh::host_of;

    #[test]
    fn a_host_becomes_a_uri_that_names_it_by_any_kind_of_address() {
        for (typed, uri, host) in [
            ("b", "qemu+ssh://b/system", "b"),
            ("root@b:22", "qemu+ssh://root@b:22/system", "b"),
            (
                "2001:db8::2",
                "qemu+ssh://[2001:db8::2]/system",
                "2001:db8::2",
            ),
            (
                "root@2001:db8::2",
                "qemu+ssh://root@[2001:db8::2]/system",
                "2001:db8::2",
            ),
            (
                "[2001:db8::2]:22",
                "qemu+ssh://[2001:db8::2]:22/system",
                "2001:db8::2",
            ),
            ("qemu+tcp://b/system", "qemu+tcp://b/system", "b"),
        ] {
            assert_eq!(to_uri(typed).as_deref(), Ok(uri));
            assert_eq!(host_of(uri), Some(host));
        }
    }
}
