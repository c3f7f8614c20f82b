//! Restores a VM from a file. Threads read each page of the file once, into batches. The guest runs only after all pages were
//! read.

use std::time::Instant;

use crate::ends::file::{FileSource, PageMap, SavedVm};
use crate::ends::request::Request;
use crate::ends::stream_sink;
use crate::ends::stream_sink::{SourceFacts, SyncPoints};
use crate::ends::stream_source::device_state;
use crate::error::MigrationError;
use crate::figures::Counters;
use crate::pipe::hooks::Hooks;
use crate::pipe::run::run_threads;
use crate::pipe::session::{Relayed, Session};
use crate::pipe::sink::Opening;
use crate::pipe::source::Source;
use crate::status::Status;
use crate::stream::handshake;
use crate::stream::main_recv::WaitCondition;

/// Sends the VM in `file`, which may have either format, to the destination.
pub(crate) fn from(file: &SavedVm, request: Request<'_>) -> Result<Relayed, MigrationError> {
    match file {
        SavedVm::Blocks(file) => run(file, request),
        SavedVm::MappedRam(file) => run(file, request),
    }
}

/// Runs one restore of the VM in `file`, from start to end.
fn run<P: PageMap>(file: &FileSource<P>, request: Request<'_>) -> Result<Relayed, MigrationError> {
    let Request {
        settings, hooks, ..
    } = request;
    let since = Instant::now();
    let memory = settings.limits.memory(0);
    let stream = file.stream();
    let stated = stream.configuration.uuid.or(stream.uuid);
    let opening = Opening {
        configuration: &stream.configuration,
        uuid: settings.uuid.or(stated).unwrap_or_default(),
        commands: &[],
        early: &stream.early,
        ram: &stream.ram,
    };
    let facts = SourceFacts {
        sync_points: stream.flush_after_each_section.map(SyncPoints::shown),
        zeros_were_detected: true,
        is_guest: false,
        preempts: false,
    };
    let sink = stream_sink::open(request, facts, opening, &memory)?;
    let received = Counters::of_side(file.readers());
    let id = handshake::new_id().map_err(MigrationError::opening)?;
    let session = Session::new(
        request.control,
        request.settings,
        memory,
        &*sink,
        received,
        since,
        id,
    );
    let mut pass_on = || pass_on(&session, file, opening, hooks);
    run_threads(
        &session,
        file,
        &stream.ram.blocks,
        hooks,
        &mut pass_on,
        None,
    )?;
    Ok(session.relayed(&opening.configuration.machine))
}

/// Runs the main thread: opens the stream, waits until the workers have sent all pages, sends the devices, and commits.
fn pass_on<P: PageMap>(
    session: &Session<'_>,
    file: &FileSource<P>,
    opening: Opening<'_>,
    hooks: Hooks<'_>,
) -> Result<(), MigrationError> {
    let stream = file.stream();
    session.sink.open(opening)?;
    session.start_ram(opening.early)?;

    session.await_readers()?;
    if !session.flow.drain() {
        return Err(MigrationError::Cancelled);
    }
    for command in &stream.commands {
        session.sink.command(*command)?;
    }
    session.sink.ram_end()?;
    session.barrier.pass();
    session.control.set_status(Status::Device);

    file.devices(&mut |part| session.sink.devices(part))?;
    session.sink.await_loaded()?;
    session.call().check()?;
    if !session.commit(hooks) {
        return Err(MigrationError::Cancelled);
    }
    device_state::hand_over(session, &stream.end, hooks).map(drop)
}
