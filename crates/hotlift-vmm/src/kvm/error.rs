//! Errors of KVM itself.

use std::io;

/// KVM is unusable, or refused a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvmError {
    /// /dev/kvm could not be opened: it is missing, or this user may not use it.
    #[error("cannot open /dev/kvm")]
    Open(#[source] io::Error),
    /// KVM speaks another version of its interface.
    #[error("KVM must have API version {expected}, got {got}")]
    ApiVersion {
        /// The only existing version.
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
    /// The kernel refused a call.
    #[error("KVM cannot {action}")]
    Kernel {
        /// The requested action, as a verb phrase.
        action: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl KvmError {
    /// Returns a function for `map_err`: the failure of `action`.
    pub(super) fn of(action: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |error| Self::Kernel {
            action,
            source: error.into(),
        }
    }
}
