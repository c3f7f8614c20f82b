//! What is behind RAM: devices, the question whether they are loaded, the last byte, and the release of the guest.

use hotlift_wire::limits;
use hotlift_wire::main_channel::{
    Command, DeviceStateEvent, DeviceStateStep, EOF_WITHOUT_DESCRIPTION, MainEvent, SectionKind,
    next_device_state,
};

use super::set_up::broken;
use super::{
    Action, ENDING, EOF, Ended, MainChannel, Phase, SILENCE, Stage, Step, Taker, event_name,
    protocol, unexpected,
};
use crate::error::MigrationError;

/// Bytes of QEMU's format: a footer's first byte (`QEMU_VM_SECTION_FOOTER`, with the section's id behind it), a
/// description's (`QEMU_VM_VMDESCRIPTION`).
const FOOTER: u8 = 0x7e;
const DESCRIPTION_MARK: u8 = 0x06;

/// What does not come from a machine type that sends neither footers nor a VM description.
const NO_DESCRIPTION: &str = "the source's VM description (pc-i440fx-2.2 sends none: start both QEMUs with \
                              -machine suppress-vmdesc=off)";

/// Bytes from a footer to the EOF behind it.
const FOOTER_TO_EOF: usize = 5;

impl MainChannel {
    /// A Hotlift's guest has its devices as sections, and asks behind them whether all is loaded.
    pub(super) fn device<'a>(
        &mut self,
        event: MainEvent<'a>,
        whole: &'a [u8],
    ) -> Result<Action<'a>, MigrationError> {
        let rules = match self.taker {
            Taker::Guest(rules) => Some(rules),
            Taker::Relay { .. } => None,
        };
        match (event, rules) {
            (MainEvent::Command(Command::Ping(value)), _) if self.is_hotlift() => {
                self.asks(&[], value)
            }
            (MainEvent::Command(command), Some(_)) => self.command(command),
            // A Hotlift has had its answer that all is loaded before it ends the stream. Without that no byte, however it
            // came about, may make the guest run here.
            (MainEvent::Eof, Some(rules))
                if self.is_hotlift() || rules.is_hotlift == Some(true) =>
            {
                Err(protocol("the end of the stream", "loading the guest"))
            }
            (MainEvent::Eof, Some(_)) => {
                self.phase = Phase::Over;
                Ok(Action::Eof { unasked: true })
            }
            (
                MainEvent::SectionStart {
                    kind: SectionKind::Full,
                    ..
                }
                | MainEvent::DevicePayload(_)
                | MainEvent::SectionFooter,
                None,
            ) => Ok(Action::Devices(whole)),
            (event, Some(_)) => self.take_device(event, ENDING),
            (other, None) => Err(unexpected(&event_name(&other))),
        }
    }

    /// The source asks with the checksum of everything so far whether all is loaded.
    fn asks(&mut self, more: &[u8], value: u32) -> Result<Action<'static>, MigrationError> {
        self.check_crc(more, value)?;
        self.phase = Phase::Loaded;
        Ok(Action::Load(value))
    }

    /// A relay's device sections come in parts with a checksum each. No damaged byte reaches a QEMU: a section type may have
    /// become EOF, and it would run the guest.
    pub(super) fn part<'a>(
        &mut self,
        bytes: &'a [u8],
        any: bool,
    ) -> Result<Step<'a>, MigrationError> {
        let step = next_device_state(bytes).map_err(MigrationError::main_wire)?;
        let (event, consumed) = match step {
            DeviceStateStep::Event(event, consumed) => (event, consumed),
            DeviceStateStep::Need(needed) => return Ok(Step::Need(needed)),
        };
        let action = match event {
            DeviceStateEvent::Part { sections, crc } => {
                self.check_crc(&bytes[..consumed - size_of_val(&crc)], crc)?;
                self.phase = Phase::Parts { any: true };
                Action::Devices(sections)
            }
            DeviceStateEvent::Ping(_) if !any => {
                return Err(unexpected("PING in another place than behind the devices"));
            }
            DeviceStateEvent::Ping(value) => self.asks(&[], value)?,
            DeviceStateEvent::Eof => {
                return Err(unexpected("EOF before the devices were loaded"));
            }
        };
        Ok(Step::Do(action, consumed))
    }

    /// Awaits EOF: of a postcopy that has its pages, or of a Hotlift that knows that all is loaded, and has released the
    /// guest, or its source has.
    pub(super) fn last<'a>(&mut self, bytes: &'a [u8]) -> Result<Step<'a>, MigrationError> {
        let is_postcopy = self.phase == Phase::Last;
        match bytes.first() {
            None => return Ok(Step::Need(1)),
            Some(&EOF) if !is_postcopy || self.stage == Stage::Ran => {}
            Some(_) => return Err(unexpected("something else than EOF")),
        }
        let has_description = !is_postcopy && matches!(self.taker, Taker::Relay { .. });
        self.phase = match has_description {
            true => Phase::Description,
            false => Phase::Over,
        };
        let unasked = false;
        Ok(Step::Do(
            Action::Eof { unasked },
            usize::from(!has_description),
        ))
    }

    /// Awaits the description behind EOF. That is no reason not to run the guest.
    pub(super) fn description<'a>(&mut self, bytes: &'a [u8]) -> Step<'a> {
        if self.search.find(bytes) == Some(0) {
            self.phase = Phase::Over;
            return Step::Do(Action::End(bytes), bytes.len());
        }
        match bytes.len() > limits::VM_DESCRIPTION {
            true => self.without_description(bytes),
            false => Step::Need(1),
        }
    }

    /// Ends the stream where no description comes, or a part of one. (Machines with `suppress-vmdesc` have none.)
    pub(super) fn without_description<'a>(&mut self, bytes: &'a [u8]) -> Step<'a> {
        self.phase = Phase::Over;
        let end = match bytes.len() {
            0 | 1 => bytes,
            _ => &EOF_WITHOUT_DESCRIPTION,
        };
        Step::Do(Action::End(end), bytes.len())
    }

    /// Passes a QEMU's devices on as they come, until the stream's last byte has come. Whatever can be EOF is held back: the
    /// destination runs the guest at it.
    pub(super) fn qemu_devices<'a>(&mut self, bytes: &'a [u8]) -> Result<Step<'a>, MigrationError> {
        let found = self.search.find(bytes);
        // Where no description comes, the bytes before the last show whether it is EOF.
        let certain = self.search.before().saturating_sub(2 * FOOTER_TO_EOF);
        let certain = found.unwrap_or(certain);
        if certain > 0 {
            self.search.passed_on(certain);
            return Ok(Step::Do(Action::Devices(&bytes[..certain]), certain));
        }
        match found {
            Some(_) => self.qemu_end(bytes),
            None => Ok(Step::Need(1)),
        }
    }

    /// Nothing follows. Without a description only the footer before it shows that the last byte is EOF, and the PING
    /// in its place, which a device cut short would swallow. A source that takes answers does not close before it has had
    /// one.
    pub(super) fn last_byte<'a>(
        &mut self,
        bytes: &'a [u8],
        how: Ended,
    ) -> Result<Step<'a>, MigrationError> {
        let is_closed = how == Ended::Closed;
        let eof = bytes.len().saturating_sub(1);
        let is_eof = match self.has_footers {
            true => is_eof(bytes, eof),
            // Then only a QEMU shows that they are whole, which loads them up to the PING. A file does not.
            false => self.shows_loading && may_be_eof(bytes, eof),
        };
        if is_eof && !(is_closed && self.return_path) {
            self.phase = Phase::QemuEnd;
            return Ok(Step::Do(Action::Devices(&bytes[..eof]), eof));
        }
        Err(match is_closed {
            true => MigrationError::main_closed(),
            false => MigrationError::Timeout {
                waiting_for: match self.has_footers {
                    true => "the rest of the source's devices",
                    false => NO_DESCRIPTION,
                }
                .to_owned(),
                waited: SILENCE,
            },
        })
    }

    /// Only EOF and the description are left. The lengths of the devices' sections before the end of RAM are compared now.
    pub(super) fn qemu_end(&mut self, bytes: &[u8]) -> Result<Step<'static>, MigrationError> {
        let checked = self.early.check(bytes);
        checked.map_err(|error| broken(error, &self.early))?;
        let held = bytes.len();
        self.phase = Phase::Release { held };
        // How the devices ended is not how the source releases its guest.
        if self.ended == Some(Ended::Silent) {
            self.ended = None;
        }
        Ok(Step::Do(Action::DevicesEnd, 0))
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
