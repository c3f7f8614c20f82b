//! Tests that devices and work queues are read correctly from artificial sysfs trees.

use std::fs;
use std::path::Path;

use hotlift_accel::idxd::{DeviceKind, Mode, State, SysfsError, devices};

fn put(root: &Path, file: &str, text: &str) {
    let path = root.join(file);
    fs::create_dir_all(path.parent().expect("a folder")).expect("make the folder");
    fs::write(path, format!("{text}\n")).expect("write the attribute");
}

/// Creates a tree like that of a host with one IAA: the bus has links into the PCI device's folder.
fn host() -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a folder");
    let device = "sys/devices/pci0000:6a/0000:6a:02.0/iax1";
    for (name, text) in [
        ("version", "0x100"),
        ("state", "enabled"),
        ("numa_node", "-1"),
        ("pasid_enabled", "1"),
        ("max_transfer_size", "2147483648"),
        ("max_work_queues", "8"),
        ("max_work_queues_size", "128"),
        ("cmd_status", "0x80110000"),
        (
            "op_cap",
            "00000000,00000000,00000000,00000000,00000000,0000000d,00000000,00000005",
        ),
        ("wq1.0/state", "enabled"),
        ("wq1.0/mode", "shared"),
        ("wq1.0/type", "user"),
        ("wq1.0/driver_name", "user"),
        ("wq1.0/name", "migrate"),
        ("wq1.0/group_id", "0"),
        ("wq1.0/size", "128"),
        ("wq1.0/threshold", "120"),
        ("wq1.0/block_on_fault", "1"),
        ("wq1.10/mode", "dedicated"),
        ("wq1.10/name", ""),
        ("wq1.10/state", "disabled"),
        ("wq1.10/group_id", "-1"),
        ("wq1.2/state", "disabled"),
        ("engine1.0/group_id", "0"),
        ("engine1.1/group_id", "-1"),
        ("group1.0/engines", "engine1.0"),
    ] {
        put(root.path(), &format!("{device}/{name}"), text);
    }
    let bus = root.path().join("sys/bus/dsa/devices");
    fs::create_dir_all(&bus).expect("the bus");
    std::os::unix::fs::symlink(root.path().join(device), bus.join("iax1")).expect("a link");
    root
}

#[test]
fn a_device_is_read_with_its_queues_in_their_order_and_absent_attributes_are_none() {
    let root = host();
    let found = devices(root.path()).expect("a tree");
    let [iax1] = &found[..] else {
        panic!("{found:?}");
    };
    assert_eq!((iax1.name.as_str(), iax1.kind), ("iax1", DeviceKind::Iaa));
    assert_eq!(iax1.place.pci.as_deref(), Some("0000:6a:02.0"));
    assert_eq!(iax1.place.numa_node, None);
    assert_eq!(iax1.version, Some(0x100));
    assert_eq!(iax1.state, Some(State::Enabled));
    assert_eq!(iax1.max_transfer_size, Some(2 << 30));
    assert_eq!(iax1.max_batch_size, None);
    assert_eq!(iax1.cmd_status, Some(0x8011_0000));
    let ops = iax1.op_cap.expect("op_cap");
    assert!(ops.has(0) && ops.has(2) && ops.has(0x42) && !ops.has(1));

    let groups: Vec<_> = iax1.engines.iter().map(|engine| engine.group).collect();
    assert_eq!(groups, [Some(0), None]);
    let names: Vec<_> = iax1
        .queues
        .iter()
        .map(|queue| queue.name.as_str())
        .collect();
    assert_eq!(names, ["wq1.0", "wq1.2", "wq1.10"]);
    let [first, second, third] = &iax1.queues[..] else {
        panic!("three queues");
    };
    assert_eq!(first.node, root.path().join("dev/iax/wq1.0"));
    assert_eq!((first.mode, first.size), (Some(Mode::Shared), Some(128)));
    assert_eq!(first.threshold, Some(120));
    assert_eq!(first.label.as_deref(), Some("migrate"));
    assert_eq!(first.block_on_fault, Some(true));
    assert_eq!(first.occupancy, None);
    assert_eq!((second.mode, second.group), (None, None));
    assert_eq!(third.mode, Some(Mode::Dedicated));
    assert_eq!((third.group, &third.label), (None, &None));
}

#[test]
fn a_host_without_the_driver_has_no_devices() {
    let root = tempfile::tempdir().expect("a folder");
    assert_eq!(devices(root.path()).expect("nothing"), []);
}

#[test]
fn an_error_names_the_file() {
    for (file, text) in [
        ("wq1.0/size", "many"),
        ("wq1.0/mode", "open"),
        ("op_cap", "x"),
    ] {
        let root = host();
        put(
            root.path(),
            &format!("sys/bus/dsa/devices/iax1/{file}"),
            text,
        );
        let error = devices(root.path()).expect_err(file);
        assert!(matches!(error, SysfsError::Value { .. }), "{error}");
        let said = error.to_string();
        assert!(said.contains(file) && said.contains(text), "{said}");
    }
    let root = host();
    let folder = root.path().join("sys/bus/dsa/devices/iax1/state");
    fs::remove_file(&folder).expect("remove");
    fs::create_dir(&folder).expect("a folder in place of a file");
    let error = devices(root.path()).expect_err("no file");
    assert!(error.to_string().contains("iax1/state"), "{error}");
}
