//! Two hosts, each with a libvirtd in separate namespaces, and domains that migrate between them.
//!
//! `scripts/libvirt-host` creates a host. When the host ends, its processes end. When the test process ends, the hosts
//! end.

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

/// Interval between two polls of a domain's state.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Returns true if this machine can run hosts with a libvirtd. Otherwise notes a skip and returns false.
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

/// A host in namespaces, with its own libvirtd.
#[derive(Debug)]
pub struct Host {
    name: &'static str,
    /// The process `unshare`. The child of `unshare` is process 1 of the host, and ends when its standard input is
    /// closed.
    holder: Child,
    init: Pid,
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        // The wait fails only if the process was already waited for.
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
            // A process that closes its output without a line has ended.
            let _ = BufReader::new(stdout).read_line(&mut word);
        }
        if word.trim() != "stands" {
            return Err(KitError::Tool {
                command: "scripts/libvirt-host".to_owned(),
                output: "it prints the reason on standard error".to_owned(),
            });
        }
        let init = child_of(Pid::from_child(&holder))?;
        Ok(Self { name, holder, init })
    }

    /// Returns the name of the host, which resolves to the host's address on both hosts.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the URI by which the other host connects to this host's libvirtd.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("qemu+tcp://{}/system", self.name)
    }

    /// Returns the path by which the test process can open the file `path` of this host.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        let path = path.trim_start_matches('/');
        Path::new("/proc")
            .join(self.init.as_raw_nonzero().to_string())
            .join("root")
            .join(path)
    }

    /// Returns a command that runs on this host. The started program is killed when the test process ends.
    #[must_use]
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.init.as_raw_nonzero()))
            .args(["--all", "setpriv", "--pdeathsig", "KILL"])
            .arg(program);
        command
    }

    /// Starts `program` on this host.
    ///
    /// # Errors
    /// If the program cannot be started.
    pub fn start(&self, program: &str, arguments: &[&str]) -> Result<Process, KitError> {
        let mut command = self.command(program);
        command.args(arguments);
        Process::start(program, None, command, &[])
    }

    /// Runs a tool on this host, and returns the tool's output.
    ///
    /// # Errors
    /// If the tool cannot be run, or fails.
    pub fn tool(&self, program: &str, arguments: &[&str]) -> Result<String, KitError> {
        let run = self.command(program).args(arguments).output();
        let run = run.map_err(KitError::system(format!("run '{program}'")))?;
        if !run.status.success() {
            return Err(KitError::Tool {
                command: format!("{program} {}", arguments.join(" ")),
                output: String::from_utf8_lossy(&run.stderr).trim().to_owned(),
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

    /// Starts this host's libvirtd. Can be called again after the libvirtd was killed.
    ///
    /// # Errors
    /// If the libvirtd does not start.
    pub fn start_libvirtd(&self) -> Result<(), KitError> {
        let line = ["--daemon", "--listen", "--pid-file", "/run/libvirtd.pid"];
        self.tool("libvirtd", &line)?;
        let deadline = Instant::now() + PATIENCE;
        // libvirtd goes into the background before it listens.
        while let Err(error) = self.virsh(&["uri"]) {
            if Instant::now() >= deadline {
                return Err(error);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Sends a signal to this host's libvirtd.
    ///
    /// # Errors
    /// If the libvirtd does not run.
    pub fn signal_libvirtd(&self, signal: &str) -> Result<(), KitError> {
        self.signal_by_file("/run/libvirtd.pid", signal)
    }

    /// Sends a signal to the QEMU of a domain.
    ///
    /// # Errors
    /// If the QEMU does not run.
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
    /// If the process has ended.
    pub fn signal(&self, process: &Process, signal: Signal) -> Result<(), KitError> {
        kill_process(child_of(process.pid())?, signal)
            .map_err(|error| KitError::system("send a signal")(error.into()))
    }

    /// Returns the process ID, as seen by the test, of a process that was started on this host.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn pid(&self, process: &Process) -> Result<Pid, KitError> {
        child_of(process.pid())
    }

    /// Returns libvirt's name for the state of a domain; `None` if the domain is not on this host.
    #[must_use]
    pub fn state(&self, domain: &Domain) -> Option<String> {
        self.virsh(&["domstate", &domain.name]).ok()
    }

    /// Returns the last output lines of a domain's QEMU on this host. Used after QEMU has probably ended.
    fn last_words(&self, domain: &Domain) -> String {
        let path = self.path(&format!("/var/log/libvirt/qemu/{}.log", domain.name));
        let output = fs::read_to_string(path).unwrap_or_default();
        let lines: Vec<_> = output.lines().collect();
        lines[lines.len().saturating_sub(4)..].join("\n")
    }
}

/// Returns the child of the process `parent`, which must have exactly one.
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
                output: String::new(),
            });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// A transient libvirt domain that runs the guest program.
#[derive(Debug)]
pub struct Domain {
    /// Name of the domain.
    pub name: String,
    program: Arc<Program>,
    console: PathBuf,
    /// ID of the memory backend of the domain's RAM.
    ram: &'static str,
}

/// Hardware of a domain in addition to its vCPU and RAM.
#[derive(Debug, Clone, Copy)]
pub enum Hardware<'a> {
    /// A disk, on a machine type that all releases of QEMU have.
    Disk(Disk),
    /// The given `<devices>` on the same machine type. NUMA node 0 has memory slots.
    Devices(&'a str),
    /// A microvm, which has no PCI devices.
    Microvm,
}

/// Location of a domain's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    /// In a folder shared by both hosts.
    Shared,
    /// A separate disk on each host, which the migration must copy.
    OfEachHost,
}

/// Two hosts, and the link between them.
#[derive(Debug)]
pub struct Hosts {
    /// The first host, `a`.
    pub source: Host,
    /// The second host, `b`.
    pub destination: Host,
    folder: TempDir,
}

/// Size of a disk in bytes. It is small because other tests cover the copying of disks.
const DISK_BYTES: u64 = 4 << 20;

impl Hosts {
    /// Creates both hosts, each with its libvirtd. Needs root.
    ///
    /// # Errors
    /// If a host or the link cannot be created.
    pub fn new() -> Result<Self, KitError> {
        let folder = qemu::folder()?;
        // QEMU runs as another user.
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
                output: String::from_utf8_lossy(&made.stderr).trim().to_owned(),
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

    /// Returns the host of the given side.
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

    /// Sets the link `state`: "down" or "up".
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn link(&self, state: &str) -> Result<(), KitError> {
        let line = ["link", "set", "dev", "veth", state];
        self.source.tool("ip", &line).map(drop)
    }

    /// Limits the link's rate in both directions to `mbits` Mbit/s from now on.
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
    /// If the domain does not start.
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
    /// If the domain does not start.
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
                    output: String::new(),
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
        // The last words of the command line are `-kernel`, the file, `-append`, and the guest program's arguments.
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

    /// Returns the file of the domain's memory backend `id` on `host`. For a DIMM, libvirt uses the alias as ID, such
    /// as `dimm0`.
    ///
    /// # Errors
    /// If the domain is not on this host.
    pub fn memory(&self, host: &Host, domain: &Domain, id: &str) -> Result<PathBuf, KitError> {
        let number = host.virsh(&["domid", &domain.name])?;
        let name = &domain.name;
        Ok(host.path(&format!("/run/ram/libvirt/qemu/{number}-{name}/{id}")))
    }

    /// Returns the side where the only running guest of a domain is.
    ///
    /// # Errors
    /// [`KitError::Memory`] if the guest runs on no side, or on both.
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

    /// Proves that exactly one guest of a domain runs, and that its memory matches its writes. Returns the guest's side
    /// and the number of its writes so far. The guest keeps running.
    ///
    /// # Errors
    /// [`KitError::Memory`] if the proof fails; other errors if the guest or its memory cannot be read.
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

/// Creates a file of `bytes` zero bytes that every user may write to.
///
/// # Errors
/// If the file cannot be created.
pub fn make_file(path: &Path, bytes: u64) -> Result<(), KitError> {
    let what = || format!("make {}", path.display());
    let file = fs::File::create(path).map_err(KitError::system(what()))?;
    file.set_len(bytes).map_err(KitError::system(what()))?;
    open_to_all(path)
}

/// Makes `path` accessible to the user that runs QEMU.
fn open_to_all(path: &Path) -> Result<(), KitError> {
    fs::set_permissions(path, Permissions::from_mode(0o777))
        .map_err(KitError::system(format!("open {} to all", path.display())))
}
