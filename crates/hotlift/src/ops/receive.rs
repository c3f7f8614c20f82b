//! The destination's side of a migration: accepts its connections, fills guest RAM, loads devices,
//! and takes the guest over when the source releases it.

use std::cell::RefCell;
use std::sync::Mutex;
use std::thread;

use hotlift_mem::RamBlock;

use crate::control::Control;
use crate::control::run_as;
use crate::ends::guest_sink::main_channel::MainReceiver;
use crate::ends::guest_sink::session::Session;
use crate::ends::guest_sink::{accept, channel, decompress_threads};
use crate::error::MigrationError;
use crate::figures::{DestinationReport, SideFigures};
use crate::guest::Guest;
use crate::handover::DestinationSide;
use crate::life::threads::{caught, spawn};
use crate::liveness::{self, Liveness};
use crate::lock::lock;
use crate::options::Options;
use crate::stream::attend::{attend, linger};
use crate::stream::door::{Arrival, Door};
use crate::stream::graceful_close;
use crate::stream::handshake;
use crate::transport::{Listener, Stream};

/// Threads that populate RAM at most: memory bandwidth is used up by then.
const POPULATE_THREADS: usize = 8;

/// Waits at `listener` for one migration into `guest`, which has not run, and returns when the guest
/// runs here and its source knows it. A source that is not heard from any more is waited for as long as it
/// may ask: `handshake_timeout` and [`Options::settle_timeout`]. The guest runs meanwhile; `control` says
/// so at once.
///
/// # Errors
/// [`MigrationError::PagesMissing`] of a guest that runs here, and waits for pages that will not come: somebody has
/// cancelled while its source was lost. After any other [`MigrationError`] the guest does not run here; its RAM and devices
/// are to be thrown away.
pub fn receive(
    guest: &dyn Guest,
    listener: Listener,
    options: &Options,
    control: &Control,
) -> Result<DestinationReport, MigrationError> {
    options.check()?;
    run_as("mig/dst/main", control, || {
        run(guest, listener, options, control)
    })
}

/// Readies the guest's RAM for a migration with these options, before anybody is told where to
/// connect: with `mem-prealloc`, makes the kernel allocate all of it now.
///
/// # Errors
/// [`MigrationError::Memory`] if there is not enough of it.
pub fn prepare(guest: &dyn Guest, options: &Options) -> Result<(), MigrationError> {
    if !options.mem_prealloc {
        return Ok(());
    }
    let workers = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(POPULATE_THREADS);
    for block in guest.ram() {
        let block: &RamBlock = block;
        // Huge pages are not to be split between threads.
        let share = block.len().div_ceil(workers).next_multiple_of(2 << 20);
        thread::scope(|scope| {
            let threads: Result<Vec<_>, _> = (0..block.len())
                .step_by(share)
                .map(|offset| {
                    let length = share.min(block.len() - offset);
                    let name = format!("mig/dst/pop_{}", offset / share);
                    spawn(scope, name, move || block.populate(offset, length))
                })
                .collect();
            for thread in threads? {
                thread.join()??;
            }
            Ok::<_, MigrationError>(())
        })?;
    }
    Ok(())
}

fn run(
    guest: &dyn Guest,
    listener: Listener,
    options: &Options,
    control: &Control,
) -> Result<DestinationReport, MigrationError> {
    let id = handshake::new_id().map_err(MigrationError::opening)?;
    let door = accept::open(&listener, options, control)?;
    let (source, since, door) = accept::accept(door, guest.uuid(), options, control)?;
    let session = Session::new(guest, options, control.clone(), id, source, since);
    let refuse = || {
        session.fail(MigrationError::main_closed());
    };
    let failed = |error| {
        let is_panic = matches!(error, MigrationError::Panicked { .. });
        session.fail(error);
        if is_panic {
            session.shut_down();
        }
    };
    let (stop, stopped) = Stream::pair().map_err(MigrationError::opening)?;
    let mut receiver = MainReceiver::new(&session)?;
    let (session, threads) = (&session, &session.threads);
    // Its lock is the door thread's until that has ended.
    let door = Mutex::new(door);
    thread::scope(|scope| {
        let outcome = (|| {
            for id in 0..options.channels() {
                let read = move || session.channel_ended(channel::receive(session, id));
                threads.spawn(scope, format!("mig/dst/recv_{id}"), &failed, read)?;
            }
            for number in 0..decompress_threads::threads(options) {
                let work = || decompress_threads::work(&session.decompress, session.target());
                threads.spawn(scope, format!("decompress_{number}"), &failed, work)?;
            }
            threads.spawn(scope, "mig/dst/door".to_owned(), &failed, || {
                let liveness = Liveness::new(options.silence_timeout, session.source.streams());
                let liveness = RefCell::new(liveness);
                let look = |door: &mut Door<'_>, arrivals: &mut Vec<Arrival>| {
                    session.look_for_preempt(door, arrivals);
                    session.look_for_silence(&mut liveness.borrow_mut());
                };
                let asked = session.asked(&refuse);
                attend(
                    &mut lock(&door),
                    &asked,
                    &stopped,
                    (liveness::INTERVAL, &look),
                );
                Ok(())
            })?;
            caught(|| receiver.run())
        })();
        outcome.unwrap_or_else(failed);
        // Nothing is waited for any more but the source's questions.
        control.life().close();
        drop(stop);
        wind_up(session, &mut lock(&door), receiver.read_ahead());
    });
    threads.book("mig/dst/main");
    // A socket's file should not outlive its use.
    drop(door);
    drop(listener);
    if let Some(error) = control.life().failure().take() {
        return Err(error);
    }
    let total = session.total();
    let counts = session.counts();
    Ok(DestinationReport {
        total_ms: total.as_secs_f64() * 1e3,
        normal_pages: counts.normal_pages,
        zero_pages: counts.zero_pages,
        postcopy: session.postcopy.get().cloned().map(Box::new),
        side: SideFigures::new(
            session.threads.read(),
            total,
            counts.normal_pages,
            session.control.jobs(),
        ),
    })
}

/// Ends the connections, after the source has had the time to read why, and knows what became of the guest.
fn wind_up(session: &Session<'_>, door: &mut Door<'_>, read_ahead: &[u8]) {
    let source = &session.source;
    let main = [&source.main];
    if let Some(reason) = session.control.life().failure().text()
        && source.is_hotlift()
        && session.taking.side() == DestinationSide::Never
    {
        graceful_close::say_reason(&main, &reason);
    }
    if source.is_hotlift() {
        let recovered = lock(&session.recovered).clone();
        let streams: Vec<_> = source.streams().chain(recovered.as_deref()).collect();
        let patience = session.options.time_for_questions();
        // It has ended by now.
        let asked = session.asked(&|| ());
        linger(
            door,
            &asked,
            &streams,
            read_ahead,
            patience,
            session.control.life(),
        );
    }
    graceful_close::close(&main);
    session.shut_down();
}
