//! What the QEMU that is to get a guest is told, and what the relay beside it must know of it.

use std::path::Path;

use hotlift::Options;
use hotlift::options::ZeroPageDetection;
use hotlift::relay::RelaySettings;

use super::destination::{Destination, at_destination};
use super::settings;
use super::uuid::Uuid;
use crate::error::CommandError;
use crate::migration_args::LimitArgs;

/// Whether the guest of a machine of this type and UUID can run in `destination` at all. QEMU itself
/// finds out more, but only at the end.
pub fn compare(
    machine: Option<&str>,
    uuid: Uuid,
    destination: &mut Destination,
) -> Result<(), CommandError> {
    let theirs = destination.qemu().machine_type().map_err(at_destination)?;
    if let (Some(source_has), Some(destination_has)) = (machine, theirs)
        && source_has != destination_has
    {
        return Err(CommandError::Differs {
            what: "the machine type",
            source_has: hotlift_qmp::one_line(source_has),
            destination_has,
        });
    }
    // QEMU takes no multifd channel of another UUID.
    let theirs = destination.uuid()?;
    if uuid != theirs {
        return Err(CommandError::Differs {
            what: "the UUID (-uuid)",
            source_has: uuid.to_string(),
            destination_has: theirs.to_string(),
        });
    }
    Ok(())
}

/// Lets QEMU listen on `socket` for a relay with so many channels (0: multifd off). `alike` is what
/// the source says of capabilities; only those that both sides must have alike are taken over.
pub fn listen(
    destination: &mut Destination,
    channels: u8,
    alike: &[(String, bool)],
    socket: &Path,
) -> Result<(), CommandError> {
    let (mut capabilities, parameters) = settings::for_relay(channels);
    let known = alike
        .iter()
        .filter(|(name, _)| settings::ALIKE.contains(&name.as_str()));
    capabilities.extend(known.map(|(name, state)| (name.as_str(), *state)));
    destination.listen(&capabilities, &parameters, socket)
}

/// Settings of the relay that such a QEMU is given its stream by, whose source is held to `limits`.
pub fn relay_settings(
    destination: &mut Destination,
    channels: u8,
    limits: &LimitArgs,
) -> Result<RelaySettings, CommandError> {
    let uuid = destination.uuid()?;
    let qemu = destination.qemu().version();
    Ok(RelaySettings {
        outgoing: Options {
            multifd: Some(channels > 0),
            multifd_channels: channels.max(1),
            max_bandwidth: 0,
            ..limits.options()
        },
        // Lists of zero pages in packets are read by QEMU 9.0 and later only.
        zero_pages: Some(if (qemu.major, qemu.minor) >= (9, 0) && channels > 0 {
            ZeroPageDetection::Multifd
        } else {
            ZeroPageDetection::Legacy
        }),
        uuid: Some(uuid.0),
        ..RelaySettings::default()
    })
}
