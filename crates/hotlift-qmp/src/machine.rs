//! What a machine says of itself.

use std::fmt;

use crate::qapi::{Type, objects};

objects! {
    /// What `query-status` answers.
    StatusInfo = "StatusInfo" {
        needed {
            /// True if the vCPUs run.
            "running" running: bool,
            /// QEMU's name of the state (`RunState`), such as `running`, `paused`, `postmigrate`, `inmigrate`.
            "status" status: String = Type::Enum("RunState"),
        }
        optional {}
    }

    /// What `query-name` answers.
    NameInfo = "NameInfo" {
        needed {}
        optional {
            /// What `-name` gave the machine.
            "name" name: String,
        }
    }

    /// What `query-uuid` answers.
    UuidInfo = "UuidInfo" {
        needed {
            /// UUID of the machine; all zero if it has none.
            "UUID" uuid: String,
        }
        optional {}
    }

    /// What `query-version` answers.
    VersionInfo = "VersionInfo" {
        needed {
            /// The QEMU, or the one whose interface it is.
            "qemu" qemu: Version,
            /// What its packager calls it.
            "package" package: String,
        }
        optional {}
    }

    /// A version of QEMU.
    #[derive(Copy, Eq, PartialOrd, Ord)]
    Version = "VersionTriple" {
        needed {
            /// 10 in 10.0.2.
            "major" major: u32,
            /// 0 in 10.0.2.
            "minor" minor: u32,
            /// 2 in 10.0.2.
            "micro" micro: u32,
        }
        optional {}
    }

    /// One of what `query-commands` answers.
    CommandInfo = "CommandInfo" {
        needed {
            /// Name of the command.
            "name" name: String,
        }
        optional {}
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}
