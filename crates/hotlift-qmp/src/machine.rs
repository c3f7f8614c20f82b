//! Types of answers about a machine.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::one_line;
use crate::qapi::{Type, objects};

objects! {
    /// Answer of `query-status`.
    StatusInfo = "StatusInfo" {
        needed {
            /// True if the vCPUs run.
            "running" running: bool,
            /// QEMU's name of the state (`RunState`), such as `running`, `paused`, `postmigrate`, `inmigrate`.
            "status" status: String = Type::Enum("RunState"),
        }
        optional {}
    }

    /// Answer of `query-name`.
    NameInfo = "NameInfo" {
        needed {}
        optional {
            /// Name of the machine (`-name`).
            "name" name: String,
        }
    }

    /// Answer of `query-uuid`.
    UuidInfo = "UuidInfo" {
        needed {
            /// UUID of the machine; all digits are zero if the machine has none.
            "UUID" uuid: String,
        }
        optional {}
    }

    /// Answer of `query-version`.
    VersionInfo = "VersionInfo" {
        needed {
            /// Version of QEMU; a Hotlift server reports the version whose interface it emulates.
            "qemu" qemu: Version,
            /// QEMU's package version, such as that of a distribution.
            "package" package: String,
        }
        optional {}
    }

    /// A version of QEMU.
    #[derive(Copy, Eq, PartialOrd, Ord)]
    Version = "VersionTriple" {
        needed {
            /// Major version: 10 in 10.0.2.
            "major" major: u32,
            /// Minor version: 0 in 10.0.2.
            "minor" minor: u32,
            /// Micro version: 2 in 10.0.2.
            "micro" micro: u32,
        }
        optional {}
    }

    /// Element of the answer of `query-commands`.
    CommandInfo = "CommandInfo" {
        needed {
            /// Name of the command.
            "name" name: String,
        }
        optional {}
    }
}

/// State of a machine (`RunState`). States that do not matter for a migration are `Other`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum RunState {
    /// The vCPUs run.
    Running,
    /// The vCPUs are stopped until a `cont`.
    Paused,
    /// The machine waits for an incoming migration, receives one, or has received a guest that it cannot run.
    InMigrate,
    /// The guest has powered off, and QEMU keeps running (`-no-shutdown`).
    Shutdown,
    /// The guest has panicked.
    GuestPanicked,
    /// The guest sleeps until it is woken up.
    Suspended,
    /// Another state; contains QEMU's name of the state.
    Other(String),
}

impl RunState {
    /// Returns QEMU's name of the state.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::InMigrate => "inmigrate",
            Self::Shutdown => "shutdown",
            Self::GuestPanicked => "guest-panicked",
            Self::Suspended => "suspended",
            Self::Other(name) => name,
        }
    }

    /// Returns true if a QEMU that receives a guest in this state starts the guest: it runs, or can wake up by itself.
    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(self, Self::Running | Self::Suspended)
    }

    /// Returns true if the guest has ended. QEMU then refuses `cont` until the machine is reset.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self, Self::Shutdown | Self::GuestPanicked)
    }
}

impl From<&str> for RunState {
    fn from(name: &str) -> Self {
        match name {
            "running" => Self::Running,
            "paused" => Self::Paused,
            "inmigrate" => Self::InMigrate,
            "shutdown" => Self::Shutdown,
            "guest-panicked" => Self::GuestPanicked,
            "suspended" => Self::Suspended,
            other => Self::Other(one_line(other)),
        }
    }
}

impl From<String> for RunState {
    fn from(name: String) -> Self {
        Self::from(name.as_str())
    }
}

impl From<RunState> for String {
    fn from(state: RunState) -> Self {
        state.name().to_owned()
    }
}

impl StatusInfo {
    /// Returns the run state.
    #[must_use]
    pub fn run_state(&self) -> RunState {
        RunState::from(self.status.as_str())
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}
