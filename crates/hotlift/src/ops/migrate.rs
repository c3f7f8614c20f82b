//! The source's side of a migration: connects, sends rounds, stops the guest, hands it over.
//!
//! ```text
//! setup    connect, opening packets, RAM block list          status setup
//! rounds   sync dirty log, send dirty pages, barrier         status active   guest runs
//! switch   stop guest, last round, device state, "loaded?"   status device   guest stands still
//! commit   release                                           the guest is the destination's
//! confirm  wait for "it runs"                                status completed
//! ```
//!
//! Up to the commit every failure, and a cancel, ends with the guest running here again. At the
//! commit the source knows that the destination has loaded everything; it says so on every socket,
//! and from then on only the destination's word that it never runs the guest brings it back.
//!
//! With `postcopy-ram`, and once it was asked for, a round is the last that the guest runs through here, however much it
//! leaves: see `postcopy`.

mod postcopy;

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_wire::handshake::Offer;
use hotlift_wire::multifd::{Hello, PacketLayout};

use crate::auto::{Auto, Reader};
use crate::control::Control;
use crate::control::run_as;
use crate::ends::guest_source::channel::ChannelSender;
use crate::ends::guest_source::main_channel::MainSender;
use crate::ends::guest_source::reporter;
use crate::ends::guest_source::reporter::Reporter;
use crate::ends::guest_source::session::Session;
use crate::ends::guest_source::xbzrle::Xbzrle;
use crate::ends::guest_source::{compress_threads, main_pages, return_path, zero_devices};
use crate::error::MigrationError;
use crate::figures::{ByteFigures, Counts, JobFigures, Measured, SourceReport};
use crate::guest::{Guest, GuestError};
use crate::handover::{Word, await_word, say_farewell, say_heard};
use crate::life::threads::{OnPanic, caught, spawn};
use crate::options::{Goal, Options};
use crate::pipe::gate::Job;
use crate::precopy::auto_converge::AutoConverge;
use crate::precopy::estimate::Estimator;
use crate::progress::OnProgress;
use crate::remote::Remote;
use crate::status::{MigrationEvent, Status};
use crate::stream::handshake;
use crate::stream::multifd_send::{ChannelOpening, connect};
use crate::tls;
use crate::transport::{Address, Stream};

/// How often cancelling is looked at where nothing wakes the thread.
const TICK: Duration = reporter::INTERVAL;

/// Rounds at most that a migration of the shortest downtime adds where it could switch over: each is to halve the rest,
/// and 2^8 is more than lies between a limit of seconds and a thread's wake-up.
const SHORTENING_ROUNDS: u64 = 8;

/// How long a failed migration waits for the destination's reason.
const REASON_WAIT: Duration = Duration::from_secs(2);

/// Migrates `guest`, which runs, to the Hotlift or QEMU that listens at `to`, and returns when the guest runs
/// there. The caller's thread waits; `control` cancels from any other.
///
/// # Errors
/// Any [`MigrationError`]. Unless it is [`MigrationError::InDoubt`] or [`MigrationError::PagesMissing`], the guest runs here as
/// before.
/// A control that has been cancelled once cancels at once.
pub fn migrate(
    guest: &dyn Guest,
    to: &Address,
    options: &Options,
    control: &Control,
    on_progress: OnProgress<'_>,
) -> Result<SourceReport, MigrationError> {
    let started = Instant::now();
    options.check()?;
    let to = Remote::new(to, tls::of_options(options, to)?);
    run_as("mig/src/main", control, || {
        run(guest, &to, options, control, on_progress, started)
    })
}

