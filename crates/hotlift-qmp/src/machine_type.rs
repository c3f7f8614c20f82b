//! Facts derived from the name of a machine type.

/// Version of the last machine types that synchronise the multifd channels after each section of RAM (`hw_compat_8_0`).
pub const LAST_FLUSHED_BY_SECTION: (u32, u32) = (8, 0);

/// Returns the version at the end of a machine type's name: (7, 2) for `pc-i440fx-7.2`; `None` if the name does not end with a
/// version.
#[must_use]
pub fn machine_version(name: &str) -> Option<(u32, u32)> {
    let (_, version) = name.rsplit_once('-')?;
    let (major, minor) = version.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Returns the version of one of QEMU's own PC machine types; `None` for machine types of distributions and for other machines.
pub(crate) fn upstream_version(name: &str) -> Option<(u32, u32)> {
    let number = ["pc-q35-", "pc-i440fx-"]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))?;
    machine_version(name).filter(|_| !number.contains('-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_upstream_pc_types_have_a_trusted_version() {
        assert_eq!(upstream_version("pc-i440fx-7.2"), Some((7, 2)));
        for other in ["virt-8.0", "pc-q35-rhel-8.0", "pc-q35-rhel8.6.0", "microvm"] {
            assert_eq!(upstream_version(other), None, "{other}");
        }
    }
}
