//! The destination's side of a migration: accepts its connections, fills guest RAM, loads devices,
//! and takes the guest over when the source lets go.

mod accept;
mod barrier;
mod channel;
mod main_channel;
mod packets;
mod session;

use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::RamBlock;
use hotlift_wire::multifd::Method;

use crate::control::{Control, Status};
use crate::error::MigrationError;
use crate::figures::{DestinationReport, SideFigures, ThreadTimes};
use crate::guest::Guest;
use crate::options::Options;
use crate::source::spawn;
use crate::transport::{Listener, wait_readable};
use channel::ChannelReceiver;
use main_channel::MainReceiver;
use session::Session;

/// How long the connections stay open for the source to read what was said last.
const LINGER: Duration = Duration::from_secs(2);

/// Threads that populate RAM at most: memory bandwidth is used up by then.
const POPULATE_THREADS: usize = 8;

/// Waits at `listener` for one migration into `guest`, which has not run, and returns when the guest
/// runs here.
///
/// # Errors
/// Any [`MigrationError`]. The guest then does not run here; its RAM and devices are to be thrown
/// away.
pub fn receive(
    guest: &dyn Guest,
    listener: Listener,
    options: &Options,
    control: &Control,
) -> Result<DestinationReport, MigrationError> {
    control.set_status(Status::Setup);
    let outcome = thread::scope(|scope| {
        spawn(scope, "mig/dst/main".to_owned(), || {
            run(guest, listener, options, control)
        })?
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    control.set_status(match &outcome {
        Ok(_) => Status::Completed,
        Err(MigrationError::Cancelled) => Status::Cancelled,
        Err(_) => Status::Failed,
    });
    outcome
}

fn run(
    guest: &dyn Guest,
    listener: Listener,
    options: &Options,
    control: &Control,
) -> Result<DestinationReport, MigrationError> {
    let populating = ThreadTimes::default();
    if options.mem_prealloc {
        populate(guest, &populating)?;
    }
    let method = Method::from_flag(options.multifd_compression.flag).unwrap_or(Method::None);
    let accepted = accept::accept(&listener, guest.uuid(), method, options, control)?;
    // Nobody else is to come, and a socket's file should not outlive its use.
    drop(listener);
    let session = Session::new(guest, options, control.clone(), method, accepted);
    let outcome = thread::scope(|scope| {
        let mut threads = Vec::new();
        for id in 0..options.multifd_channels {
            let session = &session;
            let name = format!("mig/dst/recv_{id}");
            threads.push(spawn(scope, name.clone(), move || {
                let outcome =
                    ChannelReceiver::new(session, id).and_then(|mut channel| channel.run());
                session.threads.book(&name);
                session.channel_ended(outcome);
            }));
        }
        let started = threads.into_iter().collect::<Result<Vec<_>, _>>();
        let mut main = MainReceiver::new(&session);
        let outcome = started.and_then(|_| main.run());
        wind_up(&session, &main, outcome);
        session.threads.book("mig/dst/main");
        session.take_failure()
    });
    if let Some(error) = outcome {
        return Err(error);
    }
    let total = session.elapsed();
    let counts = session.counts();
    let mut threads = session.threads.read();
    threads.extend(populating.read());
    Ok(DestinationReport {
        total_ms: total.as_secs_f64() * 1e3,
        normal_pages: counts.normal_pages,
        zero_pages: counts.zero_pages,
        side: SideFigures::new(threads, total, counts.normal_pages),
    })
}

/// Ends the connections, after the source has had the time to read why.
fn wind_up(session: &Session<'_>, main: &MainReceiver<'_>, outcome: Result<(), MigrationError>) {
    if let Err(error) = outcome {
        session.fail(error);
    }
    if let Some(reason) = session.failure_text() {
        main.give_up(&reason);
    }
    // Closing a socket with unread bytes in it resets the connection and may take the last words
    // with it: what still comes is read and dropped until the source closes.
    let stream = &session.accepted.main;
    stream.shutdown(Shutdown::Write);
    let deadline = Instant::now() + LINGER;
    let mut dropped = [0; 4096];
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        let ready = wait_readable(std::os::fd::AsFd::as_fd(stream), left);
        if !matches!(ready, Ok(true)) || !matches!(stream.read_some(&mut dropped), Ok(1..)) {
            break;
        }
    }
    session.shut_down();
}

/// Makes the kernel allocate all guest RAM now (`mem-prealloc`).
fn populate(guest: &dyn Guest, times: &ThreadTimes) -> Result<(), MigrationError> {
    let workers = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(POPULATE_THREADS);
    for block in guest.ram() {
        let share = block.len().div_ceil(workers).next_multiple_of(2 << 20);
        thread::scope(|scope| {
            let threads: Result<Vec<_>, _> = (0..block.len())
                .step_by(share)
                .map(|offset| {
                    let block: &RamBlock = block;
                    let name = format!("mig/dst/pop_{}", offset / share);
                    spawn(scope, name.clone(), move || {
                        let populated = block.populate(offset, share.min(block.len() - offset));
                        times.book(&name);
                        populated
                    })
                })
                .collect();
            for thread in threads? {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            }
            Ok::<_, MigrationError>(())
        })?;
    }
    Ok(())
}
