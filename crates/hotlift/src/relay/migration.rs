//! One migration through the relay, start to end: connections, threads, and how they end.

use std::cell::RefCell;
use std::thread;

use hotlift_methods::legacy::compress::Inflater;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::handshake::Features;
use hotlift_wire::main_channel::{DeviceLengths, MainDecoder};
use hotlift_wire::multifd::{PacketLayout, ZeroPageDetection};

use super::accept::{Arrivals, Channels};
use super::file::FileError;
use super::main_reader::MainReader;
use super::outgoing::{self, Seen};
use super::receive::Streams;
use super::session::{Call, Relayed, Session, Upstream};
use super::setup::{StreamSetup, other_devices, read_setup};
use super::sink::Opening;
use super::source::Source;
use super::watch::{EndsWatch, Watch};
use super::{Hooks, Incoming, Outgoing, RelaySettings, closed, pass_through};
use crate::control::Control;
use crate::door::Door;
use crate::error::MigrationError;
use crate::figures::Counters;
use crate::handover::{Verdict, attend, linger};
use crate::hello;
use crate::options::{CHANNEL_MEMORY, Options};
use crate::stream::graceful_close;
use crate::stream::main_recv::{MainInput, Silence};
use crate::threads::{OnPanic, caught, spawn};
use crate::transport::Stream;

/// One migration, start to end.
pub(super) fn run(
    incoming: Incoming<'_>,
    outgoing: &Outgoing<'_>,
    settings: &RelaySettings,
    control: &Control,
    hooks: Hooks<'_>,
) -> Result<Relayed, MigrationError> {
    let timeout = settings.outgoing.handshake_timeout;
    let early = Call::early(control);
    let memory = settings.outgoing.memory(0);
    let mut arrivals = Arrivals::new(incoming, settings, control);
    let id = hello::new_id().map_err(MigrationError::opening)?;
    let main = arrivals.main(timeout, &early)?;
    let since = arrivals.since;
    // Booked again below, when the number of channels is known.
    let unbooked = Counters::default();
    // A source that somebody watches is not given up for its silence: to start the dirty log of a large VM, or on a
    // busy host, takes a QEMU a minute, in which it answers nothing.
    let silence = match hooks.ownership {
        Some(_) => Silence::Unlimited,
        None => Silence::Always(timeout),
    };
    let mut input = MainInput::new(&main, &unbooked, silence, &memory).keep_everything();
    let mut decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
    let stream_setup = read_setup(&mut input, &mut decoder, id, &early)?;
    let pass_through = |arrivals, input: &MainInput<'_>, why| match outgoing {
        Outgoing::Address(address) => {
            pass_through::run(arrivals, input, address, settings, control, hooks, why)
        }
        Outgoing::File { .. } => Err(FileError::CannotBeSaved { reason: why }.into()),
    };
    let setup = match stream_setup {
        StreamSetup::PageByPage(setup) => setup,
        StreamSetup::PassThrough(why) => return pass_through(arrivals, &input, why),
    };
    let multifd = setup
        .relay
        .map(|features| features.contains(Features::MULTIFD));
    let expected = setup.flush || multifd == Some(true);
    let channels = if multifd == Some(false) {
        None
    } else {
        arrivals.channels(&main, expected, timeout, &early)?
    };
    if channels.is_none()
        && setup.relay.is_none()
        && let Some(why) = other_devices(&mut input, &mut decoder, &early)?
    {
        return pass_through(arrivals, &input, why);
    }
    let said = channels.as_ref().map(|channels| channels.uuid);
    let opening = Opening {
        configuration: setup.configuration.clone(),
        uuid: settings
            .uuid
            .or(said)
            .or(setup.configuration.uuid)
            .unwrap_or_default(),
    };
    let hello = channels.as_ref().and_then(|channels| channels.hello);
    if let Some(layout) = hello.map(|hello| hello.layout)
        && layout != PacketLayout::QEMU
    {
        let size = |layout: PacketLayout| format!("{} bytes", layout.pages() * layout.page_size());
        let error = MigrationError::Mismatch {
            what: "multifd-packet-size".to_owned(),
            source_has: size(layout),
            destination_has: format!("{}: it is a relay", size(PacketLayout::QEMU)),
        };
        graceful_close::say_reason(&[&main], &error.chain());
        graceful_close::close(&[&main]);
        return Err(error);
    }
    let seen = Seen {
        flush_after_each_section: channels.as_ref().map(|_| !setup.flush),
        zeros_were_looked_for: hello
            .is_some_and(|hello| hello.zero_page_detection != ZeroPageDetection::None),
    };
    let opened = outgoing::open(outgoing, settings, seen, &opening, &memory, control);
    let sink = match opened {
        Ok(sink) => sink,
        Err(error) => {
            if setup.relay.is_some() {
                graceful_close::say_reason(&[&main], &error.chain());
                graceful_close::close(&[&main]);
            }
            return Err(error);
        }
    };
    let multifd = channels.map_or_else(Vec::new, |Channels { streams, .. }| streams);
    memory.raise(multifd.len() * CHANNEL_MEMORY);
    let received = Counters::of_side(multifd.len());
    if let Some(on_main) = received.last() {
        on_main.add_bytes(input.everything().len());
    }
    let read_ahead = input.detach(setup.relay.is_some());
    let upstream = Upstream::new(main, multifd, setup.relay.is_some(), setup.return_path);
    let session = Session::new(
        control.clone(),
        settings.outgoing.accelerator,
        memory,
        &*sink,
        received,
        since,
        id,
    );
    let input = MainInput::attach(
        read_ahead,
        &upstream.main,
        &session.received[upstream.multifd.len()],
    );
    let mut reader = MainReader::new(&session, &upstream, &setup, input, decoder);
    let count = upstream.multifd.len();
    // A relay says how many channels it has, and asks; a QEMU does neither.
    let mut door = None;
    let mut uncounted = None;
    match upstream.is_relay {
        true => door = Some(arrivals.into_door()),
        false => uncounted = Some(arrivals),
    }
    let uncounted = RefCell::new(uncounted);
    let late_channel = || {
        let mut arrivals = uncounted.borrow_mut();
        let arrivals = arrivals.as_mut();
        arrivals.is_some_and(|arrivals| arrivals.late_channel(said, count))
    };
    let outcome = run_threads(
        &session,
        &Streams::new(&upstream, &setup.ram.blocks),
        &setup.ram.blocks,
        hooks,
        &mut || reader.run(&opening, hooks, &late_channel),
        door.as_mut(),
    );
    wind_up(&session, &upstream, door, &settings.outgoing);
    outcome?;
    Ok(session.relayed(&setup.configuration.machine))
}

