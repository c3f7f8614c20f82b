//! HiSilicon's compression engine ZIP, which compresses for the method `uadk`.

use super::host::{Host, MayOpen};
use super::libraries::Library;
use super::pci;
use super::{Accelerator, Gap, Part};

/// PCI ids of the ZIP engine: physical and virtual function.
const PCI_IDS: &[(u16, u16)] = &[(0x19e5, 0xa250), (0x19e5, 0xa251)];

/// Bit of the device's attribute `flags`: the device uses the addresses of processes (`UACCE_DEV_SVA` in Linux's `uacce.h`).
const SVA: u64 = 1;

/// Shell commands that load the driver in the mode in which it registers devices for programs.
const LOAD: [&str; 2] = ["modprobe -r hisi_zip", "modprobe hisi_zip uacce_mode=1"];

pub fn detect(host: &Host) -> Accelerator {
    let class = "/sys/class/uacce";
    let devices: Vec<_> = host
        .names(class)
        .into_iter()
        .filter(|name| name.starts_with("hisi_zip-"))
        .collect();
    let mut parts: Vec<_> = devices
        .iter()
        .map(|name| device(host, &format!("{class}/{name}"), name))
        .collect();
    if parts.is_empty() {
        let silent = pci::functions(host, PCI_IDS).into_iter();
        parts.extend(silent.map(|function| {
            let what = function.place().unwrap_or_else(|| "PCI".to_owned());
            let problem = match &function.driver {
                Some(_) => format!("{} serves the kernel only", function.address),
                None => format!("{} has no driver", function.address),
            };
            Part::new(&function.address, what, vec![Gap::new(problem, LOAD)])
        }));
    }
    let library = Library::of(host, "uadk");
    let mut gaps = Vec::new();
    if !parts.is_empty() {
        let build = [
            "git clone https://github.com/Linaro/uadk && cd uadk",
            "./autogen.sh && ./configure && make && make install && ldconfig",
        ];
        gaps.extend(library.as_ref().and_then(|library| library.gap(&build)));
    }
    Accelerator::new("HiSilicon ZIP", "method uadk", library, parts, gaps)
}

fn device(host: &Host, folder: &str, name: &str) -> Part {
    let attribute = |attribute: &str| format!("{folder}/{attribute}");
    let free = host.number(&attribute("available_instances"));
    let algorithms = host.read(&attribute("algorithms")).unwrap_or_default();
    let mut words = vec![algorithms.split_whitespace().collect::<Vec<_>>().join(" ")];
    words.extend(free.map(|free| format!("{free} queues free")));
    words.extend(
        host.number(&attribute("device/numa_node"))
            .map(|node| format!("NUMA node {node}")),
    );
    let node = format!("/dev/{name}");
    let mut gaps = Vec::new();
    if host
        .number(&attribute("flags"))
        .is_some_and(|flags| flags & SVA == 0)
    {
        // SVA (shared virtual addressing) needs a kernel (SMMUv3 with SVA, 5.9 or later) and firmware; no command repairs this.
        let problem = format!("{name} does not work on a process's own addresses (no SVA)");
        gaps.push(Gap::new::<String>(problem, []));
    } else if !algorithms.split_whitespace().any(|one| one == "zlib") {
        gaps.push(Gap::new::<String>(
            format!("{name} does not support zlib"),
            [],
        ));
    } else if free == Some(0) {
        gaps.push(Gap::new::<String>(format!("{name} has no free queue"), []));
    } else {
        match host.may_open(&node) {
            MayOpen::Yes => {}
            MayOpen::Missing => {
                let command = "udevadm trigger --subsystem-match=uacce";
                gaps.push(Gap::new(format!("{node} is missing"), [command]));
            }
            MayOpen::No => {
                let command = format!("chgrp {} {node} && chmod 660 {node}", host.group());
                let problem = format!("{node} may not be opened by {}", host.user());
                gaps.push(Gap::new(problem, [command]));
            }
        }
    }
    Part::new(name, words.join(", "), gaps)
}
