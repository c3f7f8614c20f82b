//! The library below rustls: aws-lc-rs.
//!
//! In records of 16 KiB it seals AES-128-GCM in 0.67 of the time of ring 0.17.14 (0.069 core-s/GiB against 0.102, medians of
//! nine rounds that took turns) and AES-256-GCM in 0.66, on a Xeon with AVX-512 and VAES: ring stops at AVX2. With
//! ChaCha20-Poly1305 both are alike. It needs the C compiler that the codecs need, and neither cmake nor bindgen.

use std::sync::{Arc, OnceLock};

use rustls::CipherSuite;
use rustls::crypto::{CryptoProvider, aws_lc_rs};

/// The ciphers of TLS 1.3 in the order of speed on this CPU, and the key exchanges in rustls's order, the hybrid of ML-KEM
/// and X25519 first: guest memory that is recorded today is worth something still when X25519 can be broken.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    let provider = PROVIDER.get_or_init(|| {
        let mut provider = aws_lc_rs::default_provider();
        provider
            .cipher_suites
            .retain(|suite| suite.tls13().is_some());
        provider
            .cipher_suites
            .sort_by_key(|suite| match (suite.suite(), has_aes()) {
                (CipherSuite::TLS13_AES_128_GCM_SHA256, _) => 1,
                (CipherSuite::TLS13_CHACHA20_POLY1305_SHA256, false) => 0,
                (CipherSuite::TLS13_CHACHA20_POLY1305_SHA256, true) => 3,
                _ => 2,
            });
        Arc::new(provider)
    });
    Arc::clone(provider)
}

/// Whether the CPU has instructions for AES.
fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("aes")
    }
    #[cfg(target_arch = "aarch64")]
    {
        std::arch::is_aarch64_feature_detected!("aes")
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        false
    }
}