/// Runs all threads of one migration; `main` is what this one does.
pub(super) fn run_threads(
    session: &Session<'_>,
    source: &dyn Source,
    blocks: &[RamBlockEntry],
    hooks: Hooks<'_>,
    main: &mut dyn FnMut() -> Result<(), MigrationError>,
    door: Option<&mut Door<'_>>,
) -> Result<(), MigrationError> {
    let total_bytes = blocks.iter().map(|block| block.used_length).sum();
    let watch = Watch::default();
    let (stop, stopped) = Stream::pair().map_err(MigrationError::opening)?;
    let refuse = || session.fail(closed());
    let aborting = &|| {
        session.fail(MigrationError::panicked_here());
        source.shut_down();
    };
    thread::scope(|scope| {
        let _watched = EndsWatch(&watch);
        let outcome = (|| {
            for reader in 0..source.readers() {
                let name = source.thread_name(reader);
                spawn(scope, name.clone(), move || {
                    let _ends = OnPanic(aborting);
                    let ended = source.read(session, reader);
                    session.threads.book(&name);
                    if let Err(error) = ended
                        && !session.is_committed()
                    {
                        session.fail(error);
                    }
                })?;
            }
            for worker in 0..session.sink.workers() {
                let name = format!("relay/send_{worker}");
                spawn(scope, name.clone(), move || {
                    let _ends = OnPanic(aborting);
                    let ended = write_batches(session, blocks, worker);
                    session.threads.book(&name);
                    if let Err(error) = ended {
                        session.fail(error);
                    }
                })?;
            }
            spawn(scope, "relay/return".to_owned(), || {
                let _ends = OnPanic(aborting);
                let ended = session.sink.return_path(&|bytes| source.answer(bytes));
                session.threads.book("relay/return");
                if let Err(error) = ended
                    && !session.is_committed()
                {
                    session.fail(error);
                }
            })?;
            if let Some(door) = door {
                spawn(scope, "relay/door".to_owned(), || {
                    let _ends = OnPanic(aborting);
                    attend(door, &session.asked(&refuse), &stopped);
                    session.threads.book("relay/door");
                })?;
            }
            spawn(scope, "relay/watch".to_owned(), || {
                let _ends = OnPanic(aborting);
                watch.run(session, source, total_bytes, hooks.on_progress);
            })?;
            caught(main)
        })();
        drop(stop);
        if let Err(error) = outcome {
            session.end(error);
        }
        session.flow.end();
        // Everything has been written, or nothing will be: nobody need wait for anybody.
        session.release_waiting();
        if session.failure.is_set() {
            session.explain(session.sink.closing_reason());
        }
        if let Some(reason) = session.failure.text()
            && session.verdict() != Some(Verdict::Doubt)
        {
            source.refuse(&reason);
        }
        session.sink.close();
        source.over();
    });
    session.threads.book("relay/main");
    let is_offered = session.is_offered();
    match session.failure.take() {
        None => Ok(()),
        Some(error @ MigrationError::Destination { .. }) => Err(error),
        Some(_) if session.is_committed() => Err(MigrationError::InDoubt),
        Some(error) if is_offered && source.releases_guest() => Err(MigrationError::Released {
            source: Box::new(error),
        }),
        Some(error) => Err(error),
    }
}

/// Stays until a source that is a relay knows what became of the guest, and closes all connections.
fn wind_up(session: &Session<'_>, upstream: &Upstream, door: Option<Door<'_>>, options: &Options) {
    if let Some(mut door) = door.filter(|door| door.listener().is_some()) {
        let patience = options.time_for_questions();
        // It has ended by now.
        let asked = session.asked(&|| ());
        let main = [&upstream.main];
        linger(&mut door, &asked, &main, &[], patience, &session.control);
    }
    upstream.close();
}

/// A worker: writes batches until there are no more.
fn write_batches(
    session: &Session<'_>,
    blocks: &[RamBlockEntry],
    worker: usize,
) -> Result<(), MigrationError> {
    let mut writer = None;
    let mut inflater = None;
    while let Some(mut batch) = session.flow.next() {
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
        // What was found to be zero has moved, or has gone to main.
        let still_normal = batch.normal.len();
        session
            .pages
            .add_pages(still_normal, zero + normal - still_normal);
        session.flow.give_back(batch);
    }
    Ok(())
}
