//! A VM out of a `mapped-ram` file, start to end.
//!
//! Nothing in such a file has an order: its threads read the pages, each once, from their places straight into batches.
//! The guest runs nowhere before all of them were read.

use std::time::Instant;

use super::file::MappedSource;
use super::migration::run_threads;
use super::outgoing::{self, Seen};
use super::session::{Relayed, Session};
use super::sink::{Opening, RamLayout};
use super::{Hooks, Outgoing, RelaySettings, device_state};
use crate::control::{Control, Status};
use crate::error::MigrationError;
use crate::figures::Counters;
use crate::hello;
use crate::stream::main_recv::Waiting;

/// Passes the VM in `file` on.
pub(super) fn run(
    file: &MappedSource,
    outgoing: &Outgoing<'_>,
    settings: &RelaySettings,
    control: &Control,
    hooks: Hooks<'_>,
) -> Result<Relayed, MigrationError> {
    let since = Instant::now();
    let memory = settings.outgoing.memory(0);
    let configuration = file.configuration().clone();
    let opening = Opening {
        uuid: settings.uuid.or(configuration.uuid).unwrap_or_default(),
        configuration,
    };
    let seen = Seen {
        flush_after_each_section: Some(!file.flushes()),
        zeros_were_looked_for: true,
    };
    let sink = outgoing::open(outgoing, settings, seen, &opening, &memory, control)?;
    let session = Session::new(
        control.clone(),
        settings.outgoing.accelerator,
        memory,
        &*sink,
        Counters::of_side(file.threads()),
        since,
        hello::new_id().map_err(MigrationError::opening)?,
    );
    let ram = file.ram();
    let mut pass_on = || pass_on(&session, file, &opening, &ram, hooks);
    run_threads(&session, file, &ram.blocks, hooks, &mut pass_on, None)?;
    Ok(session.relayed(&opening.configuration.machine))
}

/// What the main thread does.
fn pass_on(
    session: &Session<'_>,
    file: &MappedSource,
    opening: &Opening,
    ram: &RamLayout,
    hooks: Hooks<'_>,
) -> Result<(), MigrationError> {
    session.sink.open(opening)?;
    await_readers(session)?;
    session.sink.ram_start(ram)?;
    session.barrier.pass();
    session.control.set_status(Status::Active);

    await_readers(session)?;
    if !session.flow.drain() {
        return Err(MigrationError::Cancelled);
    }
    for command in file.commands() {
        session.sink.command(*command)?;
    }
    session.sink.ram_end()?;
    session.barrier.pass();
    session.control.set_status(Status::Device);

    let (devices, end) = file.device_state();
    session.sink.devices(devices)?;
    session.sink.await_loaded()?;
    session.call().check()?;
    if !session.commit(hooks) {
        return Err(MigrationError::Cancelled);
    }
    device_state::hand_over(session, end, hooks)
}

/// Returns when every reader stands still: before its first page, and behind its last.
fn await_readers(session: &Session<'_>) -> Result<(), MigrationError> {
    let called_off = || session.call().check().is_err();
    match session.barrier.wait_for_channels(called_off) {
        true => Ok(()),
        false => Err(MigrationError::Cancelled),
    }
}
