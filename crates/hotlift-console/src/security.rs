//! TLS as a command's options ask for it, and what is to be known of the certificates.

use std::path::Path;
use std::sync::Arc;

use clap::Args;
use hotlift::options::option;
use hotlift::tls::{self, Profile, Tls};
use hotlift::{Address, Options};

use crate::error::ConsoleError;
use crate::output::complain;

/// TLS to or from another Hotlift at `address`; see [`tls::of_options`].
///
/// # Errors
/// If it cannot be had, or the address is open to other hosts and there is none.
pub fn tls(options: &Options, address: &Address) -> Result<Option<Arc<Tls>>, ConsoleError> {
    let tls = tls::of_options(options, address)?;
    if let Some(tls) = &tls {
        warn(tls);
    }
    Ok(tls)
}

/// TLS to or from the QEMU of this host at `address`, with the certificates of `folder`.
///
/// # Errors
/// As of [`tls()`].
pub fn qemu_tls(
    folder: Option<&Path>,
    options: &Options,
    address: &Address,
) -> Result<Option<Arc<Tls>>, ConsoleError> {
    // QEMU's main channel ends without close_notify: over a network the end of its connection says nothing, TLS or not.
    if !address.is_on_this_host() && !options.insecure {
        let address = address.clone();
        return Err(ConsoleError::InsecureQemu { address });
    }
    let Some(folder) = folder else {
        return Ok(None);
    };
    // The name and the list of the options are for the other host.
    let tls = tls::of_folder(folder, Profile::Qemu, &Options::default())?;
    warn(&tls);
    Ok(Some(tls))
}

fn warn(tls: &Tls) {
    for warning in tls.warnings() {
        complain!("hotlift: {warning}");
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

/// As the table of options has it.
fn help(name: &str) -> &'static str {
    option(name).map_or("", |option| option.help)
}

impl SecurityArgs {
    /// Names and values of the options of a migration that say the same.
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

    /// The same for commands that this one starts.
    #[must_use]
    pub fn given_to_others(&self) -> Vec<(String, String)> {
        let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        self.given().into_iter().map(owned).collect()
    }

    /// As of [`tls()`].
    ///
    /// # Errors
    /// As of [`tls()`].
    pub fn tls(&self, address: &Address) -> Result<Option<Arc<Tls>>, ConsoleError> {
        let mut options = Options::default();
        for (name, value) in self.given() {
            options.set(name, value)?;
        }
        tls(&options, address)
    }
}
