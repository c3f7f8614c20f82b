//! Two hosts with a libvirtd each, in namespaces of their own, and domains that move between them.
//!
//! `scripts/libvirt-host` creates a host. Its processes end with it, and it ends with this process.

use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::error::KitError;
use crate::namespace::End;
use crate::process::Process;
use crate::program::Program;
use crate::qemu::{self, PATIENCE, VCPU_NICE};

/// Interval between checks of a domain's state.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Returns true if hosts with a libvirtd can be created here, or notes a skip.
#[must_use]
pub fn is_possible() -> bool {
    if !rustix::process::geteuid().is_root() {
        crate::skip!("root", "namespaces need it");
        return false;
    }
    if !Path::new("/usr/sbin/libvirtd").exists() {
        crate::skip!(
            "libvirt",
            "no libvirtd (packages libvirt-daemon-system, libvirt-clients)"
        );
        return false;
    }
    qemu::Release::V7.program().is_some() && qemu::has_kvm()
}

/// A host.
#[derive(Debug)]
pub struct Host {
    name: &'static str,
    /// `unshare`; its child is process 1 of the host, which ends with its standard input.
    holder: Child,
    init: Pid,
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        // It fails only if it was already waited for.
        let _ = self.holder.wait();
    }
}

impl Host {
    fn new(name: &'static str, folder: &Path) -> Result<Self, KitError> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/libvirt-host");
        let mut holder = Command::new("unshare")
            .args(["--net", "--mount", "--uts", "--pid", "--fork"])
            .args(["--kill-child", "--mount-proc"])
            .arg(script)
            .args([Path::new(name), folder])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(KitError::system("run 'unshare'"))?;
        let mut word = String::new();
        if let Some(stdout) = holder.stdout.take() {
            // A process without output has ended.
            let _ = BufReader::new(stdout).read_line(&mut word);
        }
        if word.trim() != "stands" {
            return Err(KitError::Tool {
                command: "scripts/libvirt-host".to_owned(),
                said: "it prints the reason on standard error".to_owned(),
            });
        }
        let init = child_of(Pid::from_child(&holder))?;
        Ok(Self { name, holder, init })
    }

