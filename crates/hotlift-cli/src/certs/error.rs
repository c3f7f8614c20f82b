//! Errors of `hotlift certs`.

use std::path::PathBuf;

use hotlift_mem::FileError;
use hotlift_tls::{AuthorityError, CredentialsError};

/// Error of `hotlift certs`.
#[derive(Debug, thiserror::Error)]
pub enum CertsError {
    #[error("{} exists already: --force replaces it", path.display())]
    Exists { path: PathBuf },
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{} has no CA to sign with ({})", dir.display(), file)]
    NoCa { dir: PathBuf, file: &'static str },
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error("{} has no certificate to renew", dir.display())]
    NothingToRenew { dir: PathBuf },
    #[error("{} has a problem", dir.display())]
    Problem { dir: PathBuf },
}

impl CertsError {
    /// Returns the next step.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::NoCa { .. } => Some(
                "'hotlift certs init' makes a CA; its key stays on one host, where 'certs host' and 'certs renew' run; 'certs renew --ca DIR' names \
                 its folder there",
            ),
            Self::NothingToRenew { .. } => Some("'hotlift certs host NAME' makes one"),
            Self::Credentials(CredentialsError::NoFolder { .. }) => {
                Some("'hotlift certs init', then 'hotlift certs host NAME', make them")
            }
            _ => None,
        }
    }

    /// Returns true if the command line is wrong.
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
