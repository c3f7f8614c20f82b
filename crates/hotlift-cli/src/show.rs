//! `hotlift show`: prints a description of a save file.

use clap::Args;
use hotlift::file::{Description, FileFormat, Location, RamDescription, describe};
use hotlift::{Control, MigrationError};
use hotlift_command::security::SecurityArgs;
use hotlift_qmp::{Uuid, one_line};
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::progress::bytes;
use hotlift_terminal::signals::Interrupt;
use hotlift_terminal::table::{align, new_table};
use hotlift_terminal::width;

use crate::clock::{SavedAt, now};
use crate::error::CommandError;
use crate::output_args::OutputArgs;
use crate::save_file::{location, named};

/// Flags of `show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// File of 'hotlift save', mapped-ram file of QEMU, or a file of 'hotlift serve --files': tcp:HOST:PORT/NAME
    #[arg(value_name = "FILE", value_parser = location())]
    file: Location,
    /// Read all pages and verify their checksums
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    security: SecurityArgs,
}

/// Runs `hotlift show`.
pub fn run(args: &ShowArgs) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch()?;
    let control = Control::new();
    let tls = match args.file.server() {
        Some(server) => args.security.tls(server)?,
        None => None,
    };
    let file = args.file.clone().with_tls(tls);
    let described = interrupt.cancelling(&control, || describe(&file, args.verify, &control));
    let described = described.map_err(|error| match error {
        MigrationError::Cancelled => TerminalError::Interrupted.into(),
        // Removes the prefix of `MigrationError::File`: `CommandError::Show` has a prefix of its own.
        MigrationError::File(error) => CommandError::Show {
            reason: error_line(&error),
        },
        error => CommandError::Show {
            reason: error_line(&error),
        },
    });
    let description = described.map_err(|error| named(error, &args.file))?;
    Ok(args.output.print(&description, || table(&description))?)
}

fn table(file: &Description) -> String {
    let mut table = new_table(&["save file", ""]);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    row(
        "machine",
        match one_line(&file.info.machine) {
            name if name.is_empty() => {
                "not in the stream (machine types up to 2.3 do not send it)".to_owned()
            }
            name => name,
        },
    );
    row(
        "UUID",
        match file.info.uuid.as_str() {
            "" => "not in the stream".to_owned(),
            uuid => uuid.to_owned(),
        },
    );
    let saved = match file.format {
        FileFormat::Hotlift => {
            row("written by", format!("hotlift {}", file.info.hotlift));
            SavedAt::Kept(file.saved_at())
        }
        FileFormat::MappedRam => {
            row("format", "mapped-ram of QEMU, without checksums".to_owned());
            SavedAt::Modified(file.saved_at())
        }
    };
    let behind = saved.lag(now());
    let behind = behind.unwrap_or_else(|| "less than 1 s behind".to_owned());
    row("guest's clock", format!("{behind}, if it is restored now"));
    for block in &file.ram {
        let name = format!("RAM block {}", one_line(&block.name));
        row(&name, ram(block));
    }
    for section in &file.early {
        let state = bytes(section.bytes);
        row(
            &format!("before RAM {}", one_line(&section.name)),
            match section.plugged {
                Some((plugged, all)) => {
                    format!("{state}, {} of {} are plugged", bytes(plugged), bytes(all))
                }
                None => state,
            },
        );
    }
    row("QEMU's command line", command_line(file));
    let devices = bytes(file.device_bytes);
    row(
        "devices",
        match file.devices {
            Some(count) => format!("{count}, {devices}"),
            None => devices,
        },
    );
    for share in &file.shares {
        let (pages, length) = (bytes(share.pages * 4096), bytes(share.bytes));
        row(
            &format!("method {}", share.method),
            format!("{pages} in {length}, {} blocks", share.blocks),
        );
    }
    #[expect(clippy::cast_precision_loss, reason = "a share, shown with two digits")]
    let ratio = file.content_bytes() as f64 / file.file_bytes.max(1) as f64;
    row(
        "file",
        format!("{}, content / file {ratio:.2}", bytes(file.file_bytes)),
    );
    row(
        "pages",
        match (file.verified_blocks, file.format) {
            (Some(blocks), _) => format!("no damage: {blocks} blocks were read"),
            (None, FileFormat::Hotlift) => "not read (--verify)".to_owned(),
            (None, FileFormat::MappedRam) => "not verified: the format has no checksums".to_owned(),
        },
    );
    if let Some(problem) = &file.problem {
        row("not read to its end", problem.clone());
    }
    align(&mut table);
    width::wrap(&mut table, 1);
    table.to_string()
}

/// Returns one line about the content of a RAM block.
fn ram(block: &RamDescription) -> String {
    let length = bytes(block.bytes);
    match block.pages {
        0 => format!("{length}, all zero: unused by the guest, or unplugged"),
        pages => format!("{length}, {} with content", bytes(pages * 4096)),
    }
}

