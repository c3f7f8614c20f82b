//! Tests `hotlift accel` on this host and on simulated hosts. Each simulated host lacks one part that an accelerator
//! needs.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::hotlift::Hotlift;

/// Capabilities of a process with only CAP_SYS_RAWIO.
pub const RAW_IO: u64 = 1 << 17;

/// A host's /sys, /dev and /proc in a folder.
pub struct Host(TempDir);

impl Host {
    /// Creates a host without accelerators, inspected by an ordinary user; the tests' own user is another one.
    pub fn new() -> Self {
        let host = Self(tempfile::tempdir().expect("a folder"));
        host.process(0);
        host.put("proc/cpuinfo", "flags : fpu enqcmd movdir64b waitpkg");
        host.put("proc/cmdline", "root=/dev/sda1 intel_iommu=on,sm_on");
        host.put(
            "proc/self/limits",
            "Max locked memory  1073741824  1073741824  bytes",
        );
        host.put(
            "etc/passwd",
            "root:x:0:0::/root:/bin/sh\nvm:x:424242:424243::/:/bin/sh",
        );
        host.put("etc/group", "root:x:0:\nvms:x:424243:\nqat:x:424244:vm");
        host
    }

    pub fn process(&self, capabilities: u64) {
        let ids = "Uid:\t424242\t424242\t424242\t424242\nGid:\t424243\t424243\t424243\t424243";
        let status = format!("{ids}\nGroups:\t424243\nCapEff:\t{capabilities:016x}");
        self.put("proc/self/status", &status);
    }

    pub fn put(&self, file: &str, text: &str) {
        let path = self.0.path().join(file);
        fs::create_dir_all(path.parent().expect("a folder")).expect("make the folder");
        fs::write(path, format!("{text}\n")).expect("write");
    }

    fn link(&self, file: &str, target: &str) {
        let path = self.0.path().join(file);
        fs::create_dir_all(path.parent().expect("a folder")).expect("make the folder");
        symlink(target, path).expect("link");
    }

    fn node(&self, file: &str, mode: u32) {
        self.put(file, "");
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions(self.0.path().join(file), mode).expect("set the mode");
    }

    fn pci(&self, address: &str, vendor: &str, device: &str) -> String {
        let folder = format!("sys/bus/pci/devices/{address}");
        self.put(&format!("{folder}/vendor"), vendor);
        self.put(&format!("{folder}/device"), device);
        self.put(&format!("{folder}/numa_node"), "0");
        folder
    }

    /// Adds an idxd device with one enabled shared queue of type user, and a node that all users may open.
    pub fn idxd(&self, name: &str) {
        let number = &name[3..];
        let device = format!("sys/bus/dsa/devices/{name}");
        for (file, text) in [
            ("state", "enabled"),
            ("version", "0x100"),
            ("numa_node", "0"),
            ("pasid_enabled", "1"),
            ("max_batch_size", "32"),
            ("max_transfer_size", "2147483648"),
            ("max_work_queues_size", "128"),
        ] {
            self.put(&format!("{device}/{file}"), text);
        }
        for (file, text) in [
            ("state", "enabled"),
            ("mode", "shared"),
            ("type", "user"),
            ("driver_name", "user"),
            ("size", "96"),
            ("group_id", "0"),
        ] {
            self.put(&format!("{device}/wq{number}.0/{file}"), text);
        }
        self.put(&format!("{device}/engine{number}.0/group_id"), "0");
        self.node(&format!("dev/{}/wq{number}.0", &name[..3]), 0o666);
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    fn text(&self) -> String {
        let root = self.path().to_str().expect("UTF-8");
        let (status, output) = Hotlift::start(&["accel", "--root", root]).wait();
        assert!(status.success(), "{output:?}");
        output.join("\n")
    }

    /// Returns the JSON of an accelerator.
    fn look(&self, name: &str) -> Found {
        let root = self.path().to_str().expect("UTF-8");
        Found::new(&["accel", "--json", "--root", root], name)
    }
}

#[derive(Debug)]
struct Found {
    usable: bool,
    parts: Vec<String>,
    /// Blocking problems of all parts, with their commands.
    problems: Vec<(String, Vec<String>)>,
    notes: Vec<String>,
}

impl Found {
    fn new(args: &[&str], name: &str) -> Self {
        let (status, output) = Hotlift::start(args).wait();
        assert!(status.success(), "{output:?}");
        let all: Vec<Value> = serde_json::from_str(&output.join("\n")).expect("JSON");
        let one = all.iter().find(|one| one["name"] == name).expect(name);
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        let parts = one["parts"].as_array().expect("parts");
        let gaps = |of: &Value| of["gaps"].as_array().expect("gaps").clone();
        let all_gaps: Vec<Value> = parts.iter().chain([one]).flat_map(gaps).collect();
        let (blocking, notes): (Vec<_>, Vec<_>) =
            all_gaps.into_iter().partition(|gap| gap["blocks"] == true);
        Self {
            usable: one["usable"] == true,
            parts: parts.iter().map(|part| text(&part["name"])).collect(),
            problems: blocking
                .iter()
                .map(|gap| {
                    let commands = gap["commands"].as_array().expect("commands");
                    (text(&gap["problem"]), commands.iter().map(text).collect())
                })
                .collect(),
            notes: notes.iter().map(|gap| text(&gap["problem"])).collect(),
        }
    }

