//! The UUID of a VM in the formats of QMP, of user input, and of messages between two hosts.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A UUID in the order of its digits; all bytes are zero for a VM that has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uuid(pub [u8; 16]);

impl FromStr for Uuid {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text).map(Self).ok_or_else(|| {
            "expected a UUID such as 550e8400-e29b-41d4-a716-446655440000".to_owned()
        })
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let dash = if [4, 6, 8, 10].contains(&index) {
                "-"
            } else {
                ""
            };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

/// Parses text such as `550e8400-e29b-41d4-a716-446655440000`. The bytes have the order of the digits.
fn parse(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|&c| c != '-')
        .map(|c| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok()))
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits
        .chunks_exact(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect();
    (digits.len() == 32).then_some(())?;
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_prints_as_it_was_typed_and_nothing_else_is_one() {
        let text = "550e8400-e29b-41d4-a716-446655440000";
        assert_eq!(text.parse::<Uuid>().unwrap().to_string(), text);
        for bad in [
            "",
            "550e8400",
            "g50e8400-e29b-41d4-a716-446655440000",
            &format!("{text}0"),
        ] {
            assert!(bad.parse::<Uuid>().is_err(), "{bad}");
        }
    }
}
