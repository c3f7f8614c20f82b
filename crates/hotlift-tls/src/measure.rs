//! Measurement of the cipher alone, for comparison with the cost of TLS.

use std::time::Duration;

use aws_lc_rs::aead;
use rustix::time::{ClockId, clock_gettime};

use crate::cipher::{Cipher, sealed};
use crate::error::RecordError;
use crate::record::{APPLICATION_DATA, RECORD_PLAINTEXT};

/// Returns this thread's CPU times for sealing `memory` in records of the usual size, and for opening them again. Uses
/// AES-128-GCM, which two Hotlifts negotiate. `memory` should be larger than the caches, like a guest's.
///
/// # Errors
/// If the cipher fails, which does not happen.
pub fn measure_cipher(memory: &mut [u8]) -> Result<(Duration, Duration), RecordError> {
    let cipher = || Cipher::of(&aead::AES_128_GCM, &[7; 16], [9; aead::NONCE_LEN], 0);
    let (mut seals, mut opens) = (cipher()?, cipher()?);
    let begun = cpu_time();
    for record in memory.chunks_exact_mut(sealed(RECORD_PLAINTEXT)) {
        seals.seal(APPLICATION_DATA, record)?;
    }
    let sealed_at = cpu_time();
    for record in memory.chunks_exact_mut(sealed(RECORD_PLAINTEXT)) {
        opens.open(record)?;
    }
    let opened_at = cpu_time();
    Ok((
        sealed_at.saturating_sub(begun),
        opened_at.saturating_sub(sealed_at),
    ))
}

/// Returns this thread's CPU time so far.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cipher_takes_time_both_ways() {
        let (seal, open) = measure_cipher(&mut vec![1; 1 << 20]).unwrap();
        assert!(seal > Duration::ZERO && open > Duration::ZERO);
    }
}
