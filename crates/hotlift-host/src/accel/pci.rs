//! PCI devices of accelerators, from sysfs.

use super::host::Host;

/// A PCI function, physical or virtual.
#[derive(Debug, Clone)]
pub struct Function {
    /// PCI address, as in `0000:6b:00.0`.
    pub address: String,
    /// Vendor id and device id.
    pub id: (u16, u16),
    /// Driver bound to the function; `None` if there is none.
    pub driver: Option<String>,
    /// NUMA node of the function; `None` if the host has only one node.
    pub numa_node: Option<u64>,
    /// IOMMU group: the name of its node in `/dev/vfio`. `None` without an IOMMU.
    pub iommu_group: Option<String>,
    /// PCI address of the physical function, for a virtual one; `None` for a physical function.
    pub physical: Option<String>,
}

impl Function {
    /// Returns the function's folder in sysfs.
    pub fn folder(&self) -> String {
        folder(&self.address)
    }

    /// Returns text such as "NUMA node 0"; `None` if the node is unknown.
    pub fn place(&self) -> Option<String> {
        self.numa_node.map(|node| format!("NUMA node {node}"))
    }
}

/// Returns all PCI functions of the host whose vendor and device id are in `ids`.
pub fn functions(host: &Host, ids: &[(u16, u16)]) -> Vec<Function> {
    let addresses = host.names("/sys/bus/pci/devices").into_iter();
    addresses
        .filter_map(|address| {
            let folder = folder(&address);
            let id = |name: &str| {
                let text = host.read(&format!("{folder}/{name}"))?;
                u16::from_str_radix(text.strip_prefix("0x")?, 16).ok()
            };
            let id = (id("vendor")?, id("device")?);
            ids.contains(&id).then(|| Function {
                id,
                driver: host.link(&format!("{folder}/driver")),
                numa_node: host.number(&format!("{folder}/numa_node")),
                iommu_group: host.link(&format!("{folder}/iommu_group")),
                physical: host.link(&format!("{folder}/physfn")),
                address,
            })
        })
        .collect()
}

fn folder(address: &str) -> String {
    format!("/sys/bus/pci/devices/{address}")
}

/// Returns shell commands that bind `function` to `driver` of the kernel module `module`, also if another driver has it.
pub fn give_to(module: &str, driver: &str, function: &Function) -> Vec<String> {
    let folder = function.folder();
    let address = &function.address;
    let mut commands = vec![
        format!("modprobe {module}"),
        format!("echo {driver} > {folder}/driver_override"),
        format!("echo {address} > /sys/bus/pci/drivers_probe"),
    ];
    if function.driver.is_some() {
        commands.insert(2, format!("echo {address} > {folder}/driver/unbind"));
    }
    commands
}