/// Returns a command line of QEMU for the file: machine type, RAM, vCPUs and UUID. Devices are missing, since the file does not
/// describe them fully.
fn command_line(file: &Description) -> String {
    let mut words = vec!["qemu-system-x86_64".to_owned(), "-machine".to_owned()];
    let machine = match one_line(&file.info.machine) {
        name if name.is_empty() => "TYPE".to_owned(),
        name => name,
    };
    let backends: Vec<_> = file
        .ram
        .iter()
        .filter_map(|block| Some((backend(block)?, block.bytes)))
        .collect();
    // A RAM block that QEMU creates from -m alone has the name of the machine, as in pc.ram.
    let is_own =
        |block: &&RamDescription| block.name.ends_with(".ram") && !block.name.contains('/');
    let (machine, memory) = match (file.ram.iter().find(is_own), backends.as_slice()) {
        (Some(own), _) => (machine, Some(own.bytes)),
        (None, [(id, length)]) => (format!("{machine},memory-backend={id}"), Some(*length)),
        (None, _) => (machine, None),
    };
    words.push(machine);
    if let Some(length) = memory {
        words.extend(["-m".to_owned(), size(length)]);
    }
    for (id, length) in backends {
        let length = size(length);
        words.extend([
            "-object".to_owned(),
            format!("memory-backend-ram,id={id},size={length}"),
        ]);
    }
    if let Some(vcpus) = file.vcpus.filter(|vcpus| *vcpus > 0) {
        words.extend(["-smp".to_owned(), vcpus.to_string()]);
    }
    if let Ok(uuid) = file.info.uuid.parse::<Uuid>()
        && uuid != Uuid::default()
    {
        words.extend(["-uuid".to_owned(), uuid.to_string()]);
    }
    let line = shlex::try_join(words.iter().map(String::as_str)).unwrap_or_default();
    format!("{line} … and the source's devices")
}

/// Returns the id of the memory backend that made a RAM block; `None` for RAM of devices and firmware.
fn backend(block: &RamDescription) -> Option<String> {
    let name = block.name.strip_prefix("/objects/").unwrap_or(&block.name);
    let is_id = !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    is_id.then(|| name.to_owned())
}

/// Formats a size in bytes as in QEMU's options.
fn size(length: u64) -> String {
    match length % (1 << 20) {
        0 => format!("{}M", length >> 20),
        _ => length.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use hotlift::file::FileInfo;

    use super::*;

    fn description(machine: &str, ram: &[(&str, u64, u64)]) -> Description {
        let ram = ram.iter().map(|(name, length, pages)| RamDescription {
            name: (*name).to_owned(),
            bytes: *length,
            pages: *pages,
        });
        Description {
            format: FileFormat::Hotlift,
            info: FileInfo {
                machine: machine.to_owned(),
                uuid: "486f746c696674206265736964652051".to_owned(),
                ..FileInfo::default()
            },
            modified: None,
            problem: None,
            file_bytes: 1,
            early: Vec::new(),
            ram: ram.collect(),
            devices: None,
            vcpus: Some(2),
            device_bytes: 0,
            shares: Vec::new(),
            verified_blocks: None,
        }
    }

    #[test]
    fn the_command_line_has_the_machine_its_ram_and_the_backends() {
        let line = |machine, ram: &[_]| command_line(&description(machine, ram));
        let firmware = ("pc.bios", 128 << 10, 32);
        assert_eq!(
            line(
                "pc-q35-10.0",
                &[("pc.ram", 1 << 30, 9), ("d1", 256 << 20, 0), firmware]
            ),
            "qemu-system-x86_64 -machine pc-q35-10.0 -m 1024M -object 'memory-backend-ram,id=d1,size=256M' -smp 2 \
             -uuid 486f746c-6966-7420-6265-736964652051 … and the source's devices"
        );
        let one = line("pc-i440fx-4.0", &[("/objects/ram0", 1 << 20, 9), firmware]);
        assert!(one.contains("-machine 'pc-i440fx-4.0,memory-backend=ram0' -m 1M -object 'memory-backend-ram,id=ram0,size=1M'"), "{one}");
        let two = line(
            "",
            &[
                ("n0", 4096, 9),
                ("n1", 4096, 9),
                ("0000:00:02.0/virtio-net-pci.rom", 4096, 1),
            ],
        );
        assert!(
            two.contains("-machine TYPE -object 'memory-backend-ram,id=n0,size=4096' -object"),
            "{two}"
        );
        assert!(!two.contains("rom"), "{two}");
    }

    #[test]
    fn every_ram_block_is_shown_even_without_content() {
        let shown = table(&description(
            "",
            &[("pc.ram", 1 << 30, 9), ("d1", 256 << 20, 0)],
        ));
        for words in ["RAM block d1", "256.0 MiB, all zero", "not in the stream"] {
            assert!(shown.contains(words), "{words}: {shown}");
        }
        let columns = width::of_output().unwrap_or(80);
        let is_long = |line: &&str| line.chars().count() > columns;
        assert_eq!(shown.lines().find(is_long), None, "{shown}");
        let mut damaged = description("pc-q35-10.0", &[("pc.ram", 1 << 30, 9)]);
        damaged.format = FileFormat::MappedRam;
        damaged.modified = Some(0);
        damaged.problem = Some("the file is cut short".to_owned());
        let shown = table(&damaged);
        for words in [
            "mapped-ram of QEMU",
            "modification",
            "cut short",
            "no checksums",
        ] {
            assert!(shown.contains(words), "{words}: {shown}");
        }
    }
}
