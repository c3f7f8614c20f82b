//! Attribute files of sysfs: one value each, in text.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use hotlift_mem::FileError;

/// Reason why a sysfs value is unusable.
#[derive(Debug, thiserror::Error)]
pub enum SysfsError {
    /// The file or folder exists but cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The content of the file is not a valid value of its attribute.
    #[error("{} holds '{text}', expected {expected}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Content of the file.
        text: String,
        /// Description of the valid values.
        expected: &'static str,
    },
}

/// Returns the text of an attribute without its line end; `None` if this driver or device does not have it.
pub(crate) fn text(folder: &Path, name: &str) -> Result<Option<String>, SysfsError> {
    let path = folder.join(name);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        // The driver's error for attributes that the hardware lacks, e.g. `occupancy`.
        Err(error) if error.raw_os_error() == Some(EOPNOTSUPP) => Ok(None),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(FileError::reading(&path)(error).into()),
    }
}

/// Linux's "operation not supported" on every architecture that idxd runs on.
const EOPNOTSUPP: i32 = 95;

/// Returns the parsed value of an attribute; `None` if this driver or device does not have it. `expected` describes valid
/// values in the error.
pub(crate) fn parsed<T>(
    folder: &Path,
    name: &str,
    expected: &'static str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, SysfsError> {
    let Some(text) = text(folder, name)? else {
        return Ok(None);
    };
    match parse(&text) {
        Some(value) => Ok(Some(value)),
        None => Err(SysfsError::Value {
            path: folder.join(name),
            text,
            expected,
        }),
    }
}

/// Returns a number, decimal or with the prefix `0x`; `None` if the attribute is absent.
pub(crate) fn number<T: TryFrom<u64>>(folder: &Path, name: &str) -> Result<Option<T>, SysfsError> {
    parsed(folder, name, "a number", |text| {
        let value = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok()?,
            None => text.parse().ok()?,
        };
        T::try_from(value).ok()
    })
}

/// Returns a number, such as a NUMA node or a group; `None` if it is -1 or the attribute is absent.
pub(crate) fn index(folder: &Path, name: &str) -> Result<Option<u32>, SysfsError> {
    let value = parsed(folder, name, "a number or -1", |text| match text {
        "-1" => Some(None),
        text => text.parse().ok().map(Some),
    })?;
    Ok(value.flatten())
}

/// Returns a boolean that is stored as 0 or 1; `None` if the attribute is absent.
pub(crate) fn flag(folder: &Path, name: &str) -> Result<Option<bool>, SysfsError> {
    parsed(folder, name, "0 or 1", |text| match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    })
}

/// A set of operations, in the format of `op_cap` and `op_config`: 256 bits, bit n for operation code n.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpSet([u64; 4]);

impl OpSet {
    /// Returns true if the operation with that code is in the set.
    #[must_use]
    pub fn has(&self, opcode: u8) -> bool {
        let word = self.0[usize::from(opcode / 64)];
        word >> (opcode % 64) & 1 == 1
    }

    /// Parses the two formats of the kernel:
    /// - Since Linux 6.1: words of 32 bits separated by commas, the last one lowest.
    /// - Before 6.1: four words of 64 bits separated by spaces, the first one lowest.
    fn parse(text: &str) -> Option<Self> {
        let mut set = Self::default();
        if text.contains("0x") {
            for (i, word) in text.split_whitespace().enumerate() {
                let digits = word.strip_prefix("0x")?;
                *set.0.get_mut(i)? = u64::from_str_radix(digits, 16).ok()?;
            }
        } else {
            for (i, word) in text.split(',').rev().enumerate() {
                let bits = u64::from(u32::from_str_radix(word, 16).ok()?);
                *set.0.get_mut(i / 2)? |= bits << (i % 2 * 32);
            }
        }
        Some(set)
    }
}

/// Returns a set of operations; `None` if the attribute is absent.
pub(crate) fn op_set(folder: &Path, name: &str) -> Result<Option<OpSet>, SysfsError> {
    parsed(folder, name, "a bit map of 256 bits", OpSet::parse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_a_set_of_operations_name_the_same_ones() {
        let new =
            OpSet::parse("00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f037f")
                .expect("the form since 6.1");
        let old = OpSet::parse("0x1003f037f 0 0 0");
        assert_eq!(old, None, "a word without 0x is none");
        let old = OpSet::parse("0x1003f037f 0x0 0x0 0x0").expect("the form before 6.1");
        assert_eq!(new, old);
        for (opcode, there) in [(0, true), (6, true), (7, false), (0x20, true), (255, false)] {
            assert_eq!(new.has(opcode), there, "{opcode:#x}");
        }
        assert_eq!(
            OpSet::parse("0,0,0,0,0,0,0,0,0"),
            None,
            "more than 256 bits"
        );
    }
}
