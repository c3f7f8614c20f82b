//! Work queues of the kernel driver idxd, which IAA and DSA share.

use hotlift_accel::idxd::{Device, DeviceKind, Mode, State, WorkQueue, devices};

use super::host::{Host, MayOpen, add_kernel_option};
use super::pci::{self, Function};
use super::{AccelError, Gap, Part};

/// Device ids that Linux's idxd supports, with the kind of each. The first two are those of Sapphire Rapids to Granite Rapids;
/// the others are Granite Rapids D and Diamond Rapids.
const PCI_IDS: &[(u16, DeviceKind)] = &[
    (0x0b25, DeviceKind::Dsa),
    (0x11fb, DeviceKind::Dsa),
    (0x1212, DeviceKind::Dsa),
    (0x0cfe, DeviceKind::Iaa),
    (0x1216, DeviceKind::Iaa),
];

const INTEL: u16 = 0x8086;

/// Kernel option for shared virtual memory. Without it, no queue of the type `user` can be enabled.
const SCALABLE_MODE: &str = "intel_iommu=on,sm_on";

/// Setup of a work queue that Hotlift requires, for one kind of device.
pub struct QueueRequirement {
    pub kind: DeviceKind,
    /// True if a dedicated queue (for one process) can also be used; false if only shared queues can.
    pub dedicated_too: bool,
    /// Required value of the attribute `block_on_fault`: true if the device waits for a missing page.
    pub block_on_fault: bool,
    /// Required maximum of descriptors in a batch; `None` if the device has no batches.
    pub batch: Option<u32>,
    /// Required maximum of bytes per descriptor.
    pub transfer: u64,
}

/// Returns all devices of the required kind and their configured queues, each with its missing setup.
pub fn parts(host: &Host, requirement: &QueueRequirement) -> Result<Vec<Part>, AccelError> {
    let all = devices(host.root())?;
    let mut parts = Vec::new();
    for device in all.iter().filter(|device| device.kind == requirement.kind) {
        device_parts(host, requirement, device, &mut parts);
    }
    // A device without the driver idxd appears only on the PCI bus.
    let ids: Vec<_> = PCI_IDS
        .iter()
        .filter(|(_, kind)| *kind == requirement.kind)
        .map(|(id, _)| (INTEL, *id))
        .collect();
    let unbound = pci::functions(host, &ids)
        .into_iter()
        .filter(|function| function.driver.as_deref() != Some("idxd"));
    parts.extend(unbound.map(|function| without_driver(host, &function)));
    Ok(parts)
}

fn without_driver(host: &Host, function: &Function) -> Part {
    let gap = match &function.driver {
        Some(driver) => Gap::new(
            format!("{} is bound to {driver}", function.address),
            pci::give_to("idxd", "idxd", function),
        ),
        None if host.exists("/sys/bus/pci/drivers/idxd") => Gap::new(
            format!("{} has no driver", function.address),
            pci::give_to("idxd", "idxd", function),
        ),
        None => Gap::new("the driver idxd is not loaded", ["modprobe idxd"]),
    };
    let what = function.place().unwrap_or_else(|| "PCI".to_owned());
    Part::new(&function.address, what, vec![gap])
}

fn device_parts(
    host: &Host,
    requirement: &QueueRequirement,
    device: &Device,
    parts: &mut Vec<Part>,
) {
    let mut gaps = Vec::new();
    if device.pasid_enabled == Some(false) {
        let commands = match host.kernel_has_option(SCALABLE_MODE) {
            // No command helps: the firmware or the hypervisor must enable VT-d.
            true => Vec::new(),
            false => add_kernel_option(SCALABLE_MODE).to_vec(),
        };
        let problem = format!("{} has no shared virtual memory", device.name);
        gaps.push(Gap::new(problem, commands));
    }
    if let Some(State::Other(state)) = &device.state {
        let problem = format!("{} is {state}", device.name);
        let driver = "/sys/bus/pci/drivers/idxd";
        let address = device.place.pci.iter();
        let again = address
            .flat_map(|pci| ["unbind", "bind"].map(|file| format!("echo {pci} > {driver}/{file}")));
        gaps.push(Gap::new(problem, again));
    }
    let set_up = |queue: &&WorkQueue| {
        queue.size != Some(0) && !matches!(queue.queue_type.as_deref(), None | Some("none"))
    };
    let queues: Vec<_> = device.queues.iter().filter(set_up).collect();
    if queues.is_empty() && gaps.is_empty() {
        let problem = format!("{} has no work queue", device.name);
        gaps.push(Gap::new(problem, new_queue(device, requirement)));
    }
    // Programs use only queues, never the device itself. So the gaps of a device are also gaps of its queues.
    let missing = gaps.clone();
    let mut part = Part::new(&device.name, about_device(device), gaps);
    part.usable = false;
    parts.push(part);
    parts.extend(queues.into_iter().map(|queue| {
        let mut gaps = missing.clone();
        gaps.extend(queue_gaps(host, requirement, device, queue));
        let name = full_name(device, queue);
        Part::new(name, about_queue(queue), gaps)
    }));
}

