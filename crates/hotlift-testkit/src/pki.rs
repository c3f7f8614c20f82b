//! Creates a CA and the certificates of hosts.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use hotlift_tls::{Authority, Credentials, Issued, Profile, Role, Settings, Tls};
use tempfile::TempDir;

/// Validity of a host certificate, in days.
const DAYS: u32 = 5;

/// A CA, with the certificate folders of hosts; the folders are deleted on drop.
pub struct Pki {
    folder: TempDir,
    ca: Issued,
    authority: Authority,
}

impl Pki {
    /// Creates a CA.
    ///
    /// # Panics
    /// If the CA cannot be created.
    #[must_use]
    pub fn new() -> Self {
        let ca = Authority::make("CA", 2 * DAYS, SystemTime::now()).expect("a CA");
        Self {
            folder: tempfile::tempdir().expect("a folder"),
            authority: Authority::open(&ca.certificate, &ca.key).expect("it was just made"),
            ca,
        }
    }

    /// Writes the `tls-creds` certificates of a host with these names to `folder`. The host can be server and client.
    ///
    /// # Panics
    /// If a certificate cannot be written.
    pub fn host_in(&self, folder: &Path, names: &[&str]) {
        fs::create_dir_all(folder).expect("a folder");
        fs::write(folder.join("ca-cert.pem"), &self.ca.certificate).expect("a file");
        for role in [Role::Server, Role::Client] {
            let issued = self
                .authority
                .issue(names, role, DAYS, SystemTime::now())
                .expect("a certificate");
            let file = |what: &str| folder.join(format!("{}-{what}.pem", role.name()));
            fs::write(file("cert"), issued.certificate).expect("a file");
            fs::write(file("key"), issued.key).expect("a file");
        }
    }

    /// Creates a `tls-creds` folder for the host `name`, with certificates for the roles of server and client. Returns
    /// the path.
    ///
    /// # Panics
    /// If the folder cannot be created, or a folder for this name exists.
    #[must_use]
    pub fn host(&self, name: &str) -> PathBuf {
        let folder = self.folder.path().join(name);
        fs::create_dir(&folder).expect("a name of its own");
        self.host_in(&folder, &[name]);
        folder
    }

    /// Returns the TLS settings between two Hotlifts, with new certificates of the host `name`.
    ///
    /// # Panics
    /// As [`Self::host`].
    #[must_use]
    pub fn tls(&self, name: &str) -> Arc<Tls> {
        let credentials = Credentials::open(&self.host(name)).expect("they were just made");
        let settings = Settings::new(Profile::Hotlift);
        Arc::new(Tls::new(Arc::new(credentials), settings))
    }
}

impl Default for Pki {
    fn default() -> Self {
        Self::new()
    }
}