    /// Asserts that only this is missing, and that these commands are named for it.
    #[track_caller]
    fn lacks(&self, problem: &str, commands: &[&str]) {
        assert!(!self.usable, "{self:?}");
        let [(found, run)] = &self.problems[..] else {
            panic!("one problem expected: {self:?}");
        };
        assert!(found.contains(problem), "'{found}' is not '{problem}'");
        assert_eq!(run, commands);
    }

    #[track_caller]
    fn is_usable(&self) {
        assert!(self.usable && self.problems.is_empty(), "{self:?}");
    }
}

#[test]
fn a_host_without_accelerators_prints_two_lines() {
    let text = Host::new().text();
    let expected = "Not on this host: Intel IAA, Intel QAT, HiSilicon ZIP, Intel DSA.\nEvery method runs in software; \
                    'hotlift methods' lists the libraries.";
    assert_eq!(text, expected);
}

#[test]
fn this_host_is_listed_with_any_hardware() {
    for name in ["Intel IAA", "Intel QAT", "HiSilicon ZIP", "Intel DSA"] {
        Found::new(&["accel", "--json"], name);
    }
}

#[test]
fn a_device_without_driver_needs_the_module() {
    let host = Host::new();
    host.pci("0000:6a:02.0", "0x8086", "0x0cfe");
    host.process(RAW_IO);
    let found = host.look("Intel IAA");
    found.lacks("driver idxd is not loaded", &["modprobe idxd"]);
    assert_eq!(found.parts, ["0000:6a:02.0"]);
}

#[test]
fn a_device_bound_to_another_driver_is_unbound_first() {
    let host = Host::new();
    let folder = host.pci("0000:6a:02.0", "0x8086", "0x0cfe");
    host.link(
        &format!("{folder}/driver"),
        "../../../../bus/pci/drivers/vfio-pci",
    );
    host.process(RAW_IO);
    let device = "/sys/bus/pci/devices/0000:6a:02.0";
    host.look("Intel IAA").lacks(
        "bound to vfio-pci",
        &[
            "modprobe idxd",
            &format!("echo idxd > {device}/driver_override"),
            &format!("echo 0000:6a:02.0 > {device}/driver/unbind"),
            "echo 0000:6a:02.0 > /sys/bus/pci/drivers_probe",
        ],
    );
}

#[test]
fn an_iaa_with_a_shared_queue_is_usable() {
    let host = Host::new();
    host.process(RAW_IO);
    host.idxd("iax1");
    let found = host.look("Intel IAA");
    found.is_usable();
    assert_eq!(found.parts, ["iax1", "iax1/wq1.0"]);
    assert!(!host.look("Intel DSA").usable);
    let text = host.text();
    assert!(
        text.starts_with("Intel IAA, for method qpl: usable\n"),
        "{text}"
    );
    assert!(!text.contains("Every method runs in software"), "{text}");
}

#[test]
fn a_device_without_a_queue_gets_one_of_all_its_entries() {
    let host = Host::new();
    host.process(RAW_IO);
    host.idxd("iax1");
    for (file, text) in [("state", "disabled"), ("type", "none"), ("size", "0")] {
        host.put(&format!("sys/bus/dsa/devices/iax1/wq1.0/{file}"), text);
    }
    let config = "accel-config config-wq iax1/wq1.0 -g 0 -s 128 -t 128 -p 10 -b 1 -m shared -y user \
                  -d user -n hotlift --max-transfer-size=65536";
    let commands = [
        "accel-config disable-device iax1",
        "accel-config config-engine iax1/engine1.0 -g 0",
        config,
        "accel-config enable-device iax1",
        "accel-config enable-wq iax1/wq1.0",
    ];
    host.look("Intel IAA")
        .lacks("iax1 has no work queue", &commands);
    host.put("sys/bus/dsa/devices/iax1/state", "disabled");
    host.look("Intel IAA")
        .lacks("iax1 has no work queue", &commands[1..]);
}

#[test]
fn a_dsa_queue_gets_the_batches_that_its_device_can_do() {
    let host = Host::new();
    host.process(RAW_IO);
    host.idxd("dsa0");
    host.look("Intel DSA").is_usable();
    host.put("sys/bus/dsa/devices/dsa0/wq0.0/type", "none");
    host.put("sys/bus/dsa/devices/dsa0/state", "disabled");
    let found = host.look("Intel DSA");
    let commands = &found.problems[0].1;
    let config = "accel-config config-wq dsa0/wq0.0 -g 0 -s 128 -t 128 -p 10 -b 0 -m shared -y user \
                  -d user -n hotlift --max-transfer-size=2097152 --max-batch-size=32";
    assert!(
        commands.iter().any(|command| command == config),
        "{commands:?}"
    );
}

#[test]
fn a_disabled_device_or_queue_is_enabled() {
    let host = Host::new();
    host.process(RAW_IO);
    host.idxd("iax1");
    host.put("sys/bus/dsa/devices/iax1/wq1.0/state", "disabled");
    let queue = "accel-config enable-wq iax1/wq1.0";
    host.look("Intel IAA")
        .lacks("iax1/wq1.0 is disabled", &[queue]);
    host.put("sys/bus/dsa/devices/iax1/state", "disabled");
    let device = "accel-config enable-device iax1";
    host.look("Intel IAA")
        .lacks("iax1 is disabled", &[device, queue]);
}

#[test]
fn a_queue_that_libqpl_cannot_use_is_reconfigured() {
    let host = Host::new();
    host.process(RAW_IO);
    host.idxd("iax1");
    let commands = [
        "accel-config disable-wq iax1/wq1.0",
        "accel-config config-wq iax1/wq1.0 -m shared -t 96 -y user -d user -n hotlift",
        "accel-config enable-wq iax1/wq1.0",
    ];
    host.put("sys/bus/dsa/devices/iax1/wq1.0/mode", "dedicated");
    host.look("Intel IAA").lacks("is dedicated", &commands);
    host.put("sys/bus/dsa/devices/iax1/wq1.0/mode", "shared");
    host.put("sys/bus/dsa/devices/iax1/wq1.0/type", "kernel");
    host.put("sys/bus/dsa/devices/iax1/wq1.0/driver_name", "crypto");
    host.look("Intel IAA")
        .lacks("is used by the kernel (crypto)", &commands);
    // Hotlift drives DSA itself, in either mode.
    host.idxd("dsa0");
    host.put("sys/bus/dsa/devices/dsa0/wq0.0/mode", "dedicated");
    host.look("Intel DSA").is_usable();
}

#[test]
fn without_shared_virtual_memory_the_kernel_needs_an_option() {
    let host = Host::new();
    host.process(RAW_IO);
    host.idxd("iax1");
    host.put("sys/bus/dsa/devices/iax1/pasid_enabled", "0");
    host.put("proc/cmdline", "intel_iommu=on");
    let found = host.look("Intel IAA");
    let (problem, commands) = &found.problems[0];
    assert!(problem.contains("no shared virtual memory"), "{problem}");
    assert!(commands[0].contains("intel_iommu=on,sm_on"), "{commands:?}");
    // The option is set: then the firmware must change, and no command helps.
    host.put("proc/cmdline", "quiet intel_iommu=on,sm_on");
    assert!(host.look("Intel IAA").problems[0].1.is_empty());
}

#[test]
fn a_node_that_may_not_be_opened_is_given_to_the_users_group() {
    let host = Host::new();
    host.process(RAW_IO);
    host.idxd("iax1");
    host.node("dev/iax/wq1.0", 0o660);
    let command = "chgrp vms /dev/iax/wq1.0 && chmod 660 /dev/iax/wq1.0";
    host.look("Intel IAA")
        .lacks("/dev/iax/wq1.0 may not be opened by vm", &[command]);
    fs::remove_file(host.path().join("dev/iax/wq1.0")).expect("remove the node");
    host.look("Intel IAA").lacks(
        "/dev/iax/wq1.0 is missing",
        &["udevadm trigger --subsystem-match=dsa"],
    );
}

#[test]
fn without_cap_sys_rawio_iaa_is_out_of_reach_and_dsa_is_slower() {
    let host = Host::new();
    host.idxd("iax1");
    host.idxd("dsa0");
    let command = "setcap cap_sys_rawio+ep $(command -v hotlift)";
    host.look("Intel IAA").lacks("no CAP_SYS_RAWIO", &[command]);
    let dsa = host.look("Intel DSA");
    dsa.is_usable();
    assert!(dsa.notes[0].contains("no CAP_SYS_RAWIO"), "{:?}", dsa.notes);
}

#[test]
fn a_cpu_that_hides_enqcmd_cannot_reach_an_iaa() {
    let host = Host::new();
    host.process(RAW_IO);
    host.idxd("iax1");
    host.put("proc/cpuinfo", "flags : fpu movdir64b");
    host.look("Intel IAA").lacks("no ENQCMD", &[]);
}

#[test]
fn one_queue_that_works_is_enough() {
    let host = Host::new();
    host.process(RAW_IO);
    host.idxd("iax1");
    host.idxd("iax3");
    host.node("dev/iax/wq3.0", 0o600);
    let found = host.look("Intel IAA");
    assert!(found.usable, "{found:?}");
    assert!(!host.text().contains("missing"), "{}", host.text());
}

#[test]
fn an_attribute_that_makes_no_sense_is_an_error_that_names_it() {
    let host = Host::new();
    host.idxd("iax1");
    host.put("sys/bus/dsa/devices/iax1/wq1.0/size", "many");
    let root = host.path().to_str().expect("UTF-8");
    let (status, output) = Hotlift::start(&["accel", "--root", root]).wait();
    assert_eq!(status.code(), Some(1));
    assert!(output[0].contains("wq1.0/size holds 'many'"), "{output:?}");
}

const PF: &str = "sys/bus/pci/devices/0000:6b:00.0";

/// Creates a host with QAT and two VFs for members of group qat, and a user in it.
fn qat() -> Host {
    let host = Host::new();
    host.pci("0000:6b:00.0", "0x8086", "0x4940");
    host.link(&format!("{PF}/driver"), "../../../../bus/pci/drivers/4xxx");
    host.put(&format!("{PF}/qat/state"), "up");
    host.put(&format!("{PF}/qat/cfg_services"), "sym;dc");
    host.put(&format!("{PF}/sriov_totalvfs"), "16");
    for (address, group) in [("0000:6b:00.1", "71"), ("0000:6b:00.2", "72")] {
        let folder = host.pci(address, "0x8086", "0x4941");
        host.link(&format!("{folder}/physfn"), "../0000:6b:00.0");
        host.link(
            &format!("{folder}/driver"),
            "../../../../bus/pci/drivers/vfio-pci",
        );
        host.link(
            &format!("{folder}/iommu_group"),
            &format!("../../../kernel/iommu_groups/{group}"),
        );
        host.node(&format!("dev/vfio/{group}"), 0o666);
    }
    host.node("run/qat/qatmgr.sock", 0o666);
    host
}

#[test]
fn a_complete_qat_is_usable() {
    let host = qat();
    let found = host.look("Intel QAT");
    found.is_usable();
    assert_eq!(found.parts, ["0000:6b:00.0"]);
}

#[test]
fn a_qat_without_driver_needs_the_module() {
    let host = qat();
    fs::remove_file(host.path().join(PF).join("driver")).expect("remove");
    host.look("Intel QAT")
        .lacks("0000:6b:00.0 has no driver", &["modprobe qat_4xxx"]);
}

#[test]
fn a_qat_set_up_for_something_else_is_set_up_for_compression() {
    let host = qat();
    host.put(&format!("{PF}/qat/cfg_services"), "sym;asym");
    host.look("Intel QAT").lacks(
        "set up for sym;asym",
        &[
            "systemctl stop qat",
            &format!("echo 0 > /{PF}/sriov_numvfs"),
            &format!("echo down > /{PF}/qat/state"),
            &format!("echo dc > /{PF}/qat/cfg_services"),
            &format!("echo up > /{PF}/qat/state"),
            "systemctl restart qat",
        ],
    );
}

#[test]
fn a_qat_that_is_down_gets_the_command_to_start_it() {
    let host = qat();
    host.put(&format!("{PF}/qat/state"), "down");
    host.look("Intel QAT")
        .lacks("is down", &[&format!("echo up > /{PF}/qat/state")]);
}

#[test]
fn a_qat_without_virtual_functions_needs_the_service() {
    let host = qat();
    for vf in ["0000:6b:00.1", "0000:6b:00.2"] {
        let folder = host.path().join("sys/bus/pci/devices").join(vf);
        fs::remove_dir_all(folder).expect("remove");
    }
    host.look("Intel QAT").lacks(
        "has no virtual functions, 16 are possible",
        &["systemctl enable --now qat"],
    );
}

#[test]
fn a_qat_whose_virtual_functions_have_another_or_no_driver_needs_vfio() {
    let host = qat();
    for vf in ["0000:6b:00.1", "0000:6b:00.2"] {
        fs::remove_file(
            host.path()
                .join("sys/bus/pci/devices")
                .join(vf)
                .join("driver"),
        )
        .expect("remove");
    }
    host.look("Intel QAT").lacks(
        "0000:6b:00.1 is not bound to vfio-pci",
        &[
            "modprobe vfio-pci",
            "echo vfio-pci > /sys/bus/pci/devices/0000:6b:00.1/driver_override",
            "echo 0000:6b:00.1 > /sys/bus/pci/drivers_probe",
        ],
    );
}

#[test]
fn a_user_outside_of_group_qat_is_put_into_it() {
    let host = qat();
    host.node("dev/vfio/71", 0o660);
    // One accessible function suffices.
    host.look("Intel QAT").is_usable();
    host.node("dev/vfio/72", 0o660);
    host.look("Intel QAT").lacks(
        "/dev/vfio/71 may not be opened by vm",
        &["usermod -aG qat vm"],
    );
}

#[test]
fn a_qat_without_its_service_or_without_locked_memory_is_not_usable() {
    let host = qat();
    host.put(
        "proc/self/limits",
        "Max locked memory  8388608  8388608  bytes",
    );
    host.look("Intel QAT")
        .lacks("only 8 MiB of memory may be locked", &["ulimit -l 65536"]);
    // CAP_IPC_LOCK has no limit.
    host.process(1 << 14);
    host.look("Intel QAT").is_usable();
    fs::remove_file(host.path().join("run/qat/qatmgr.sock")).expect("remove");
    host.look("Intel QAT")
        .lacks("service does not run", &["systemctl enable --now qat"]);
}

#[test]
fn a_virtual_function_in_a_vm_is_usable_without_its_physical_function() {
    let host = qat();
    for vf in ["0000:6b:00.1", "0000:6b:00.2"] {
        let folder = host.path().join("sys/bus/pci/devices").join(vf);
        fs::remove_file(folder.join("physfn")).expect("remove");
    }
    fs::remove_dir_all(host.path().join(PF)).expect("remove");
    let found = host.look("Intel QAT");
    found.is_usable();
    assert_eq!(found.parts, ["0000:6b:00.1", "0000:6b:00.2"]);
}

/// Creates a host with HiSilicon's engine, and a node that all users may open.
fn zip() -> Host {
    let host = Host::new();
    let device = "sys/class/uacce/hisi_zip-0";
    host.put(&format!("{device}/flags"), "1");
    host.put(&format!("{device}/algorithms"), "zlib\ngzip\ndeflate");
    host.put(&format!("{device}/available_instances"), "256");
    host.node("dev/hisi_zip-0", 0o666);
    host
}

#[test]
fn a_complete_hisilicon_engine_is_usable() {
    let found = zip().look("HiSilicon ZIP");
    found.is_usable();
    assert_eq!(found.parts, ["hisi_zip-0"]);
}

#[test]
fn missing_parts_of_a_hisilicon_engine_are_named() {
    let host = zip();
    host.node("dev/hisi_zip-0", 0o600);
    let command = "chgrp vms /dev/hisi_zip-0 && chmod 660 /dev/hisi_zip-0";
    host.look("HiSilicon ZIP")
        .lacks("may not be opened by vm", &[command]);
    for (file, text, problem) in [
        ("available_instances", "0", "no free queue"),
        ("algorithms", "gzip", "does not support zlib"),
        ("flags", "0", "no SVA"),
    ] {
        host.put(&format!("sys/class/uacce/hisi_zip-0/{file}"), text);
        host.look("HiSilicon ZIP").lacks(problem, &[]);
    }
}

#[test]
fn a_hisilicon_engine_in_kernel_mode_needs_its_module_reloaded() {
    let host = Host::new();
    let folder = host.pci("0000:75:00.0", "0x19e5", "0xa250");
    host.link(
        &format!("{folder}/driver"),
        "../../../../bus/pci/drivers/hisi_zip",
    );
    host.look("HiSilicon ZIP").lacks(
        "serves the kernel only",
        &["modprobe -r hisi_zip", "modprobe hisi_zip uacce_mode=1"],
    );
}
