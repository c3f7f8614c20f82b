//! Verification of the peer's certificate: its names, its CA, and the allow-list.

use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

use crate::authz::Authz;
use crate::credentials::{Material, Role};
use crate::error::{Fault, TlsError};
use crate::identity::{Identity, at};
use hotlift_mem::lock;

/// Limit of an unverified name in a message, in characters: a peer's certificate may have a name of sixty thousand.
const MAX_SHOWN: usize = 200;

/// The certificate that the peer sent in this handshake, valid or not.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen(Arc<Mutex<Option<Identity>>>);

impl Seen {
    pub(crate) fn take(&self) -> Option<Identity> {
        lock(&self.0).take()
    }

    fn put(&self, identity: Identity) {
        *lock(&self.0) = Some(identity);
    }
}

/// Verifies a certificate for one handshake: first by rustls, then by the allow-list.
#[derive(Debug)]
pub(crate) struct Verifier<V: ?Sized> {
    pub(crate) chain: Arc<V>,
    pub(crate) authz: Option<Arc<Authz>>,
    pub(crate) seen: Seen,
}

impl<V: ?Sized> Verifier<V> {
    fn inspect(&self, certificate: &CertificateDer<'_>) -> Result<Identity, Error> {
        let identity = Identity::read(certificate)
            .map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))?;
        self.seen.put(identity.clone());
        Ok(identity)
    }

    fn authorise(&self, identity: &Identity) -> Result<(), Error> {
        match &self.authz {
            Some(list) if !list.allows(identity) => Err(Error::InvalidCertificate(
                // The peer receives access_denied.
                CertificateError::ApplicationVerificationFailure,
            )),
            _ => Ok(()),
        }
    }
}

/// Methods of both verifiers that check signatures, which rustls's verifier does.
macro_rules! leaves_signatures_to_the_chain {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.chain.verify_tls12_signature(message, cert, dss)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.chain.verify_tls13_signature(message, cert, dss)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.chain.supported_verify_schemes()
        }
    };
}

impl ServerCertVerifier for Verifier<WebPkiServerVerifier> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let identity = self.inspect(end_entity)?;
        let verified = self.chain.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        );
        let verified = verified.map_err(of_another_ca)?;
        self.authorise(&identity)?;
        Ok(verified)
    }

    leaves_signatures_to_the_chain!();
}

impl ClientCertVerifier for Verifier<dyn ClientCertVerifier> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let identity = self.inspect(end_entity)?;
        let verified = self
            .chain
            .verify_client_cert(end_entity, intermediates, now);
        let verified = verified.map_err(of_another_ca)?;
        self.authorise(&identity)?;
        Ok(verified)
    }

    leaves_signatures_to_the_chain!();
}

/// Converts the error of a bad signature to the error of an unknown CA, also for the alert to the peer. A CA with the
/// same name but another key is another CA.
fn of_another_ca(error: Error) -> Error {
    match error {
        Error::InvalidCertificate(CertificateError::BadSignature) => {
            Error::InvalidCertificate(CertificateError::UnknownIssuer)
        }
        error => error,
    }
}

/// Returns the fault that a handshake would find in a certificate of this host; `None` if there is none. The peer is
/// assumed to have the same CA and list of revoked certificates. The name that the peer expects is unknown here, but a
/// server's certificate must have at least one.
pub(crate) fn own_fault(
    material: &Material,
    role: Role,
    (certificate, chain): (&CertificateDer<'_>, &[CertificateDer<'_>]),
    identity: &Identity,
    now: SystemTime,
) -> Option<Fault> {
    let now = UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).ok()?);
    let verified = match role {
        Role::Client => {
            let verifier = &material.client_verifier;
            let verified = verifier.verify_client_cert(certificate, chain, now);
            verified.map(|_| ())
        }
        Role::Server => {
            let name = ServerName::try_from(NO_HOST).ok()?;
            let verifier = &material.server_verifier;
            let verified = verifier.verify_server_cert(certificate, chain, &name, &[], now);
            verified.map(|_| ())
        }
    };
    match verified.map_err(of_another_ca) {
        // The name is checked last, so a mismatch means that all other checks have passed.
        Ok(())
        | Err(Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        )) => {
            let has_name = !identity.dns.is_empty() || !identity.ip.is_empty();
            (role == Role::Server && !has_name).then_some(Fault::NoName)
        }
        Err(error) => Some(fault_of(error, identity, role.name(), None)),
    }
}

/// A name that no certificate has: RFC 2606 reserves it.
const NO_HOST: &str = "hotlift.invalid";

/// Converts an error of rustls about the peer's certificate `identity`. `side` is the peer's role: `server` or `client`.
pub(crate) fn fault(
    error: Error,
    identity: &Identity,
    side: &'static str,
    authz: Option<&Authz>,
) -> TlsError {
    TlsError::Theirs {
        subject: identity.to_string().chars().take(MAX_SHOWN).collect(),
        fault: fault_of(error, identity, side, authz),
    }
}

fn fault_of(error: Error, identity: &Identity, side: &'static str, authz: Option<&Authz>) -> Fault {
    let error = match error {
        Error::InvalidCertificate(error) => error,
        error => return Fault::BadRevocationList(error),
    };
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            Fault::Ended { at: identity.ends }
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            Fault::NotYetValid {
                from: identity.begins,
            }
        }
        CertificateError::UnknownIssuer => Fault::UnknownCa {
            issuer: identity.issuer.clone(),
        },
        CertificateError::Revoked => Fault::Revoked,
        CertificateError::ExpiredRevocationListContext { next_update, .. } => {
            Fault::RevocationListEnded {
                at: at(i64::try_from(next_update.as_secs()).unwrap_or(i64::MAX)),
            }
        }
        CertificateError::NotValidForNameContext { expected, .. } => Fault::NameMismatch {
            expected: expected.to_str().into_owned(),
            has: identity.names().take(SHOWN_NAMES).collect(),
        },
        CertificateError::ApplicationVerificationFailure => Fault::NotAllowed {
            list: authz.map(Authz::to_string).unwrap_or_default(),
        },
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            Fault::Purpose { needed: side }
        }
        CertificateError::Other(_) if identity.is_ca => Fault::OfCa,
        error => Fault::Other(error),
    }
}

/// Limit of names in the error about a certificate for another host.
const SHOWN_NAMES: usize = 20;
