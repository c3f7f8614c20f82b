//! What the QEMU that is to get a guest is told, and what the relay beside it must know of it.

use std::path::Path;

use hotlift::Options;
use hotlift::options::ZeroPageDetection;
use hotlift::relay::RelaySettings;
use hotlift_console::migration_args::LimitArgs;
use hotlift_qmp::{Qemu, QmpError};

use super::control::Vm;
use super::destination::{Destination, at_destination};
use super::settings;
use crate::error::CommandError;

/// Whether the guest of the VM `source` can run in `destination` at all. QEMU itself finds out more, but only when it
/// reads the stream.
pub fn compare(source: &Vm, destination: &Destination) -> Result<(), CommandError> {
    let there = vm(&mut destination.qemu()).map_err(at_destination)?;
    if let (Some(here), Some(there)) = (&source.machine, there.machine) {
        alike("the machine type", &hotlift_qmp::one_line(here), &there)?;
    }
    // QEMU takes no multifd channel of another UUID.
    alike("the UUID (-uuid)", &source.uuid, &there.uuid)?;
    if let (Some(here), Some(there)) = (source.ram_bytes, there.ram_bytes) {
        alike("the RAM size in bytes (-m)", &here, &there)?;
    }
    if let (Some(here), Some(there)) = (source.vcpus, there.vcpus) {
        alike("the number of vCPUs (-smp)", &here, &there)?;
    }
    Ok(())
}

/// What the VM of `qemu` is.
pub fn vm(qemu: &mut Qemu) -> Result<Vm, QmpError> {
    Ok(Vm {
        machine: qemu.machine_type()?,
        uuid: qemu.query_uuid()?,
        ram_bytes: qemu.base_memory()?,
        vcpus: qemu.vcpus()?,
    })
}

fn alike<T: PartialEq + ToString>(
    what: &'static str,
    source_has: &T,
    destination_has: &T,
) -> Result<(), CommandError> {
    if source_has == destination_has {
        return Ok(());
    }
    Err(CommandError::Differs {
        what,
        source_has: source_has.to_string(),
        destination_has: destination_has.to_string(),
    })
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
