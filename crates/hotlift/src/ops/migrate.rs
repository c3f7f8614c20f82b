//! The source's side of a migration: connects, sends rounds, stops the guest, and transfers its ownership.
//!
//! ```text
//! setup    connect, opening packets, RAM block list          status setup
//! rounds   sync dirty log, send dirty pages, barrier         status active   guest runs
//! switch   stop guest, last round, device state, "loaded?"   status device   guest is paused
//! commit   release                                           the guest is the destination's
//! confirm  wait for "it runs"                                status completed
//! ```
//!
//! Until the commit, a failure or a cancel ends with the guest running at the source again. At the commit the source knows that
//! the destination has loaded everything, and sends the commit on every connection. After the commit the source resumes the
//! guest only if the destination states that it never runs the guest.
//!
//! With `postcopy-ram`, a request for postcopy stops the guest after the present round, even if many pages are left: see
//! `postcopy`.

mod postcopy;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;
use hotlift_net::transport::{Address, Stream};
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::{Command, Configuration};

use crate::auto::Auto;
use crate::control::Control;
use crate::control::run_as;
use crate::ends::guest_source::reporter::{INTERVAL, Reporter};
use crate::ends::guest_source::source::GuestSource;
use crate::ends::guest_source::xbzrle::Xbzrle;
use crate::ends::guest_source::{main_pages, zero_devices};
use crate::ends::stream_sink::{SourceFacts, StreamSink};
use crate::error::MigrationError;
use crate::figures::{Counters, SideFigures, SourceReport};
use crate::guest::Guest;
use crate::handover::DestinationStatement;
use crate::life::threads::caught;
use crate::options::{Goal, Options};
use crate::pipe::hooks::Hooks;
use crate::pipe::run::run_threads;
use crate::pipe::session::Session;
use crate::pipe::settings::RelaySettings;
use crate::pipe::sink::{EarlySections, Opening, Postcopy, RamLayout};
use crate::precopy::auto_converge::AutoConverge;
use crate::precopy::estimate::Estimator;
use crate::progress::OnProgress;
use crate::status::{MigrationEvent, Status};
use crate::stream::handshake;
use crate::tls;

/// Maximum count of rounds that goal `shortest-downtime` adds once the remaining pages fit the downtime limit. Each added round
/// must halve the remaining pages. After eight rounds, pages that would take seconds take only about as long as a thread's
/// wake-up.
const SHORTENING_ROUNDS: u64 = 8;

/// Migrates the running `guest` to the Hotlift or QEMU that listens at `to`. Blocks the calling thread, and returns once the
/// guest runs at the destination. Another thread can cancel through `control`.
///
/// # Errors
/// Any [`MigrationError`]. After an error the guest runs at the source as before, except after [`MigrationError::InDoubt`] or
/// [`MigrationError::PagesMissing`]. If `control` was cancelled before the call, returns [`MigrationError::Cancelled`] at once.
pub fn migrate(
    guest: &dyn Guest,
    to: &Address,
    options: &Options,
    control: &Control,
    on_progress: OnProgress<'_>,
) -> Result<SourceReport, MigrationError> {
    let started = Instant::now();
    options.check()?;
    let settings = RelaySettings {
        outgoing: options.stream.clone(),
        limits: options.limits.clone(),
        zero_pages: Some(options.zero_pages.detection),
        outgoing_tls: tls::of_options(&options.tls, &options.limits, to)?,
        ..RelaySettings::default()
    };
    run_as("mig/src/main", control, || {
        run(
            guest,
            to,
            (options, &settings),
            control,
            on_progress,
            started,
        )
    })
}

