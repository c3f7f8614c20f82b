//! Intel QAT (QuickAssist Technology), which compresses for the method `qatzip`.
//!
//! The kernel's driver controls the physical function (PF). The service of QATlib creates virtual functions (VFs), binds them
//! to the driver vfio-pci, and assigns them to programs. The library libqatzip uses this service.

use super::host::{Host, MayOpen, add_kernel_option};
use super::libraries::Library;
use super::pci::{self, Function};
use super::{Accelerator, Gap, Part};

/// QAT generations that both Linux and QATlib support. Each has the device id of the PF, the device id of the VF, and the name
/// of the PF's driver. The driver's kernel module is `qat_` and this name.
const MODELS: &[(u16, u16, &str)] = &[
    (0x4940, 0x4941, "4xxx"),
    (0x4942, 0x4943, "4xxx"),
    (0x4944, 0x4945, "4xxx"),
    (0x4946, 0x4947, "420xx"),
];

const INTEL: u16 = 0x8086;

/// Socket of QATlib's service, which assigns VFs to programs.
const SERVICE_SOCKET: &str = "/run/qat/qatmgr.sock";

/// Group of users that may use the VFs of QATlib's service.
const GROUP: &str = "qat";

const START_SERVICE: &str = "systemctl enable --now qat";

/// Required limit of locked memory, in bytes: enough for eight channels, with a reserve. QEMU's authors measured 10 to 20 MB
/// for 2 to 8 channels on one PF.
const MEMORY_LOCK: u64 = 64 << 20;

pub fn detect(host: &Host) -> Accelerator {
    let ids = |pick: fn(&(u16, u16, &str)) -> u16| -> Vec<_> {
        MODELS.iter().map(|model| (INTEL, pick(model))).collect()
    };
    let physical = pci::functions(host, &ids(|model| model.0));
    let virtual_ones = pci::functions(host, &ids(|model| model.1));
    let mut parts: Vec<Part> = physical
        .iter()
        .map(|pf| {
            let is_its = |vf: &&Function| vf.physical.as_ref() == Some(&pf.address);
            let vfs: Vec<_> = virtual_ones.iter().filter(is_its).collect();
            physical_part(host, pf, &vfs)
        })
        .collect();
    // In a VM only VFs are visible.
    let alone = virtual_ones.iter().filter(|vf| vf.physical.is_none());
    parts.extend(alone.map(|vf| {
        let place = vf.place().into_iter();
        let what: Vec<_> = ["virtual function".to_owned()]
            .into_iter()
            .chain(place)
            .collect();
        Part::new(
            &vf.address,
            what.join(", "),
            virtual_gap(host, vf).into_iter().collect(),
        )
    }));
    let library = Library::of(host, "qatzip");
    let mut gaps = Vec::new();
    if !parts.is_empty() {
        gaps.extend(service(host));
        gaps.extend(memory_lock(host));
        // Package of Debian 13 and later.
        gaps.extend(
            library
                .as_ref()
                .and_then(|library| library.gap(&["apt install libqatzip3 qatlib-service"])),
        );
    }
    Accelerator::new("Intel QAT", "method qatzip", library, parts, gaps)
}

fn physical_part(host: &Host, pf: &Function, vfs: &[&Function]) -> Part {
    let folder = pf.folder();
    let attribute = |name: &str| host.read(&format!("{folder}/{name}"));
    let state = attribute("qat/state");
    let services = attribute("qat/cfg_services");
    let mut words = Vec::new();
    words.extend(state.clone());
    words.extend(
        services
            .as_ref()
            .map(|services| format!("services {services}")),
    );
    words.push(format!("{} virtual functions", vfs.len()));
    words.extend(pf.place());
    let gaps = physical_gap(host, pf, state.as_deref(), services.as_deref(), vfs);
    Part::new(&pf.address, words.join(", "), gaps.into_iter().collect())
}

