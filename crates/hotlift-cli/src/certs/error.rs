//! Errors of `hotlift certs`.

use std::path::PathBuf;

use hotlift_mem::FileError;
use hotlift_tls::{AuthorityError, CredentialsError};

/// Error of `hotlift certs`.
#[derive(Debug, thiserror::Error)]
pub enum CertsError {
    #[error("{} already exists; --force replaces it", path.display())]
    Exists { path: PathBuf },
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{} has no CA ({} is missing)", dir.display(), file)]
    NoCa { dir: PathBuf, file: &'static str },
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error("{} has no certificate to renew", dir.display())]
    NothingToRenew { dir: PathBuf },
    #[error("the certificates in {} have a problem, shown above", dir.display())]
    Problem { dir: PathBuf },
}

impl CertsError {
    /// Returns the next step for the operator; `None` if the message itself contains it.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::NoCa { .. } => Some(
                "make a CA with 'hotlift certs init'; its key stays on one host: run 'certs host' and 'certs renew' there; \
                 'certs renew --ca DIR' names its folder",
            ),
            Self::NothingToRenew { .. } => Some("make one with 'hotlift certs host NAME'"),
            Self::Credentials(CredentialsError::NoFolder { .. }) => {
                Some("make them with 'hotlift certs init', then 'hotlift certs host NAME'")
            }
            _ => None,
        }
    }

    /// Returns true if the command line is invalid, and nothing was changed.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::Authority(
                AuthorityError::BadName { .. }
                    | AuthorityError::Wildcard { .. }
                    | AuthorityError::NoName
            )
        )
    }
}
