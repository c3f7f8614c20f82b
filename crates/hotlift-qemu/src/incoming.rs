//! Settings of the destination's QEMU, and of the relay that sends it the guest.

use std::path::Path;

use hotlift::lazy::Preempt;
use hotlift::options::{Limits, StreamOptions, ZeroPageDetection};
use hotlift::relay::RelaySettings;
use hotlift_qmp::Version;

use crate::capabilities::{PREEMPT, Purpose};
use crate::destination::Destination;
use crate::error::{QemuError, Side, at_destination};
use crate::settings;

/// Makes QEMU listen on `socket` for a relay with `channels` multifd channels (0: multifd off). `alike` are the source's
/// capabilities: those that must be equal on both sides are copied to QEMU.
///
/// # Errors
/// If QEMU refuses, or has settings that the command refuses.
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

/// Makes QEMU listen on `socket` for a lazy restore, in which QEMU requests pages. Requested pages get a separate connection if
/// QEMU supports it.
///
/// # Errors
/// If QEMU refuses: page requests are not possible with this kind of RAM, or not permitted on this host.
pub fn listen_for_pages(destination: &mut Destination, socket: &Path) -> Result<(), QemuError> {
    settings::check(&mut destination.qemu(), Side::Destination, Purpose::Restore)?;
    let has_preempt = preempt_of(destination, |_is_on| true)?.is_some();
    let (capabilities, parameters) = settings::for_lazy_restore(has_preempt);
    destination.listen(&capabilities, &parameters, socket)
}

/// Returns when QEMU accepts the separate connection for requested pages, after [`listen_for_pages`]; `None` if QEMU uses no
/// such connection.
///
/// # Errors
/// If QEMU does not answer.
pub fn preempt(destination: &Destination) -> Result<Option<Preempt>, QemuError> {
    preempt_of(destination, |is_on| is_on)
}

/// Returns QEMU's RAM blocks by name with their page sizes in bytes; empty if QEMU does not report them.
///
/// # Errors
/// If QEMU does not answer.
pub fn page_sizes(destination: &Destination) -> Result<Vec<(String, u64)>, QemuError> {
    let page_sizes = destination.qemu().page_sizes().map_err(at_destination)?;
    Ok(page_sizes.unwrap_or_default())
}

/// Does the same as [`preempt`], but returns `None` if `is_right` returns false for the value of the capability
/// `postcopy-preempt`.
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

/// Returns the settings of the relay that sends the guest to `destination`. `limits` are the bandwidth and CPU limits of the
/// source.
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
        // QEMU before 9.0 cannot read lists of zero pages in packets.
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
