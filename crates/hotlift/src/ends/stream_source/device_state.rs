//! The end of a migration: device state, and who has the guest.

use std::time::{Duration, Instant};

use hotlift_wire::limits;
use hotlift_wire::main_channel::{
    Command, DeviceStateEvent, DeviceStateStep, EOF_WITHOUT_DESCRIPTION, EarlyLengths, EofSearch,
    MainDecoder, MainEvent, SectionKind, Step, next_device_state,
};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::Doing;

use crate::ends::stream_source::damage::broken;
use crate::ends::stream_source::upstream::Upstream;
use crate::error::{Channel, MigrationError};
use crate::handover::Word;
use crate::life::threads::OnPanic;
use crate::pipe::hooks::{Hooks, Ownership};
use crate::pipe::session::Session;
use crate::status::Status;
use crate::stream::main_recv::{MainInput, Waiting, check_crc, event_name};
use crate::stream::return_path::encode;

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

/// Bytes from a footer to the EOF behind it.
const FOOTER_TO_EOF: usize = 5;

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
    (has_footers, early): (bool, &EarlyLengths),
    hooks: Hooks<'_>,
    late_channel: &dyn Fn() -> bool,
) -> Result<(), MigrationError> {
    session.control.set_status(Status::Device);
    pass_devices(session, upstream, input, has_footers)?;
    let checked = early.check(input.unread());
    checked.map_err(|error| broken(error, early))?;
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
    hand_over(session, input.unread(), hooks).map(drop)
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

/// Passes the devices on as they come, until the stream's last byte has come. EOF and what follows it are left in `input`.
///
/// Whatever can be EOF is held back: the destination runs the guest at it.
fn pass_devices(
    session: &Session<'_>,
    upstream: &Upstream,
    input: &mut MainInput<'_>,
    has_footers: bool,
) -> Result<(), MigrationError> {
    let mut search = EofSearch::default();
    loop {
        let found = search.find(input.unread());
        // Where no description comes, the bytes before the last show whether it is EOF.
        let certain = search.before().saturating_sub(2 * FOOTER_TO_EOF);
        let certain = found.unwrap_or(certain);
        if certain > 0 {
            session.sink.devices(&input.unread()[..certain])?;
            input.take(certain);
            search.passed_on(certain);
        }
        if found.is_some() {
            return Ok(());
        }
        if input.fill_some(1, Some(SILENCE), &session.call())? {
            continue;
        }
        // Without a description only the footer before it shows that the last byte is EOF, and the PING
        // in its place, which a device cut short would swallow. A source that takes answers
        // does not close before it has had one.
        let is_closed = upstream.is_closed();
        let held = input.unread();
        let eof = held.len().saturating_sub(1);
        let is_eof = match has_footers {
            true => is_eof(held, eof),
            // Then only a QEMU shows that they are whole, which loads them up to the PING. A file does not.
            false => session.sink.shows_loading() && may_be_eof(held, eof),
        };
        if is_eof && !(is_closed && upstream.return_path) {
            session.sink.devices(&held[..eof])?;
            input.take(eof);
            return Ok(());
        }
        return Err(match is_closed {
            true => MigrationError::main_closed(),
            false => MigrationError::Timeout {
                waiting_for: match has_footers {
                    true => "the rest of the source's devices",
                    false => NO_DESCRIPTION,
                }
                .to_owned(),
                waited: SILENCE,
            },
        });
    }
}

/// Whether the byte at `at`, the last that came, can be EOF: it is behind a footer. A description of
/// which a part has come has zero bytes in its length; that one's EOF came earlier, and must not go out.
fn is_eof(held: &[u8], at: usize) -> bool {
    let follows_footer = |at: usize| {
        let footer = at.checked_sub(FOOTER_TO_EOF).map(|footer| held[footer]);
        footer == Some(FOOTER) && held[at] == EOF
    };
    let mut earlier = at.saturating_sub(FOOTER_TO_EOF)..at;
    follows_footer(at)
        && !earlier.any(|earlier| follows_footer(earlier) && held[earlier + 1] == DESCRIPTION_MARK)
}

/// The same without footers: a zero byte at the end, and not one of a description's length.
fn may_be_eof(held: &[u8], at: usize) -> bool {
    let earlier = held.get(at.saturating_sub(5)..=at).unwrap_or_default();
    held.get(at) == Some(&EOF)
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

/// Of a relay: its device sections come in parts with a checksum, and it asks itself whether all is loaded before EOF may
/// follow.
pub(crate) fn from_relay(
    session: &Session<'_>,
    upstream: &Upstream,
    input: &mut MainInput<'_>,
    hooks: Hooks<'_>,
) -> Result<(), MigrationError> {
    let mut has_devices = false;
    let mut is_loaded = false;
    loop {
        let step = next_device_state(input.unread()).map_err(MigrationError::main_wire)?;
        let (event, consumed) = match step {
            DeviceStateStep::Event(event, consumed) => (event, consumed),
            DeviceStateStep::Need(needed) => {
                if !input.fill(needed, &session.call())? {
                    return Err(MigrationError::main_closed());
                }
                continue;
            }
        };
        match event {
            DeviceStateEvent::Part { .. } if is_loaded => {
                return Err(unexpected("devices behind the last"));
            }
            DeviceStateEvent::Part { sections, crc } => {
                // No damaged byte reaches a QEMU: a section type may have become EOF, and it would run the guest.
                if let Some(mut sum) = input.crc() {
                    let before_crc = consumed - size_of_val(&crc);
                    sum.update(&input.unread()[..before_crc]);
                    check_crc(sum, crc).map_err(MigrationError::main_wire)?;
                }
                has_devices = true;
                session.control.set_status(Status::Device);
                session.sink.devices(sections)?;
                input.take(consumed);
            }
            DeviceStateEvent::Ping(_) if is_loaded || !has_devices => {
                return Err(unexpected("PING in another place than behind the devices"));
            }
            DeviceStateEvent::Ping(asked) => {
                input.check_crc(asked).map_err(MigrationError::main_wire)?;
                input.take(consumed);
                session.sink.await_loaded()?;
                is_loaded = true;
                if !session.taking.loaded() {
                    return Err(MigrationError::Cancelled);
                }
                upstream.answer(&encode(&[ReturnMessage::Pong(asked)]));
            }
            DeviceStateEvent::Eof if !is_loaded => {
                return Err(unexpected("EOF before the devices were loaded"));
            }
            DeviceStateEvent::Eof => return end_of_relay(session, upstream, input, hooks),
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
                session.sink.devices(&input.unread()[..consumed])?;
                None
            }
            other => return Err(unexpected(&event_name(&other))),
        };
        input.take(consumed);
        if let Some(asked) = asked {
            break asked;
        }
    };
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
    let mut search = EofSearch::default();
    loop {
        let unread = input.unread();
        let taken = unread.len();
        end.extend_from_slice(unread);
        input.take(taken);
        if search.find(&end) == Some(0) {
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

/// What a Hotlift's stream has in a wrong place.
pub(crate) fn unexpected(got: &str) -> MigrationError {
    MigrationError::Protocol {
        channel: Channel::Main,
        got: got.to_owned(),
        doing: "reading the end of a hotlift's stream",
    }
}
