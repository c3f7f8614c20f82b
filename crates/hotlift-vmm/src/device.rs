//! Format of the device state of built-in guests: a list of fields. The decoder trusts no field.
//!
//! ```text
//! be32 tag | be32 length | length bytes      and so on, each tag once, in any order
//! ```
//!
//! | device | instance | version | fields |
//! |---|---|---|---|
//! | `hotlift/guest` | 0 | 1 | 1 settings (44 bytes), 2 digest (8 bytes a group of pages) |
//! | `hotlift/vcpu` | vCPU | 1 | see [`crate::kvm`] |
//! | `hotlift/worker` | worker | 1 | 1 writes and errors (16 bytes) |

use hotlift::guest::DeviceState;

use crate::layout::{Layout, LayoutError};
use crate::settings::Program;
use crate::verify::{Digest, VerifyError};
use crate::workload::{Pace, Workload};

/// An error in a received device state.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// This guest has no device of that name and instance.
    #[error("unknown device {idstr} {instance}")]
    UnknownDevice {
        /// Name of the device.
        idstr: String,
        /// Instance number of the device.
        instance: u32,
    },
    /// The stream contains a device twice.
    #[error("device {idstr} {instance} arrived twice")]
    RepeatedDevice {
        /// Name of the device.
        idstr: &'static str,
        /// Instance number of the device.
        instance: u32,
    },
    /// The stream lacks a device, for example because the source has fewer vCPUs.
    #[error("device {idstr} {instance} is missing")]
    MissingDevice {
        /// Name of the device.
        idstr: &'static str,
        /// Instance number of the device.
        instance: u32,
    },
    /// The layout version of a device is unknown.
    #[error("device {idstr} has version {got}, must be {expected}")]
    Version {
        /// Name of the device.
        idstr: String,
        /// Supported version.
        expected: u32,
        /// Version in the stream.
        got: u32,
    },
    /// A field extends beyond the end of the device state.
    #[error("device {idstr}: field at {offset} needs {needed} bytes, {left} are left")]
    Truncated {
        /// Name of the device.
        idstr: &'static str,
        /// Offset of the field in the state, in bytes.
        offset: usize,
        /// Required length, in bytes.
        needed: usize,
        /// Bytes that remain in the state.
        left: usize,
    },
    /// A field is unknown, or occurs twice.
    #[error("device {idstr}: unexpected field {tag}")]
    UnexpectedField {
        /// Name of the device.
        idstr: &'static str,
        /// Tag of the field.
        tag: u32,
    },
    /// A required field is missing.
    #[error("device {idstr}: field {field} is missing")]
    MissingField {
        /// Name of the device.
        idstr: &'static str,
        /// Name of the field.
        field: &'static str,
    },
    /// A field has the wrong size.
    #[error("device {idstr}: field {field} must have {expected} bytes, got {got}")]
    FieldLength {
        /// Name of the device.
        idstr: &'static str,
        /// Name of the field.
        field: &'static str,
        /// Required length, in bytes.
        expected: usize,
        /// Received length, in bytes.
        got: usize,
    },
    /// A value that must be equal on source and destination differs.
    #[error("{what} must be {expected} as here, got {got}")]
    Mismatch {
        /// Name of the value.
        what: &'static str,
        /// Value in this guest.
        expected: u64,
        /// Value in the stream.
        got: u64,
    },
    /// A value is out of its range.
    #[error("device {idstr}: field {field} is out of range: {got}")]
    OutOfRange {
        /// Name of the device.
        idstr: &'static str,
        /// Name of the field.
        field: &'static str,
        /// Value in the stream.
        got: u64,
    },
    /// The sizes of RAM and working set do not fit together.
    #[error("device hotlift/guest: inconsistent settings")]
    Layout(#[from] LayoutError),
    /// The digest (page hash sums) has another size than this guest's RAM requires.
    #[error("device hotlift/guest: wrong digest")]
    Digest(#[from] VerifyError),
    /// The kernel rejected a part of a vCPU's state.
    #[error("vCPU {vcpu}: the kernel does not {action}")]
    Kernel {
        /// Number of the vCPU.
        vcpu: u8,
        /// The rejected action, as a verb phrase.
        action: &'static str,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// The kernel rejected the value of an MSR.
    #[error("vCPU {vcpu}: the kernel does not load {value:#x} into MSR {index:#x}")]
    Msr {
        /// Number of the vCPU.
        vcpu: u8,
        /// Index of the MSR.
        index: u32,
        /// Rejected value.
        value: u64,
    },
}

/// Writes the fields of one device state.
#[derive(Debug, Default)]
pub(crate) struct FieldWriter(Vec<u8>);

impl FieldWriter {
    pub fn put(&mut self, tag: u32, bytes: &[u8]) {
        let len = u32::try_from(bytes.len()).expect("a field of device state is far below 4 GiB");
        self.0.extend_from_slice(&tag.to_be_bytes());
        self.0.extend_from_slice(&len.to_be_bytes());
        self.0.extend_from_slice(bytes);
    }

    pub fn device(self, idstr: &str, instance_id: u32, version_id: u32) -> DeviceState {
        DeviceState {
            idstr: idstr.to_owned(),
            instance_id,
            version_id,
            payload: self.0,
        }
    }
}

/// Reads the fields of one device state. [`Fields::finish`] checks that every field was read.
pub(crate) struct Fields<'a> {
    idstr: &'static str,
    fields: Vec<(u32, &'a [u8])>,
}

impl<'a> Fields<'a> {
    pub fn parse(idstr: &'static str, payload: &'a [u8]) -> Result<Self, DeviceError> {
        let mut fields: Vec<(u32, &[u8])> = Vec::new();
        let mut rest = payload;
        while !rest.is_empty() {
            let truncated = |needed, left| DeviceError::Truncated {
                idstr,
                offset: payload.len() - rest.len(),
                needed,
                left,
            };
            let (head, body) = rest
                .split_first_chunk::<8>()
                .ok_or_else(|| truncated(8, rest.len()))?;
            let tag = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
            let len = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            let (bytes, after) = body
                .split_at_checked(len)
                .ok_or_else(|| truncated(len, body.len()))?;
            if fields.iter().any(|&(known, _)| known == tag) {
                return Err(DeviceError::UnexpectedField { idstr, tag });
            }
            fields.push((tag, bytes));
            rest = after;
        }
        Ok(Self { idstr, fields })
    }

    /// Returns the bytes of field `tag`, which may have any length. Errors name the field `field`.
    pub fn take(&mut self, tag: u32, field: &'static str) -> Result<&'a [u8], DeviceError> {
        let at = self.fields.iter().position(|&(known, _)| known == tag);
        let at = at.ok_or(DeviceError::MissingField {
            idstr: self.idstr,
            field,
        })?;
        Ok(self.fields.swap_remove(at).1)
    }

    /// Returns the bytes of field `tag`, which must have length `N`. Errors name the field `field`.
    pub fn take_exact<const N: usize>(
        &mut self,
        tag: u32,
        field: &'static str,
    ) -> Result<&'a [u8; N], DeviceError> {
        let bytes = self.take(tag, field)?;
        bytes
            .try_into()
            .map_err(|_| self.wrong_length(field, N, bytes.len()))
    }

    /// Returns the numbers in field `tag`, which contains big-endian u64s. Errors name the field `field`.
    pub fn take_u64s(&mut self, tag: u32, field: &'static str) -> Result<Vec<u64>, DeviceError> {
        let bytes = self.take(tag, field)?;
        let (numbers, rest) = bytes.as_chunks::<8>();
        if rest.is_empty() {
            Ok(numbers
                .iter()
                .map(|&number| u64::from_be_bytes(number))
                .collect())
        } else {
            Err(self.wrong_length(field, numbers.len() * 8, bytes.len()))
        }
    }

    pub fn wrong_length(&self, field: &'static str, expected: usize, got: usize) -> DeviceError {
        DeviceError::FieldLength {
            idstr: self.idstr,
            field,
            expected,
            got,
        }
    }

    pub fn out_of_range(&self, field: &'static str, got: u64) -> DeviceError {
        DeviceError::OutOfRange {
            idstr: self.idstr,
            field,
            got,
        }
    }

    pub fn finish(self) -> Result<(), DeviceError> {
        match self.fields.first() {
            None => Ok(()),
            Some(&(tag, _)) => Err(DeviceError::UnexpectedField {
                idstr: self.idstr,
                tag,
            }),
        }
    }
}

/// Sorts the received devices: returns the payload of the guest's device, and the payloads of the vCPU devices
/// `vcpu_idstr` in the order of the vCPUs.
pub(crate) fn sort<'a>(
    devices: &'a [DeviceState],
    vcpu_idstr: &'static str,
    version: u32,
    vcpus: u8,
) -> Result<(&'a [u8], Vec<&'a [u8]>), DeviceError> {
    let mut guest = None;
    let of_vcpus = |device: &&DeviceState| device.idstr == vcpu_idstr;
    let last = devices
        .iter()
        .filter(of_vcpus)
        .map(|device| device.instance_id)
        .max();
    let got = last.map_or(0, |last| u64::from(last) + 1);
    if got != u64::from(vcpus) {
        return Err(DeviceError::Mismatch {
            what: "number of vCPUs",
            expected: u64::from(vcpus),
            got,
        });
    }
    let mut found = vec![None; usize::from(vcpus)];
    for device in devices {
        let instance = device.instance_id;
        let index = usize::try_from(instance).unwrap_or(usize::MAX);
        let (place, idstr, expected) = match (device.idstr.as_str(), found.get_mut(index)) {
            (GUEST, _) if instance == 0 => (&mut guest, GUEST, GUEST_VERSION),
            (idstr, Some(place)) if idstr == vcpu_idstr => (place, vcpu_idstr, version),
            (idstr, _) => {
                return Err(DeviceError::UnknownDevice {
                    idstr: idstr.to_owned(),
                    instance,
                });
            }
        };
        if device.version_id != expected {
            let (idstr, got) = (device.idstr.clone(), device.version_id);
            return Err(DeviceError::Version {
                idstr,
                expected,
                got,
            });
        }
        if place.replace(device.payload.as_slice()).is_some() {
            return Err(DeviceError::RepeatedDevice { idstr, instance });
        }
    }
    let guest = guest.ok_or(DeviceError::MissingDevice {
        idstr: GUEST,
        instance: 0,
    })?;
    let vcpus = (0u32..)
        .zip(found)
        .map(|(instance, payload)| {
            payload.ok_or(DeviceError::MissingDevice {
                idstr: vcpu_idstr,
                instance,
            })
        })
        .collect::<Result<_, _>>()?;
    Ok((guest, vcpus))
}

const GUEST: &str = "hotlift/guest";
const GUEST_VERSION: u32 = 1;
const SETTINGS: u32 = 1;
const DIGEST: u32 = 2;

/// Returns the state that all vCPUs of a guest share, as a device.
pub(crate) fn save_guest(program: &Program, digest: &Digest) -> DeviceState {
    let layout = &program.layout;
    let mut settings = Vec::with_capacity(44);
    settings.extend_from_slice(&layout.ram_bytes().to_be_bytes());
    settings.extend_from_slice(&u32::from(layout.vcpus()).to_be_bytes());
    settings.extend_from_slice(&program.workload.code().to_be_bytes());
    settings.extend_from_slice(&[0; 4]);
    settings.extend_from_slice(&program.rate.to_be_bytes());
    settings.extend_from_slice(&layout.working_set().to_be_bytes());
    settings.extend_from_slice(&program.seed.to_be_bytes());
    let digest: Vec<u8> = digest
        .sums()
        .iter()
        .flat_map(|sum| sum.to_be_bytes())
        .collect();
    let mut fields = FieldWriter::default();
    fields.put(SETTINGS, &settings);
    fields.put(DIGEST, &digest);
    fields.device(GUEST, 0, GUEST_VERSION)
}

/// Decodes the device made by [`save_guest`]. RAM size and number of vCPUs must equal those of `here`. The other values
/// replace the values of `here`.
pub(crate) fn load_guest(payload: &[u8], here: &Layout) -> Result<(Program, Digest), DeviceError> {
    let mut fields = Fields::parse(GUEST, payload)?;
    let settings = fields.take_exact::<44>(SETTINGS, "settings")?;
    let u32_at = |at: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&settings[at..at + 4]);
        u32::from_be_bytes(bytes)
    };
    let u64_at = |at: usize| u64::from(u32_at(at)) << 32 | u64::from(u32_at(at + 4));
    let same = |what, expected, got| {
        if expected == got {
            Ok(())
        } else {
            Err(DeviceError::Mismatch {
                what,
                expected,
                got,
            })
        }
    };
    same("bytes of RAM", here.ram_bytes(), u64_at(0))?;
    same(
        "number of vCPUs",
        u64::from(here.vcpus()),
        u64::from(u32_at(8)),
    )?;
    let workload = Workload::from_code(u32_at(12))
        .ok_or_else(|| fields.out_of_range("workload", u64::from(u32_at(12))))?;
    if u32_at(16) != 0 {
        return Err(fields.out_of_range("reserved", u64::from(u32_at(16))));
    }
    let rate = u64_at(20);
    if rate > Pace::MAX_RATE {
        return Err(fields.out_of_range("rate", rate));
    }
    let layout = Layout::new(here.ram_bytes(), here.vcpus(), Some(u64_at(28)))?;
    let digest = Digest::from_sums(&layout, fields.take_u64s(DIGEST, "digest")?)?;
    fields.finish()?;
    Ok((
        Program {
            workload,
            rate,
            seed: u64_at(36),
            layout,
        },
        digest,
    ))
}
