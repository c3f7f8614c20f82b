//! Tests domains with memory and devices of each kind that libvirt 9.0 defines, and a microvm.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use hotlift_testkit::libvirt::{Domain, Hardware, Hosts, make_file};
use hotlift_testkit::namespace::End;

use crate::agents::{both, end};
use crate::{hosts, is_at, migrate, other, program};

/// File of an NVDIMM, separate on each host.
const NVDIMM: &str = "/run/web1.nvdimm";

/// Bytes of an NVDIMM, and of a DIMM.
const BYTES: u64 = 16 << 20;

/// All devices except disks.
const DEVICES: &str = "
    <video><model type='virtio' heads='6'/></video>
    <memory model='dimm'><target><size unit='MiB'>16</size><node>0</node></target></memory>
    <memory model='nvdimm'><source><path>/run/web1.nvdimm</path></source>
      <target><size unit='MiB'>16</size><node>0</node></target></memory>
    <memory model='virtio-mem'><target><size unit='MiB'>64</size><node>0</node><block unit='MiB'>2</block>
      <requested unit='MiB'>0</requested></target></memory>
    <shmem name='web1.shmem' role='master'><model type='ivshmem-plain'/><size unit='M'>4</size></shmem>
    <memballoon model='virtio'/>";

/// Returns content for a device's memory: one page in four is zero, the others differ.
fn content() -> Vec<u8> {
    let words = (0..BYTES / 8).map(|word| match word / 512 % 4 {
        0 => 0,
        _ => (word / 16 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    });
    words.flat_map(u64::to_le_bytes).collect()
}

/// Returns the files of the DIMM and the NVDIMM.
fn memory(hosts: &Hosts, end: End, domain: &Domain) -> [PathBuf; 2] {
    let host = hosts.host(end);
    let dimm = hosts.memory(host, domain, "dimm0").expect("a DIMM");
    [dimm, host.path(NVDIMM)]
}

#[test]
fn domains_with_devices_of_each_kind_and_a_microvm_go_through_the_agents() {
    let Some(hosts) = hosts() else { return };
    let agents = both(&hosts, "");
    for host in [&hosts.source, &hosts.destination] {
        make_file(&host.path(NVDIMM), BYTES).expect("an NVDIMM");
    }
    let devices = hosts.domain_with("web1", &program(), Hardware::Devices(DEVICES));
    let microvm = hosts.domain_with("web2", &program(), Hardware::Microvm);
    let domains = [devices, microvm].map(|it| it.expect("a domain"));
    let content = content();
    // No guest uses the memory of these devices.
    for file in memory(&hosts, End::Source, &domains[0]) {
        let file = File::options().write(true).open(file).expect("a file");
        file.write_all_at(&content, 0).expect("its content");
    }
    let mut from = End::Source;
    for options in [&["--parallel"][..], &[]] {
        for domain in &domains {
            migrate(&hosts, from, domain, options)
                .unwrap_or_else(|why| panic!("{} {options:?}: {why}", domain.name));
            is_at(&hosts, other(from), domain);
        }
        // The next migration must restore all of it.
        fs::write(hosts.host(from).path(NVDIMM), vec![0; content.len()]).expect("zeros");
        from = other(from);
        for file in memory(&hosts, from, &domains[0]) {
            let there = fs::read(&file).expect("a file");
            assert!(there == content, "{} differs", file.display());
        }
    }
    for agent in &agents {
        agent.has_carried(4);
    }
    end(agents);
}
