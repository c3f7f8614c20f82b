//! The end of a migration: device state, and who has the guest.

use std::time::{Duration, Instant};

use hotlift_methods::OverMemoryLimit;
use hotlift_wire::main_channel::{
    Command, DeviceStateEvent, DeviceStateStep, EOF_WITHOUT_DESCRIPTION, MainDecoder, MainEvent,
    SectionKind, Step, complete_device_state, next_device_state,
};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::Doing;
use hotlift_wire::{WireError, limits};

use crate::control::Status;
use crate::ends::stream_source::upstream::Upstream;
use crate::error::{Channel, MigrationError};
use crate::handover::Word;
use crate::pipe::hooks::{Hooks, Ownership};
use crate::pipe::session::Session;
use crate::stream::counted_buffer::CountedBuffer;
use crate::stream::main_recv::{MainInput, Waiting, event_name};
use crate::stream::return_path::encode;
use crate::threads::OnPanic;

/// A source that has said nothing for so long behind RAM has sent its last byte, though there is no VM
/// description to show it (machines with `suppress-vmdesc`). A second was too short: QEMU flushes its
/// disks between the last device and EOF.
const SILENCE: Duration = Duration::from_secs(30);

/// Bytes of QEMU's format: the section type behind the last section (`QEMU_VM_EOF`), a footer's first
/// byte (`QEMU_VM_SECTION_FOOTER`, with the section's id behind it), a description's
/// (`QEMU_VM_VMDESCRIPTION`).
pub(crate) const EOF: u8 = 0x00;
const FOOTER: u8 = 0x7e;
const DESCRIPTION_MARK: u8 = 0x06;

/// What does not come from a machine type that sends neither footers nor a VM description.
const NO_DESCRIPTION: &str = "the source's VM description (pc-i440fx-2.2 sends none: start both QEMUs with \
                              -machine suppress-vmdesc=off)";

/// How long a VM description may be behind the EOF of a relay, which sends both in one go.
const DESCRIPTION: Duration = Duration::from_secs(1);

/// How long a source may take to release the guest, once it was told that all is loaded.
const RELEASE: Duration = Duration::from_secs(60);

/// How often it is asked whether it has.
const ASK: Duration = Duration::from_millis(1);

/// Of a QEMU: everything behind RAM, up to word that the guest runs on the other side.
pub(crate) fn from_qemu(
    session: &Session<'_>,
    upstream: &Upstream,
    input: &mut MainInput<'_>,
    has_footers: bool,
    hooks: Hooks<'_>,
    late_channel: &dyn Fn() -> bool,
) -> Result<(), MigrationError> {
    let (sections, eof) = read_device_state(session, upstream, input, has_footers)?;
    session.control.set_status(Status::Device);
    session.sink.devices(&sections[..eof])?;
    session.sink.await_loaded()?;
    let channel_missing = late_channel();
    if channel_missing {
        return Err(MigrationError::Protocol {
            channel: Channel::Main,
            got: "a further multifd channel at the end of the stream".to_owned(),
            doing: "reading RAM (its connection came too late to be counted)",
        });
    }
    // A source that takes answers releases the guest at SHUT(0), and not before: one that has gone already was
    // cancelled, or has died.
    if upstream.return_path && upstream.is_closed() {
        return Err(MigrationError::main_closed());
    }
    if !session.offer() {
        return Err(MigrationError::Cancelled);
    }
    upstream.answer_surely(&encode(&[ReturnMessage::Shut(0)]))?;
    await_release(session, upstream, input, hooks)?;
    session.giving.released();
    if !session.commit(hooks) {
        return Err(MigrationError::Cancelled);
    }
    hand_over(session, &sections[eof..], hooks).map(drop)
}

/// Sends EOF and what follows it, and waits until it is known what became of the guest; what it does.
pub(crate) fn hand_over(
    session: &Session<'_>,
    end: &[u8],
    hooks: Hooks<'_>,
) -> Result<Doing, MigrationError> {
    let outcome = session.sink.commit(end, hooks.has_taken);
    session.settle(match &outcome {
        Ok(_) => Some(Word::Runs),
        // A file that is not whole runs no guest.
        Err(MigrationError::Destination { .. } | MigrationError::File(_)) => Some(Word::Never),
        Err(_) => None,
    });
    if let (Ok(doing), Some(on_taken)) = (&outcome, hooks.on_taken) {
        on_taken(*doing);
    }
    outcome
}

