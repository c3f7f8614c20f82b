//! Permission of this user to load a guest's pages on access (userfaultfd), and the settings that are missing for it.

use std::io;

use hotlift_mem::{UserfaultSupport, probe_userfault};
use rustix::io::Errno;
use serde::Serialize;

/// Setting that permits userfaultfd to a user.
const GRANT: &str = "'setfacl -m u:USER:rw /dev/userfaultfd' for this user (Linux 6.1 and newer), or 'sysctl \
                     vm.unprivileged_userfaultfd=1' for all";

/// Requirement for a host whose kernel has no userfaultfd.
const BUILD: &str = "a kernel with CONFIG_USERFAULTFD, and a container that allows its calls";

/// Features of userfaultfd that a process of this user can use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PageFaults {
    /// True if missing pages of private memory can be loaded on access: postcopy and a lazy restore need this.
    pub missing: bool,
    /// True if missing pages of shared memory can be loaded on access.
    pub missing_shared: bool,
    /// True if the kernel reports accesses to pages of shared memory that exist, but are not mapped (minor faults).
    pub minor: bool,
    /// True if the kernel reports the first write to a page.
    pub write_protect: bool,
    /// Error of the system if no feature is available; `None` otherwise.
    pub reason: Option<String>,
    /// Setting that the operator should change; `None` if no feature is missing.
    pub set: Option<&'static str>,
}

/// Asks the kernel for the features of userfaultfd that this user can use.
#[must_use]
pub fn page_faults() -> PageFaults {
    PageFaults::of(probe_userfault())
}

impl PageFaults {
    fn of(probed: io::Result<UserfaultSupport>) -> Self {
        let none = |reason: &io::Error, set| Self {
            missing: false,
            missing_shared: false,
            minor: false,
            write_protect: false,
            reason: Some(reason.to_string()),
            set: Some(set),
        };
        match probed {
            Ok(support) => Self {
                missing: true,
                missing_shared: support.missing_shared,
                minor: support.minor_shared,
                write_protect: support.write_protect,
                reason: None,
                set: None,
            },
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::PERM | Errno::ACCESS) => none(&error, GRANT),
                _ => none(&error, BUILD),
            },
        }
    }

    /// Returns a description of the features for the operator.
    #[must_use]
    pub fn text(&self) -> String {
        if let (Some(reason), Some(set)) = (&self.reason, self.set) {
            return format!(
                "page faults: not for this user ({reason}): its processes cannot use postcopy and restore --lazy\n  needed: \
                 {set}"
            );
        }
        let also = [
            (self.missing_shared, "missing pages of shared memory"),
            (self.minor, "minor faults"),
            (self.write_protect, "write protection"),
        ];
        let also: Vec<_> = also
            .into_iter()
            .filter_map(|(has, what)| has.then_some(what))
            .collect();
        let also = match also.is_empty() {
            true => String::new(),
            false => format!("; {}, too", also.join(", ")),
        };
        format!(
            "page faults: missing pages can be served on access (postcopy, restore --lazy){also}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_permission_names_the_setting_and_a_missing_feature_the_kernel() {
        for (errno, set) in [
            (Errno::PERM, "setfacl"),
            (Errno::ACCESS, "vm.unprivileged_userfaultfd=1"),
            (Errno::NOSYS, "CONFIG_USERFAULTFD"),
        ] {
            let faults = PageFaults::of(Err(errno.into()));
            assert!(!faults.missing);
            let text = faults.text();
            assert!(
                text.contains(set) && text.contains("not for this user"),
                "{text}"
            );
        }
    }

    #[test]
    fn each_kernel_feature_is_reported_separately() {
        let all = UserfaultSupport {
            by_device: true,
            missing_shared: true,
            minor_shared: true,
            write_protect: true,
            write_protect_shared: true,
            thread_id: true,
        };
        let text = PageFaults::of(Ok(all)).text();
        assert!(
            text.ends_with("shared memory, minor faults, write protection, too"),
            "{text}"
        );
        let old = UserfaultSupport {
            missing_shared: false,
            minor_shared: false,
            write_protect: false,
            ..all
        };
        let faults = PageFaults::of(Ok(old));
        assert!(faults.missing && faults.set.is_none());
        assert!(faults.text().ends_with("(postcopy, restore --lazy)"));
    }
}
