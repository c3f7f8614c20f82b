//! Creates the TLS configuration from the options.

use std::path::Path;
use std::sync::Arc;

use hotlift_net::transport::Address;
pub use hotlift_tls::{
    ALERT_BEGINS, Exporter, Fault, HANDSHAKE_BEGINS, Identity, Missing, Profile, Role, Tls,
    TlsError, Warning, measure_cipher,
};
use hotlift_tls::{Authz, AuthzError, Credentials, CredentialsError, Settings, find_folder};

use crate::options::{Limits, TlsOptions};

/// Error of the TLS configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsSetupError {
    /// The folder of the option `tls-creds` cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The list of the option `tls-authz` is invalid.
    #[error("tls-authz")]
    Authz(#[from] AuthzError),
    /// The address leads to other hosts, but there are no certificates.
    #[error(
        "{address} is for other hosts, which needs certificates ('hotlift certs' makes them, '--tls DIR' names their folder) or \
         '--insecure'"
    )]
    Insecure {
        /// The address that leads to other hosts.
        address: Address,
        /// Reason why no certificates were found in the standard folders.
        #[source]
        source: Box<CredentialsError>,
    },
}

/// Returns the TLS configuration for connections between two Hotlifts, to or from `address`. Uses the options `tls-creds`,
/// `tls-hostname` and `tls-authz`. Without `tls-creds`:
///
/// - A connection that stays on this host has no TLS (`None`).
/// - With the option `insecure`, any other connection has no TLS either.
/// - Otherwise the first standard folder with certificates is used.
///
/// # Errors
/// [`TlsSetupError`]: an option cannot be used, or there are no certificates.
pub fn of_options(
    options: &TlsOptions,
    limits: &Limits,
    address: &Address,
) -> Result<Option<Arc<Tls>>, TlsSetupError> {
    let folder = match options.creds.as_str() {
        "" if address.is_on_this_host() || options.insecure => return Ok(None),
        "" => find_folder().map_err(|source| TlsSetupError::Insecure {
            address: address.clone(),
            source: Box::new(source),
        })?,
        given => given.into(),
    };
    of_folder(&folder, Profile::Hotlift, options, limits).map(Some)
}

/// Returns the TLS configuration with the certificates in `folder`, and with `tls-hostname` and `tls-authz` of the options.
///
/// # Errors
/// [`TlsSetupError`]: the folder or an option cannot be used.
pub fn of_folder(
    folder: &Path,
    profile: Profile,
    options: &TlsOptions,
    limits: &Limits,
) -> Result<Arc<Tls>, TlsSetupError> {
    let credentials = Credentials::open(folder)?;
    let text = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    let authz = match text(&options.authz) {
        Some(patterns) => Some(Arc::new(Authz::new(patterns.split_whitespace())?)),
        None => None,
    };
    let usual = Settings::new(profile);
    let settings = Settings {
        hostname: text(&options.hostname),
        authz,
        handshake_timeout: usual.handshake_timeout.min(limits.handshake_timeout),
        records_per_key: options.records_per_key,
        ..usual
    };
    Ok(Arc::new(Tls::new(Arc::new(credentials), settings)))
}

/// Returns the TLS configuration for connections to or from a QEMU, with the certificates in `folder`. `hostname` is QEMU's
/// option `tls-hostname`. `verify_peer` is QEMU's property `verify-peer` at the server's end of the connection.
///
/// # Errors
/// [`TlsSetupError::Credentials`]: the folder cannot be used.
pub fn of_qemu(
    folder: &Path,
    hostname: Option<&str>,
    verify_peer: bool,
) -> Result<Arc<Tls>, TlsSetupError> {
    let credentials = Credentials::open(folder)?;
    let settings = Settings {
        hostname: hostname.map(str::to_owned),
        verify_peer,
        ..Settings::new(Profile::Qemu)
    };
    Ok(Arc::new(Tls::new(Arc::new(credentials), settings)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plaintext_to_other_hosts_is_sent_only_if_allowed() {
        let of = |address: &str, insecure| {
            let options = TlsOptions {
                insecure,
                ..TlsOptions::default()
            };
            of_options(&options, &Limits::default(), &address.parse().unwrap())
        };
        for address in ["tcp::1", "tcp:0.0.0.0:1", "tcp:[::]:1", "tcp:192.0.2.1:1"] {
            // This machine may have certificates or none.
            assert!(!matches!(of(address, false), Ok(None)), "{address}");
            assert!(matches!(of(address, true), Ok(None)), "{address}");
        }
        for address in [
            "tcp:127.0.0.1:1",
            "tcp:[::1]:1",
            "tcp:localhost:1",
            "unix:/x",
        ] {
            assert!(matches!(of(address, false), Ok(None)), "{address}");
        }
    }
}