/// Runs the migration thread (`mig/src/main`) from start to end.
fn run(
    guest: &dyn Guest,
    to: &Address,
    (options, settings): (&Options, &RelaySettings),
    control: &Control,
    on_progress: OnProgress<'_>,
    started: Instant,
) -> Result<SourceReport, MigrationError> {
    let xbzrle = Xbzrle::new(guest, options)?;
    let devices = zero_devices::open(
        guest,
        &options.zero_pages,
        options.stream.accelerator,
        control,
    )?;
    let blocks = guest.ram().iter();
    let blocks = blocks.map(|block| RamBlockEntry::new(block.name(), block.len() as u64));
    let page_size = PAGE_SIZE as u64;
    let advise = Command::PostcopyAdvise {
        page_sizes: Some((page_size, page_size)),
    };
    let opening = Opening {
        configuration: &Configuration {
            machine: guest.machine().to_owned(),
            ..Configuration::default()
        },
        uuid: guest.uuid(),
        commands: &[advise][..usize::from(options.postcopy.ram)],
        early: &EarlySections::default(),
        ram: &RamLayout {
            blocks: blocks.collect(),
            ..RamLayout::default()
        },
    };
    let memory = options.limits.memory(0);
    let sink = StreamSink::connect(
        to,
        settings,
        SourceFacts::guest(options.postcopy.preempt),
        opening,
        &memory,
        control,
    )?;
    let source = GuestSource::new(guest, options, control, &sink.out, devices);
    let id = handshake::new_id().map_err(MigrationError::opening)?;
    let received = Counters::of_side(0);
    let session = Session::new(control, settings, memory, &sink, received, started, id);
    let mut migration = Migration {
        session: &session,
        source: &source,
        opening,
        reporter: Reporter::new(&source, on_progress, started),
        started,
        total: Duration::ZERO,
        setup: Duration::ZERO,
        downtime: Duration::ZERO,
        estimator: Estimator::default(),
        auto_converge: AutoConverge::new(|percent| guest.throttle(percent), Instant::now()),
        xbzrle,
        round: 0,
        preempt: None,
        sent_all: false,
        not_restored: None,
    };
    let mut main = || migration.run();
    let outcome = run_threads(&session, &source, &[], Hooks::default(), &mut main, None);
    migration.not_restored.take().map_or(outcome, Err)?;
    source.show_zero_jobs();
    let counts = source.out.counts();
    let threads = session.threads.read();
    let pages = counts.normal_pages;
    let side = SideFigures {
        zero_jobs: control.zero_jobs(),
        ..SideFigures::new(threads, migration.total, pages, control.jobs())
    };
    let times = [migration.total, migration.setup, migration.downtime];
    Ok(SourceReport {
        rounds: migration.round,
        dirty_syncs: source.ram.syncs(),
        bytes: source.bytes(),
        throttle_percent: migration.auto_converge.highest(),
        throttle_refused: migration.auto_converge.is_refused(),
        postcopy_requests: source.postcopy_requests.load(Ordering::Relaxed),
        xbzrle: migration.xbzrle.as_ref().map(Xbzrle::figures),
        methods: session.sink.methods(),
        explored_packets: source.out.multifd.auto().map_or(0, Auto::explored),
        timeline: migration.reporter.timeline(),
        ..SourceReport::new(times, counts, side)
    })
}

/// State of the migration thread (`mig/src/main`).
struct Migration<'a> {
    session: &'a Session<'a>,
    source: &'a GuestSource<'a>,
    opening: Opening<'a>,
    reporter: Reporter<'a>,
    started: Instant,
    /// Total time. `setup` and `downtime` are parts of it.
    total: Duration,
    setup: Duration,
    downtime: Duration,
    estimator: Estimator,
    auto_converge: AutoConverge<'a>,
    xbzrle: Option<Xbzrle>,
    round: u64,
    /// With `postcopy-preempt`: the connection for requested pages.
    preempt: Option<Stream>,
    /// In postcopy: true once all pages were sent. The final END may have arrived too.
    sent_all: bool,
    /// Error of the attempt to resume the guest at the source.
    not_restored: Option<MigrationError>,
}

