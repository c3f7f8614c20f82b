//! What can go wrong with KVM itself.

use std::io;

/// KVM cannot be used, or refused something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvmError {
    /// /dev/kvm could not be opened: it is missing, or this user may not use it.
    #[error("cannot open /dev/kvm")]
    Open(#[source] io::Error),
    /// KVM speaks another version of its interface.
    #[error("KVM must have API version {expected}, got {got}")]
    ApiVersion {
        /// The only version there is.
        expected: i32,
        /// What the kernel says.
        got: i32,
    },
    /// KVM lacks something that the guest cannot do without.
    #[error("KVM has no {capability}")]
    Capability {
        /// Name of the capability (`KVM_CAP_USER_MEMORY`).
        capability: &'static str,
    },
    /// The kernel refused a call.
    #[error("KVM cannot {action}")]
    Kernel {
        /// What was asked for, as a verb phrase.
        action: &'static str,
        /// Its answer.
        #[source]
        source: io::Error,
    },
}

impl KvmError {
    /// For `map_err`: the failure of `action`.
    pub(super) fn of(action: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |error| Self::Kernel {
            action,
            source: error.into(),
        }
    }
}
