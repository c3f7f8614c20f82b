//! Parses the machine's devices from the output of QEMU's human monitor (`info qtree`): no QMP command reports their buses.

use serde::{Deserialize, Serialize};

/// Maximum number of devices kept for a machine. The largest machine in QEMU's own tests has some hundreds.
const MAX_DEVICES: usize = 4096;

/// A device of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MachineDevice {
    /// Location: the addresses of its parent devices, then its own address, as QEMU names device states in the stream. On a bus
    /// without addresses, the device's type is used as its address.
    pub place: String,
    /// Type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Ids of vendor, device and subsystem; only for a PCI device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<String>,
    /// Number of MSI-X vectors; `None` if QEMU reports none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vectors: Option<u64>,
}

/// A bus or device in the tree. The lines of its children have a deeper indentation.
struct Node {
    indent: usize,
    /// Index of the device itself, or of the device that owns the bus; `None` for a bus without a device.
    device: Option<usize>,
    /// True for the bus between a PCI device and its virtio device, which the operator sees as one device.
    is_virtio: bool,
}

/// A device with the properties read so far.
#[derive(Default)]
struct Entry {
    above: Option<usize>,
    kind: String,
    is_part: bool,
    address: Option<String>,
    scsi: [Option<u64>; 3],
    pci: Option<String>,
    vectors: Option<u64>,
}

impl Entry {
    /// Parses a line with a property of the device.
    fn property(&mut self, line: &str) {
        if let Some((name, value)) = line.split_once(" = ") {
            let number = value.split(' ').next().and_then(|it| it.parse().ok());
            match name {
                "addr" => self.address = Some(value.to_owned()),
                "channel" => self.scsi[0] = number,
                "scsi-id" => self.scsi[1] = number,
                "lun" => self.scsi[2] = number,
                "unit" | "nr" | "address" => self.address = number.map(|it| it.to_string()),
                "vectors" => self.vectors = number,
                _ => {}
            }
        } else if let Some((_, id)) = line.split_once(", pci id ") {
            self.pci = Some(id.to_owned());
        } else if let (true, Some((_, port))) =
            (line.starts_with("addr "), line.split_once(", port "))
        {
            // USB device: "addr 0.0, port 1, speed 480, name …".
            self.address = port.split(',').next().map(str::to_owned);
        }
    }

    /// Returns the last step of the device's location: its own address or type.
    fn step(&self) -> String {
        match (&self.scsi, &self.address) {
            ([Some(channel), Some(id), Some(lun)], _) => format!("{channel}:{id}:{lun}"),
            (_, Some(address)) => address.clone(),
            _ => general_type(&self.kind).to_owned(),
        }
    }
}

/// Returns the type without the accelerator in its name: `isa-pit` and `kvm-pit` have the same state in the stream.
#[must_use]
pub fn general_type(kind: &str) -> &str {
    let kind = kind.strip_prefix("kvm-").unwrap_or(kind);
    kind.strip_prefix("isa-").unwrap_or(kind)
}