/// Reports to the source that the guest is on the other side, and what it does there.
pub(crate) fn report_taken(session: &Session<'_>, upstream: &Upstream, doing: Doing) {
    let shut = ReturnMessage::Shut(0);
    let messages = if upstream.takes_doing && doing != Doing::Unknown {
        session.taking.note_doing(doing);
        encode(&[ReturnMessage::Doing(doing), shut])
    } else {
        encode(&[shut])
    };
    session.taking.taken();
    upstream.answer(&messages);
}

/// Reads until the stream's last byte has come: the bytes, and where EOF is in them.
fn read_device_state(
    session: &Session<'_>,
    upstream: &Upstream,
    input: &mut MainInput<'_>,
    has_footers: bool,
) -> Result<(CountedBuffer, usize), MigrationError> {
    let mut sections = CountedBuffer::new(&session.memory);
    let (mut searched, mut candidates) = (0, Vec::new());
    loop {
        let unread = input.unread();
        let taken = unread.len();
        sections.extend(unread).map_err(too_much)?;
        input.take(taken);
        check_length(&sections)?;
        if let Some(eof) = complete_device_state(&sections, &mut searched, &mut candidates) {
            return Ok((sections, eof));
        }
        if input.fill_some(1, Some(SILENCE), &session.call())? {
            continue;
        }
        // Without a description only the footer before it shows that the last byte is EOF, and the PING
        // in its place, which a device cut short would swallow. A source that takes answers
        // does not close before it has had one.
        let is_closed = upstream.is_closed();
        let is_eof = |eof| match has_footers {
            true => is_eof(&sections, eof),
            // Then only a QEMU shows that they are whole, which loads them up to the PING. A file does not.
            false => session.sink.shows_loading() && may_be_eof(&sections, eof),
        };
        return match sections.len().checked_sub(1) {
            Some(eof) if is_eof(eof) && !(is_closed && upstream.return_path) => Ok((sections, eof)),
            _ if is_closed => Err(MigrationError::main_closed()),
            _ => Err(MigrationError::Timeout {
                waiting_for: match has_footers {
                    true => "the rest of the source's devices",
                    false => NO_DESCRIPTION,
                }
                .to_owned(),
                waited: SILENCE,
            }),
        };
    }
}

/// Whether the byte at `at`, the last that came, can be EOF: it is behind a footer. A description of
/// which a part has come has zero bytes in its length; that one's EOF came earlier, and must not go out.
fn is_eof(sections: &[u8], at: usize) -> bool {
    let follows_footer = |at: usize| sections[at] == EOF && at >= 5 && sections[at - 5] == FOOTER;
    let earlier = at.saturating_sub(5)..at;
    follows_footer(at)
        && !earlier
            .into_iter()
            .any(|earlier| follows_footer(earlier) && sections[earlier + 1] == DESCRIPTION_MARK)
}

/// The same without footers: a zero byte at the end, and not one of a description's length.
fn may_be_eof(sections: &[u8], at: usize) -> bool {
    let earlier = &sections[at.saturating_sub(5)..=at];
    sections[at] == EOF
        && !earlier
            .windows(2)
            .any(|pair| pair == [EOF, DESCRIPTION_MARK])
}

