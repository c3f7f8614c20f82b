//! Explores every order in which messages, losses, cuts, kills, cancels and panics can meet a handover, with the state
//! machines of the product.
//!
//! A connection delivers in order until it is cut. After that each side may see a FIN, a reset or nothing at all, whatever the
//! other side did: a proxy turns each into another. A question uses its own connection; the question and its answer may be
//! lost. Timeouts are steps that may come at any moment, except for two that limit each other: a destination answers for as
//! long as a source may ask.
//!
//! A QEMU beside a relay may load the guest and not run it, because it cannot lock a disk. A `cont` makes it run later, at any
//! moment. A relay that has started this QEMU ends it, and reports that the guest never ran there. It may report this only if
//! it has seen the QEMU end, and the QEMU has not run the guest before.
//!
//! In a postcopy the source's pages are needed after the commit: lost connections are replaced, as often as they are lost.
//!
//! An attacker between the hosts cuts and delays, as every network may, and also forges messages and replays old ones. With TLS
//! a forgery ends the connection. Without TLS it can make two guests of one, or none. A test asserts this, to record that the
//! handover is not safe without TLS.

use std::io::Write;

use hotlift_wire::settle::Outcome;
use stateright::{Checker, Model, Property};

use crate::handover::source::SourceSide;
use crate::handover::{DestinationSide, DestinationStatement, SourceOutcome};

/// Party that hands the guest over, or receives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Role {
    /// A guest's own migration.
    Guest,
    /// The relay beside a QEMU, which runs the guest until the relay reports that all is loaded.
    Relay,
}

/// A possible bug in the code around the machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mutant {
    None,
    /// A reset counts as a statement that the guest does not run there.
    ResetIsAStatement,
    /// The destination stops listening as soon as it has reported that the guest runs.
    ClosesEarly,
    /// The destination answers "never", and does not refuse a commit that arrives later.
    AnswersWithoutRefusing,
    /// A cancel after the commit returns the guest to the source.
    CancelIsNeverTooLate,
    /// A destination that lost its connections behaves as after a commit: it starts the guest.
    SilenceIsACommit,
    /// Ctrl-C at the destination ends the guest after EOF.
    CancelEndsTheGuest,
    /// The source runs the guest after the connection of a postcopy is lost.
    LostPostcopyRunsHere,
    /// The source releases the pages of a guest that runs at the destination, before the destination has all of them.
    LetsGoOfPages,
    /// The destination obeys RUN after any answer.
    RunIsObeyed,
    /// The destination reports "never" although its QEMU still exists, and has the guest without running it.
    StoppedIsNever,
    /// The destination reports "never" first, and ends its QEMU afterwards.
    EndsAfterTheReport,
    /// The source takes back a guest that the destination's QEMU has, and does not run, before that QEMU was seen to end.
    TakesBackEarly,
    /// The destination reports "never" about each QEMU that it has ended, even one that has run the guest before its end.
    EndIsProof,
}

/// Access of an attacker to the traffic between the hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attacker {
    None,
    /// Forged and replayed messages count as the other side's.
    InTheClear,
    /// Forged and replayed data is no valid record, and ends the connection.
    OverTls,
}

struct Handover {
    /// True if the guest runs before all its pages are there.
    postcopy: bool,
    /// The destination takes no questions, and its refusals have no reasons: a QEMU.
    silent: bool,
    source: Role,
    /// A relay here has a QEMU, which runs the guest only in a step of its own.
    destination: Role,
    /// The destination's relay has started its QEMU, and may end it.
    may_end: bool,
    mutant: Mutant,
    /// Processes may be killed.
    kills: bool,
    attacker: Attacker,
}