/// Parses the answer to `info qtree`:
///
/// ```text
/// bus: main-system-bus
///   type System
///   dev: q35-pcihost, id ""
///     bus: pcie.0
///       type PCIE
///       dev: virtio-net-pci, id "net0"
///         vectors = 4 (0x4)
///         addr = 02.0
///         class Ethernet controller, addr 00:02.0, pci id 1af4:1000 (sub 1af4:0001)
/// ```
pub(crate) fn parse(text: &str) -> Vec<MachineDevice> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut above: Vec<Node> = Vec::new();
    for line in text.lines() {
        let body = line.trim_start_matches(' ');
        let indent = line.len() - body.len();
        let body = body.trim_end();
        while above.last().is_some_and(|node| node.indent >= indent) {
            above.pop();
        }
        let device = above.last().and_then(|node| node.device);
        let is_virtio = above.last().is_some_and(|node| node.is_virtio);
        if let Some(bus) = body.strip_prefix("bus: ") {
            above.push(Node {
                indent,
                device,
                is_virtio: bus == "virtio-bus",
            });
        } else if let Some(rest) = body.strip_prefix("dev: ") {
            if entries.len() == MAX_DEVICES {
                break;
            }
            above.push(Node {
                indent,
                device: Some(entries.len()),
                is_virtio: false,
            });
            entries.push(Entry {
                above: device,
                kind: rest.split(',').next().unwrap_or_default().to_owned(),
                is_part: is_virtio,
                ..Entry::default()
            });
        } else if let Some(entry) = device.and_then(|device| entries.get_mut(device)) {
            entry.property(body);
        }
    }
    // A parent device is listed before its children.
    let mut places: Vec<String> = Vec::with_capacity(entries.len());
    for entry in &entries {
        let above = entry.above.map_or("", |above| places[above].as_str());
        places.push(match (above, entry.is_part) {
            (above, true) => above.to_owned(),
            ("", false) => entry.step(),
            (above, false) => format!("{above}/{}", entry.step()),
        });
    }
    let whole = places.into_iter().zip(entries);
    whole
        .filter(|(_, entry)| !entry.is_part)
        .map(|(place, entry)| MachineDevice {
            place,
            kind: entry.kind,
            pci: entry.pci,
            vectors: entry.vectors,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "bus: main-system-bus\r
  type System\r
  dev: hpet, id \"\"\r
    timers = 3 (0x3)\r
  dev: kvm-ioapic, id \"\"\r
  dev: q35-pcihost, id \"\"\r
    MCFG = -1 (0xffffffffffffffff)\r
    bus: pcie.0\r
      type PCIE\r
      dev: virtio-scsi-pci, id \"\"\r
        vectors = 5 (0x5)\r
        addr = 05.0\r
        class SCSI controller, addr 00:05.0, pci id 1af4:1004 (sub 1af4:0008)\r
        bus: virtio-bus\r
          type virtio-pci-bus\r
          dev: virtio-scsi-device, id \"\"\r
            num_queues = 2 (0x2)\r
            bus: scsi.0\r
              type SCSI\r
              dev: scsi-hd, id \"\"\r
                channel = 0 (0x0)\r
                scsi-id = 1 (0x1)\r
                lun = 2 (0x2)\r
      dev: qemu-xhci, id \"\"\r
        addr = 04.0\r
        class USB controller, addr 00:04.0, pci id 1b36:000d (sub 1af4:1100)\r
        bus: usb-bus.0\r
          type usb-bus\r
          dev: usb-tablet, id \"\"\r
            port = \"\"\r
            addr 0.0, port 1, speed 480, name QEMU USB Tablet, attached\r
  dev: fw_cfg_io, id \"\"\r
";

    #[test]
    fn the_path_of_a_device_has_the_addresses_of_its_parent_buses() {
        let devices = parse(TREE);
        let found: Vec<_> = devices
            .iter()
            .map(|it| (it.place.as_str(), it.kind.as_str()))
            .collect();
        assert_eq!(
            found,
            [
                ("hpet", "hpet"),
                ("ioapic", "kvm-ioapic"),
                ("q35-pcihost", "q35-pcihost"),
                ("q35-pcihost/05.0", "virtio-scsi-pci"),
                ("q35-pcihost/05.0/0:1:2", "scsi-hd"),
                ("q35-pcihost/04.0", "qemu-xhci"),
                ("q35-pcihost/04.0/1", "usb-tablet"),
                ("fw_cfg_io", "fw_cfg_io"),
            ]
        );
        assert_eq!(devices[3].vectors, Some(5));
        assert_eq!(devices[3].pci.as_deref(), Some("1af4:1004 (sub 1af4:0008)"));
        assert_eq!(devices[0].pci, None);
    }

    #[test]
    fn unexpected_text_and_endless_lists_are_tolerated() {
        for text in [
            "",
            "unknown command: 'info qtree'\r\n",
            "dev: ",
            "    addr = 1\nbus: \ndev:",
        ] {
            assert!(parse(text).len() <= 1, "{text:?}");
        }
        let endless = "dev: a, id \"\"\n".repeat(3 * MAX_DEVICES);
        assert_eq!(parse(&endless).len(), MAX_DEVICES);
    }
}