/// Waits until the source has given the guest up.
fn await_release(
    session: &Session<'_>,
    upstream: &Upstream,
    input: &mut MainInput<'_>,
    hooks: Hooks<'_>,
) -> Result<(), MigrationError> {
    let deadline = Instant::now() + RELEASE;
    let call = session.call();
    while Instant::now() < deadline {
        let Some(ownership) = hooks.ownership else {
            // Nothing follows the end of a stream but its close; a source that keeps it open has not
            // released the guest.
            match input.fill_some(1, Some(Duration::ZERO), &call) {
                Ok(false) if upstream.is_closed() => return Ok(()),
                Ok(false) => continue,
                Ok(true) => {
                    return Err(MigrationError::Protocol {
                        channel: Channel::Main,
                        got: "bytes behind the VM description".to_owned(),
                        doing: "waiting for the source to release the guest",
                    });
                }
                // A connection that is reset was closed with SHUT(0) unread: the source was cancelled, or
                // has died.
                Err(error) => return Err(error),
            }
        };
        call.check()?;
        match ownership() {
            Ownership::Released => return Ok(()),
            Ownership::Kept => {
                session.source_kept_it();
                return Err(MigrationError::Cancelled);
            }
            Ownership::Unknown => std::thread::sleep(ASK),
        }
    }
    Err(MigrationError::Timeout {
        waiting_for: "the source to release the guest (it was told that all is loaded; ask its \
                      query-migrate)"
            .to_owned(),
        waited: RELEASE,
    })
}

/// Of a relay: its device sections have a length, and it asks itself whether all is loaded before EOF may follow.
pub(crate) fn from_relay(
    session: &Session<'_>,
    upstream: &Upstream,
    input: &mut MainInput<'_>,
    hooks: Hooks<'_>,
) -> Result<(), MigrationError> {
    let mut has_devices = false;
    let mut is_loaded = false;
    loop {
        match next_device_state(input.unread()).map_err(MigrationError::main_wire)? {
            DeviceStateStep::Need(needed) => {
                if !input.fill(needed, &session.call())? {
                    return Err(MigrationError::main_closed());
                }
            }
            DeviceStateStep::Event(event, consumed) => {
                if event == DeviceStateEvent::Eof {
                    if !is_loaded {
                        return Err(unexpected("EOF before the devices were loaded"));
                    }
                    return end_of_relay(session, upstream, input, hooks);
                }
                if let DeviceStateEvent::Ping(expected) = event
                    && has_devices
                    && !is_loaded
                {
                    input
                        .check_crc(expected)
                        .map_err(MigrationError::main_wire)?;
                }
                input.take(consumed);
                match event {
                    DeviceStateEvent::Packaged(_) if has_devices => {
                        return Err(unexpected("devices behind the last"));
                    }
                    DeviceStateEvent::Packaged(length) => {
                        has_devices = true;
                        session.control.set_status(Status::Device);
                        let sections = read_package(session, input, length, None)?;
                        session.sink.devices(&sections)?;
                    }
                    DeviceStateEvent::Ping(_) if is_loaded || !has_devices => {
                        return Err(unexpected("PING in another place than behind the devices"));
                    }
                    DeviceStateEvent::Ping(expected) => {
                        session.sink.await_loaded()?;
                        is_loaded = true;
                        if !session.taking.loaded() {
                            return Err(MigrationError::Cancelled);
                        }
                        upstream.answer(&encode(&[ReturnMessage::Pong(expected)]));
                    }
                    DeviceStateEvent::Eof => {}
                }
            }
        }
    }
}

/// Of a guest that is saved: its devices are sections of its stream, behind which it asks whether all is loaded.
pub(crate) fn from_guest(
    session: &Session<'_>,
    upstream: &Upstream,
    input: &mut MainInput<'_>,
    decoder: &mut MainDecoder,
    hooks: Hooks<'_>,
) -> Result<(), MigrationError> {
    session.control.set_status(Status::Device);
    let mut sections = CountedBuffer::new(&session.memory);
    let asked = loop {
        let next = decoder.next(input.unread());
        let (event, consumed) = match next.map_err(MigrationError::main_wire)? {
            Step::Event { event, consumed } => (event, consumed),
            Step::Need(needed) => {
                if !input.fill(needed, &session.call())? {
                    return Err(MigrationError::main_closed());
                }
                continue;
            }
        };
        let asked = match event {
            MainEvent::Command(Command::Ping(value)) => {
                input.check_crc(value).map_err(MigrationError::main_wire)?;
                Some(value)
            }
            MainEvent::SectionStart {
                kind: SectionKind::Full,
                ..
            }
            | MainEvent::DevicePayload(_)
            | MainEvent::SectionFooter => {
                let bytes = &input.unread()[..consumed];
                sections.extend(bytes).map_err(too_much)?;
                check_length(&sections)?;
                None
            }
            other => return Err(unexpected(&event_name(&other))),
        };
        input.take(consumed);
        if let Some(asked) = asked {
            break asked;
        }
    };
    session.sink.devices(&sections)?;
    session.sink.await_loaded()?;
    if !session.taking.loaded() {
        return Err(MigrationError::Cancelled);
    }
    upstream.answer(&encode(&[ReturnMessage::Pong(asked)]));
    if input.unread().is_empty() && !input.fill(1, &session.call())? {
        return Err(MigrationError::main_closed());
    }
    match input.unread()[0] {
        EOF => end_of_relay(session, upstream, input, hooks),
        _ => Err(unexpected("something else than EOF")),
    }
}

