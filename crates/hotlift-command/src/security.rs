//! Sets up TLS from a command's options, and prints warnings about the certificates.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use hotlift::options::{Limits, OptionError, TlsOptions, option};
use hotlift::tls::{self, Tls};
use hotlift::{Address, Options};
use hotlift_terminal::output::warn;

use crate::error::SharedError;

/// Returns the TLS settings for connections with another Hotlift at `address` (see [`tls::of_options`]); `None` without TLS.
///
/// # Errors
/// If TLS cannot be set up, or if `address` is open to other hosts and TLS is not configured.
pub fn tls(options: &TlsOptions, address: &Address) -> Result<Option<Arc<Tls>>, SharedError> {
    let tls = tls::of_options(options, &Limits::default(), address)?;
    if let Some(tls) = &tls {
        warn(tls);
    }
    Ok(tls)
}

/// Flags for TLS between a relay and the QEMU of its host.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "TLS")]
pub struct QemuTlsArgs {
    /// Use TLS with the QEMU of this host, with the certificates in this folder; QEMU needs an object tls-creds-x509, and its
    /// parameter tls-creds must name the object
    #[arg(
        id = "qemu_tls",
        long = "qemu-tls",
        value_name = "DIR",
        hide_short_help = true
    )]
    folder: Option<PathBuf>,
    /// Name that the certificate of the destination QEMU must have, as QEMU's tls-hostname [default: 'localhost' on a
    /// UNIX socket, else the host of --connect]
    #[arg(
        id = "qemu_tls_hostname",
        long = "qemu-tls-hostname",
        value_name = "NAME",
        requires = "qemu_tls",
        hide_short_help = true
    )]
    hostname: Option<String>,
    /// At the source: request a certificate from QEMU, as verify-peer of QEMU's tls-creds-x509 does. At the destination: off
    /// sends no certificate to QEMU, which must have verify-peer=off
    #[arg(
        id = "qemu_tls_verify_peer",
        long = "qemu-tls-verify-peer",
        value_name = "on|off",
        requires = "qemu_tls",
        value_enum,
        hide_possible_values = true,
        hide_short_help = true
    )]
    verify_peer: Option<Switch>,
}

/// `on` or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

impl QemuTlsArgs {
    /// Returns the TLS settings for connections with the QEMU of this host at `address`; `None` without TLS. `connects` is true
    /// if the relay connects to QEMU, false if QEMU connects.
    ///
    /// # Errors
    /// As [`tls()`]. Also if a flag applies only to the other direction, or if `address` is on a network and not `insecure`.
    pub fn tls(
        &self,
        options: &TlsOptions,
        address: &Address,
        connects: bool,
    ) -> Result<Option<Arc<Tls>>, SharedError> {
        if self.hostname.is_some() && !connects {
            let conflict = OptionError::Conflict {
                option: "--qemu-tls-hostname".to_owned(),
                needs: "'relay destination'; at the source, QEMU checks the name: set its parameter tls-hostname",
            };
            return Err(conflict.into());
        }
        // QEMU's main channel ends without close_notify: over a network, a closed connection proves nothing, even with TLS.
        if !address.is_on_this_host() && !options.insecure {
            let address = address.clone();
            return Err(SharedError::InsecureQemu { address });
        }
        let Some(folder) = &self.folder else {
            return Ok(None);
        };
        let verify_peer = self.verify_peer != Some(Switch::Off);
        let tls = tls::of_qemu(folder, self.hostname.as_deref(), verify_peer)?;
        warn(&tls);
        Ok(Some(tls))
    }
}

fn warn(tls: &Tls) {
    for warning in tls.warnings() {
        warn!("hotlift: {warning}");
    }
}

/// Flags of a command that speaks with another Hotlift and takes no options of a migration.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "TLS")]
pub struct SecurityArgs {
    #[arg(long = "tls-creds", visible_alias = "tls", value_name = "DIR", help = help("tls-creds"),
          conflicts_with = "insecure")]
    creds: Option<String>,
    #[arg(long = "tls-hostname", value_name = "NAME", help = help("tls-hostname"), hide_short_help = true,
          conflicts_with = "insecure")]
    hostname: Option<String>,
    #[arg(long = "tls-authz", value_name = "PATTERNS", help = help("tls-authz"), hide_short_help = true,
          conflicts_with = "insecure")]
    authz: Option<String>,
    #[arg(long, help = help("insecure"), num_args = 0..=1, require_equals = true, default_missing_value = "on",
          value_name = "on|off")]
    insecure: Option<String>,
}

/// Returns the help text of an option from the table.
fn help(name: &str) -> &'static str {
    option(name).map_or("", |option| option.help)
}

impl SecurityArgs {
    /// Returns names and values of the flags that were given, as migration options.
    #[must_use]
    pub fn given<'a>(&'a self) -> Vec<(&'static str, &'a str)> {
        let texts = [
            ("tls-creds", &self.creds),
            ("tls-hostname", &self.hostname),
            ("tls-authz", &self.authz),
            ("insecure", &self.insecure),
        ];
        let given = |(name, value): (_, &'a Option<String>)| Some((name, value.as_deref()?));
        texts.into_iter().filter_map(given).collect()
    }

    /// Returns the result of [`given`](Self::given) as owned text, for commands that this command starts.
    #[must_use]
    pub fn given_to_others(&self) -> Vec<(String, String)> {
        let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        self.given().into_iter().map(owned).collect()
    }

    /// Returns the TLS settings of these flags for connections at `address`; see [`tls()`].
    ///
    /// # Errors
    /// As [`tls()`].
    pub fn tls(&self, address: &Address) -> Result<Option<Arc<Tls>>, SharedError> {
        let mut options = Options::default();
        for (name, value) in self.given() {
            options.set(name, value)?;
        }
        tls(&options.tls, address)
    }
}
