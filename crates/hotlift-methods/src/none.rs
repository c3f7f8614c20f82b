//! `none`: uncompressed pages.
//!
//! The engine sends and receives uncompressed pages without a copy. This implementation copies them: it is for tests, and for
//! callers that use all methods in the same way.

use hotlift_mem::GuestRun;

use crate::target::Target;
use crate::{Accelerator, Decode, Encode, EncoderSettings, MethodError, check};

const NAME: &str = "none";

pub(crate) fn encoder(_settings: &EncoderSettings) -> Result<Box<dyn Encode>, MethodError> {
    Ok(Box::new(Copy))
}

pub(crate) fn decoder(_accelerator: Accelerator) -> Result<Box<dyn Decode>, MethodError> {
    Ok(Box::new(Copy))
}

struct Copy;

impl Encode for Copy {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        check::whole_pages(NAME, pages)?;
        out.clear();
        out.extend_from_slice(pages);
        Ok(())
    }
}

impl Decode for Copy {
    fn decode(&mut self, payload: &[u8], pages: &[GuestRun<'_>]) -> Result<(), MethodError> {
        let target = Target::new(pages);
        if payload.len() < target.bytes() {
            return Err(MethodError::Short {
                method: NAME,
                payload: payload.len(),
                expected: target.bytes(),
                got: payload.len(),
            });
        }
        if payload.len() > target.bytes() {
            return Err(MethodError::Long {
                method: NAME,
                payload: payload.len(),
                expected: target.bytes(),
            });
        }
        target.scatter(payload);
        Ok(())
    }
}
