//! Files for results, whose names come from the operator.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::geteuid;

/// Writes `bytes` to the file, and replaces its content.
///
/// # Errors
/// As [`open`].
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut how = OpenOptions::new();
    open(path, how.write(true).create(true).truncate(true))?.write_all(bytes)
}

/// Opens a file. A symbolic link is followed only if it belongs to this user or to root, as `/dev/stdout` does. In a folder to
/// which all users can write, another user's link could make this process overwrite one of its own files. (With
/// `fs.protected_symlinks` the kernel also refuses this.)
///
/// # Errors
/// The system's error, or an error that the link was refused.
pub fn open(path: &Path, how: &mut OpenOptions) -> io::Result<File> {
    let flags = |flags: OFlags| flags.bits().cast_signed();
    match how.custom_flags(flags(OFlags::NOFOLLOW)).open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {}
        opened => return opened,
    }
    let owner = fs::symlink_metadata(path)?.uid();
    if owner != 0 && owner != geteuid().as_raw() {
        return Err(io::Error::other("it is a symbolic link of another user"));
    }
    how.custom_flags(flags(OFlags::empty())).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{lchown, symlink};

    use super::*;

    #[test]
    fn a_link_of_this_user_is_followed_and_one_of_another_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::write(&target, "longer than what is written").unwrap();
        symlink(&target, &link).unwrap();
        write(&link, b"results").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"results");
        write(Path::new("/dev/null"), b"results").unwrap();
        if !geteuid().is_root() {
            hotlift_testkit::skip!("root", "only root can make links of another user");
            return;
        }
        lchown(&link, Some(65534), None).unwrap();
        let error = write(&link, b"other results").unwrap_err();
        assert!(error.to_string().contains("symbolic link"), "{error}");
        assert_eq!(fs::read(&target).unwrap(), b"results");
    }
}
