//! The destination's side of a migration: accepts its connections, fills guest RAM, and loads devices. Takes ownership of the
//! guest when the source releases it.

use std::thread;

use hotlift_mem::RamBlock;
use hotlift_net::admission::Listener;

use crate::control::Control;
use crate::control::run_as;
use crate::ends::guest_sink::accept;
use crate::ends::guest_sink::main_channel::MainReceiver;
use crate::ends::guest_sink::sink::GuestSink;
use crate::ends::guest_sink::source::GuestConnections;
use crate::error::MigrationError;
use crate::figures::{Counters, DestinationReport, SideFigures};
use crate::guest::Guest;
use crate::life::threads::spawn;
use crate::lock::lock;
use crate::options::{CHANNEL_MEMORY, Options};
use crate::pipe::hooks::Hooks;
use crate::pipe::run::run_threads;
use crate::pipe::session::Session;
use crate::pipe::settings::RelaySettings;
use crate::stream::handshake;

/// Maximum count of threads that populate RAM: eight already use all of the memory bandwidth.
const POPULATE_THREADS: usize = 8;

/// Waits at `listener` for one migration into `guest`, which must not have run yet. Returns when the guest runs and the source
/// has confirmed that it knows this. Without a confirmation, returns after `handshake_timeout` plus `settle_timeout`, when the
/// source no longer asks. The guest already runs during that wait; `control` reports at once that it runs.
///
/// # Errors
/// [`MigrationError::PagesMissing`] after a cancel in postcopy while the source was disconnected: the guest runs here, but will
/// never get its missing pages. After any other [`MigrationError`] the guest does not run here. Its RAM and devices must then
/// be discarded.
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

/// With `mem-prealloc`, makes the kernel allocate all of the guest's RAM now. Without this option, does nothing. Must be called
/// before a peer learns where to connect.
///
/// # Errors
/// [`MigrationError::Memory`] if the host has too little memory.
pub fn prepare(guest: &dyn Guest, options: &Options) -> Result<(), MigrationError> {
    if !options.mem_prealloc {
        return Ok(());
    }
    let workers = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(POPULATE_THREADS);
    for block in guest.ram() {
        let block: &RamBlock = block;
        // No huge page may be split between two threads.
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
    let accept_loop = accept::open(&listener, options, control)?;
    let (source, since, accept_loop) = accept::accept(accept_loop, guest.uuid(), options, control)?;
    let channels = source.multifd.len();
    let memory = options.limits.memory(channels);
    // `CHANNEL_MEMORY` covers the payloads of QEMU's packets; larger packets have larger payloads.
    let larger = source.layout.max_payload().saturating_sub(CHANNEL_MEMORY);
    memory.raise(channels * larger);
    let sink = GuestSink::new(guest, options, control, source);
    let settings = RelaySettings {
        outgoing: options.stream.clone(),
        limits: options.limits.clone(),
        ..RelaySettings::default()
    };
    let received = Counters::of_side(channels);
    let session = Session::new(control, &settings, memory, &sink, received, since, id);
    let mut receiver = MainReceiver::new(&session, &sink)?;
    let mut main = || {
        let outcome = receiver.run();
        lock(&sink.read_ahead).extend_from_slice(receiver.read_ahead());
        outcome
    };
    let (blocks, hooks) = (&sink.blocks, Hooks::default());
    run_threads(
        &session,
        &GuestConnections(&sink),
        blocks,
        hooks,
        &mut main,
        Some(accept_loop),
    )?;
    // Deletes the socket's file once no more connections are expected.
    drop(listener);
    let end = session
        .destination_handover
        .run_since()
        .unwrap_or_else(|| control.life().now());
    let total = end.saturating_duration_since(since);
    let counts = session.received();
    let threads = session.threads.read();
    Ok(DestinationReport {
        total_ms: total.as_secs_f64() * 1e3,
        normal_pages: counts.normal_pages,
        zero_pages: counts.zero_pages,
        postcopy: sink.postcopy.get().cloned().map(Box::new),
        side: SideFigures::new(threads, total, counts.normal_pages, control.jobs()),
    })
}
