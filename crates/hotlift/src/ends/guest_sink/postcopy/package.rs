//! What a source sends in one piece: the devices, between LISTEN and RUN.

use crc32fast::Hasher;
use hotlift_wire::main_channel::postcopy::PostcopyCommand;
use hotlift_wire::main_channel::{Command, MainDecoder, MainEvent, SectionKind, Step};

use crate::error::{Channel, MigrationError};
use crate::guest::DeviceState;
use crate::stream::main_recv::{check_crc, event_name};

/// A package, taken apart.
#[derive(Debug, Default)]
pub(super) struct Package {
    pub(super) devices: Vec<DeviceState>,
    /// What the source wants to hear once they are loaded.
    pub(super) pings: Vec<u32>,
}

impl Package {
    /// Reads a package that has come whole. `crc` is that of main up to it, of a source that says it in its PINGs.
    ///
    /// # Errors
    /// [`MigrationError::Wire`], also for a checksum that does not agree; [`MigrationError::Protocol`] for a package that is
    /// not LISTEN, devices and PINGs, RUN.
    pub(super) fn read(
        decoder: &mut MainDecoder,
        crc: Option<&Hasher>,
        bytes: &[u8],
    ) -> Result<Self, MigrationError> {
        let mut package = Self::default();
        let (mut listens, mut runs) = (false, false);
        let mut device = None;
        let mut rest = bytes;
        while !rest.is_empty() {
            let step = decoder.next(rest).map_err(MigrationError::main_wire)?;
            let Step::Event { event, consumed } = step else {
                return Err(out_of_place("the end of the package"));
            };
            match event {
                _ if runs => return Err(out_of_place("something behind RUN")),
                MainEvent::Postcopy(PostcopyCommand::Listen) if !listens => listens = true,
                _ if !listens => return Err(out_of_place("something before LISTEN")),
                MainEvent::Postcopy(PostcopyCommand::Run) => runs = true,
                MainEvent::Command(Command::Ping(value)) => {
                    if let Some(mut crc) = crc.cloned() {
                        crc.update(&bytes[..bytes.len() - rest.len()]);
                        check_crc(crc, value).map_err(MigrationError::main_wire)?;
                    }
                    package.pings.push(value);
                }
                MainEvent::SectionStart {
                    kind: SectionKind::Full,
                    idstr,
                    instance_id,
                    version_id,
                    ..
                } => {
                    device = Some(DeviceState {
                        idstr: idstr.to_owned(),
                        instance_id,
                        version_id,
                        payload: Vec::new(),
                    });
                }
                MainEvent::DevicePayload(payload) => {
                    if let Some(mut device) = device.take() {
                        device.payload = payload.to_vec();
                        package.devices.push(device);
                    }
                }
                MainEvent::SectionFooter => {}
                other => return Err(out_of_place(&event_name(&other))),
            }
            rest = &rest[consumed..];
        }
        match runs {
            true if crc.is_some() && package.pings.is_empty() => {
                Err(out_of_place("RUN without a checksum"))
            }
            true => Ok(package),
            false => Err(out_of_place("the end of the package, before RUN")),
        }
    }
}

fn out_of_place(got: &str) -> MigrationError {
    MigrationError::Protocol {
        channel: Channel::Main,
        got: got.to_owned(),
        doing: "reading the package of a postcopy",
    }
}