/// Returns the first gap (missing setup) of a physical function, in the order of its setup; `None` if nothing is missing.
fn physical_gap(
    host: &Host,
    pf: &Function,
    state: Option<&str>,
    services: Option<&str>,
    vfs: &[&Function],
) -> Option<Gap> {
    let address = &pf.address;
    let qat = format!("{}/qat", pf.folder());
    let model = MODELS.iter().find(|model| model.0 == pf.id.1)?;
    let module = format!("qat_{}", model.2);
    match pf.driver.as_deref() {
        Some(driver) if driver == model.2 => {}
        Some(driver) => {
            let problem = format!("{address} is bound to {driver}");
            return Some(Gap::new(problem, pci::give_to(&module, model.2, pf)));
        }
        None => {
            let problem = format!("{address} has no driver");
            return Some(Gap::new(problem, [format!("modprobe {module}")]));
        }
    }
    if let Some(services) = services.filter(|list| !list.split(';').any(|one| one == "dc")) {
        let problem = format!("{address} is set up for {services}, not for compression (dc)");
        let mut commands = Vec::new();
        if !vfs.is_empty() {
            commands.push("systemctl stop qat".to_owned());
            commands.push(format!("echo 0 > {}/sriov_numvfs", pf.folder()));
        }
        commands.push(format!("echo down > {qat}/state"));
        commands.push(format!("echo dc > {qat}/cfg_services"));
        commands.push(format!("echo up > {qat}/state"));
        commands.push("systemctl restart qat".to_owned());
        return Some(Gap::new(problem, commands));
    }
    if state == Some("down") {
        let command = format!("echo up > {qat}/state");
        return Some(Gap::new(format!("{address} is down"), [command]));
    }
    let Some(first) = vfs.first() else {
        let most = host.number(&format!("{}/sriov_totalvfs", pf.folder()));
        let possible = most.map_or(String::new(), |most| format!(", {most} are possible"));
        let problem = format!("{address} has no virtual functions{possible}");
        return Some(Gap::new(problem, [START_SERVICE]));
    };
    let gaps: Vec<_> = vfs.iter().map(|vf| virtual_gap(host, vf)).collect();
    if gaps.iter().any(Option::is_none) {
        return None;
    }
    virtual_gap(host, first)
}

fn virtual_gap(host: &Host, vf: &Function) -> Option<Gap> {
    let address = &vf.address;
    let Some(group) = &vf.iommu_group else {
        let option = "intel_iommu=on";
        let problem = format!("{address} is behind no IOMMU");
        return Some(Gap::new(problem, add_kernel_option(option)));
    };
    if vf.driver.as_deref() != Some("vfio-pci") {
        let problem = match &vf.driver {
            Some(driver) => format!("{address} is bound to {driver}, not to vfio-pci"),
            None => format!("{address} is not bound to vfio-pci"),
        };
        return Some(Gap::new(problem, pci::give_to("vfio-pci", "vfio-pci", vf)));
    }
    let node = format!("/dev/vfio/{group}");
    openable(host, &node)
}

fn openable(host: &Host, node: &str) -> Option<Gap> {
    let problem = match host.may_open(node) {
        MayOpen::Yes => return None,
        MayOpen::Missing => return Some(Gap::new(format!("{node} is missing"), [START_SERVICE])),
        MayOpen::No => format!("{node} may not be opened by {}", host.user()),
    };
    // The command takes effect at the next login.
    Some(Gap::new(
        problem,
        [format!("usermod -aG {GROUP} {}", host.user())],
    ))
}

fn service(host: &Host) -> Option<Gap> {
    if host.exists(SERVICE_SOCKET) {
        return openable(host, SERVICE_SOCKET);
    }
    let problem = format!("QATlib's service does not run: {SERVICE_SOCKET} is missing");
    Some(Gap::new(problem, [START_SERVICE]))
}

fn memory_lock(host: &Host) -> Option<Gap> {
    let limit = host
        .memory_lock_limit()
        .filter(|limit| *limit < MEMORY_LOCK)?;
    let problem = format!("only {} MiB of memory may be locked", limit >> 20);
    // The command sets the limit of the shell, as root or up to its hard limit. /etc/security/limits.conf makes it permanent.
    Some(Gap::new(
        problem,
        [format!("ulimit -l {}", MEMORY_LOCK >> 10)],
    ))
}
