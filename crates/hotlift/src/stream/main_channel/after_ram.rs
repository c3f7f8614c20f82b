//! The part of the main channel after RAM:
//!
//! - devices, and the PING that asks if they are loaded
//! - the last byte (EOF), and the release of the guest

use hotlift_wire::limits;
use hotlift_wire::main_channel::{
    Command, DeviceStateEvent, DeviceStateStep, EOF_WITHOUT_DESCRIPTION, MainEvent, SectionKind,
    next_device_state,
};

use super::set_up::broken;
use super::{
    Action, ENDING, EOF, EndCause, MainChannel, Phase, SILENCE, Stage, Step, StreamConsumer,
    event_name, protocol, unexpected,
};
use crate::error::MigrationError;

/// Marker bytes of QEMU's format. A footer begins with `QEMU_VM_SECTION_FOOTER`, followed by the section's id. A VM description
/// begins with `QEMU_VM_VMDESCRIPTION`.
const FOOTER: u8 = 0x7e;
const DESCRIPTION_MARK: u8 = 0x06;

/// Name, for errors, of the missing data in the stream of a machine type that has neither footers nor a VM description.
const NO_DESCRIPTION: &str = "the source's VM description (pc-i440fx-2.2 sends none: start both QEMUs with \
                              -machine suppress-vmdesc=off)";

/// Count of bytes from the start of a footer to EOF.
const FOOTER_TO_EOF: usize = 5;

impl MainChannel {
    /// Handles a record after RAM in a stream of a Hotlift's guest: device sections, then the PING that asks if all is loaded.
    pub(super) fn device<'a>(
        &mut self,
        event: MainEvent<'a>,
        whole: &'a [u8],
    ) -> Result<Action<'a>, MigrationError> {
        let rules = match self.taker {
            StreamConsumer::Guest(rules) => Some(rules),
            StreamConsumer::Relay { .. } => None,
        };
        match (event, rules) {
            (MainEvent::Command(Command::Ping(value)), _) if self.is_hotlift() => {
                self.asks(&[], value)
            }
            (MainEvent::Command(command), Some(_)) => self.command(command),
            // A Hotlift ends the stream only after the answer that all is loaded. Before that answer, no byte may start the
            // guest, not even a damaged one.
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

    /// Handles the PING that asks if all is loaded. Its value is the checksum of everything before it.
    fn asks(&mut self, more: &[u8], value: u32) -> Result<Action<'static>, MigrationError> {
        self.check_crc(more, value)?;
        self.phase = Phase::Loaded;
        Ok(Action::Load(value))
    }

    /// Handles a relay's device sections, which arrive in parts. Each part has a checksum, because no damaged byte may reach a
    /// QEMU: a section type that became EOF would start the guest.
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
                return Err(unexpected("PING at another place than after the devices"));
            }
            DeviceStateEvent::Ping(value) => self.asks(&[], value)?,
            DeviceStateEvent::Eof => {
                return Err(unexpected("EOF before the devices were loaded"));
            }
        };
        Ok(Step::Do(action, consumed))
    }

    /// Waits for EOF. In postcopy it comes after all pages. From a Hotlift it comes after the answer that all is loaded, and
    /// releases the guest.
    pub(super) fn last<'a>(&mut self, bytes: &'a [u8]) -> Result<Step<'a>, MigrationError> {
        let is_postcopy = self.phase == Phase::Last;
        match bytes.first() {
            None => return Ok(Step::Need(1)),
            Some(&EOF) if !is_postcopy || self.stage == Stage::Ran => {}
            Some(_) => return Err(unexpected("another record than EOF")),
        }
        let has_description = !is_postcopy && matches!(self.taker, StreamConsumer::Relay { .. });
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

    /// Waits for the VM description after EOF. The guest may run without it.
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

    /// Ends the stream with a missing or incomplete VM description. (Machines with `suppress-vmdesc` send none.)
    pub(super) fn without_description<'a>(&mut self, bytes: &'a [u8]) -> Step<'a> {
        self.phase = Phase::Over;
        let end = match bytes.len() {
            0 | 1 => bytes,
            _ => &EOF_WITHOUT_DESCRIPTION,
        };
        Step::Do(Action::End(end), bytes.len())
    }

    /// Forwards a QEMU's devices as they arrive, up to the last byte of the stream. Does not forward bytes that can be EOF,
    /// because EOF starts the guest at the destination.
    pub(super) fn qemu_devices<'a>(&mut self, bytes: &'a [u8]) -> Result<Step<'a>, MigrationError> {
        let found = self.search.find(bytes);
        // Without a description, the bytes before the last byte show if it is EOF.
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

    /// Handles the end of a stream without a VM description. Two facts identify the last byte as EOF:
    ///
    /// - A footer precedes it.
    /// - The destination answers the PING that it receives in place of EOF. (A truncated device would consume the PING.)
    ///
    /// A source with a return path does not close its connection before it has an answer.
    pub(super) fn last_byte<'a>(
        &mut self,
        bytes: &'a [u8],
        how: EndCause,
    ) -> Result<Step<'a>, MigrationError> {
        let is_closed = how == EndCause::Closed;
        let eof = bytes.len().saturating_sub(1);
        let is_eof = match self.has_footers {
            true => is_eof(bytes, eof),
            // Without footers, only the answer to the PING proves that the devices are complete: a QEMU loads them first. A
            // file proves nothing.
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

    /// Called when only EOF and the VM description are left. Checks the lengths of the early device sections.
    pub(super) fn qemu_end(&mut self, bytes: &[u8]) -> Result<Step<'static>, MigrationError> {
        let checked = self.early.check(bytes);
        checked.map_err(|error| broken(error, &self.early))?;
        let held = bytes.len();
        self.phase = Phase::Release { held };
        // The silence has shown only that the devices have ended. It is still unknown how the source releases its guest.
        if self.ended == Some(EndCause::Silent) {
            self.ended = None;
        }
        Ok(Step::Do(Action::DevicesEnd, 0))
    }
}

/// Returns true if the last byte, at index `at`, can be EOF: it follows a footer. Returns false within a partial VM
/// description, whose length contains zero bytes: there EOF came earlier.
fn is_eof(held: &[u8], at: usize) -> bool {
    let follows_footer = |at: usize| {
        let footer = at.checked_sub(FOOTER_TO_EOF).map(|footer| held[footer]);
        footer == Some(FOOTER) && held[at] == EOF
    };
    let mut earlier = at.saturating_sub(FOOTER_TO_EOF)..at;
    follows_footer(at)
        && !earlier.any(|earlier| follows_footer(earlier) && held[earlier + 1] == DESCRIPTION_MARK)
}

/// Returns true if the last byte, at index `at`, can be EOF in a stream without footers. It must be zero, and not part of a VM
/// description's length.
fn may_be_eof(held: &[u8], at: usize) -> bool {
    let earlier = held.get(at.saturating_sub(5)..=at).unwrap_or_default();
    held.get(at) == Some(&EOF)
        && !earlier
            .windows(2)
            .any(|pair| pair == [EOF, DESCRIPTION_MARK])
}
