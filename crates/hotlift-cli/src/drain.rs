//! `hotlift drain`: moves the domains (VMs of libvirt) of this host to other hosts, by a plan.
//!
//! libvirt migrates the domains; the agents of the hosts carry the data. A drain stores no state. If it ends early, the same
//! command moves the domains that are still here.

mod choice;
mod display;
mod one_move;
mod peers;
mod plan;

use std::ffi::OsString;
use std::io::PipeWriter;
use std::net::Ipv6Addr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use clap::Args;
use hotlift_command::args;
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::output::warn;
use hotlift_terminal::signals::{Interrupt, end_of_thread};

use self::choice::Domains;
use self::display::{Display, MoveState, Outcome, table};
use self::one_move::{Move, MoveEvent, POLL_INTERVAL};
use self::peers::UnreachableHost;
use self::plan::{Budget, Plan, Step};
use crate::agent_control::{self, ControlArgs};
use crate::error::CommandError;
use crate::libvirt::virsh::Libvirt;
use crate::output_args::OutputArgs;
use crate::ramp_args::RampArgs;

/// Flags of `drain`.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// Destination hosts, separated by commas: a host name, for qemu+ssh://NAME/system, or a URI of libvirt
    #[arg(long, value_name = "HOST", required = true, value_delimiter = ',', value_parser = to_uri)]
    to: Vec<String>,
    /// Move only this domain, by name or UUID; repeatable [default: all running domains]
    #[arg(long = "domain", value_name = "NAME")]
    domains: Vec<String>,
    /// URI of this host's libvirt
    #[arg(long, value_name = "URI", default_value = "qemu:///system")]
    connect: String,
    /// Highest number of domains to move at once [default: 2, or up to 8 small domains; at most what this host's agent allows]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(1..))]
    at_once: Option<u8>,
    /// Bandwidth of the link that the plan assumes, in bytes a second, such as 125M [default: the limit of this host's agent,
    /// or 125000000]
    #[arg(long, value_name = "BYTES", value_parser = to_bytes)]
    bandwidth: Option<u64>,
    /// Number of connections of each domain's QEMU ('virsh migrate --parallel-connections'); 0 to use no --parallel
    #[arg(long, value_name = "NUMBER", default_value_t = 2)]
    parallel: u8,
    /// Print the plan, and move nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    ramp: RampArgs,
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
            // In a URI, an IPv6 address needs brackets.
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

/// Runs `hotlift drain`.
pub fn run(args: &DrainArgs) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch()?;
    let here = Libvirt::at(&args.connect);
    // Checked first: without libvirt on this host, the destinations do not matter.
    here.ask(&["uri"])?;
    let places = choice::destinations(&args.to)?;
    let domains = Domains::chosen(&here, &args.domains, &places)?;
    let agent = agent_control::of_this_host(&args.control);
    let budget = Budget::new(args.bandwidth, args.at_once, agent.as_ref());
    let plan = Plan::new(domains.measured(&here), places, budget);
    if args.dry_run {
        return Ok(args.output.print(&plan, || plan.table())?);
    }
    let outcomes = Drain::new(plan, here, args).run(&interrupt);
    args.output.print(&outcomes, || table(&outcomes))?;
    for outcome in &outcomes {
        if let MoveState::Stayed { reason }
        | MoveState::Ended { reason }
        | MoveState::NotBegun { reason }
        | MoveState::Unknown { reason } = &outcome.move_state
        {
            warn!("hotlift: {}: {reason}", outcome.step.domain.name);
        }
    }
    summarize(&outcomes, interrupt.is_raised())
}

/// Returns the result of the drain: its worst outcome decides.
fn summarize(outcomes: &[Outcome], is_interrupted: bool) -> Result<(), CommandError> {
    let of = outcomes.len();
    let count =
        |is: fn(&MoveState) -> bool| outcomes.iter().filter(|one| is(&one.move_state)).count();
    let unknown = count(|move_state| matches!(move_state, MoveState::Unknown { .. }));
    let moved = count(|move_state| matches!(move_state, MoveState::Moved { .. }));
    let ended = count(|move_state| matches!(move_state, MoveState::Ended { .. }));
    match (unknown, of - unknown - moved - ended, ended) {
        (1.., _, _) => Err(CommandError::DomainsInDoubt { domains: unknown }),
        (0, 1.., _) if is_interrupted => Err(TerminalError::Interrupted.into()),
        (0, stayed @ 1.., _) => Err(CommandError::DomainsStayed { stayed, of }),
        (0, 0, 1..) => Err(CommandError::DomainsEnded { ended, of }),
        (0, 0, 0) => Ok(()),
    }
}

fn not_begun(step: Step) -> Outcome {
    let move_state = match step.stays {
        None => MoveState::Waiting,
        Some(stays) => MoveState::NotBegun {
            reason: stays.reason().to_owned(),
        },
    };
    Outcome { step, move_state }
}

/// A running drain, with the states of all its moves.
struct Drain<'a> {
    budget: Budget,
    here: Libvirt,
    args: &'a DrainArgs,
    outcomes: Vec<Outcome>,
    /// For each running move, the write end of a pipe: the drop aborts the move.
    aborts: Vec<Option<PipeWriter>>,
    /// Reason why no further moves start; `None` while further moves may start.
    stop: Option<String>,
    events: Receiver<DrainEvent>,
    /// Keeps the channel open: otherwise a wait would end when no move is running.
    sender: Sender<DrainEvent>,
    display: Display,
}

/// Event that changes the state of a drain.
enum DrainEvent {
    /// Event of the move with this index in the plan.
    Move(usize, MoveEvent),
    Lost(UnreachableHost),
    Interrupted,
}

