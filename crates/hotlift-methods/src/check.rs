//! Checks shared by the encoders.

use std::ops::RangeInclusive;

use hotlift_mem::PAGE_SIZE;

use crate::MethodError;

/// Rejects input that is not whole pages.
pub(crate) fn whole_pages(method: &'static str, pages: &[u8]) -> Result<(), MethodError> {
    if pages.is_empty() || !pages.len().is_multiple_of(PAGE_SIZE) {
        return Err(MethodError::UnevenInput {
            method,
            bytes: pages.len(),
        });
    }
    Ok(())
}

/// Rejects a level outside of `levels`.
pub(crate) fn level(
    method: &'static str,
    levels: &RangeInclusive<u8>,
    asked: u8,
) -> Result<(), MethodError> {
    if !levels.contains(&asked) {
        return Err(MethodError::Level {
            method,
            level: asked,
            min: *levels.start(),
            max: *levels.end(),
        });
    }
    Ok(())
}