/// A message in transit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    AskLoaded,
    Pong,
    Commit,
    Runs,
    Refused,
    Question,
    Answer(u8),
    Heard,
    /// Postcopy only: all pages are sent.
    End,
    /// Postcopy only: all pages are there.
    HasAll,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    source: SourceSide,
    destination_handover: DestinationSide,
    /// The QEMU of a source that is a relay has released the guest.
    released: bool,
    /// The guest runs at the source, or would if it were not stopped for the handover.
    runs_here: bool,
    runs_there: bool,
    /// The guest ran at the destination at some time.
    ran_there: bool,
    /// The QEMU of a destination that is a relay has the guest, and does not run it.
    stopped_there: bool,
    /// The destination's relay has seen that its QEMU does not run the guest.
    saw_stopped: bool,
    /// The QEMU of the destination was ended.
    ended_there: bool,
    /// The source knows that this QEMU was ended and never ran the guest. Until then it counts the guest as moved.
    told_ended: bool,
    source_alive: bool,
    destination_alive: bool,
    /// The stream's connection is cut. `source_saw` and `destination_saw`: that side has seen it.
    cut: bool,
    source_saw: bool,
    destination_saw: bool,
    /// The destination still listens.
    listens: bool,
    asked_loaded: bool,
    /// END was sent over the present connection.
    sent_end: bool,
    end_arrived: bool,
    has_all: bool,
    heard: bool,
    /// The outcome of the guest there was unknown for a time.
    was_unsure: bool,
    to_destination: Vec<Message>,
    to_source: Vec<Message>,
    /// One question at a time.
    question: Option<Message>,
    /// Number of messages that the attacker may still forge.
    forgeries: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    SendAskLoaded,
    DeliverToDestination,
    DeliverToSource,
    QemuReleases,
    QemuTakesBack,
    SourceCommits,
    SendEnd,
    Resume,
    GuestRuns,
    GuestCannotRun,
    GuestStaysStopped,
    SeeStopped,
    EndStopped,
    SayEnded,
    SayStopped,
    TellEnded,
    TakeBack,
    LaterCont,
    RunnerPanics,
    Cut,
    SourceSeesCut,
    DestinationSeesCut,
    SourceFails,
    DestinationFails,
    Ask,
    LoseQuestion,
    DeliverQuestion,
    DeliverAnswer,
    DeliverHeard,
    SourceGivesUp,
    DestinationStopsListening,
    KillSource,
    KillDestination,
    ForgeToDestination(Message),
    ForgeToSource(Message),
    ForgeAnswer(Message),
}

/// Number of messages that an attacker forges; a handover has five messages.
const FORGERIES: u8 = 2;

const ANSWERS: [Outcome; 5] = [
    Outcome::Unknown,
    Outcome::Runs,
    Outcome::Never,
    Outcome::Undecided,
    Outcome::HasAll,
];

impl State {
    /// Applies the outcome of the source's state machine to the guest.
    fn source_ended(&mut self) {
        match self.source.outcome() {
            // The command, or the operator on its advice, resumes a paused QEMU.
            Some(SourceOutcome::Kept | SourceOutcome::Refused) => self.runs_here = true,
            Some(SourceOutcome::Moved | SourceOutcome::Doubt | SourceOutcome::PagesLost) | None => {
            }
        }
    }

    fn source_fails(&mut self, mutant: Mutant) {
        if mutant == Mutant::CancelIsNeverTooLate && self.source.outcome().is_none() {
            self.source = SourceSide::Ended(SourceOutcome::Kept);
        }
        self.source.fail();
        self.source_ended();
    }

    fn source_receives(&mut self, statement: DestinationStatement) {
        if self.source.receive(statement) {
            self.source_ended();
            if self.cut {
                return;
            }
            self.to_destination.push(Message::Heard);
        }
    }

    fn run_there(&mut self) {
        self.runs_there = true;
        self.ran_there = true;
    }

    /// Returns true if the QEMU of the destination has loaded the guest.
    fn was_accepted(&self) -> bool {
        self.stopped_there || self.runs_there
    }

    fn refuse(&mut self) {
        self.destination_handover.refused();
        self.send_to_source(Message::Refused);
    }

    fn is_serving(&self) -> bool {
        matches!(self.source, SourceSide::Serving { .. })
    }

    /// Reports that all pages are there, if they are and the guest runs.
    fn may_have_all(&mut self) {
        if self.end_arrived && self.destination_handover == DestinationSide::Runs && !self.has_all {
            self.has_all = true;
            self.heard = false;
            self.send_to_source(Message::HasAll);
        }
    }

    fn send_to_source(&mut self, message: Message) {
        if !self.cut {
            self.to_source.push(message);
        }
    }
}

