//! Prepares the destination's QEMU, and the settings of its relay.

use std::path::Path;

use hotlift::lazy::Preempt;
use hotlift::options::{Limits, StreamOptions, ZeroPageDetection};
use hotlift::relay::RelaySettings;
use hotlift_qmp::Version;

use crate::capabilities::{PREEMPT, Purpose};
use crate::destination::Destination;
use crate::error::{QemuError, Side, at_destination};
use crate::settings;

/// Makes QEMU listen on `socket` for a relay with this number of channels (0: multifd off). `alike` has the source's
/// capabilities; only those that must be equal on both sides are applied.
///
/// # Errors
/// If QEMU refuses, or has settings that a command with this purpose refuses.
pub fn listen(
    destination: &mut Destination,
    purpose: Purpose,
    channels: u8,
    alike: &[(String, bool)],
    socket: &Path,
) -> Result<(), QemuError> {
    settings::check(&mut destination.qemu(), Side::Destination, purpose)?;
    let (mut capabilities, parameters) = settings::for_relay(purpose, channels);
    let alike = settings::alike(alike.to_vec());
    capabilities.extend(alike.iter().map(|(name, state)| (name.as_str(), *state)));
    destination.listen(&capabilities, &parameters, socket)
}

/// Makes QEMU listen on `socket` for a lazy restore, in which it requests pages: on a separate connection if QEMU supports it.
///
/// # Errors
/// If QEMU refuses: its kind of RAM does not support page requests, or the host forbids them.
pub fn listen_for_pages(destination: &mut Destination, socket: &Path) -> Result<(), QemuError> {
    settings::check(&mut destination.qemu(), Side::Destination, Purpose::Restore)?;
    let has_preempt = preempt_of(destination, |_is_on| true)?.is_some();
    let (capabilities, parameters) = settings::for_lazy_restore(has_preempt);
    destination.listen(&capabilities, &parameters, socket)
}

/// Returns the point at which a QEMU of [`listen_for_pages`] accepts the connection for requested pages; `None` if it does not.
///
/// # Errors
/// If QEMU does not answer.
pub fn preempt(destination: &Destination) -> Result<Option<Preempt>, QemuError> {
    preempt_of(destination, |is_on| is_on)
}

/// Returns QEMU's RAM blocks by name with their page sizes in bytes; nothing if QEMU does not report them.
///
/// # Errors
/// If QEMU does not answer.
pub fn page_sizes(destination: &Destination) -> Result<Vec<(String, u64)>, QemuError> {
    let page_sizes = destination.qemu().page_sizes().map_err(at_destination)?;
    Ok(page_sizes.unwrap_or_default())
}

/// Does the same as [`preempt`]; returns `None` unless `is_right` accepts the capability's value.
fn preempt_of(
    destination: &Destination,
    is_right: impl Fn(bool) -> bool,
) -> Result<Option<Preempt>, QemuError> {
    let mut qemu = destination.qemu();
    let Version { major, minor, .. } = qemu.version();
    let moment = match (major, minor) {
        (8.., _) => Some(Preempt::BeforeRun),
        (7, 2..) => Some(Preempt::First),
        _ => None,
    };
    let capabilities = qemu.query_capabilities().map_err(at_destination)?;
    let mut has = capabilities.iter();
    let is_there = has.any(|(name, is_on)| name == PREEMPT && is_right(*is_on));
    Ok(moment.filter(|_| is_there))
}

/// Returns the settings of a relay to the QEMU `destination`; `limits` apply to the source.
///
/// # Errors
/// If QEMU does not answer.
pub fn relay_settings(
    destination: &mut Destination,
    channels: u8,
    limits: Limits,
) -> Result<RelaySettings, QemuError> {
    let uuid = destination.uuid()?;
    let flushes = match channels {
        0 => None,
        _ => destination
            .qemu()
            .flushes_after_each_section()
            .map_err(at_destination)?,
    };
    let qemu = destination.qemu().version();
    Ok(RelaySettings {
        outgoing: StreamOptions {
            multifd: Some(channels > 0),
            multifd_channels: channels.max(1),
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        limits,
        // Only QEMU 9.0 and later reads lists of zero pages in packets.
        zero_pages: Some(if (qemu.major, qemu.minor) >= (9, 0) && channels > 0 {
            ZeroPageDetection::Multifd
        } else {
            ZeroPageDetection::Legacy
        }),
        uuid: Some(uuid.0),
        qemu_flushes_after_each_section: flushes,
        ..RelaySettings::default()
    })
}
