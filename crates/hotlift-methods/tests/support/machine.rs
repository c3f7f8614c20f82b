//! A QEMU that runs the machine of the recorded streams, and the connections of a migration with this QEMU.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use hotlift_methods::MethodInfo;
use hotlift_qmp::Qemu;
use hotlift_testkit::qemu::{self, Launched, QMP};
use serde_json::{Value, json};

use super::stream::{RAM_PAGES, Stream, ram_page};

/// Time without output or reads after which a QEMU counts as hanging. A destination that rejects a payload hangs: the channel's
/// thread ends, and the main thread, with QMP, waits for that channel's SYNC forever, in 7.2 as in 10.0.
const PATIENCE: Duration = Duration::from_secs(30);

/// Multifd channels of the recorded streams.
const CHANNELS: usize = 2;
const UUID: &str = "486f746c-6966-7420-6669-787475726573";
const BIOS_LEN: usize = 64 << 10;

/// Sends `main` and `channels` in `method`, or `main` alone, to a new destination. An error is QEMU's last output.
pub fn load(
    program: &Path,
    machine: &str,
    main: Vec<u8>,
    channels: Option<(&str, Vec<Vec<u8>>)>,
) -> Result<Loaded, String> {
    let mut machine = Machine::start(program, machine, &[], &["-incoming", "defer"]);
    machine.set_multifd(channels.as_ref().map(|(method, _)| *method))?;
    let path = machine.process.path("stream");
    let uri = format!("unix:{}", path.display());
    machine.execute("migrate-incoming", &json!({ "uri": uri }))?;

    // QEMU 7.2 uses the first connection as main.
    let writers: Vec<_> = std::iter::once(main)
        .chain(channels.into_iter().flat_map(|(_, channels)| channels))
        .map(|bytes| {
            let mut connection = UnixStream::connect(&path).expect("QEMU listens");
            thread::spawn(move || -> io::Result<UnixStream> {
                connection.set_write_timeout(Some(PATIENCE))?;
                connection.write_all(&bytes)?;
                Ok(connection)
            })
        })
        .collect();
    machine.migrated()?;
    for writer in writers {
        writer.join().expect("a writer").expect("QEMU read it all");
    }

    let bios = machine.process.path("bios-read-back");
    let place =
        json!({ "val": (4_u64 << 30) - BIOS_LEN as u64, "size": BIOS_LEN, "filename": bios });
    machine.execute("pmemsave", &place)?;
    Ok(Loaded {
        ram: fs::read(machine.process.path("ram")).expect("the guest's RAM"),
        bios: fs::read(bios).expect("the guest's BIOS"),
    })
}

/// Memory of a destination after a migration.
pub struct Loaded {
    /// All of `pc.ram`: it is a shared file, where `pmemsave` would miss the range hidden by the BIOS.
    pub ram: Vec<u8>,
    /// All of `pc.bios`.
    pub bios: Vec<u8>,
}

/// Migrates a paused machine with the script's RAM to the caller.
pub fn send(program: &Path, machine: &str, method: &MethodInfo) -> Result<Stream, String> {
    let ram: Vec<u8> = (0..RAM_PAGES).flat_map(ram_page).collect();
    let mut machine = Machine::start(program, machine, &ram, &[]);
    machine.set_multifd(Some(method.name))?;
    let path = machine.process.path("stream");
    let listener = UnixListener::bind(&path).expect("a listener");
    let readers = thread::spawn(move || {
        let connections = listener.incoming().take(1 + CHANNELS);
        let readers = connections.map(|connection| {
            let mut connection = connection.expect("QEMU connects");
            thread::spawn(move || -> io::Result<Vec<u8>> {
                let mut bytes = Vec::new();
                connection.set_read_timeout(Some(PATIENCE))?;
                connection.read_to_end(&mut bytes)?;
                Ok(bytes)
            })
        });
        readers.collect::<Vec<_>>()
    });
    let uri = format!("unix:{}", path.display());
    machine.execute("migrate", &json!({ "uri": uri }))?;
    machine.migrated()?;
    machine.qmp.quit().map_err(|error| error.to_string())?;

    let readers = readers.join().expect("all connections").into_iter();
    let all: Vec<Vec<u8>> = readers
        .map(|reader| reader.join().expect("a reader").expect("read to the end"))
        .collect();
    let (main, mut channels): (Vec<_>, Vec<_>) = all
        .into_iter()
        .partition(|bytes| bytes.starts_with(b"QEVM"));
    channels.sort_by_key(|bytes| bytes[24]);
    let main = main.into_iter().next().expect("a main channel");
    Ok(Stream::new(main, &channels, method))
}

/// A paused QEMU.
struct Machine {
    process: Launched,
    qmp: Qemu,
}

impl Machine {
    fn start(program: &Path, machine: &str, ram: &[u8], arguments: &[&str]) -> Self {
        let folder = qemu::folder().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        fs::write(path("ram"), ram).expect("the RAM's file");
        // Without the recorded BIOS, so that the memory read back was migrated.
        fs::write(path("bios"), [0xf4; BIOS_LEN]).expect("the BIOS's file");
        let memory = format!(
            "memory-backend-file,id=pc.ram,mem-path={},size={},share=on",
            path("ram").display(),
            RAM_PAGES * 4096
        );
        let machine = format!("{machine},acpi=off,graphics=off,memory-backend=pc.ram");
        let bios = path("bios").display().to_string();
        let mut line = qemu::bare(&path(QMP));
        for (flag, value) in [
            ("-machine", &*machine),
            ("-object", &memory),
            ("-m", "2048k"),
            ("-accel", "tcg"),
            ("-cpu", "qemu64"),
            ("-uuid", UUID),
            ("-vga", "none"),
            ("-bios", &bios),
        ] {
            line.extend([flag, value].map(str::to_owned));
        }
        line.extend(["-S"].iter().chain(arguments).map(|&word| word.to_owned()));
        let process = Launched::start(program, &line, folder).expect("QEMU starts");
        let mut qmp = process.connect().expect("QMP");
        qmp.client().set_timeout(PATIENCE);
        Self { process, qmp }
    }

    /// Enables multifd in `method` with the channels of the recorded streams, or none, and events of progress.
    fn set_multifd(&mut self, method: Option<&str>) -> Result<(), String> {
        let capabilities = [("multifd", method.is_some()), ("events", true)];
        let set = self.qmp.set_capabilities(&capabilities);
        set.map_err(|error| self.explain(&error))?;
        let Some(method) = method else {
            return Ok(());
        };
        let parameters = json!({ "multifd-channels": CHANNELS, "multifd-compression": method });
        let set = self.qmp.set_parameters(&parameters);
        set.map_err(|error| self.explain(&error))
    }

    fn execute(&mut self, command: &str, arguments: &Value) -> Result<(), String> {
        let answer = self.qmp.client().execute(command, arguments);
        answer.map(drop).map_err(|error| self.explain(&error))
    }

    /// Waits for the end of a migration. After a failed one QEMU reports the reason and exits, or hangs.
    fn migrated(&mut self) -> Result<(), String> {
        loop {
            let event = self.qmp.wait_event(PATIENCE);
            match event.map_err(|error| self.explain(&error))? {
                Some(event) if event.data["status"] == "completed" => return Ok(()),
                Some(_) => {}
                None => return Err(self.explain(&"it hangs")),
            }
        }
    }

    /// Returns the failure with QEMU's output.
    fn explain(&self, why: &dyn std::fmt::Display) -> String {
        let process = self.process.process();
        process.read_last_output();
        format!("QEMU: {why}: {}", process.output_lines().join(" | "))
    }
}