impl Model for Handover {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            source: SourceSide::default(),
            destination_handover: DestinationSide::default(),
            released: false,
            runs_here: true,
            runs_there: false,
            ran_there: false,
            stopped_there: false,
            saw_stopped: false,
            ended_there: false,
            told_ended: false,
            source_alive: true,
            destination_alive: true,
            cut: false,
            source_saw: false,
            destination_saw: false,
            listens: !self.silent,
            asked_loaded: false,
            sent_end: false,
            end_arrived: false,
            has_all: false,
            heard: false,
            was_unsure: false,
            to_destination: Vec::new(),
            to_source: Vec::new(),
            question: None,
            forgeries: match self.attacker {
                Attacker::None => 0,
                Attacker::InTheClear | Attacker::OverTls => FORGERIES,
            },
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Step>) {
        actions.extend([
            Step::SendAskLoaded,
            Step::DeliverToDestination,
            Step::DeliverToSource,
            Step::QemuReleases,
            Step::QemuTakesBack,
            Step::SourceCommits,
            Step::SendEnd,
            Step::Resume,
            Step::GuestRuns,
            Step::GuestCannotRun,
            Step::GuestStaysStopped,
            Step::SeeStopped,
            Step::EndStopped,
            Step::SayEnded,
            Step::SayStopped,
            Step::TellEnded,
            Step::TakeBack,
            Step::LaterCont,
            Step::RunnerPanics,
            Step::Cut,
            Step::SourceSeesCut,
            Step::DestinationSeesCut,
            Step::SourceFails,
            Step::DestinationFails,
            Step::Ask,
            Step::LoseQuestion,
            Step::DeliverQuestion,
            Step::DeliverAnswer,
            Step::DeliverHeard,
            Step::SourceGivesUp,
            Step::DestinationStopsListening,
        ]);
        if self.kills {
            actions.extend([Step::KillSource, Step::KillDestination]);
        }
        if self.attacker != Attacker::None {
            actions.extend([Message::AskLoaded, Message::Commit].map(Step::ForgeToDestination));
            let answers = [Message::Pong, Message::Runs, Message::Refused];
            actions.extend(answers.map(Step::ForgeToSource));
            actions.extend([1, 2].map(|code| Step::ForgeAnswer(Message::Answer(code))));
        }
        actions.retain(|step| self.next_state(state, *step).is_some());
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        let (here, there) = (state.source_alive, state.destination_alive);
        match step {
            Step::SendAskLoaded if here && !state.asked_loaded && !state.cut => {
                if state.source.outcome().is_some() {
                    return None;
                }
                // The guest is paused from here on, until the machine decides otherwise.
                state.runs_here = false;
                state.asked_loaded = true;
                state.to_destination.push(Message::AskLoaded);
            }
            Step::DeliverToDestination if there && !state.cut => {
                if state.to_destination.is_empty() {
                    return None;
                }
                match state.to_destination.remove(0) {
                    Message::AskLoaded if self.postcopy || state.destination_handover.loaded() => {
                        state.send_to_source(Message::Pong);
                    }
                    // In postcopy the devices come in the same package.
                    Message::Commit if self.postcopy => {
                        state.destination_handover.loaded();
                        if !state.destination_handover.commit()
                            && self.mutant == Mutant::RunIsObeyed
                        {
                            state.destination_handover = DestinationSide::Starting;
                        }
                    }
                    Message::Commit => {
                        state.destination_handover.commit();
                    }
                    Message::End => {
                        state.end_arrived = true;
                        state.may_have_all();
                    }
                    Message::Heard => state.heard = true,
                    _ => {}
                }
            }
            Step::DeliverToSource if here && !state.cut => {
                if state.to_source.is_empty() {
                    return None;
                }
                match state.to_source.remove(0) {
                    Message::Pong => match self.source {
                        Role::Guest => {
                            let may = match self.postcopy {
                                true => state.source.serve(),
                                false => state.source.commit(),
                            };
                            if may {
                                state.to_destination.push(Message::Commit);
                            }
                        }
                        Role::Relay => {
                            state.source.offer();
                        }
                    },
                    Message::Runs => state.source_receives(DestinationStatement::Runs),
                    Message::HasAll if state.source.all_pages_arrived() => {
                        state.to_destination.push(Message::Heard);
                    }
                    // A QEMU that refuses closes the connection, and its refusal is no statement.
                    Message::Refused if self.silent && state.is_serving() => {
                        state.cut = true;
                        state.source_saw = true;
                        state.to_destination.clear();
                        state.to_source.clear();
                    }
                    Message::Refused if state.source.is_committed() => {
                        state.source_receives(DestinationStatement::Never);
                    }
                    Message::Refused => state.source_fails(self.mutant),
                    _ => {}
                }
            }
            Step::QemuReleases if here && state.source == SourceSide::Offered => {
                state.released = true;
                state.source.released();
            }
            Step::QemuTakesBack if here && state.source == SourceSide::Offered => {
                state.source.taken_back();
                state.source_ended();
            }
            Step::SourceCommits if here && state.source == SourceSide::Released => {
                state.source.commit();
                // A connection that is lost by now may have carried the commit, or not.
                if !state.cut {
                    state.to_destination.push(Message::Commit);
                }
            }
            Step::SendEnd if here && state.is_serving() && !state.cut && !state.sent_end => {
                state.sent_end = true;
                state.to_destination.push(Message::End);
            }
            // The operator makes the destination listen again, and the source connect.
            Step::Resume
                if here
                    && there
                    && state.is_serving()
                    && state.destination_handover == DestinationSide::Runs
                    && !state.has_all
                    && state.source_saw
                    && state.destination_saw =>
            {
                state.source.receive(DestinationStatement::Runs);
                state.cut = false;
                state.source_saw = false;
                state.destination_saw = false;
                state.sent_end = false;
            }
            Step::GuestRuns
                if there
                    && !state.stopped_there
                    && !state.ended_there
                    && (state.destination_handover == DestinationSide::Starting
                        || (state.destination_handover == DestinationSide::Unsure
                            && self.destination == Role::Relay)) =>
            {
                state.destination_handover.record_run();
                state.run_there();
                match self.postcopy {
                    true => state.may_have_all(),
                    false => state.send_to_source(Message::Runs),
                }
                if self.mutant == Mutant::ClosesEarly {
                    state.listens = false;
                    state.cut = true;
                }
            }
            Step::GuestCannotRun
                if there
                    && state.destination_handover == DestinationSide::Starting
                    && !state.was_accepted()
                    && !state.ended_there =>
            {
                state.refuse();
            }
            Step::GuestStaysStopped
                if self.destination == Role::Relay
                    && state.destination_handover == DestinationSide::Starting
                    && !state.was_accepted()
                    && !state.ended_there =>
            {
                state.stopped_there = true;
            }
            Step::SeeStopped if there && state.stopped_there && !state.saw_stopped => {
                state.saw_stopped = true;
                if self.mutant == Mutant::StoppedIsNever
                    || self.may_end && self.mutant == Mutant::EndsAfterTheReport
                {
                    state.refuse();
                }
            }
            // A `cont` may have come between the check and the end of the QEMU.
            Step::EndStopped
                if there
                    && self.may_end
                    && state.saw_stopped
                    && !state.ended_there
                    && (state.destination_handover == DestinationSide::Starting
                        || state.destination_handover == DestinationSide::Runs
                            && state.stopped_there
                        || self.mutant == Mutant::EndsAfterTheReport) =>
            {
                state.ended_there = true;
                state.stopped_there = false;
                state.runs_there = false;
            }
            Step::SayEnded
                if there
                    && state.ended_there
                    && state.destination_handover == DestinationSide::Starting =>
            {
                match state.ran_there && self.mutant != Mutant::EndIsProof {
                    true => {
                        state.destination_handover.unsure();
                        state.was_unsure = true;
                    }
                    false => state.refuse(),
                }
            }
            // A QEMU that another process has started keeps the guest: its operator decides whether it runs. A QEMU that
            // answers too late has already reported on the stream that it has the guest.
            Step::SayStopped
                if there
                    && state.stopped_there
                    && state.destination_handover == DestinationSide::Starting =>
            {
                state.destination_handover.record_run();
                state.send_to_source(Message::Runs);
            }
            Step::TellEnded
                if there
                    && here
                    && state.destination_handover == DestinationSide::Runs
                    && !state.told_ended
                    && (state.ended_there && !state.ran_there
                        || self.mutant == Mutant::TakesBackEarly && state.stopped_there) =>
            {
                state.told_ended = true;
            }
            Step::TakeBack
                if here
                    && state.told_ended
                    && !state.runs_here
                    && state.source == SourceSide::Ended(SourceOutcome::Moved) =>
            {
                state.runs_here = true;
            }
            Step::LaterCont if state.stopped_there => {
                state.stopped_there = false;
                state.run_there();
            }
            Step::RunnerPanics
                if there && state.destination_handover == DestinationSide::Starting =>
            {
                state.destination_handover.unsure();
                state.was_unsure = true;
            }
            Step::Cut if !state.cut => {
                state.cut = true;
                state.to_destination.clear();
                state.to_source.clear();
            }
            Step::SourceSeesCut if here && state.cut && !state.source_saw => {
                state.source_saw = true;
                if self.mutant == Mutant::ResetIsAStatement {
                    state.source.receive(DestinationStatement::Never);
                    state.source_ended();
                }
                if self.mutant == Mutant::LostPostcopyRunsHere && state.is_serving() {
                    state.runs_here = true;
                }
                state.source_fails(Mutant::None);
            }
            Step::DestinationSeesCut if there && state.cut && !state.destination_saw => {
                state.destination_saw = true;
                if self.mutant == Mutant::SilenceIsACommit && state.destination_handover.commit() {
                    return Some(state);
                }
                state.destination_handover.abandon();
            }
            Step::SourceFails if here && state.source.outcome().is_none() => {
                let before = state.source;
                state.source_fails(self.mutant);
                if before == state.source {
                    return None;
                }
            }
            Step::DestinationFails if there => {
                if self.mutant == Mutant::CancelEndsTheGuest
                    && state.destination_handover == DestinationSide::Runs
                {
                    state.runs_there = false;
                    state.destination_handover = DestinationSide::Never;
                } else if !state.destination_handover.abandon() {
                    return None;
                }
                state.send_to_source(Message::Refused);
            }
            Step::Ask
                if here
                    && (state.source == SourceSide::Committed
                        || state.source_saw
                            && (state.source == (SourceSide::Serving { runs: false })
                                || state.is_serving() && state.sent_end)) =>
            {
                if state.question.is_some() || !state.listens || !there {
                    return None;
                }
                state.question = Some(Message::Question);
            }
            Step::LoseQuestion if state.question.is_some() => state.question = None,
            Step::DeliverQuestion if there && state.question == Some(Message::Question) => {
                if !state.listens {
                    return None;
                }
                let outcome = if self.mutant == Mutant::AnswersWithoutRefusing
                    && state.destination_handover == DestinationSide::Loaded
                {
                    Outcome::Never
                } else {
                    match state.destination_handover.ask() {
                        Outcome::Runs if state.has_all => Outcome::HasAll,
                        outcome => outcome,
                    }
                };
                state.question = Some(Message::Answer(outcome as u8));
            }
            Step::DeliverAnswer if here => {
                let Some(Message::Answer(code)) = state.question else {
                    return None;
                };
                state.question = None;
                let Some(statement) = DestinationStatement::of_outcome(ANSWERS[usize::from(code)])
                else {
                    return Some(state);
                };
                if state.source.receive(statement) {
                    if self.mutant == Mutant::LetsGoOfPages {
                        state.source.all_pages_arrived();
                    }
                    state.source_ended();
                    state.question = Some(Message::Heard);
                }
            }
            Step::DeliverHeard if there && state.question == Some(Message::Heard) => {
                state.question = None;
                state.heard = true;
            }
            // The source asks for long enough that a network that recovers brings an answer. Only a destination that was
            // killed, or that never learns the outcome itself, leaves the source without an answer.
            Step::SourceGivesUp
                if here
                    && state.source == SourceSide::Committed
                    && (!there
                        || state.destination_handover == DestinationSide::Unsure
                        || !state.listens) =>
            {
                state.source.end_wait();
            }
            // In postcopy the operator ends the wait, once no destination can continue.
            Step::SourceGivesUp
                if here
                    && state.is_serving()
                    && state.source_saw
                    && (!there
                        || state.has_all && self.silent
                        || state.destination_handover == DestinationSide::Unsure
                        || state.destination_handover == DestinationSide::Never
                            && !state.listens) =>
            {
                state.source.end_wait();
            }
            // The destination answers until it receives the confirmation, or until no source can ask any more.
            Step::DestinationStopsListening
                if there
                    && state.listens
                    && state.destination_handover != DestinationSide::Loading
                    && (!self.postcopy
                        || state.has_all
                        || state.destination_handover == DestinationSide::Never)
                    && (state.heard || state.source.outcome().is_some() || !here) =>
            {
                state.listens = false;
            }
            Step::KillSource if here => {
                state.source_alive = false;
                // A QEMU beside a killed relay keeps running unless it has released the guest. A guest of this process ends
                // with it.
                state.runs_here = self.source == Role::Relay && !state.released;
                state.cut = true;
                state.to_destination.clear();
                state.to_source.clear();
            }
            Step::KillDestination if there => {
                state.destination_alive = false;
                if self.destination == Role::Guest {
                    state.runs_there = false;
                } else if state.destination_handover == DestinationSide::Starting
                    && !state.stopped_there
                    && !state.ended_there
                {
                    // The destination's QEMU may have read EOF.
                    state.run_there();
                }
                state.cut = true;
                state.listens = false;
                state.to_destination.clear();
                state.to_source.clear();
            }
            Step::ForgeToDestination(message) | Step::ForgeToSource(message)
                if state.forgeries > 0 && !state.cut =>
            {
                state.forgeries -= 1;
                match (self.attacker, step) {
                    (Attacker::OverTls, _) => {
                        state.cut = true;
                        state.to_destination.clear();
                        state.to_source.clear();
                    }
                    (_, Step::ForgeToSource(_)) => state.to_source.push(message),
                    _ => state.to_destination.push(message),
                }
            }
            Step::ForgeAnswer(answer) if state.forgeries > 0 && state.question.is_some() => {
                state.forgeries -= 1;
                state.question = match self.attacker {
                    Attacker::OverTls => None,
                    _ => Some(answer),
                };
            }
            _ => return None,
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("never two guests", |_, state: &State| {
                !(state.runs_here && state.runs_there)
            }),
            // The guest's disks are ahead of the memory that the source has.
            Property::always(
                "a guest that ran at the destination never continues here",
                |_, state: &State| !(state.runs_here && state.ran_there),
            ),
            Property::always(
                "nothing of the guest is let go of before it is there",
                |model: &Self, state: &State| {
                    !model.postcopy
                        || state.source != SourceSide::Ended(SourceOutcome::Moved)
                        || state.has_all
                },
            ),
            Property::always(
                "the guest is not ended before the other side has it",
                |_, state: &State| {
                    state.source != SourceSide::Ended(SourceOutcome::Moved)
                        || state.was_accepted()
                        || state.ended_there
                        || !state.destination_alive
                },
            ),
            // Checked where no step is possible any more.
            Property::always(
                "one guest runs at the end if no process was killed",
                |model: &Self, state: &State| {
                    let mut steps = Vec::new();
                    model.actions(state, &mut steps);
                    let lasting = |step: &Step| {
                        let is_whim =
                            matches!(step, Step::Cut | Step::LoseQuestion | Step::LaterCont);
                        let is_forgery = matches!(
                            step,
                            Step::ForgeToDestination(_)
                                | Step::ForgeToSource(_)
                                | Step::ForgeAnswer(_)
                        );
                        !is_whim && !is_forgery
                    };
                    let over = !steps.iter().any(lasting);
                    let killed = !state.source_alive || !state.destination_alive;
                    // The thread that had to start the guest panicked: the guest stays with the source, paused, in doubt.
                    let unsure = state.destination_handover == DestinationSide::Unsure
                        || model.silent && state.source == SourceSide::Ended(SourceOutcome::Doubt);
                    !over || killed || unsure || (state.runs_here != state.was_accepted())
                },
            ),
            Property::always(
                "a guest that runs there has all pages at the end if no process was killed",
                |model: &Self, state: &State| {
                    let mut steps = Vec::new();
                    model.actions(state, &mut steps);
                    let killed = !state.source_alive || !state.destination_alive;
                    let over = !steps.iter().any(|step| !matches!(step, Step::Cut));
                    !model.postcopy || !over || killed || !state.runs_there || state.has_all
                },
            ),
            Property::always(
                "no side is in doubt if no process was killed",
                |model: &Self, state: &State| {
                    let killed = !state.source_alive || !state.destination_alive;
                    let excused = killed || state.was_unsure || model.silent;
                    excused || state.source != SourceSide::Ended(SourceOutcome::Doubt)
                },
            ),
            Property::always(
                "a guest that has all its pages is not abandoned if no process was killed",
                |model: &Self, state: &State| {
                    let killed = !state.source_alive || !state.destination_alive;
                    let torn = state.source == SourceSide::Ended(SourceOutcome::PagesLost);
                    killed || model.silent || !state.has_all || !torn
                },
            ),
            Property::sometimes("the guest moves", |_, state: &State| {
                state.source == SourceSide::Ended(SourceOutcome::Moved)
            }),
        ]
    }
}