impl<'a> Drain<'a> {
    fn new(plan: Plan, here: Libvirt, args: &'a DrainArgs) -> Self {
        let (sender, events) = channel();
        let lost = sender.clone();
        // Send errors are ignored: they mean that the drain has ended.
        peers::watch(&plan, move |one| _ = lost.send(DrainEvent::Lost(one)));
        Self {
            budget: plan.budget,
            aborts: plan.steps.iter().map(|_| None).collect(),
            outcomes: plan.steps.into_iter().map(not_begun).collect(),
            here,
            args,
            stop: None,
            events,
            sender,
            display: Display::new(args.output.quiet),
        }
    }

    fn run(mut self, interrupt: &Interrupt) -> Vec<Outcome> {
        let sender = self.sender.clone();
        let signal = move |_| _ = sender.send(DrainEvent::Interrupted);
        // The event of an earlier signal arrives too late, so the signal is checked here: after it, no move may start.
        if interrupt.is_raised() {
            self.interrupted();
        }
        interrupt.watching(None, signal, || self.move_all());
        if let Some(reason) = &self.stop {
            for outcome in &mut self.outcomes {
                if matches!(outcome.move_state, MoveState::Waiting) {
                    let reason = reason.clone();
                    outcome.move_state = MoveState::NotBegun { reason };
                }
            }
        }
        self.display.finish();
        self.outcomes
    }

    /// Starts moves in the order of the plan, as the budget permits. Returns when no move runs and no move can start.
    fn move_all(&mut self) {
        let mut show_at = Instant::now() + POLL_INTERVAL;
        loop {
            self.begin();
            if self.under_way().is_empty() {
                return;
            }
            let wait = match self.display.is_table() {
                true => show_at.saturating_duration_since(Instant::now()),
                false => Duration::MAX,
            };
            let mut events = self.events.recv_timeout(wait).ok();
            while let Some(one) = events {
                match one {
                    DrainEvent::Move(index, event) => self.take(index, event),
                    DrainEvent::Lost(UnreachableHost { uri, reason }) => {
                        self.abort(reason, Some(&uri))
                    }
                    DrainEvent::Interrupted => self.interrupted(),
                }
                events = self.events.try_recv().ok();
            }
            if Instant::now() >= show_at {
                show_at = Instant::now() + POLL_INTERVAL;
                self.display.show(&self.outcomes);
            }
        }
    }

    fn under_way(&self) -> Vec<&Step> {
        let is_under_way = |one: &&Outcome| matches!(one.move_state, MoveState::UnderWay { .. });
        let all = self.outcomes.iter().filter(is_under_way);
        all.map(|one| &one.step).collect()
    }

    fn next(&self) -> Option<usize> {
        let waits = |outcome: &Outcome| matches!(outcome.move_state, MoveState::Waiting);
        self.outcomes.iter().position(waits)
    }

    fn interrupted(&mut self) {
        self.abort("interrupted".to_owned(), None);
    }

    /// Starts no further moves, and aborts running ones: those to `to`, or all if `to` is `None`.
    fn abort(&mut self, reason: String, to: Option<&str>) {
        if self.stop.is_none() {
            self.display.finish();
            warn!("hotlift: {reason}; running migrations are aborted, and their domains stay here");
            self.stop = Some(reason);
        }
        for (outcome, abort) in self.outcomes.iter().zip(&mut self.aborts) {
            if to.is_none_or(|to| outcome.step.to.as_deref() == Some(to)) {
                *abort = None;
            }
        }
    }

    /// Starts the moves that the budget permits now. Keeps their order: a move that must wait also delays all later moves.
    fn begin(&mut self) {
        while self.stop.is_none()
            && let Some(index) = self.next()
        {
            let step = &self.outcomes[index].step;
            if !self.budget.may_begin(step, &self.under_way()) {
                return;
            }
            self.start(index);
        }
    }

    fn start(&mut self, index: usize) {
        let mut options = Vec::new();
        if self.args.parallel > 0 {
            options.extend(["--parallel", "--parallel-connections"].map(OsString::from));
            options.push(self.args.parallel.to_string().into());
        }
        options.extend_from_slice(&self.args.options);
        let (abort, to_abort) = match end_of_thread() {
            Ok(ends) => ends,
            Err(error) => {
                let reason = error_line(&error);
                return self.enter(index, MoveState::NotBegun { reason });
            }
        };
        self.aborts[index] = Some(to_abort);
        let one = Move {
            here: self.here.clone(),
            step: self.outcomes[index].step.clone(),
            options,
            limit: self.args.ramp.limit(None),
            is_displayed: self.display.is_table(),
            abort,
        };
        let sender = self.sender.clone();
        one.start(move |event| _ = sender.send(DrainEvent::Move(index, event)));
        self.enter(index, MoveState::UnderWay { progress: None });
    }

    fn take(&mut self, index: usize, event: MoveEvent) {
        match event {
            MoveEvent::Progress(progress) => {
                if let Some(remark) = &progress.remark {
                    self.display.remark(&self.outcomes[index], remark);
                }
                let progress = Some(progress);
                self.outcomes[index].move_state = MoveState::UnderWay { progress };
            }
            MoveEvent::Ended { move_state, lost } => {
                self.enter(index, move_state);
                self.stop = self.stop.take().or(lost);
            }
        }
    }

    fn enter(&mut self, index: usize, move_state: MoveState) {
        self.outcomes[index].move_state = move_state;
        self.display.note(&self.outcomes[index]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libvirt::virsh::host_of;

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
