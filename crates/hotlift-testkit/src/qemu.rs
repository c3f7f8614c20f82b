//! The QEMUs that tests run, and where they are.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::skip;

/// A release of QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Release {
    /// Debian 12's.
    #[serde(rename = "7.2")]
    V7,
    /// bookworm-backports', unpacked by `scripts/qemu-10.0`.
    #[serde(rename = "10.0")]
    V10,
}

impl Release {
    /// Its number.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::V7 => "7.2",
            Self::V10 => "10.0",
        }
    }

    /// Where it is; `None` if it is not installed.
    #[must_use]
    pub fn find(self) -> Option<PathBuf> {
        match self {
            Self::V7 => {
                static IS_V7: OnceLock<bool> = OnceLock::new();
                let found = find_installed()?;
                let is_v7 = || {
                    let run = Command::new(&found).arg("--version").output();
                    run.is_ok_and(|run| String::from_utf8_lossy(&run.stdout).contains(" 7.2."))
                };
                IS_V7.get_or_init(is_v7).then_some(found)
            }
            Self::V10 => {
                let folder = set("HOTLIFT_QEMU10");
                let folder = folder.unwrap_or_else(|| cache().join("qemu-10.0/bin"));
                Some(folder.join(PROGRAM)).filter(|program| program.exists())
            }
        }
    }

    /// Where it is, or a skip.
    #[must_use]
    pub fn program(self) -> Option<PathBuf> {
        let found = self.find();
        if found.is_none() {
            let (key, reason) = self.skip();
            skip!(key, "{reason}");
        }
        found
    }

    /// Key and reason of a skip without it.
    #[must_use]
    pub fn skip(self) -> (&'static str, &'static str) {
        match self {
            Self::V7 => ("qemu-7.2", "PATH has no qemu-system-x86_64 of version 7.2"),
            Self::V10 => ("qemu-10.0", "scripts/qemu-10.0 fetches it"),
        }
    }
}

const PROGRAM: &str = "qemu-system-x86_64";

/// The QEMU in `PATH`, of whatever release, or a skip.
#[must_use]
pub fn installed() -> Option<PathBuf> {
    let found = find_installed();
    if found.is_none() {
        skip!("qemu", "no {PROGRAM} in PATH (package qemu-system-x86)");
    }
    found
}

fn find_installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut programs = std::env::split_paths(&path).map(|folder| folder.join(PROGRAM));
    programs.find(|program| program.is_file())
}

/// Whether guests can run under KVM, or a skip.
#[must_use]
pub fn has_kvm() -> bool {
    let usable = hotlift_vmm::kvm::usable();
    if let Err(why) = &usable {
        skip!("kvm", "{why}");
    }
    usable.is_ok()
}

/// Where what was fetched is kept, as in `scripts/`.
#[must_use]
pub fn cache() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache");
    set("HOTLIFT_CACHE").unwrap_or_else(default)
}

fn set(name: &str) -> Option<PathBuf> {
    let value = std::env::var_os(name).filter(|value| !value.is_empty());
    value.map(PathBuf::from)
}
