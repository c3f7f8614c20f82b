//! Header and footer around the payload of a section.
//!
//! ```text
//! START, FULL: type  be32 id  counted idstr  be32 instance  be32 version | payload | 0x7e  be32 id
//! PART, END:   type  be32 id                                             | payload | 0x7e  be32 id
//! ```

use crate::reader::put_counted_string;
use crate::{Reader, WireError};

pub(super) const EOF: u8 = 0x00;
pub(super) const START: u8 = 0x01;
pub(super) const PART: u8 = 0x02;
pub(super) const END: u8 = 0x03;
pub(super) const FULL: u8 = 0x04;
pub(super) const SUBSECTION: u8 = 0x05;
pub(super) const VM_DESCRIPTION: u8 = 0x06;
pub(super) const CONFIGURATION: u8 = 0x07;
pub(super) const COMMAND: u8 = 0x08;
pub(super) const FOOTER: u8 = 0x7e;

/// The four kinds of sections (`QEMU_VM_SECTION_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SectionKind {
    /// First section of an iterable device, such as `ram`.
    Start,
    /// Further section of an iterable device. There may be any number of them.
    Part,
    /// Last section of an iterable device, sent while the vCPUs are stopped.
    End,
    /// The only section of an ordinary device.
    Full,
}

/// Header of a START or FULL section, without its type byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SectionHeader<'a> {
    pub(super) id: u32,
    pub(super) idstr: &'a str,
    pub(super) instance_id: u32,
    pub(super) version_id: u32,
}

impl<'a> SectionHeader<'a> {
    pub(super) fn decode(reader: &mut Reader<'a>) -> Result<Self, WireError> {
        Ok(Self {
            id: reader.be32("section id")?,
            idstr: reader.counted_string("section idstr")?,
            instance_id: reader.be32("section instance id")?,
            version_id: reader.be32("section version id")?,
        })
    }

    pub(super) fn encode(&self, kind: u8, out: &mut Vec<u8>) -> Result<(), WireError> {
        out.push(kind);
        out.extend_from_slice(&self.id.to_be_bytes());
        put_counted_string(out, self.idstr, "section idstr")?;
        out.extend_from_slice(&self.instance_id.to_be_bytes());
        out.extend_from_slice(&self.version_id.to_be_bytes());
        Ok(())
    }
}

pub(super) fn read_footer(reader: &mut Reader<'_>, id: u32) -> Result<(), WireError> {
    let marker = reader.u8("section footer")?;
    if marker != FOOTER {
        return Err(WireError::Mismatch {
            what: "section footer",
            expected: u64::from(FOOTER),
            got: u64::from(marker),
        });
    }
    let got = reader.be32("section id in a footer")?;
    if got != id {
        return Err(WireError::Mismatch {
            what: "section id in a footer",
            expected: u64::from(id),
            got: u64::from(got),
        });
    }
    Ok(())
}

pub(super) fn put_footer(id: u32, out: &mut Vec<u8>) {
    out.push(FOOTER);
    out.extend_from_slice(&id.to_be_bytes());
}
