//! A QEMU that runs the machine of the recorded streams, and the two ends of a migration with it.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::Duration;

use hotlift_methods::MethodInfo;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::stream::{RAM_PAGES, Stream, ram_page};

/// How long a QEMU may say nothing, or take no bytes, before it counts as hanging. That is how a
/// destination refuses a payload: the channel's thread ends, and in 7.2 as in 10.0 the main thread,
/// QMP with it, waits for that channel's SYNC for ever.
const PATIENCE: Duration = Duration::from_secs(30);

/// Multifd channels of the recorded streams.
const CHANNELS: usize = 2;
const UUID: &str = "486f746c-6966-7420-6669-787475726573";
const BIOS_LEN: usize = 64 << 10;

/// Plays `main` and `channels` in `method`, or `main` alone, to a new destination. An error is what QEMU
/// said when it gave up.
pub fn load(
    program: &Path,
    machine: &str,
    main: Vec<u8>,
    channels: Option<(&str, Vec<Vec<u8>>)>,
) -> Result<Loaded, String> {
    let mut machine = Machine::start(program, machine, &[], &["-incoming", "defer"]);
    machine.set_multifd(channels.as_ref().map(|(method, _)| *method))?;
    let path = machine.folder.path().join("stream");
    let uri = format!("unix:{}", path.display());
    machine.execute("migrate-incoming", &json!({ "uri": uri }))?;

    // QEMU 7.2 takes the connection that comes first for main.
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

    let bios = machine.folder.path().join("bios-read-back");
    let place =
        json!({ "val": (4_u64 << 30) - BIOS_LEN as u64, "size": BIOS_LEN, "filename": bios });
    machine.execute("pmemsave", &place)?;
    Ok(Loaded {
        ram: fs::read(machine.folder.path().join("ram")).expect("the guest's RAM"),
        bios: fs::read(bios).expect("the guest's BIOS"),
    })
}

/// What a destination holds after a migration.
pub struct Loaded {
    /// All of `pc.ram`: it is a shared file, where `pmemsave` would miss what the BIOS area hides.
    pub ram: Vec<u8>,
    /// All of `pc.bios`.
    pub bios: Vec<u8>,
}

/// Migrates a paused machine with the script's RAM to the caller.
pub fn send(program: &Path, machine: &str, method: &MethodInfo) -> Result<Stream, String> {
    let ram: Vec<u8> = (0..RAM_PAGES).flat_map(ram_page).collect();
    let mut machine = Machine::start(program, machine, &ram, &[]);
    machine.set_multifd(Some(method.name))?;
    let path = machine.folder.path().join("stream");
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
    machine.execute("quit", &json!({}))?;

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

/// A paused QEMU, killed when dropped.
struct Machine {
    process: Child,
    monitor: BufReader<UnixStream>,
    folder: TempDir,
}

impl Machine {
    fn start(program: &Path, machine: &str, ram: &[u8], arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        fs::write(path("ram"), ram).expect("the RAM's file");
        // Nothing of the recorded BIOS, so that what is read back was migrated.
        fs::write(path("bios"), [0xf4; BIOS_LEN]).expect("the BIOS's file");
        // QMP is on a socket in the place of stdin and stdout: there is nothing to wait for, and a
        // QEMU that dies is an end of file.
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        ours.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let process = Command::new(program)
            .args([
                "-machine",
                &format!("{machine},acpi=off,graphics=off,memory-backend=pc.ram"),
            ])
            .arg("-object")
            .arg(format!(
                "memory-backend-file,id=pc.ram,mem-path={},size={},share=on",
                path("ram").display(),
                RAM_PAGES * 4096
            ))
            .args([
                "-m", "2048k", "-accel", "tcg", "-cpu", "qemu64", "-uuid", UUID,
            ])
            .args(["-nodefaults", "-display", "none", "-vga", "none", "-S"])
            .args(["-qmp", "stdio", "-bios"])
            .arg(path("bios"))
            .args(arguments)
            .stdin(OwnedFd::from(
                theirs.try_clone().expect("a second descriptor"),
            ))
            .stdout(OwnedFd::from(theirs))
            .stderr(File::create(path("stderr")).expect("a file for stderr"))
            .spawn()
            .expect("QEMU starts");
        Self {
            process,
            monitor: BufReader::new(ours),
            folder,
        }
    }

    /// Multifd in `method` with the channels of the recorded streams, or none; tells of progress.
    fn set_multifd(&mut self, method: Option<&str>) -> Result<(), String> {
        self.execute("qmp_capabilities", &json!({}))?;
        let capabilities = [("multifd", method.is_some()), ("events", true)]
            .map(|(name, state)| json!({ "capability": name, "state": state }));
        let capabilities = json!({ "capabilities": capabilities });
        self.execute("migrate-set-capabilities", &capabilities)?;
        let Some(method) = method else {
            return Ok(());
        };
        let parameters = json!({ "multifd-channels": CHANNELS, "multifd-compression": method });
        self.execute("migrate-set-parameters", &parameters)
    }

    fn execute(&mut self, command: &str, arguments: &Value) -> Result<(), String> {
        let line = format!(
            "{}\n",
            json!({ "execute": command, "arguments": arguments })
        );
        let sent = self.monitor.get_mut().write_all(line.as_bytes());
        sent.map_err(|error| format!("{command}: {error}"))?;
        loop {
            let answer = self.line()?;
            if let Some(error) = answer.get("error") {
                return Err(format!("{command}: {error}"));
            }
            if answer.get("return").is_some() {
                return Ok(());
            }
        }
    }

    /// Waits for the end of a migration. After a failed one QEMU says why and exits, or hangs.
    fn migrated(&mut self) -> Result<(), String> {
        while self.line()?.pointer("/data/status") != Some(&json!("completed")) {}
        Ok(())
    }

    /// The next thing that QMP says.
    fn line(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        let why = match self.monitor.read_line(&mut line) {
            Ok(1..) => return Ok(serde_json::from_str(&line).expect("QMP speaks JSON")),
            Ok(0) => "exits".to_owned(),
            Err(error) => format!("hangs ({error})"),
        };
        let stderr = fs::read_to_string(self.folder.path().join("stderr")).expect("stderr");
        Err(format!("QEMU {why}: {}", stderr.trim_end()))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both fail only if the process has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
