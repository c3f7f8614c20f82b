//! Recognises files that users mistake for a save file by their first bytes, and names the tool that reads them.

use crate::error::file::FileError;

/// A recognised kind of file: its first bytes, its name, and the advice to the user.
type Kind = (&'static [u8], &'static str, &'static str);

/// Magic numbers: RFC 1952, RFC 8878, the xz, bzip2 and LZ4 frame formats, QEMU's qcow2 specification, libvirt's save images
/// (finished and unfinished), ELF.
const KINDS: &[Kind] = &[
    (
        b"\x1f\x8b",
        "a gzip file",
        "decompress it first ('gzip -d')",
    ),
    (
        b"\x28\xb5\x2f\xfd",
        "a zstd file",
        "decompress it first ('zstd -d')",
    ),
    (b"\xfd7zXZ\0", "an xz file", "decompress it first ('xz -d')"),
    (b"BZh", "a bzip2 file", "decompress it first ('bzip2 -d')"),
    (
        b"\x04\x22\x4d\x18",
        "an lz4 file",
        "decompress it first ('lz4 -d')",
    ),
    (
        b"QFI\xfb",
        "a qcow2 disk image",
        "load a snapshot in it with QEMU (-loadvm NAME)",
    ),
    (
        b"LibvirtQemudSave",
        "a save file of libvirt",
        "restore it with libvirt ('virsh restore FILE')",
    ),
    (
        b"LibvirtQemudPart",
        "an incomplete save file of libvirt",
        "save the guest again",
    ),
    (
        b"\x7fELF",
        "an ELF file",
        "a memory dump has no devices, so no guest can be restored from it",
    ),
];

/// Returns the error for a file that is not a save file: with advice if the kind of the file is recognised by its first bytes.
pub(super) fn not_a_save(first: &[u8]) -> FileError {
    match recognise(first) {
        Some((is, instead)) => FileError::Foreign { is, instead },
        None => FileError::NotASave,
    }
}

/// Returns the kind of a file with these first bytes, and the advice to the user; `None` for an unknown kind.
fn recognise(first: &[u8]) -> Option<(&'static str, &'static str)> {
    let mut kinds = KINDS.iter();
    let (_, is, instead) = kinds.find(|(magic, ..)| first.starts_with(magic))?;
    Some((is, instead))
}

#[cfg(test)]
mod tests {
    use super::super::layout::HEAD_LEN;
    use super::*;

    #[test]
    fn a_magic_number_fits_in_the_bytes_that_are_read() {
        for (magic, ..) in KINDS {
            assert!(magic.len() <= HEAD_LEN);
            assert!(recognise(magic).is_some());
            assert!(recognise(&magic[..magic.len() - 1]).is_none());
        }
    }
}
