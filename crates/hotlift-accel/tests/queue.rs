//! Tests that unusable work queues are reported before any job is submitted. The sysfs tree is artificial, and its
//! device nodes are plain files.

use std::fs;
use std::path::Path;

use hotlift_accel::idxd::CpuFeatures;
use hotlift_accel::idxd::queue::{QueueError, open};

fn put(root: &Path, file: &str, text: &str) {
    let path = root.join(file);
    fs::create_dir_all(path.parent().expect("a folder")).expect("make the folder");
    fs::write(path, format!("{text}\n")).expect("write the attribute");
}

/// Creates a host with one DSA with one usable queue, except for the attributes in `changed`.
fn host(changed: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a folder");
    let device = "sys/bus/dsa/devices/dsa0";
    let sound = [
        ("state", "enabled"),
        ("version", "0x100"),
        ("max_batch_size", "1024"),
        ("wq0.0/state", "enabled"),
        ("wq0.0/mode", "shared"),
        ("wq0.0/type", "user"),
        ("wq0.0/size", "64"),
        ("wq0.0/max_batch_size", "32"),
    ];
    for (name, text) in sound.iter().chain(changed) {
        put(root.path(), &format!("{device}/{name}"), text);
    }
    put(root.path(), "dev/dsa/wq0.0", "");
    root
}

fn refused(root: &Path, path: &str) -> QueueError {
    let opened = open(root, Path::new(path), CpuFeatures::default());
    opened.err().expect("a queue that cannot be used")
}

#[test]
fn a_path_that_is_no_queue_is_named() {
    let host = host(&[]);
    for path in ["/dev/dsa/wq0.1", "/dev/null", "wq0.0", ""] {
        let error = refused(host.path(), path);
        assert!(
            matches!(error, QueueError::Unknown { .. }),
            "{path}: {error}"
        );
    }
}

#[test]
fn a_queue_that_is_set_up_for_something_else_says_so() {
    for (changed, says) in [
        (("state", "disabled"), "is not enabled"),
        (("wq0.0/state", "disabled"), "is not enabled"),
        (("wq0.0/type", "kernel"), "is not of type user"),
        (
            (
                "op_cap",
                "00000000,00000000,00000000,00000000,00000000,00000000,00000000,0000003f",
            ),
            "does not compare",
        ),
    ] {
        let host = host(&[changed]);
        let error = refused(host.path(), "/dev/dsa/wq0.0").to_string();
        assert!(error.contains(says) && error.contains("wq0.0"), "{error}");
    }
}

/// A plain file accepts descriptors as bytes, but no device reads them.
#[test]
fn a_node_without_a_device_behind_it_is_not_usable() {
    let host = host(&[]);
    let error = refused(host.path(), "/dev/dsa/wq0.0");
    assert!(matches!(error, QueueError::Proof { .. }), "{error}");
    let written = fs::read(host.path().join("dev/dsa/wq0.0")).expect("the node");
    assert_eq!(written.len(), 64, "one descriptor, and no other after it");
}

#[test]
fn a_real_queue_is_proven_where_there_is_one() {
    let nodes = fs::read_dir("/dev/dsa").into_iter().flatten().flatten();
    let nodes: Vec<_> = nodes.map(|entry| entry.path()).collect();
    if nodes.is_empty() {
        hotlift_testkit::skip!("dsa", "no work queue in /dev/dsa");
        return;
    }
    for node in nodes {
        match open(Path::new("/"), &node, CpuFeatures::of_this_cpu()) {
            Ok(device) => println!("{}: batches of {}", device.name, device.max_batch),
            Err(error) => println!("{error}"),
        }
    }
}