/// Returns the properties that do not hold, and the number of states that were explored.
fn explore(model: Handover) -> (Vec<&'static str>, usize) {
    let checker = model.checker().spawn_bfs().join();
    let mut broken: Vec<_> = checker.discoveries().into_keys().collect();
    // This property must be found: it is the success of a handover.
    broken.retain(|name| *name != "the guest moves");
    broken.sort_unstable();
    (broken, checker.unique_state_count())
}

fn all(mutant: Mutant, attacker: Attacker) -> impl Iterator<Item = Handover> {
    let roles = [Role::Guest, Role::Relay];
    let pairs = roles
        .into_iter()
        .flat_map(move |source| roles.map(|to| (source, to)));
    let precopy = pairs.flat_map(|(source, destination)| {
        let ways = if destination == Role::Relay { 2 } else { 1 };
        [false, true]
            .into_iter()
            .take(ways)
            .map(move |may_end| (source, destination, may_end, false, false))
    });
    // Postcopy between guests of their processes; a silent destination, as a QEMU is, also requests pages of such a guest.
    let postcopy = [false, true].map(|silent| (Role::Guest, Role::Guest, false, true, silent));
    let all = precopy.chain(postcopy);
    all.flat_map(move |(source, destination, may_end, postcopy, silent)| {
        [false, true].map(|kills| Handover {
            postcopy,
            silent,
            source,
            destination,
            may_end,
            mutant,
            kills,
            attacker,
        })
    })
}