fn full_name(device: &Device, queue: &WorkQueue) -> String {
    format!("{}/{}", device.name, queue.name)
}

fn about_device(device: &Device) -> String {
    let mut words = vec![state_text(&device.state)];
    if let Some(version) = device.version {
        words.push(format!("version {}.{}", version >> 8, version & 0xff));
    }
    if let Some(node) = device.place.numa_node {
        words.push(format!("NUMA node {node}"));
    }
    words.push(format!("{} engines", device.engines.len()));
    words.extend(device.place.pci.clone());
    words.join(", ")
}

fn about_queue(queue: &WorkQueue) -> String {
    let mut words = vec![state_text(&queue.state)];
    words.extend(queue.mode.map(|mode| match mode {
        Mode::Shared => "shared".to_owned(),
        Mode::Dedicated => "dedicated".to_owned(),
    }));
    words.extend(queue.queue_type.clone());
    words.extend(queue.size.map(|size| format!("{size} entries")));
    words.extend(
        queue
            .max_batch_size
            .map(|size| format!("batches of {size}")),
    );
    words.extend(
        queue
            .max_transfer_size
            .map(|size| format!("{} KiB each", size >> 10)),
    );
    words.extend(queue.label.as_ref().map(|label| format!("'{label}'")));
    words.join(", ")
}

fn state_text(state: &Option<State>) -> String {
    match state {
        None => "state unknown".to_owned(),
        Some(State::Disabled) => "disabled".to_owned(),
        Some(State::Enabled) => "enabled".to_owned(),
        Some(State::Other(state)) => state.clone(),
    }
}

fn queue_gaps(
    host: &Host,
    requirement: &QueueRequirement,
    device: &Device,
    queue: &WorkQueue,
) -> Vec<Gap> {
    let name = full_name(device, queue);
    let enabled = queue.state == Some(State::Enabled);
    let is_users = queue.queue_type.as_deref() == Some("user");
    let wrong_mode = queue.mode == Some(Mode::Dedicated) && !requirement.dedicated_too;
    if !is_users || wrong_mode {
        let problem = if is_users {
            format!("{name} is dedicated, and libqpl uses shared queues only")
        } else {
            let whose = queue.driver_name.as_deref().unwrap_or("a driver");
            format!("{name} is used by the kernel ({whose})")
        };
        let size = queue.size.unwrap_or(1);
        let mut commands = Vec::new();
        if enabled {
            commands.push(format!("accel-config disable-wq {name}"));
        }
        commands.push(format!(
            "accel-config config-wq {name} -m shared -t {size} -y user -d user -n hotlift"
        ));
        commands.push(format!("accel-config enable-wq {name}"));
        return vec![Gap::new(problem, commands)];
    }
    if device.state != Some(State::Enabled) {
        let enable = format!("accel-config enable-device {}", device.name);
        let commands = [enable, format!("accel-config enable-wq {name}")];
        return vec![Gap::new(format!("{} is disabled", device.name), commands)];
    }
    if !enabled {
        let command = format!("accel-config enable-wq {name}");
        return vec![Gap::new(format!("{name} is disabled"), [command])];
    }
    let node = host.name_of(&queue.node);
    match host.may_open(&node) {
        MayOpen::Yes => Vec::new(),
        MayOpen::Missing => {
            // udev creates the node; a container gets it only if it was started with this device.
            let problem = format!("{node} is missing");
            vec![Gap::new(problem, ["udevadm trigger --subsystem-match=dsa"])]
        }
        MayOpen::No => {
            let command = format!("chgrp {} {node} && chmod 660 {node}", host.group());
            vec![Gap::new(
                format!("{node} may not be opened by {}", host.user()),
                [command],
            )]
        }
    }
}

/// Returns shell commands that set up one queue with all resources of an unconfigured device.
fn new_queue(device: &Device, requirement: &QueueRequirement) -> Vec<String> {
    let name = &device.name;
    let Some(queue) = device.queues.first() else {
        return vec![format!("accel-config list -i -d {name}")];
    };
    let mut commands = Vec::new();
    // Entries and groups can be assigned only while the device is disabled.
    if device.state == Some(State::Enabled) {
        commands.push(format!("accel-config disable-device {name}"));
    }
    for engine in &device.engines {
        commands.push(format!(
            "accel-config config-engine {name}/{} -g 0",
            engine.name
        ));
    }
    let size = device.max_work_queues_size.unwrap_or(1);
    let block = u8::from(requirement.block_on_fault);
    let transfer = device
        .max_transfer_size
        .unwrap_or(u64::MAX)
        .min(requirement.transfer);
    let mut config = format!(
        "accel-config config-wq {} -g 0 -s {size} -t {size} -p 10 -b {block} -m shared -y user -d user \
         -n hotlift --max-transfer-size={transfer}",
        full_name(device, queue)
    );
    if let Some((wanted, most)) = requirement.batch.zip(device.max_batch_size) {
        config.push_str(&format!(" --max-batch-size={}", wanted.min(most)));
    }
    commands.push(config);
    commands.push(format!("accel-config enable-device {name}"));
    commands.push(format!(
        "accel-config enable-wq {}",
        full_name(device, queue)
    ));
    commands
}
