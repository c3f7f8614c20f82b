//! The KVM guest (being built).
use crate::builtin::CreateError;
use crate::settings::GuestSettings;
/// KVM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// Not there yet.
    #[error("not built yet")]
    Unfinished,
}
pub(crate) fn usable() -> Result<(), KvmError> {
    Err(KvmError::Unfinished)
}
/// placeholder
pub struct KvmGuest;
impl KvmGuest {
    pub(crate) fn new(_: &GuestSettings) -> Result<crate::threads::ThreadsGuest, CreateError> {
        Err(KvmError::Unfinished.into())
    }
}
