//! Errors of KVM.

use std::io;

/// KVM cannot be used, or rejected a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvmError {
    /// /dev/kvm could not be opened: the file is missing, or this user has no permission.
    #[error("cannot open /dev/kvm")]
    Open(#[source] io::Error),
    /// The kernel has another version of the KVM interface.
    #[error("KVM must have API version {expected}, got {got}")]
    ApiVersion {
        /// The supported version.
        expected: i32,
        /// The kernel's version.
        got: i32,
    },
    /// KVM lacks a required capability.
    #[error("KVM has no {capability}")]
    Capability {
        /// Name of the capability (`KVM_CAP_USER_MEMORY`).
        capability: &'static str,
    },
    /// The kernel rejected a call.
    #[error("KVM cannot {action}")]
    Kernel {
        /// The rejected action, as a verb phrase.
        action: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl KvmError {
    /// Returns a function for `map_err` that makes an error of `action`.
    pub(super) fn of(action: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |error| Self::Kernel {
            action,
            source: error.into(),
        }
    }
}
