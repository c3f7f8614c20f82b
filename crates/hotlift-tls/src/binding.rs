//! The exporter (RFC 8446, section 7.5): a secret that only the two ends of one connection know.

use hotlift_mem::lock;
use std::fmt;
use std::sync::{Arc, Mutex};

use aws_lc_rs::hmac;
use rustls::crypto::tls13::OkmBlock;
use rustls::{KeyLog, Tls13CipherSuite};

/// Labels of the two exported values in a proof. Unregistered labels begin with `EXPORTER` (RFC 5705, section 4).
const CONVERSATION: &str = "EXPORTER-hotlift-conversation";
const DATA: &str = "EXPORTER-hotlift-data";

/// Length of an exported value and of a proof, in bytes.
const LENGTH: usize = 32;

/// Computes values that only the two ends of a connection know. Cheap to clone. It cannot decrypt the connection.
#[derive(Clone)]
pub struct Exporter {
    secret: Arc<OkmBlock>,
    suite: &'static Tls13CipherSuite,
}

impl fmt::Debug for Exporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exporter").finish_non_exhaustive()
    }
}

impl Exporter {
    /// Returns the exported value for `label` and `context`, the same at both ends. Unregistered labels begin with `EXPORTER`.
    #[must_use]
    pub fn export(&self, label: &str, context: &[u8]) -> [u8; LENGTH] {
        let hash = self.suite.common.hash_provider;
        let mut derived = [0; OkmBlock::MAX_LEN];
        let derived = &mut derived[..hash.output_len()];
        self.expand(&self.secret, label, hash.hash(&[]).as_ref(), derived);
        let mut value = [0; LENGTH];
        let of_context = hash.hash(context);
        self.expand(
            &OkmBlock::new(derived),
            "exporter",
            of_context.as_ref(),
            &mut value,
        );
        value
    }

    /// Returns the proof that connection `data` belongs to the conversation on this connection. The client of `data` sends the
    /// proof on `data`. The proof requires the secrets of both connections, and is valid for no other connection.
    #[must_use]
    pub fn proof(&self, data: &Self) -> [u8; LENGTH] {
        let mut proof = [0; LENGTH];
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.export(CONVERSATION, &[]));
        proof.copy_from_slice(hmac::sign(&key, &data.export(DATA, &[])).as_ref());
        proof
    }

    /// Computes HKDF-Expand-Label (RFC 8446, section 7.1).
    fn expand(&self, secret: &OkmBlock, label: &str, context: &[u8], to: &mut [u8]) {
        let short = |length: usize| [u8::try_from(length).unwrap_or(u8::MAX)];
        let length = u16::try_from(to.len()).unwrap_or(u16::MAX).to_be_bytes();
        let info: [&[u8]; 6] = [
            &length,
            &short("tls13 ".len() + label.len()),
            b"tls13 ",
            label.as_bytes(),
            &short(context.len()),
            context,
        ];
        let expander = self.suite.hkdf_provider.expander_for_okm(secret);
        // Fails only for more than 255 blocks of output; no value here has more than two.
        let _ = expander.expand_slice(&info, to);
    }
}

/// Captures the exporter's secret during a handshake: rustls's unbuffered connection has no other access to it.
#[derive(Default)]
pub(crate) struct ExporterSecret(Mutex<Option<OkmBlock>>);

impl ExporterSecret {
    pub(crate) fn exporter(&self, suite: &'static Tls13CipherSuite) -> Option<Exporter> {
        let mut secret = lock(&self.0);
        let secret = Arc::new(secret.take()?);
        Some(Exporter { secret, suite })
    }
}

impl fmt::Debug for ExporterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExporterSecret").finish_non_exhaustive()
    }
}

/// Label of the exporter's secret in NSS's key log format.
const EXPORTER_SECRET: &str = "EXPORTER_SECRET";

impl KeyLog for ExporterSecret {
    fn log(&self, label: &str, _client_random: &[u8], secret: &[u8]) {
        if self.will_log(label) && secret.len() <= OkmBlock::MAX_LEN {
            let mut kept = lock(&self.0);
            *kept = Some(OkmBlock::new(secret));
        }
    }

    fn will_log(&self, label: &str) -> bool {
        label == EXPORTER_SECRET
    }
}