    /// Returns its name, which resolves to its address on both hosts.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the URI of its libvirtd, for the other host.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("qemu+tcp://{}/system", self.name)
    }

    /// Returns the path of a file of this host, for this process.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        let path = path.trim_start_matches('/');
        Path::new("/proc")
            .join(self.init.as_raw_nonzero().to_string())
            .join("root")
            .join(path)
    }

    /// Returns a command that runs on this host. It is killed with its starter.
    #[must_use]
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.init.as_raw_nonzero()))
            .args(["--all", "setpriv", "--pdeathsig", "KILL"])
            .arg(program);
        command
    }

    /// Starts a program on this host.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(&self, program: &str, arguments: &[&str]) -> Result<Process, KitError> {
        let mut command = self.command(program);
        command.args(arguments);
        Process::start(program, None, command, &[])
    }

    /// Runs a tool on this host; returns its output.
    ///
    /// # Errors
    /// If it cannot be run, or fails.
    pub fn tool(&self, program: &str, arguments: &[&str]) -> Result<String, KitError> {
        let run = self.command(program).args(arguments).output();
        let run = run.map_err(KitError::system(format!("run '{program}'")))?;
        if !run.status.success() {
            return Err(KitError::Tool {
                command: format!("{program} {}", arguments.join(" ")),
                said: String::from_utf8_lossy(&run.stderr).trim().to_owned(),
            });
        }
        Ok(String::from_utf8_lossy(&run.stdout).trim().to_owned())
    }

    /// Runs `virsh` with the libvirtd of this host.
    ///
    /// # Errors
    /// As for [`Host::tool`].
    pub fn virsh(&self, arguments: &[&str]) -> Result<String, KitError> {
        self.tool("virsh", arguments)
    }

    /// Starts its libvirtd, also after a kill.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start_libvirtd(&self) -> Result<(), KitError> {
        let line = ["--daemon", "--listen", "--pid-file", "/run/libvirtd.pid"];
        self.tool("libvirtd", &line)?;
        let deadline = Instant::now() + PATIENCE;
        // It goes into the background before it listens.
        while let Err(error) = self.virsh(&["uri"]) {
            if Instant::now() >= deadline {
                return Err(error);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Sends a signal to its libvirtd.
    ///
    /// # Errors
    /// If it does not run.
    pub fn signal_libvirtd(&self, signal: &str) -> Result<(), KitError> {
        self.signal_by_file("/run/libvirtd.pid", signal)
    }

    /// Sends a signal to the QEMU of a domain.
    ///
    /// # Errors
    /// If it does not run.
    pub fn signal_qemu(&self, domain: &Domain, signal: &str) -> Result<(), KitError> {
        let file = format!("/run/libvirt/qemu/{}.pid", domain.name);
        self.signal_by_file(&file, signal)
    }

    /// Lowers the priority of a domain's vCPUs, as [`qemu::lower_vcpu_priority`] does.
    fn lower_vcpu_priority(&self, domain: &Domain) -> Result<(), KitError> {
        let script = format!(
            "cd /proc/$(cat /run/libvirt/qemu/{}.pid)/task && \
             for thread in $(grep -l '^CPU ' */comm); do \
             renice -n {VCPU_NICE} -p ${{thread%/comm}}; done",
            domain.name
        );
        self.tool("sh", &["-c", &script]).map(drop)
    }

    fn signal_by_file(&self, file: &str, signal: &str) -> Result<(), KitError> {
        let pid = fs::read_to_string(self.path(file)).map_err(KitError::system("read a pid"))?;
        self.tool("kill", &["-s", signal, pid.trim()]).map(drop)
    }

    /// Sends a signal to a process that was started on this host.
    ///
    /// # Errors
    /// If it has ended.
    pub fn signal(&self, process: &Process, signal: Signal) -> Result<(), KitError> {
        kill_process(child_of(process.pid())?, signal)
            .map_err(|error| KitError::system("send a signal")(error.into()))
    }

    /// Returns the local process id of a process that was started on this host.
    ///
    /// # Errors
    /// If it has ended.
    pub fn pid(&self, process: &Process) -> Result<Pid, KitError> {
        child_of(process.pid())
    }

    /// Returns libvirt's name of a domain's state; `None` if it is not on this host.
    #[must_use]
    pub fn state(&self, domain: &Domain) -> Option<String> {
        self.virsh(&["domstate", &domain.name]).ok()
    }

    /// Returns the last output lines of a domain's QEMU on this host, which has probably ended.
    fn last_words(&self, domain: &Domain) -> String {
        let path = self.path(&format!("/var/log/libvirt/qemu/{}.log", domain.name));
        let output = fs::read_to_string(path).unwrap_or_default();
        let lines: Vec<_> = output.lines().collect();
        lines[lines.len().saturating_sub(4)..].join("\n")
    }
}

/// Returns the only child of a process.
fn child_of(parent: Pid) -> Result<Pid, KitError> {
    let pid = parent.as_raw_nonzero();
    let path = format!("/proc/{pid}/task/{pid}/children");
    let deadline = Instant::now() + PATIENCE;
    loop {
        let children = fs::read_to_string(&path).map_err(KitError::system("read the children"))?;
        let mut children = children.split_whitespace();
        if let Some(child) = children.next().and_then(|pid| pid.parse().ok()) {
            return Pid::from_raw(child).ok_or_else(|| KitError::Memory {
                problem: "a child has no number".to_owned(),
            });
        }
        if Instant::now() >= deadline {
            return Err(KitError::Late {
                process: format!("process {pid}"),
                what: "started".to_owned(),
                waited: PATIENCE,
                said: String::new(),
            });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// A transient domain with the guest program.
#[derive(Debug)]
pub struct Domain {
    /// Its name.
    pub name: String,
    program: Arc<Program>,
    console: PathBuf,
    /// Id of its RAM's backend.
    ram: &'static str,
}

/// Hardware of a domain other than its vCPU and RAM.
#[derive(Debug, Clone, Copy)]
pub enum Hardware<'a> {
    /// A disk, on a machine type that all releases of QEMU have.
    Disk(Disk),
    /// These `<devices>`, on the same machine type; node 0 has memory slots.
    Devices(&'a str),
    /// A microvm, which has no PCI devices.
    Microvm,
}

/// Location of a domain's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    /// In a folder shared by both hosts.
    Shared,
    /// A separate one per host, so that it has to be copied.
    OfEachHost,
}

/// Both hosts, and the link between them.
#[derive(Debug)]
pub struct Hosts {
    /// The first host, `a`.
    pub source: Host,
    /// The second host, `b`.
    pub destination: Host,
    folder: TempDir,
}

/// Bytes of a disk; few, since other tests cover the copy.
const DISK_BYTES: u64 = 4 << 20;

impl Hosts {
    /// Creates both, each with its libvirtd. Needs root.
    ///
    /// # Errors
    /// If any part of it cannot be created.
    pub fn new() -> Result<Self, KitError> {
        let folder = qemu::folder()?;
        // QEMU runs as a separate user.
        open_to_all(folder.path())?;
        let this = Self {
            source: Host::new("a", folder.path())?,
            destination: Host::new("b", folder.path())?,
            folder,
        };
        let [a, b] = [&this.source, &this.destination].map(|host| host.init.as_raw_nonzero());
        let (a, b) = (a.to_string(), b.to_string());
        let pair = [
            "link", "add", "veth", "netns", &a, "type", "veth", "peer", "name", "veth", "netns", &b,
        ];
        let made = Command::new("ip").args(pair).output();
        let made = made.map_err(KitError::system("run 'ip'"))?;
        if !made.status.success() {
            return Err(KitError::Tool {
                command: format!("ip {}", pair.join(" ")),
                said: String::from_utf8_lossy(&made.stderr).trim().to_owned(),
            });
        }
        for (host, number) in [(&this.source, 1), (&this.destination, 2)] {
            let addresses = [
                format!("192.0.2.{number}/24"),
                format!("2001:db8::{number}/64"),
            ];
            for address in addresses {
                // Without duplicate detection an address is usable at once.
                host.tool("ip", &["address", "add", &address, "dev", "veth", "nodad"])?;
            }
            host.tool("ip", &["link", "set", "dev", "veth", "up"])?;
            host.start_libvirtd()?;
        }
        Ok(this)
    }

    /// Returns the host of a side.
    #[must_use]
    pub fn host(&self, end: End) -> &Host {
        match end {
            End::Source => &self.source,
            End::Destination => &self.destination,
        }
    }

    /// Returns the folder shared by both hosts.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Takes the link down or up.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn link(&self, state: &str) -> Result<(), KitError> {
        let line = ["link", "set", "dev", "veth", state];
        self.source.tool("ip", &line).map(drop)
    }

    /// Limits both directions to `mbits` Mbit/s from now on.
    ///
    /// # Errors
    /// If `tc` fails.
    pub fn limit(&self, mbits: u32) -> Result<(), KitError> {
        for host in [&self.source, &self.destination] {
            let rate = format!("{mbits}mbit");
            let bucket = [
                "qdisc", "replace", "dev", "veth", "root", "tbf", "rate", &rate, "burst", "128k",
                "limit", "1m",
            ];
            host.tool("tc", &bucket)?;
        }
        Ok(())
    }

    /// Starts a domain with a disk at the source, and waits until its guest writes.
    ///
    /// # Errors
    /// If it does not start.
    pub fn domain(
        &self,
        name: &str,
        program: &Arc<Program>,
        disk: Disk,
    ) -> Result<Domain, KitError> {
        self.make_disks(name, disk)?;
        self.domain_with(name, program, Hardware::Disk(disk))
    }

    /// Starts a domain with other hardware at the source, and waits until its guest writes.
    ///
    /// # Errors
    /// If it does not start.
    pub fn domain_with(
        &self,
        name: &str,
        program: &Arc<Program>,
        hardware: Hardware<'_>,
    ) -> Result<Domain, KitError> {
        let domain = Domain {
            name: name.to_owned(),
            program: Arc::clone(program),
            console: self.folder().join(format!("{name}.console")),
            ram: match hardware {
                Hardware::Disk(_) => "pc.ram",
                Hardware::Devices(_) => "ram-node0",
                Hardware::Microvm => "microvm.ram",
            },
        };
        make_file(&domain.console, 0)?;
        let xml = self.folder().join(format!("{name}.xml"));
        fs::write(&xml, self.xml(&domain, hardware)?).map_err(KitError::system("write the XML"))?;
        let source = &self.source;
        source.virsh(&["create", "--paused", &xml.display().to_string()])?;
        program.fill(&self.memory(source, &domain, domain.ram)?)?;
        if !program.keeps_rate() {
            source.lower_vcpu_priority(&domain)?;
        }
        source.virsh(&["resume", name])?;
        let deadline = Instant::now() + PATIENCE;
        while !fs::read_to_string(&domain.console).is_ok_and(|output| output.contains("writes=")) {
            if Instant::now() >= deadline {
                return Err(KitError::Late {
                    process: name.to_owned(),
                    what: "counted".to_owned(),
                    waited: PATIENCE,
                    said: String::new(),
                });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(domain)
    }

    fn make_disks(&self, name: &str, disk: Disk) -> Result<(), KitError> {
        match disk {
            Disk::Shared => make_file(&self.folder().join(format!("{name}.disk")), DISK_BYTES),
            Disk::OfEachHost => {
                let path = format!("/run/{name}.disk");
                make_file(&self.source.path(&path), DISK_BYTES)?;
                make_file(&self.destination.path(&path), DISK_BYTES)
            }
        }
    }

    fn xml(&self, domain: &Domain, hardware: Hardware<'_>) -> Result<String, KitError> {
        let name = &domain.name;
        let ram = domain.program.ram_bytes() >> 10;
        let elf = self.folder().join("hotlift.elf");
        let boot = domain.program.boot(&elf)?;
        // '-kernel', the file, '-append', its words.
        let append = boot.last().cloned().unwrap_or_default();
        let machine = match hardware {
            Hardware::Microvm => "microvm",
            Hardware::Disk(_) | Hardware::Devices(_) => qemu::PC_7,
        };
        let (mut memory, mut devices) = (String::new(), String::new());
        match hardware {
            Hardware::Disk(disk) => {
                let disk = match disk {
                    Disk::Shared => self.folder().join(format!("{name}.disk")),
                    Disk::OfEachHost => PathBuf::from(format!("/run/{name}.disk")),
                };
                devices = format!(
                    "<disk type='file'><driver name='qemu' type='raw'/><source file='{}'/>\
                     <target dev='vda' bus='virtio'/></disk><memballoon model='none'/>",
                    disk.display()
                );
            }
            Hardware::Devices(xml) => {
                memory = format!(
                    "<maxMemory slots='4' unit='GiB'>1</maxMemory>\
                     <cpu><numa><cell id='0' cpus='0' memory='{ram}' unit='KiB'/></numa></cpu>"
                );
                xml.clone_into(&mut devices);
            }
            Hardware::Microvm => "<memballoon model='none'/>".clone_into(&mut devices),
        }
        let mut xml = String::new();
        let written = write!(
            xml,
            "<domain type='kvm'><name>{name}</name>\
             <memory unit='KiB'>{ram}</memory>{memory}\
             <memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>\
             <vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='{machine}'>hvm</type>\
             <loader type='rom'>/usr/share/qemu/qboot.rom</loader>\
             <kernel>{elf}</kernel><cmdline>{append}</cmdline></os>\
             <features><acpi/></features>\
             <devices>\
             <controller type='usb' model='none'/>\
             <serial type='file'><source path='{console}' append='on'/></serial>\
             {devices}\
             </devices></domain>",
            elf = elf.display(),
            console = domain.console.display(),
        );
        written.expect("a String takes everything");
        Ok(xml)
    }

    /// Returns the file of a domain's memory backend on a host. libvirt gives that of a DIMM its alias, as `dimm0`.
    ///
    /// # Errors
    /// If the domain is not there.
    pub fn memory(&self, host: &Host, domain: &Domain, id: &str) -> Result<PathBuf, KitError> {
        let number = host.virsh(&["domid", &domain.name])?;
        let name = &domain.name;
        Ok(host.path(&format!("/run/ram/libvirt/qemu/{number}-{name}/{id}")))
    }

    /// Returns the side where the only guest of a domain runs.
    ///
    /// # Errors
    /// [`KitError::Memory`] if it runs nowhere, or on both hosts.
    pub fn guest_location(&self, domain: &Domain) -> Result<End, KitError> {
        let states = [&self.source, &self.destination].map(|host| host.state(domain));
        match states.each_ref().map(Option::as_deref) {
            [Some("running"), None] => Ok(End::Source),
            [None, Some("running")] => Ok(End::Destination),
            _ => {
                let output = [&self.source, &self.destination].map(|host| host.last_words(domain));
                let problem = format!(
                    "{} is {states:?} at source and destination; output of their QEMUs: {output:?}",
                    domain.name
                );
                Err(KitError::Memory { problem })
            }
        }
    }

    /// Proves that exactly one guest of a domain runs, and that its memory matches its writes. Returns its side and its writes
    /// so far; it keeps running.
    ///
    /// # Errors
    /// [`KitError::Memory`] if not; other errors if it cannot be read.
    pub fn prove(&self, domain: &Domain) -> Result<(End, u64), KitError> {
        let end = self.guest_location(domain)?;
        let host = self.host(end);
        let name = &domain.name;
        host.virsh(&["suspend", name])?;
        let registers = host.virsh(&["qemu-monitor-command", "--hmp", name, "info registers"])?;
        let ram = fs::read(self.memory(host, domain, domain.ram)?);
        let ram = ram.map_err(KitError::system("read the file of RAM"))?;
        let writes = domain.program.prove(&registers, &ram)?;
        host.virsh(&["resume", name])?;
        Ok((end, writes))
    }
}

/// Creates a file that every user may write to.
///
/// # Errors
/// If it cannot be created.
pub fn make_file(path: &Path, bytes: u64) -> Result<(), KitError> {
    let what = || format!("make {}", path.display());
    let file = fs::File::create(path).map_err(KitError::system(what()))?;
    file.set_len(bytes).map_err(KitError::system(what()))?;
    open_to_all(path)
}

/// Makes `path` accessible to QEMU's user.
fn open_to_all(path: &Path) -> Result<(), KitError> {
    fs::set_permissions(path, Permissions::from_mode(0o777))
        .map_err(KitError::system(format!("open {} to all", path.display())))
}