/// The migration thread.
fn run(
    guest: &dyn Guest,
    to: &Remote,
    options: &Options,
    control: &Control,
    on_progress: OnProgress<'_>,
    started: Instant,
) -> Result<SourceReport, MigrationError> {
    let xbzrle = Xbzrle::new(guest, options)?;
    let devices = zero_devices::open(guest, options, control)?;
    let opening = ChannelOpening {
        uuid: guest.uuid(),
        hello: Hello {
            channels: options.channels(),
            method: options.packet_method(),
            layout: options.packet_layout(),
            zero_page_detection: options.zero_page_detection,
        },
    };
    let connections = connect(
        to,
        None,
        &opening,
        options.handshake_timeout,
        &control.dialing(),
    )?;
    let session = Session::new(
        guest,
        options,
        control.clone(),
        &opening.hello,
        connections,
        devices,
    );
    let main = MainSender::new(&session)?;
    let measured = thread::scope(|scope| {
        let mut threads = Vec::new();
        for id in 0..options.channels() {
            let session = &session;
            let name = format!("mig/src/send_{id}");
            threads.push(spawn(scope, name.clone(), move || {
                let _ends = OnPanic(|| session.abort());
                let outcome = ChannelSender::new(session, id).and_then(|mut sender| sender.run());
                session.threads.book(&name);
                if let Err(error) = outcome {
                    session.fail(error);
                }
            }));
        }
        for number in 0..compress_threads::threads(options) {
            let session = &session;
            let name = format!("compress_{number}");
            threads.push(spawn(scope, name.clone(), move || {
                let _ends = OnPanic(|| session.abort());
                let outcome =
                    compress_threads::work(&session.compress, session.guest, session.options);
                session.threads.book(&name);
                if let Err(error) = outcome {
                    session.fail(error);
                }
            }));
        }
        if let Some(devices) = &session.zero_devices {
            let session = &session;
            // QEMU's series calls it so.
            let name = "dsa_completion";
            threads.push(spawn(scope, name.to_owned(), move || {
                let _ends = OnPanic(|| session.abort());
                devices.finder.listen();
                session.threads.book(name);
            }));
            for model in &devices.models {
                threads.push(spawn(scope, "dsa_simulated".to_owned(), || model.run()));
            }
        }
        threads.push(spawn(scope, "mig/src/return".to_owned(), || {
            let _ends = OnPanic(|| session.abort());
            return_path::listen(&session);
            session.threads.book("mig/src/return");
        }));
        let _ends = OnPanic(|| session.abort());
        let started_all = threads.into_iter().collect::<Result<Vec<_>, _>>();
        let mut migration = Migration {
            session: &session,
            main,
            reporter: Reporter::new(&session, on_progress, started),
            started,
            estimator: Estimator::default(),
            auto_converge: AutoConverge::new(|percent| guest.throttle(percent), Instant::now()),
            xbzrle,
            round: 0,
            guest_was_stopped: false,
            asked_whether_loaded: false,
            to,
            preempt: None,
            sent_all: false,
        };
        let outcome = started_all
            .map_err(Ended::Here)
            .and_then(|_| caught(|| migration.phases()));
        let outcome = migration.wind_up(outcome);
        if let Some(devices) = &session.zero_devices {
            devices.close();
        }
        session.threads.book("mig/src/main");
        outcome
    });
    measured.map(|mut measured| {
        measured.threads = session.threads.read();
        measured.counts = session.counts();
        measured.bytes = session.bytes();
        measured.jobs = session.control.jobs();
        session.tell_zero_jobs();
        measured.zero_jobs = session.control.zero_jobs();
        SourceReport::from(measured)
    })
}

/// The migration thread's own state.
struct Migration<'a> {
    session: &'a Session<'a>,
    main: MainSender<'a>,
    reporter: Reporter<'a>,
    started: Instant,
    estimator: Estimator,
    auto_converge: AutoConverge<'a>,
    xbzrle: Option<Xbzrle>,
    round: u64,
    guest_was_stopped: bool,
    /// The destination may know that it has everything.
    asked_whether_loaded: bool,
    /// Where the destination listens.
    to: &'a Remote,
    /// Of a postcopy with `postcopy-preempt`: where pages go that are asked for.
    preempt: Option<Stream>,
    /// Of a postcopy: every page was sent over one connection or the other, and its end may have come.
    sent_all: bool,
}

