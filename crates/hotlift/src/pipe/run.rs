//! Runs the threads of one migration from a source to a sink.

use std::sync::Mutex;
use std::thread;

use hotlift_methods::legacy::compress::Inflater;
use hotlift_net::admission::Admitted;
use hotlift_net::transport::Stream;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::return_path::ReturnMessage;

use crate::error::MigrationError;
use crate::life::LONG;
use crate::life::threads::{DetachableThread, caught};
use crate::lock::lock;
use crate::pipe::hooks::Hooks;
use crate::pipe::session::Session;
use crate::pipe::source::Source;
use crate::pipe::watch::Watch;
use crate::status::Status;
use crate::stream::accept_loop::AcceptLoop;
use crate::stream::serve_queries::serve_queries;

/// Runs all threads of one migration. The calling thread runs `main`.
pub(crate) fn run_threads(
    session: &Session<'_>,
    source: &dyn Source,
    blocks: &[RamBlockEntry],
    hooks: Hooks<'_>,
    main: &mut dyn FnMut() -> Result<(), MigrationError>,
    accept_loop: Option<AcceptLoop<'_>>,
) -> Result<(), MigrationError> {
    let total_bytes = blocks.iter().map(|block| block.used_length).sum();
    let watch = Watch::new(session, source).map_err(MigrationError::opening)?;
    let (stop, stopped) = Stream::pair().map_err(MigrationError::opening)?;
    let threads = &session.threads;
    let refuse = || session.fail(MigrationError::main_closed());
    let failed = |error| {
        let is_panic = matches!(error, MigrationError::Panicked { .. });
        session.fail(error);
        if is_panic {
            source.shut_down();
        }
    };
    let has_accept_loop = accept_loop.is_some();
    // The accept thread holds the lock until it ends.
    let accept_loop = Mutex::new(accept_loop);
    thread::scope(|scope| {
        let watched = watch.ends();
        let outcome = (|| {
            for reader in 0..source.readers() {
                let name = source.thread_name(reader);
                threads.spawn(scope, name, &failed, move || source.read(session, reader))?;
            }
            for worker in 0..session.sink.workers() {
                let work = move || write_batches(session, blocks, worker);
                threads.spawn(scope, source.worker_name(worker), &failed, work)?;
            }
            let listen = || {
                let lost = |channel, error| source.lost(session, channel, error);
                let forward = |channel, message: &ReturnMessage<'_>, bytes: &[u8]| {
                    session.note_answer(message);
                    source.answer(session, channel, message, bytes)?;
                    if session.is_switched() {
                        // A reader that waits for a batch may have to continue to the requested page.
                        session.flow.recheck_waits();
                    }
                    Ok(())
                };
                session.sink.return_path(&forward, &lost);
                Ok(())
            };
            if !session.sink.is_guest() {
                threads.spawn(scope, source.name("return"), &failed, listen)?;
            }
            if has_accept_loop {
                let answer = || {
                    let further = |accept_loop: &mut AcceptLoop<'_>,
                                   arrivals: &mut Vec<Admitted>| {
                        source.accept_late(session, accept_loop, arrivals);
                    };
                    let asked = session.query_subject(&refuse);
                    if let Some(accept_loop) = &mut *lock(&accept_loop) {
                        serve_queries(accept_loop, &asked, &stopped, (LONG, &further));
                    }
                    Ok(())
                };
                threads.spawn(scope, source.name("accept"), &failed, answer)?;
            }
            let watch = || watch.run(total_bytes, hooks.on_progress);
            threads.spawn(scope, source.name("watch"), &failed, watch)?;
            caught(main)
        })();
        drop(stop);
        if let Err(error) = outcome {
            session.end(error);
        }
        session.flow.end();
        // Everything has been written, or nothing will be: no thread has to wait for another.
        session.control.life().close();
        if session.source_handover.failure.is_set()
            && !session.source_handover.is_committed()
            && let Some(reason) = session.sink.closing_reason()
        {
            session.source_handover.failure.explain(reason);
        }
        let may_run_there = session.may_run_there();
        if let Some(reason) = session.source_handover.failure.for_the_source()
            && !session.source_handover.is_committed()
            && !may_run_there
        {
            source.refuse(session, &reason);
        }
        session.sink.close();
        if may_run_there && session.source_handover.failure.is_set() {
            // Without their connections both QEMUs pause the postcopy, and can be reconnected.
            source.shut_down();
        }
        drop(watched);
        if let Some(accept_loop) = &mut *lock(&accept_loop) {
            source.linger(session, accept_loop);
        }
        source.over(session);
    });
    session.threads.record_cpu_time(&source.name("main"));
    let is_offered = session.source_handover.is_offered();
    match session.source_handover.failure.take() {
        None => Ok(()),
        Some(error @ MigrationError::PagesMissing { .. }) => Err(error),
        // The package was rejected.
        Some(error @ MigrationError::Destination { .. }) if session.sink.refuses_with_text() => {
            Err(error)
        }
        Some(error) if session.source_resumes() => Err(MigrationError::GivenBack {
            source: Box::new(error),
        }),
        Some(error) if session.may_run_there() && !session.source_handover.is_committed() => {
            session.control.set_status(Status::PostcopyPaused);
            Err(MigrationError::PagesMissing {
                source: Box::new(error),
            })
        }
        Some(error @ MigrationError::Destination { .. }) => Err(error),
        Some(_) if session.source_handover.is_committed() => Err(MigrationError::InDoubt),
        Some(error) if (is_offered || session.is_switched()) && source.releases_guest() => {
            Err(MigrationError::Released {
                source: Box::new(error),
            })
        }
        Some(error) => Err(error),
    }
}

/// Returns true if no other thread waits for the workers, so the workers' priority may be lowered. Otherwise, a worker without
/// CPU time could delay requested pages while it has the lock of main.
fn is_background(session: &Session<'_>) -> bool {
    let postcopy = session.sink.postcopy().filter(|_| session.may_run_there());
    postcopy.is_some_and(|postcopy| postcopy.has_separate_connection())
}

/// Runs a worker thread: writes batches until the flow ends.
fn write_batches(
    session: &Session<'_>,
    blocks: &[RamBlockEntry],
    worker: usize,
) -> Result<(), MigrationError> {
    let mut writer = None;
    let mut inflater = None;
    let mut yielding = DetachableThread::default();
    while let Some(mut batch) = session.flow.next_of(Some(worker)) {
        yielding.once(is_background(session));
        if batch.is_compressed() {
            let block = &blocks[batch.block].name;
            let failed = |(offset, source)| MigrationError::Page {
                block: block.clone(),
                offset: usize::try_from(offset).unwrap_or(usize::MAX),
                source,
            };
            let inflater = match &mut inflater {
                Some(inflater) => inflater,
                None => {
                    let made = Inflater::new().map_err(|source| failed((0, source)))?;
                    inflater.insert(made)
                }
            };
            batch.inflate(inflater).map_err(failed)?;
        }
        let writer = match &mut writer {
            Some(writer) => writer,
            None => writer.insert(session.sink.page_writer(worker)?),
        };
        let (normal, zero) = (batch.normal.len(), batch.zero.len());
        writer.write(&mut batch)?;
        // Pages found to be zero were moved, or sent on main.
        let still_normal = batch.normal.len();
        session
            .pages
            .add_pages(still_normal, zero + normal - still_normal);
        session.flow.give_back(batch);
    }
    Ok(())
}