impl Migration<'_> {
    /// Runs all phases. After a failure before the commit, resumes the guest at the source.
    fn run(&mut self) -> Result<(), MigrationError> {
        let outcome = caught(|| self.phases());
        self.auto_converge.release();
        let Self {
            session, source, ..
        } = *self;
        let ended = match outcome {
            Err(error) if !session.source_handover.is_committed() => error,
            moved => {
                let postcopy = session.sink.postcopy().into_iter();
                postcopy.for_each(Postcopy::guest_may_run);
                // The guest has left this host; its dirty log only costs CPU time.
                let _ = source.guest.stop_dirty_log();
                return moved.map_err(|error| match self.has_lost_pages() {
                    // After any error, the destination may run the guest.
                    true => MigrationError::PagesMissing {
                        source: Box::new(error),
                    },
                    false => MigrationError::InDoubt,
                });
            }
        };
        session.end(ended);
        // In QEMU's order of events: first the outcome, then that the guest runs again.
        session
            .control
            .set_status(match session.control.is_cancelled() {
                true => Status::Cancelling,
                false => Status::Failed,
            });
        // Resumes the guest before it waits for the destination's reason, because the guest is paused.
        self.not_restored = self.give_back().err();
        Err(MigrationError::Cancelled)
    }

    /// Runs all phases in order, until the guest runs at the destination.
    fn phases(&mut self) -> Result<(), MigrationError> {
        self.set_up()?;
        self.setup = self.started.elapsed();
        self.reporter.set_up(self.setup);
        self.session.control.set_status(Status::Active);
        let switch = self.rounds()?;
        if let SwitchoverKind::Postcopy = switch {
            // Connects while the guest still runs, to shorten the downtime.
            self.preempt = self.connect_preempt(&self.source.out.to)?;
        }
        let stopped_at = Instant::now();
        self.stop_guest()?;
        self.downtime = match switch {
            SwitchoverKind::Whole => {
                self.switch_over()?;
                self.hand_over()?;
                stopped_at.elapsed()
            }
            SwitchoverKind::Postcopy => self.postcopy(stopped_at)?,
        };
        self.total = self.started.elapsed();
        Ok(())
    }

    /// Sends the start of the stream, and waits until the destination has answered. Then starts the dirty log.
    fn set_up(&mut self) -> Result<(), MigrationError> {
        let Self {
            session, source, ..
        } = self;
        // The answer shows that the destination has all channels. It also shows if the destination is a Hotlift or a QEMU.
        session.sink.open(self.opening)?;
        session.sink.ram_start()?;
        source.ram.start_log()?;
        self.report_pass();
        Ok(())
    }

    /// Fetches the dirty log. Returns the count of pages that became dirty.
    fn sync(&self) -> Result<u64, MigrationError> {
        let newly_dirty = self.source.ram.sync()?;
        self.report_pass();
        Ok(newly_dirty)
    }

    fn report_pass(&self) {
        let pass = MigrationEvent::Pass(self.source.ram.syncs());
        self.session.control.report(pass);
    }

    /// Sends rounds while the guest runs, until the remaining pages fit the downtime limit, or postcopy is requested.
    fn rounds(&mut self) -> Result<SwitchoverKind, MigrationError> {
        let mut synced_at = Instant::now();
        // Count of pending pages when they last fitted, and the round in which they first fitted.
        let (mut fitted, mut first_fit) = (None, None);
        loop {
            self.send_round()?;
            let newly_dirty = self.sync()?;
            let live = self.session.control.steering().latest(self.source.options);
            self.estimator.assume(live.switchover.avail_bandwidth);
            let pending = self.source.ram.pending();
            self.estimator
                .synced(pending, newly_dirty, synced_at.elapsed());
            synced_at = Instant::now();
            let sent = self.source.out.counts().transferred_bytes;
            self.auto_converge
                .synced(newly_dirty, sent, synced_at, &live.auto_converge);
            self.reporter.throttled(&self.auto_converge);
            // Reports rounds that are shorter than a wait for the channels.
            if self.reporter.is_due() {
                self.report();
            }
            let fits = |time| time <= live.switchover.downtime_limit;
            if self.estimator.time_for(pending).is_some_and(fits) {
                let before = fitted.replace(pending);
                let rests = |before| pending > before / 2;
                // Rounds since the pages first fitted. The pages have fitted after each of these rounds.
                let tries = self.round - *first_fit.get_or_insert(self.round);
                let keep_waiting = live.stream.goal == Goal::ShortestDowntime
                    && !before.is_some_and(rests)
                    && tries < SHORTENING_ROUNDS;
                if !keep_waiting {
                    return Ok(SwitchoverKind::Whole);
                }
            }
            if self.source.cuts_round() {
                return Ok(SwitchoverKind::Postcopy);
            }
        }
    }

    /// Waits, without a time limit, until the destination has processed all sent data. Written data is not yet in the
    /// destination's memory: sockets buffer some MiB, for which a slow decoder needs 100 ms. Without this wait, that time would
    /// be downtime after the switchover. The wait costs a round-trip time per round.
    fn catch_up(&mut self) -> Result<(), MigrationError> {
        let session = self.session;
        session.sink.catch_up(INTERVAL, &mut || {
            check(session)?;
            self.report();
            Ok(())
        })
    }

    /// Reports progress to the caller.
    fn report(&mut self) {
        self.reporter.report(self.round, &self.estimator);
    }

    /// Sends the dirty pages once, then a barrier. While the guest runs, also waits until the destination has processed them.
    fn send_round(&mut self) -> Result<(), MigrationError> {
        self.round += 1;
        let before = self.source.out.counts();
        let started = Instant::now();
        let on_main = main_pages::needed(self.source.options);
        self.source.ram.start_round(on_main);
        self.source.rounds.start();
        if on_main {
            let Self {
                session,
                source,
                reporter,
                estimator,
                xbzrle,
                round,
                ..
            } = self;
            if let Some(xbzrle) = xbzrle {
                xbzrle.start_round(source.is_guest_stopped());
            }
            main_pages::scan(source, &session.flow, xbzrle, |xbzrle| {
                if reporter.is_due() {
                    reporter.encoded(xbzrle.as_ref());
                    reporter.report(*round, estimator);
                }
            })?;
            reporter.encoded(xbzrle.as_ref());
        }
        self.wait_for_channels()?;
        self.source.ram.end_round();
        self.session.sink.barrier()?;
        // Measured without the wait for the destination. With the round-trip time included, a migration over a long distance
        // could never meet a short downtime limit.
        let after = self.source.out.counts();
        self.estimator
            .round_done(after.since(before), started.elapsed());
        // After the last round, the source asks instead if all is loaded.
        if !self.source.is_guest_stopped() {
            self.catch_up()?;
        }
        Ok(())
    }

    /// Stops the guest. With `pause-before-switchover`, waits until the operator lets the migration continue.
    fn stop_guest(&mut self) -> Result<(), MigrationError> {
        let GuestSource {
            control, options, ..
        } = self.source;
        self.source.guest_stopped();
        self.source.guest.pause()?;
        self.auto_converge.release();
        self.reporter.throttled(&self.auto_converge);
        control.report(MigrationEvent::Stopped);
        if options.switchover.pause_before {
            control.set_status(Status::PreSwitchover);
            while !control.may_proceed(INTERVAL) {
                check(self.session)?;
                self.report();
            }
        }
        check(self.session)?;
        control.set_status(Status::Device);
        Ok(())
    }

    /// Sends the remaining pages and the devices of the stopped guest, and waits until the destination has loaded them.
    fn switch_over(&mut self) -> Result<(), MigrationError> {
        let GuestSource {
            guest, out, ram, ..
        } = self.source;
        // The estimate that the remaining pages fit the downtime limit assumes full speed.
        out.link.pacer.lift();
        self.sync()?;
        out.main.take().complete();
        self.send_round()?;
        let left = ram.pending();
        if left > 0 {
            return Err(MigrationError::Incomplete { pages: left });
        }
        let devices = guest.save_devices()?;
        let mut main = out.main.take();
        devices.iter().try_for_each(|device| main.device(device))?;
        drop(main);
        self.session.sink.await_loaded()
    }

    /// Commits: transfers the guest to the destination, and waits until the outcome is known.
    fn hand_over(&mut self) -> Result<(), MigrationError> {
        let session = self.session;
        if !session.commit(Hooks::default()) {
            return Err(MigrationError::Cancelled);
        }
        let outcome = session.sink.commit(&[], None);
        // A destination that accepts a guest of this process also runs it.
        session.source_handover.settle(match &outcome {
            Ok(_) => Some(DestinationStatement::Runs),
            Err(MigrationError::Destination { .. }) => Some(DestinationStatement::Never),
            Err(_) => None,
        });
        outcome.map(drop)
    }

    /// Waits until the channel threads have finished the round, and reports their progress.
    fn wait_for_channels(&mut self) -> Result<(), MigrationError> {
        let (session, source) = (self.session, self.source);
        source.rounds.await_channels(INTERVAL, || {
            check(session)?;
            if self.reporter.is_due() {
                self.report();
            }
            Ok(())
        })
    }

    /// Stops the dirty log, and resumes the guest at the source if it was stopped for the migration.
    fn give_back(&self) -> Result<(), MigrationError> {
        let stopped = self.source.guest.stop_dirty_log();
        if self.source.is_guest_stopped() {
            self.source.guest.resume()?;
            self.session.control.report(MigrationEvent::Resumed);
        }
        Ok(stopped?)
    }
}

/// Pages that the destination has when the guest switches over.
enum SwitchoverKind {
    /// The destination has all pages of the guest.
    Whole,
    /// Pages are missing: they follow while the guest runs at the destination.
    Postcopy,
}

/// Returns an error if the migration is cancelled or has failed. The recorded first error is the real reason.
fn check(session: &Session<'_>) -> Result<(), MigrationError> {
    match session.control.life().is_stopped() {
        true => Err(MigrationError::Cancelled),
        false => Ok(()),
    }
}
