//! What a machine says of itself.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::one_line;
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

/// What a machine does (`RunState`), as far as migrations tell the states apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum RunState {
    /// The vCPUs run.
    Running,
    /// The vCPUs are stopped, until a `cont`.
    Paused,
    /// An incoming migration is under way, or has left a guest that no `cont` runs.
    InMigrate,
    /// The guest has powered off (`-no-shutdown`).
    Shutdown,
    /// The guest has panicked.
    GuestPanicked,
    /// The guest sleeps, until it is woken up.
    Suspended,
    /// Another state, by QEMU's name.
    Other(String),
}

impl RunState {
    /// QEMU's name of it.
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

    /// Whether a QEMU that is given a guest in this state starts it: the guest runs, or wakes up by itself.
    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(self, Self::Running | Self::Suspended)
    }

    /// Whether the guest has ended, and QEMU refuses `cont` until the machine is reset.
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
    /// What the machine does.
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