impl Migration<'_> {
    /// All phases, in order.
    fn phases(&mut self) -> Result<Measured, Ended> {
        self.setup()?;
        let setup = self.started.elapsed();
        self.reporter.set_up(setup);
        self.session.control.set_status(Status::Active);
        let switch = self.rounds()?;
        if let Switch::Postcopy = switch {
            // While the guest still runs.
            self.preempt = self.connect_preempt(self.to)?;
        }
        let stopped_at = Instant::now();
        self.stop_guest()?;
        let downtime = match switch {
            Switch::Whole => {
                self.switch_over()?;
                self.hand_over()?;
                stopped_at.elapsed()
            }
            Switch::Postcopy => self.postcopy(stopped_at)?,
        };
        Ok(Measured {
            total: self.started.elapsed(),
            setup,
            downtime,
            rounds: self.round,
            dirty_syncs: self.session.ram.syncs(),
            counts: Counts::default(),
            bytes: ByteFigures::default(),
            throttle_percent: self.auto_converge.highest(),
            throttle_refused: self.auto_converge.is_refused(),
            postcopy_requests: self.session.postcopy_requests.load(Ordering::Relaxed),
            xbzrle: self.xbzrle.as_ref().map(Xbzrle::figures),
            methods: self.reporter.methods(),
            explored_packets: self.session.multifd.auto().map_or(0, Auto::explored),
            timeline: self.reporter.timeline(),
            threads: Vec::new(),
            jobs: JobFigures::default(),
            zero_jobs: JobFigures::default(),
        })
    }

    /// Sends what opens the stream, and waits until the destination has taken it.
    fn setup(&mut self) -> Result<(), Ended> {
        let offer = Offer::new(handshake::features(self.session.options));
        self.main.send_opening(offer)?;
        // The answer shows that it has all channels, and tells a Hotlift from a QEMU.
        let waiting_for = format!(
            "the destination's answer to the opening (does it expect {} multifd channels, too?)",
            self.session.options.channels()
        );
        self.await_pongs(Some(&waiting_for))?;
        let is_hotlift = self.session.answers.opened(offer)?;
        self.session.multifd.reader_is(match is_hotlift {
            true => Reader::Hotlift,
            false => Reader::Qemu(self.session.options.qemu_reads()),
        })?;
        if !is_hotlift && self.session.options.packet_layout() != PacketLayout::QEMU {
            return Err(MigrationError::Mismatch {
                what: "multifd-packet-size".to_owned(),
                source_has: format!("{} bytes", self.session.options.multifd_packet_size),
                destination_has: format!(
                    "room for {}: it is a QEMU",
                    PacketLayout::QEMU.pages() * PacketLayout::QEMU.page_size()
                ),
            }
            .into());
        }
        self.main.send_ram_blocks()?;
        self.run_job(Job::Sync)?;
        self.session.ram.start_log()?;
        self.tell_pass();
        Ok(())
    }

    /// Reads the dirty log; returns how many pages it added.
    fn sync(&self) -> Result<u64, Ended> {
        let newly_dirty = self.session.ram.sync()?;
        self.tell_pass();
        Ok(newly_dirty)
    }

    fn tell_pass(&self) {
        let pass = MigrationEvent::Pass(self.session.ram.syncs());
        self.session.control.tell(pass);
    }

    /// Rounds while the guest runs, until the rest fits the downtime limit, or need not.
    fn rounds(&mut self) -> Result<Switch, Ended> {
        let mut synced_at = Instant::now();
        // Pages that were left when they first fitted, and then each time.
        let (mut fitted, mut first_fit) = (None, None);
        loop {
            self.send_round()?;
            let newly_dirty = self.sync()?;
            let live = self.session.control.steering().latest(self.session.options);
            self.estimator.assume(live.avail_switchover_bandwidth);
            let pending = self.session.ram.pending();
            self.estimator
                .synced(pending, newly_dirty, synced_at.elapsed());
            synced_at = Instant::now();
            let sent = self.session.counts().transferred_bytes;
            self.auto_converge
                .synced(newly_dirty, sent, synced_at, &live);
            self.reporter.throttled(&self.auto_converge);
            // Rounds shorter than a wait for the channels are told of here.
            if self.reporter.is_due() {
                self.reporter.tell(self.round, &self.estimator);
            }
            let fits = |time| time <= live.downtime_limit;
            if self.estimator.time_for(pending).is_some_and(fits) {
                let before = fitted.replace(pending);
                let rests = |before| pending > before / 2;
                // It has fitted in each of those rounds.
                let tries = self.round - *first_fit.get_or_insert(self.round);
                let goes_on = live.goal == Goal::ShortestDowntime
                    && !before.is_some_and(rests)
                    && tries < SHORTENING_ROUNDS;
                if !goes_on {
                    return Ok(Switch::Whole);
                }
            }
            if self.session.cuts_round() {
                return Ok(Switch::Postcopy);
            }
        }
    }

    /// Waits until the destination has worked through all that was sent, however long that takes: what was written is
    /// not yet in its memory. Sockets hold some MiB, which a slow decoder works off in 100 ms; behind the switchover
    /// that is downtime. It costs a round-trip time a round.
    fn catch_up(&mut self) -> Result<(), Ended> {
        // A Hotlift was asked behind the round's flush, for its checksum.
        if self.session.answers.id().is_none() {
            self.main.ping()?;
        }
        self.await_pongs(None)
    }

    /// One pass over the dirty pages, closed by a barrier: until the destination has them all.
    fn send_round(&mut self) -> Result<(), Ended> {
        self.round += 1;
        let before = self.session.counts();
        let started = Instant::now();
        let on_main = main_pages::needed(self.session.options);
        self.session.ram.start_round(on_main);
        self.session.gate.start(Job::Round);
        if on_main {
            let Self {
                main,
                reporter,
                estimator,
                xbzrle,
                round,
                ..
            } = self;
            if let Some(xbzrle) = xbzrle {
                xbzrle.start_round(self.guest_was_stopped);
            }
            main_pages::scan(self.session, &mut main.send, xbzrle, |xbzrle| {
                if reporter.is_due() {
                    reporter.encoded(xbzrle.as_ref());
                    reporter.tell(*round, estimator);
                }
            })?;
            reporter.encoded(xbzrle.as_ref());
        }
        self.wait_for_channels()?;
        self.session.ram.end_round();
        self.main.send_flush()?;
        // Without the wait for the destination: a round-trip time counted as time of some pages would keep a migration
        // over a long way from ever meeting a short downtime limit.
        let after = self.session.counts();
        self.estimator
            .round_done(after.since(before), started.elapsed());
        // Behind the last round comes the question whether all is loaded.
        if !self.guest_was_stopped {
            self.catch_up()?;
        }
        Ok(())
    }

    /// Stops the guest, and waits with `pause-before-switchover` until it may go on.
    fn stop_guest(&mut self) -> Result<(), Ended> {
        let Session {
            control, options, ..
        } = self.session;
        self.guest_was_stopped = true;
        self.session.guest.pause()?;
        self.session.guest_stopped();
        self.auto_converge.release();
        self.reporter.throttled(&self.auto_converge);
        control.tell(MigrationEvent::Stopped);
        if options.pause_before_switchover {
            control.set_status(Status::PreSwitchover);
            while !control.may_proceed(TICK) {
                self.check()?;
                self.reporter.tell(self.round, &self.estimator);
            }
        }
        self.check()?;
        control.set_status(Status::Device);
        Ok(())
    }

    /// Sends all that is left.
    fn switch_over(&mut self) -> Result<(), Ended> {
        let session = self.session;
        // The rest was measured to fit the downtime limit at full speed.
        session.pacer.lift();
        self.sync()?;
        self.main.send.complete();
        self.send_round()?;
        let left = session.ram.pending();
        if left > 0 {
            return Err(MigrationError::Incomplete { pages: left }.into());
        }
        let devices = session.guest.save_devices()?;
        self.asked_whether_loaded = true;
        self.main.send_devices(&devices)?;
        self.await_pongs(Some("the destination's word that it has loaded the guest"))
    }

    /// Hands the guest over and waits until it is known what became of it.
    fn hand_over(&mut self) -> Result<(), Ended> {
        if !self.session.commit() {
            self.check()?;
            return Err(MigrationError::Cancelled.into());
        }
        // A socket that fails now is one of several that carry the same word.
        self.main.send.end_of_file();
        let id = self.session.answers.id();
        if id.is_some() {
            self.session.gate.start(Job::Sync);
        }
        // A QEMU takes no questions.
        let to_ask = id.map(|id| (self.to, id));
        let patience = self.session.options.settle_timeout;
        let answers = &self.session.answers;
        let told = await_word(patience, to_ask, &mut |wait| answers.wait_told(wait));
        // The guest of this process runs where it is taken.
        let word = told.map(|(word, _)| word);
        self.session.giving.settle(word);
        if let (Some(_), Some(id)) = (word, id) {
            for stream in self.session.streams() {
                say_heard(stream, id);
            }
        }
        match word {
            Some(Word::Runs | Word::HasAll) => Ok(()),
            Some(Word::Never) => Err(answers.refusal().into()),
            None => Err(MigrationError::InDoubt.into()),
        }
    }

    /// Gives all channel threads a job and waits for them.
    fn run_job(&mut self, job: Job) -> Result<(), Ended> {
        self.session.gate.start(job);
        self.wait_for_channels()
    }

    /// Waits until the channel threads have finished their job, and tells how they get on.
    fn wait_for_channels(&mut self) -> Result<(), Ended> {
        loop {
            let finished = self.session.gate.wait_finished(TICK);
            self.check()?;
            if finished {
                return Ok(());
            }
            self.reporter.tell(self.round, &self.estimator);
        }
    }

    /// Waits until every PING sent so far has been answered, in order. `waiting_for` names a handshake, which may take as
    /// long as its time-out; without it the wait has no limit.
    fn await_pongs(&mut self, waiting_for: Option<&str>) -> Result<(), Ended> {
        let session = self.session;
        let limit = waiting_for.map(|what| (session.options.handshake_timeout, what));
        session.answers.await_answers(limit, TICK, || {
            self.check()?;
            if limit.is_none() {
                self.reporter.tell(self.round, &self.estimator);
            }
            Ok(())
        })
    }

    /// Whether the migration is to go on.
    fn check(&self) -> Result<(), Ended> {
        if self.session.giving.failure.is_set() {
            return Err(Ended::Elsewhere);
        }
        if self.session.control.life().is_stopped() {
            return Err(MigrationError::Cancelled.into());
        }
        Ok(())
    }

    /// Ends the migration's threads and connections; after a failure, gives the guest back first.
    fn wind_up(&mut self, outcome: Result<Measured, Ended>) -> Result<Measured, MigrationError> {
        let session = self.session;
        self.auto_converge.release();
        let measured = match outcome {
            Ok(measured) => {
                session.gate.start(Job::Exit);
                session.compress.end();
                session.shut_down();
                // The guest is gone from here; its log only costs.
                let _ = session.guest.stop_dirty_log();
                return Ok(measured);
            }
            // Whatever it was, the destination may run the guest.
            Err(ended) if self.is_torn() => Err(MigrationError::PagesMissing {
                source: Box::new(match ended {
                    Ended::Here(error) => error,
                    Ended::Elsewhere => MigrationError::Cancelled,
                }),
            }),
            Err(_) if session.giving.is_committed() => Err(MigrationError::InDoubt),
            Err(Ended::Here(error)) => Err(error),
            Err(Ended::Elsewhere) => Ok(()),
        };
        if session.giving.is_committed()
            && let Err(error) = measured
        {
            session.end(MigrationError::InDoubt);
            session.shut_down();
            let _ = session.guest.stop_dirty_log();
            return Err(error);
        }
        if let Err(error) = measured {
            session.end(error);
        }
        // In QEMU's order: what became of it, and then that the guest runs.
        session
            .control
            .set_status(if session.control.is_cancelled() {
                Status::Cancelling
            } else {
                Status::Failed
            });
        // The guest first: it has stood still for long enough.
        let restored = self.give_back();
        if let Some(reason) = session.answers.wait_reason(REASON_WAIT) {
            session.giving.failure.explain(reason);
        }
        session.shut_down();
        if self.asked_whether_loaded
            && let Some(id) = session.answers.id()
        {
            say_farewell(self.to, id);
        }
        restored?;
        let failure = session.giving.failure.take();
        Err(failure.unwrap_or(MigrationError::Cancelled))
    }

    /// Makes the guest run here again, if it was stopped for this.
    fn give_back(&self) -> Result<(), MigrationError> {
        let stopped = self.session.guest.stop_dirty_log();
        if self.guest_was_stopped {
            self.session.guest.resume()?;
            self.session.control.tell(MigrationEvent::Resumed);
        }
        Ok(stopped?)
    }
}

/// How the guest is handed over.
enum Switch {
    /// With all of its pages.
    Whole,
    /// Before the destination has them.
    Postcopy,
}

/// Why the phases of a migration were left.
enum Ended {
    /// The migration thread found this.
    Here(MigrationError),
    /// Another thread did, and has stored it.
    Elsewhere,
}

impl From<MigrationError> for Ended {
    fn from(error: MigrationError) -> Self {
        Self::Here(error)
    }
}

impl From<GuestError> for Ended {
    fn from(error: GuestError) -> Self {
        Self::Here(error.into())
    }
}