#[test]
fn one_guest_remains_in_every_order_of_events() {
    let mut explored = 0;
    for model in all(Mutant::None, Attacker::None) {
        let what = format!(
            "{:?} to {:?}, may end: {}, postcopy: {}, silent: {}, kills: {}",
            model.source,
            model.destination,
            model.may_end,
            model.postcopy,
            model.silent,
            model.kills
        );
        let (broken, states) = explore(model);
        assert!(broken.is_empty(), "{what}: {broken:?}");
        explored += states;
    }
    // The test harness hides the output of 'eprintln' in a passing test.
    let _ = writeln!(
        std::io::stderr(),
        "{explored} states of the handover were explored"
    );
    assert!(explored > 1000, "{explored} states are not all");
}

#[test]
fn the_checker_finds_each_mutant() {
    for mutant in [
        Mutant::ResetIsAStatement,
        Mutant::ClosesEarly,
        Mutant::AnswersWithoutRefusing,
        Mutant::CancelIsNeverTooLate,
        Mutant::SilenceIsACommit,
        Mutant::CancelEndsTheGuest,
        Mutant::LostPostcopyRunsHere,
        Mutant::LetsGoOfPages,
        Mutant::RunIsObeyed,
        Mutant::StoppedIsNever,
        Mutant::EndsAfterTheReport,
        Mutant::TakesBackEarly,
        Mutant::EndIsProof,
    ] {
        let found = all(mutant, Attacker::None).any(|model| !explore(model).0.is_empty());
        assert!(found, "{mutant:?} passes");
    }
}

#[test]
fn tls_stops_an_attacker_between_the_hosts_who_without_it_causes_two_guests() {
    for model in all(Mutant::None, Attacker::OverTls) {
        let what = format!("{:?} to {:?}", model.source, model.destination);
        let (broken, _) = explore(model);
        assert!(broken.is_empty(), "{what}: {broken:?}");
    }
    let broken: Vec<_> = all(Mutant::None, Attacker::InTheClear)
        .flat_map(|model| explore(model).0)
        .collect();
    assert!(broken.contains(&"never two guests"), "{broken:?}");
}
