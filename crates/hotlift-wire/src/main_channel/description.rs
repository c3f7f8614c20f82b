//! The VM description: JSON text after EOF, which contains the layout of each device's state.
//!
//! The length of a device's state is the sum over its fields of size × array length. A field's size includes nested structs.
//! Each subsection adds its own sum, the length of its name, and 6 bytes of header. The streams recorded for the tests confirm
//! this.

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error, SeqAccess, Visitor};

use super::section::{EOF, VM_DESCRIPTION};
use crate::reader::as_u64;
use crate::{Reader, WireError, limits};

/// "HLDL", with which the second copy of a device's length is XORed. Adjacent bytes of this value differ, so a length that is
/// read one byte too early or too late does not match. With a complement as second copy, small lengths would match.
pub(super) const LENGTH_CHECK: u32 = 0x484c_444c;

/// Source of the lengths of device states, which a QEMU's stream does not contain.
#[derive(Debug, Clone)]
pub enum DeviceLengths {
    /// Two be32 copies of its length precede each device's state; the second is XORed with "HLDL".
    /// [`MainEncoder`](super::MainEncoder) writes both copies. Two copies detect a damaged length immediately. With one copy
    /// the receiver would wait, with the guest stopped, for bytes that never arrive.
    LengthPrefixed,
    /// The lengths come from the VM description at the end of the stream, which must be completely recorded.
    Description(VmDescription),
}

/// Lengths of device states, by device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VmDescription {
    lengths: HashMap<(String, u32), u64>,
}

impl VmDescription {
    /// Parses a VM description. At most [`limits::VM_DESCRIPTION`] bytes of JSON and [`limits::SECTIONS`] devices are accepted.
    pub fn parse(json: &[u8]) -> Result<Self, WireError> {
        if json.len() > limits::VM_DESCRIPTION {
            return Err(WireError::OverLimit {
                what: "length of the VM description",
                limit: as_u64(limits::VM_DESCRIPTION),
                got: as_u64(json.len()),
            });
        }
        let top: Top =
            serde_json::from_slice(json).map_err(|source| WireError::Description { source })?;
        Ok(Self {
            lengths: top.devices.0,
        })
    }

    /// Finds the VM description at the end of a recorded stream; `None` if there is none.
    ///
    /// The search goes backwards from the end of the stream, because device sections cannot be decoded without the description.
    /// The text must follow EOF, the record's type, and a length that reaches exactly to the end.
    pub fn find(recorded: &[u8]) -> Option<&[u8]> {
        const HEAD: usize = 6;
        let furthest = recorded.len().saturating_sub(HEAD + limits::VM_DESCRIPTION);
        (furthest..recorded.len().saturating_sub(HEAD))
            .rev()
            .find_map(|at| {
                let mut reader = Reader::new(&recorded[at..]);
                let head = *reader.array::<2>("VM description").ok()?;
                let length = reader.be32("VM description").ok()?;
                let text = &recorded[at + HEAD..];
                let whole = u64::from(length) == as_u64(text.len());
                (head == [EOF, VM_DESCRIPTION] && whole && text.first() == Some(&b'{'))
                    .then_some(text)
            })
    }

    /// Returns the length in bytes of the state of device `idstr` with `instance_id`; `None` if the description does not
    /// contain it.
    pub fn payload_len(&self, idstr: &str, instance_id: u32) -> Option<u64> {
        self.lengths.get(&(idstr.to_owned(), instance_id)).copied()
    }

    /// Returns the number of devices with this name in the description.
    pub fn instances(&self, idstr: &str) -> usize {
        self.lengths
            .keys()
            .filter(|(name, _)| name == idstr)
            .count()
    }

    /// Returns the number of devices in the description.
    pub fn devices(&self) -> usize {
        self.lengths.len()
    }
}

// The text comes from a peer, so only names and sums are kept, which are computed during parsing. Otherwise a text with many
// empty objects would need several times its own size in memory.

#[derive(Deserialize)]
struct Top {
    devices: Devices,
}

struct Devices(HashMap<(String, u32), u64>);

#[derive(Deserialize)]
struct Device {
    name: String,
    #[serde(default)]
    instance_id: u32,
    #[serde(default)]
    fields: Sum<Field>,
    #[serde(default)]
    subsections: Sum<Subsection>,
}

#[derive(Deserialize)]
struct Field {
    size: u64,
    array_len: Option<u64>,
}

#[derive(Deserialize)]
struct Subsection {
    vmsd_name: String,
    #[serde(default)]
    fields: Sum<Field>,
    #[serde(default)]
    subsections: Sum<Subsection>,
}

/// Length in the stream of an item of the description; `None` if it exceeds 64 bits.
trait WireLength {
    fn wire_length(&self) -> Option<u64>;
}

impl WireLength for Field {
    fn wire_length(&self) -> Option<u64> {
        self.size.checked_mul(self.array_len.unwrap_or(1))
    }
}

impl WireLength for Subsection {
    fn wire_length(&self) -> Option<u64> {
        // A subsection begins with 0x05, the name with its length byte, and a be32 version.
        let head = as_u64(self.vmsd_name.len()).checked_add(2 + 4)?;
        head.checked_add(self.fields.bytes)?
            .checked_add(self.subsections.bytes)
    }
}

/// An array of which only the total length is kept.
struct Sum<T> {
    bytes: u64,
    items: PhantomData<T>,
}

impl<T> Default for Sum<T> {
    fn default() -> Self {
        Self {
            bytes: 0,
            items: PhantomData,
        }
    }
}

impl<'de, T: WireLength + DeserializeOwned> Deserialize<'de> for Sum<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Self::default())
    }
}

impl<'de, T: WireLength + DeserializeOwned> Visitor<'de> for Sum<T> {
    type Value = Self;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut array: A) -> Result<Self, A::Error> {
        while let Some(item) = array.next_element::<T>()? {
            self.bytes = item
                .wire_length()
                .and_then(|length| self.bytes.checked_add(length))
                .ok_or_else(|| A::Error::custom("lengths exceed 64 bits"))?;
        }
        Ok(self)
    }
}

impl<'de> Deserialize<'de> for Devices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Self(HashMap::new()))
    }
}

impl<'de> Visitor<'de> for Devices {
    type Value = Self;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an array of devices")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut array: A) -> Result<Self, A::Error> {
        while let Some(device) = array.next_element::<Device>()? {
            if self.0.len() == limits::SECTIONS {
                return Err(A::Error::custom("too many devices"));
            }
            let length = device
                .fields
                .bytes
                .checked_add(device.subsections.bytes)
                .ok_or_else(|| A::Error::custom("lengths exceed 64 bits"))?;
            let repeated = self.0.insert((device.name, device.instance_id), length);
            if repeated.is_some() {
                return Err(A::Error::custom("a device is described twice"));
            }
        }
        Ok(self)
    }
}
