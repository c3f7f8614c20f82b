//! RAM sections, sync points, commands between them, and the switch to postcopy with its package.

use hotlift_wire::handshake::{CONNECTED, PREEMPT};
use hotlift_wire::main_channel::postcopy::{LOADED_DEVICES_END, PostcopyCommand};
use hotlift_wire::main_channel::{self as wire, Command, MainEvent, SectionKind};

use super::set_up::{PRECOPY, broken};
use super::{
    Action, DEVICE_BYTES, MainChannel, Phase, Source, Stage, Step, StreamConsumer, event_name,
    protocol, too_many_devices, unexpected,
};
use crate::error::MigrationError;
use crate::guest::DeviceState;

/// Activity that errors name, for records within a package.
const READING_PACKAGE: &str = "reading the package of a postcopy";

impl MainChannel {
    /// Handles a record between the set-up and the end of RAM.
    pub(super) fn ram<'a>(&mut self, event: MainEvent<'a>) -> Result<Action<'a>, MigrationError> {
        let is_guest = matches!(self.taker, StreamConsumer::Guest(_));
        Ok(match event {
            MainEvent::RamPage {
                block,
                offset,
                content,
            } => Action::Page {
                block,
                offset,
                content,
            },
            MainEvent::SectionStart { kind, .. } if kind != SectionKind::Full => {
                self.section = Some(kind);
                self.flushed = false;
                match kind {
                    SectionKind::End if !is_guest && !self.has_begun() => Action::LastSection,
                    _ => Action::Nothing,
                }
            }
            MainEvent::MultifdFlush => {
                self.flushed = true;
                Action::SyncPoint
            }
            MainEvent::RamEos => self.section_end()?,
            MainEvent::SectionFooter => {
                if self.section == Some(SectionKind::End) {
                    self.phase = match self.source {
                        _ if is_guest => Phase::Devices,
                        _ if self.has_begun() => Phase::Last,
                        Source::Guest => Phase::Devices,
                        Source::Relay => Phase::Parts { any: false },
                        Source::Qemu => Phase::QemuDevices,
                    };
                }
                Action::Nothing
            }
            MainEvent::Command(command) => self.command(command)?,
            MainEvent::Postcopy(PostcopyCommand::Discard { block, ranges })
                if self.may_switch(Stage::Advised) =>
            {
                self.stage = self.stage.max(Stage::Begun);
                Action::Discard { block, ranges }
            }
            // QEMU hangs without a preceding DISCARD; a guest's source must send one.
            MainEvent::Postcopy(PostcopyCommand::Packaged(length))
                if self.may_switch(match is_guest {
                    true => Stage::Begun,
                    false => Stage::Advised,
                }) && self.stage != Stage::Ran =>
            {
                self.begin_package(length)?
            }
            MainEvent::EarlySection(section) if !is_guest => {
                self.early.record(&section);
                Action::Early(section)
            }
            MainEvent::SectionStart { .. } if is_guest => {
                return Err(protocol(
                    "a device before the end of RAM, or after the last",
                    PRECOPY,
                ));
            }
            MainEvent::Postcopy(other) if is_guest => {
                return Err(protocol(&format!("{other:?}"), PRECOPY));
            }
            other if is_guest => return Err(protocol(&event_name(&other), PRECOPY)),
            other => return Err(protocol(&event_name(&other), "reading RAM")),
        })
    }

    /// Returns true if postcopy has begun. Then each page is sent once, and there are no sync points.
    fn has_begun(&self) -> bool {
        self.stage >= Stage::Begun
    }

    /// Returns true if a postcopy command is allowed now. For a guest of this process, the command requires that `stage` was
    /// reached.
    fn may_switch(&self, stage: Stage) -> bool {
        match self.taker {
            StreamConsumer::Relay { .. } => self.takes_postcopy,
            StreamConsumer::Guest(_) => self.stage >= stage,
        }
    }

    /// Handles EOS, the end of a RAM section. With machine types up to 8.0 and multifd, EOS is also a sync point.
    fn section_end(&mut self) -> Result<Action<'static>, MigrationError> {
        let is_last = self.section == Some(SectionKind::End);
        if let StreamConsumer::Guest(_) = self.taker {
            let misses_sync_point = self.multifd && !self.flushed;
            return match self.section {
                Some(SectionKind::Start) if misses_sync_point => Err(protocol(
                    "a stream with a barrier in each section (machine types up to 8.0)",
                    PRECOPY,
                )),
                Some(SectionKind::End) if misses_sync_point => {
                    Err(protocol("the end of RAM without a barrier", PRECOPY))
                }
                _ => Ok(Action::SectionEnd),
            };
        }
        let is_sync_point = self.multifd
            && !self.has_flushes
            && (!self.has_begun()
                || (is_last && self.is_hotlift())
                || std::mem::take(&mut self.awaits_sync));
        Ok(match (is_sync_point, is_last) {
            (_, true) => Action::RamEnd { is_sync_point },
            (true, false) => Action::SyncPoint,
            (false, false) => Action::SectionEnd,
        })
    }

    pub(super) fn command(&mut self, command: Command) -> Result<Action<'static>, MigrationError> {
        if let StreamConsumer::Guest(rules) = self.taker {
            return match command {
                Command::OpenReturnPath => {
                    self.return_path = true;
                    Ok(Action::Nothing)
                }
                Command::Ping(value) => self.ping_of_guest(rules, value),
                Command::SwitchoverStart => Ok(Action::Nothing),
                Command::PostcopyAdvise { page_sizes } => self.advise_guest(rules, page_sizes),
            };
        }
        Ok(match (command, self.source) {
            (Command::Ping(value), Source::Guest) => {
                self.check_crc(&[], value)?;
                Action::Pong(value)
            }
            // The destination has already answered the start of the stream.
            (Command::Ping(CONNECTED), Source::Relay) => Action::Pong(CONNECTED),
            (Command::Ping(PREEMPT), Source::Relay) => Action::Preempt,
            _ => Action::Command(command),
        })
    }

    fn begin_package(&mut self, length: u32) -> Result<Action<'static>, MigrationError> {
        let missing = usize::try_from(length).unwrap_or(usize::MAX);
        if let StreamConsumer::Guest(_) = self.taker {
            if missing > DEVICE_BYTES {
                return Err(too_many_devices("length of a package of devices", missing));
            }
            self.phase = Phase::Package { missing };
            return Ok(Action::Nothing);
        }
        // A postcopy has no VM description against which the lengths could be checked.
        let checked = self.early.check(&[]);
        checked.map_err(|error| broken(error, &self.early))?;
        self.stage = self.stage.max(Stage::Begun);
        self.phase = Phase::Package { missing };
        Ok(Action::Package(length))
    }

    /// Forwards a package as it arrives. Forwards the package's end only after the whole package was received and checked. A
    /// QEMU does not use an incomplete package, so a lost source or a damaged byte cannot start the guest.
    pub(super) fn pass_package<'a>(
        &mut self,
        bytes: &'a [u8],
        missing: usize,
    ) -> Result<Step<'a>, MigrationError> {
        if missing > LOADED_DEVICES_END {
            let part = bytes.len().min(missing - LOADED_DEVICES_END);
            if part == 0 {
                return Ok(Step::Need(1));
            }
            let missing = missing - part;
            self.phase = Phase::Package { missing };
            return Ok(Step::Do(Action::PackagePart(&bytes[..part]), part));
        }
        let Some((end, behind)) = bytes.split_at_checked(missing) else {
            return Ok(Step::Need(missing - bytes.len()));
        };
        let mut taken = missing;
        if self.package_is_checked {
            let step = self.decoder.next(behind);
            match step.map_err(MigrationError::main_wire)? {
                wire::Step::Need(needed) => return Ok(Step::Need(needed)),
                wire::Step::Event {
                    event: MainEvent::Command(Command::Ping(value)),
                    consumed,
                } => {
                    self.check_crc(end, value)?;
                    taken += consumed;
                }
                wire::Step::Event { .. } => {
                    return Err(unexpected(
                        "another record than the checksum of the package",
                    ));
                }
            }
        }
        self.phase = Phase::Ram;
        self.stage = Stage::Ran;
        self.awaits_sync = self.is_hotlift() && self.multifd && !self.has_flushes;
        Ok(Step::Do(Action::PackageEnd(end), taken))
    }

    /// Parses a package for a guest of this process. Requests the start of the guest only after the whole package was received
    /// and checked.
    pub(super) fn take_package<'a>(
        &mut self,
        bytes: &'a [u8],
        missing: usize,
    ) -> Result<Step<'a>, MigrationError> {
        let misplaced = |got: &str| Err(protocol(got, READING_PACKAGE));
        if missing == 0 {
            return misplaced("the end of the package, before RUN");
        }
        let (event, consumed) = match self.decode(bytes).map_err(MigrationError::main_wire)? {
            wire::Step::Need(needed) if needed <= missing.saturating_sub(bytes.len()) => {
                return Ok(Step::Need(needed));
            }
            wire::Step::Event { event, consumed } if consumed <= missing => (event, consumed),
            _ => return misplaced("the end of the package"),
        };
        let missing = missing - consumed;
        self.phase = Phase::Package { missing };
        let action = match event {
            MainEvent::Postcopy(PostcopyCommand::Listen) if !self.listens => {
                self.listens = true;
                Action::Nothing
            }
            _ if !self.listens => return misplaced("a record before LISTEN"),
            MainEvent::Postcopy(PostcopyCommand::Run) => {
                if missing > 0 {
                    return misplaced("a record after RUN");
                }
                if self.is_hotlift() && self.pings.is_empty() {
                    return misplaced("RUN without a checksum");
                }
                self.phase = Phase::Pages;
                self.crc = None;
                Action::Run(std::mem::take(&mut self.pings))
            }
            MainEvent::Command(Command::Ping(value)) => {
                self.check_crc(&[], value)?;
                self.pings.push(value);
                Action::Nothing
            }
            event => self.take_device(event, READING_PACKAGE)?,
        };
        Ok(Step::Do(action, consumed))
    }

    /// Handles a record of a guest's device sections. Rejects any other record.
    pub(super) fn take_device<'a>(
        &mut self,
        event: MainEvent<'a>,
        doing: &'static str,
    ) -> Result<Action<'a>, MigrationError> {
        match event {
            MainEvent::SectionStart {
                kind: SectionKind::Full,
                idstr,
                instance_id,
                version_id,
                ..
            } => {
                self.device = Some(DeviceState {
                    idstr: idstr.to_owned(),
                    instance_id,
                    version_id,
                    payload: Vec::new(),
                });
                Ok(Action::Nothing)
            }
            MainEvent::DevicePayload(payload) => {
                self.device_bytes += payload.len();
                if self.device_bytes > DEVICE_BYTES {
                    let what = "length of all device payloads";
                    return Err(too_many_devices(what, self.device_bytes));
                }
                let device = self.device.take().map(|device| DeviceState {
                    payload: payload.to_vec(),
                    ..device
                });
                Ok(device.map_or(Action::Nothing, Action::Device))
            }
            MainEvent::SectionFooter => Ok(Action::Nothing),
            other => Err(protocol(&event_name(&other), doing)),
        }
    }
}