/// Whether all device sections together may be so long.
fn check_length(sections: &[u8]) -> Result<(), MigrationError> {
    match sections.len() > limits::DEVICE_SECTIONS {
        false => Ok(()),
        true => Err(MigrationError::main_wire(WireError::OverLimit {
            what: "length of all device sections",
            limit: limits::DEVICE_SECTIONS as u64,
            got: sections.len() as u64,
        })),
    }
}

/// Reads the `length` bytes of a package. A source that sends nothing for `patience` counts as closed.
pub(crate) fn read_package(
    session: &Session<'_>,
    input: &mut MainInput<'_>,
    length: usize,
    patience: Option<Duration>,
) -> Result<CountedBuffer, MigrationError> {
    let mut sections = CountedBuffer::new(&session.memory);
    while sections.len() < length {
        let unread = input.unread();
        let taken = unread.len().min(length - sections.len());
        sections.extend(&unread[..taken]).map_err(too_much)?;
        input.take(taken);
        if sections.len() < length && !input.fill_some(1, patience, &session.call())? {
            return Err(MigrationError::main_closed());
        }
    }
    Ok(sections)
}

/// EOF has come from a Hotlift, which knows that all is loaded, and has released the guest, or its source has.
fn end_of_relay(
    session: &Session<'_>,
    upstream: &Upstream,
    input: &mut MainInput<'_>,
    hooks: Hooks<'_>,
) -> Result<(), MigrationError> {
    // A source that was told meanwhile that the guest never runs here has it.
    if !session.taking.commit() {
        return Err(unexpected("EOF of a source that has kept the guest"));
    }
    let _unsure = OnPanic(|| session.taking.unsure());
    if !session.commit(hooks) {
        session.taking.refused();
        return Err(MigrationError::Cancelled);
    }
    // Nothing may fail any more: without memory for the description, the guest goes without.
    let description = session.memory.take(limits::VM_DESCRIPTION);
    let most = description.map_or(0, |()| limits::VM_DESCRIPTION);
    let mut end = Vec::new();
    let (mut searched, mut candidates) = (0, Vec::new());
    loop {
        let unread = input.unread();
        let taken = unread.len();
        end.extend_from_slice(unread);
        input.take(taken);
        let complete = complete_device_state(&end, &mut searched, &mut candidates).is_some();
        if complete {
            break;
        }
        let mut more = || input.fill_some(1, Some(DESCRIPTION), &session.call());
        if end.len() > most || !matches!(more(), Ok(true)) {
            // No reason not to run the guest. (Machines with `suppress-vmdesc` have none.)
            if end.len() > 1 {
                end = EOF_WITHOUT_DESCRIPTION.to_vec();
            }
            break;
        }
    }
    let outcome = hand_over(session, &end, hooks);
    match &outcome {
        Ok(doing) => report_taken(session, upstream, *doing),
        Err(MigrationError::Destination { .. } | MigrationError::File(_)) => {
            session.taking.refused();
        }
        Err(_) => session.taking.unsure(),
    }
    outcome.map(drop)
}

fn too_much(source: OverMemoryLimit) -> MigrationError {
    MigrationError::memory(Channel::Main, source)
}

/// What a Hotlift's stream has in a wrong place.
pub(crate) fn unexpected(got: &str) -> MigrationError {
    MigrationError::Protocol {
        channel: Channel::Main,
        got: got.to_owned(),
        doing: "reading the end of a hotlift's stream",
    }
}
