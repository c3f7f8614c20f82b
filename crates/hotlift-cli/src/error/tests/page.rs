//! Generates `docs/errors.md` from the errors of the commands, as they are printed.

use std::fmt::Write;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::Parser;
use hotlift::conversation::ConversationError;
use hotlift::error::Channel;
use hotlift::file::{FileError, Location, ServerError};
use hotlift::options::OptionError;
use hotlift::tls::{Fault, Missing, TlsError, TlsSetupError};
use hotlift::transport::TransportError;
use hotlift::{Address, MigrationError};
use hotlift_agent::config::ConfigError;
use hotlift_agent::error::{AgentError, CarryError, RulesError};
use hotlift_command::error::SharedError;
use hotlift_command::program::USAGE;
use hotlift_host::error::HostError;
use hotlift_monitor::MonitorError;
use hotlift_qemu::error::{QemuError, at_destination, at_source};
use hotlift_qmp::QmpError;
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_testkit::generated;
use hotlift_tls::{AuthorityError, CredentialsError};
use hotlift_vmm::CreateError;
use hotlift_vmm::layout::LayoutError;
use rustix::io::Errno;

use crate::certs::error::CertsError;
use crate::error::{CommandError, MissingPagesFrom};
use crate::libvirt::virsh::VirshError;

/// Start of the document.
const HEAD: &str = r#"# Errors

This page lists errors as the commands print them. Values and texts of QEMU, libvirt and the system are examples; COMMAND is the
typed command. The next step is the second line of the error, the end of the first line, or below it.
[failures.md](failures.md#exit-codes) explains the exit codes. A line `error="..."` is part of a line in the agent's log.
The usage of the command follows a line `error: ...`.

A test in `crates/hotlift-cli/src/error/tests/page.rs` generates this page.
"#;

/// QMP socket in the examples.
const QMP: &str = "unix:/run/vm.qmp";

/// Address of 'hotlift serve' or of a relay in the examples.
const TO: &str = "tcp:192.0.2.2:4444";

/// An error in the document, with its explanation.
struct Row {
    /// Lines that the command prints.
    lines: Vec<String>,
    /// Cause of the error, as a sentence.
    cause: &'static str,
    /// Next step; `None` if the printed lines contain it.
    next: Option<&'static str>,
    /// Exit code; `None` for a line of the agent's log.
    code: Option<u8>,
}

/// Creates a row for an error that itself shows the next step, in its advice or in its message.
fn row(error: impl Into<CommandError>, cause: &'static str) -> Row {
    let error = error.into();
    let mut lines = vec![format!("hotlift: {}", error.line())];
    let help = || {
        error
            .is_usage()
            .then(|| "for more, try 'hotlift COMMAND --help'".to_owned())
    };
    let next = error.advice().or_else(help);
    lines.extend(next.map(|next| format!("hotlift: {next}")));
    Row {
        lines,
        cause,
        next: None,
        code: Some(error.exit_code()),
    }
}

/// Creates a row for an error whose next step depends on facts that the command does not know.
fn then(error: impl Into<CommandError>, cause: &'static str, next: &'static str) -> Row {
    let row = row(error, cause);
    assert_eq!(row.lines.len(), 1, "{:?} has a next step", row.lines);
    Row {
        next: Some(next),
        ..row
    }
}

/// Creates a row for the error of a migration in the agent's log.
fn logged(error: impl Into<CarryError>, cause: &'static str, next: &'static str) -> Row {
    Row {
        lines: vec![format!("error=\"{}\"", error_line(&error.into()))],
        cause,
        next: Some(next),
        code: None,
    }
}

/// Creates a row for a command line that clap rejects.
fn typed(arguments: &[&str], cause: &'static str) -> Row {
    let words = ["hotlift"].iter().chain(arguments);
    let error = crate::Cli::try_parse_from(words)
        .err()
        .expect("not a command line");
    let text = error.render().to_string();
    Row {
        lines: text
            .lines()
            .take_while(|line| !line.is_empty())
            .map(str::to_owned)
            .collect(),
        cause,
        next: None,
        code: Some(USAGE),
    }
}

fn system(errno: Errno) -> io::Error {
    errno.into()
}

fn address(uri: &str) -> Address {
    uri.parse().expect("an address")
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn day(number: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + seconds(number * 86_400)
}

fn connect(uri: &str, errno: Errno) -> TransportError {
    TransportError::Connect {
        uri: uri.to_owned(),
        source: system(errno),
    }
}

fn failed(reasons: &str) -> QemuError {
    QemuError::Failed {
        reasons: reasons.to_owned(),
    }
}

fn busy(status: &str) -> QemuError {
    QemuError::Busy {
        status: status.to_owned(),
    }
}

fn handshake(source: TlsError) -> SharedError {
    SharedError::Tls {
        host: "192.0.2.2".to_owned(),
        source: Box::new(source),
    }
}

fn theirs(fault: Fault) -> SharedError {
    handshake(TlsError::Theirs {
        subject: "CN=b.example".to_owned(),
        fault,
    })
}

fn migrate() -> Vec<Row> {
    let qmp = || QMP.to_owned();
    let no_serve = |errno| SharedError::NoServe {
        source: connect(TO, errno),
    };
    let silent = |has_hello| CommandError::ServeSilent {
        address: address(TO),
        missing: match has_hello {
            true => "its QEMU is not ready",
            false => "it accepted the connection, but does not answer",
        },
        limit: seconds(if has_hello { 90 } else { 30 }),
        has_hello,
    };
    let no_qmp = || QmpError::Connect {
        address: QMP.to_owned(),
        waited: seconds(2),
        source: system(Errno::NOENT),
    };
    let not_waiting = |migration: &str| QemuError::NotWaiting {
        status: "running".to_owned(),
        migration: migration.to_owned(),
    };
    let reasons = || "the connection broke".to_owned();
    vec![
        row(no_serve(Errno::CONNREFUSED), "No process listens at this address and port."),
        row(no_serve(Errno::TIMEDOUT), "The host does not answer, or a firewall drops its packets."),
        row(no_serve(Errno::HOSTUNREACH), "The network has no path to this address."),
        row(
            SharedError::from(ConversationError::Closed),
            "The process at this address closed the connection.",
        ),
        row(
            SharedError::from(ConversationError::Version { theirs: 2, ours: 1 }),
            "The hotlifts of the two hosts have different versions of the control protocol.",
        ),
        row(
            SharedError::from(ConversationError::Role {
                theirs: "agent".to_owned(),
                ours: "migration",
            }),
            "Another command of hotlift, such as the agent, listens at this address.",
        ),
        row(silent(false), "'hotlift serve' is stopped, or serves another source."),
        row(silent(true), "The destination's QEMU does not become ready."),
        then(
            SharedError::Refused {
                reason: "another migration to this QEMU runs".to_owned(),
            },
            "'hotlift serve' rejected the migration for the given reason.",
            "remove that cause on the destination host, and migrate again",
        ),
        row(
            CommandError::DataPort(failed(
                "cannot connect to 'tcp:192.0.2.2:40123': Connection timed out (os error 110)",
            )),
            "A firewall drops packets to the second port of 'hotlift serve'.",
        ),
        row(SharedError::OnlyTcp { flag: "--to" }, "The address is not a TCP address."),
        row(at_source(no_qmp()), "No QEMU listens at this path."),
        row(
            at_source(QmpError::Timeout {
                command: "greeting".to_owned(),
                waited: seconds(2),
            }),
            "QEMU does not answer, or serves another client of this socket.",
        ),
        row(
            at_destination(QmpError::Closed {
                command: "query-migrate".to_owned(),
            }),
            "QEMU closed its QMP socket, usually because it ended.",
        ),
        row(
            QemuError::InUse { process: 4711 },
            "Another hotlift command changed the migration settings of this QEMU and still runs.",
        ),
        row(busy("active"), "A migration of this QEMU runs."),
        row(busy("postcopy-active"), "The guest still receives pages."),
        row(busy("postcopy-paused"), "The guest lost the source of its pages."),
        row(
            QemuError::LeftPaused { qmp: qmp() },
            "An earlier migration or save left the guest paused here.",
        ),
        row(
            QemuError::Blocked {
                reasons: "The migration has been blocked by the VFIO device".to_owned(),
            },
            "QEMU cannot migrate one of the devices.",
        ),
        row(
            QemuError::Setting {
                what: "capability",
                name: "block".to_owned(),
                value: "on".to_owned(),
                reason: "a relay cannot carry the contents of disks, which the stream would contain",
                remedy: "off".to_owned(),
            },
            "A setting of QEMU changes the stream in a way that a relay cannot carry.",
        ),
        row(
            QemuError::Differs {
                differences: "machine type: the source has pc-i440fx-10.0, the destination has q35 (start the destination's QEMU \
                              with -machine pc-i440fx-10.0)"
                    .to_owned(),
            },
            "The VM of the destination's QEMU differs from that of the source's.",
        ),
        row(CommandError::Different { count: 2 }, "'--check' found differences that QEMU refuses."),
        row(
            QemuError::Shared {
                problem: "QEMU has no memory backend with share=on".to_owned(),
            },
            "The RAM of the two QEMUs is not in the same shared files.",
        ),
        row(not_waiting("none"), "The destination's QEMU was started without '-incoming defer', or has a guest."),
        row(not_waiting("postcopy-paused"), "The destination's QEMU has a guest that waits for pages."),
        row(
            QemuError::NoPostcopy {
                message: "Postcopy is not supported: Userfaultfd not available".to_owned(),
            },
            "QEMU's user has no access to userfaultfd.",
        ),
        row(
            QemuError::NoPostcopy {
                message: "Host backend files need to be TMPFS or HUGETLBFS only".to_owned(),
            },
            "The RAM of the destination's QEMU is a file on a disk.",
        ),
        row(
            QemuError::Program {
                program: PathBuf::from("qemu-system-x86_64"),
                source: system(Errno::NOENT),
            },
            "The program does not exist.",
        ),
        row(
            QemuError::Command {
                problem: "-incoming must be 'defer' or absent".to_owned(),
            },
            "QEMU's command line contains an argument that hotlift sets itself. Remove it.",
        ),
        then(
            QemuError::Ended {
                status: std::os::unix::process::ExitStatusExt::from_raw(1 << 8),
                errors: "Could not access KVM kernel module: Permission denied".to_owned(),
            },
            "QEMU rejected its command line, or lacks a resource that it needs.",
            "remove the cause that QEMU's message names",
        ),
        then(
            failed(
                "the destination: the main channel was closed by the other side; its QEMU: it has ended (exit status: 1): \
                 load of migration failed: Invalid argument",
            ),
            "The destination's QEMU could not load the guest; the guest keeps running at the source.",
            "compare both command lines: 'hotlift migrate --check'; QEMU's log has details",
        ),
        row(
            failed("the destination: the main channel was closed by the other side; its QEMU: Failed to get \"write\" lock"),
            "Another process has locked a disk of the VM.",
        ),
        then(
            failed(
                "nothing was received from 192.0.2.2 for 40s; check that the host is up, that the network reaches it, and that \
                 the path carries packets of the MTU",
            ),
            "The network or the other host failed for longer than '--silence-timeout'.",
            "migrate again when the network works; the guest keeps running at the source",
        ),
        row(
            QemuError::InDoubt {
                reasons: reasons(),
                qmp: qmp(),
            },
            "The connections failed at the handover, and the destination did not answer within '--settle-timeout'.",
        ),
        row(
            QemuError::StoppedThere {
                reasons: reasons(),
                qmp: qmp(),
            },
            "The destination's QEMU loaded the guest, but cannot start it.",
        ),
        row(
            QemuError::RunsTwice { qmp: qmp() },
            "Another client sent 'cont' to the source's QEMU after the handover.",
        ),
        row(
            QemuError::Stalled {
                reasons: reasons(),
                qmp: qmp(),
            },
            "The source's QEMU does not answer, so its guest may still be paused.",
        ),
        row(
            QemuError::Gone { reasons: reasons() },
            "The source's QEMU failed before the destination had the guest.",
        ),
        row(
            QemuError::GuestEnded {
                how: "the guest powered off".to_owned(),
            },
            "The guest ended before the handover.",
        ),
        then(
            QemuError::MovedAnyway {
                reasons: "'hotlift serve' sent no final message".to_owned(),
            },
            "The connection to 'hotlift serve' failed after the handover.",
            "none: the guest is at the destination",
        ),
        row(
            CommandError::NotTaken {
                reason: "its migration is in state 'failed'".to_owned(),
            },
            "The destination's QEMU failed after the last byte of the stream.",
        ),
        row(
            CommandError::EndedSince {
                how: "the guest's QEMU was ended by a signal".to_owned(),
            },
            "The destination's QEMU ended after it received the guest.",
        ),
        row(
            CommandError::NotKnown {
                reasons: "QEMU does not answer over QMP".to_owned(),
                qemu: "QMP socket unix:/run/vm.qmp".to_owned(),
            },
            "The destination's QEMU does not report whether it runs the guest.",
        ),
        row(
            CommandError::NotRunning {
                reasons: "the guest was 'running' before, and is 'inmigrate' in this QEMU".to_owned(),
                qemu: "QMP socket unix:/run/vm.qmp".to_owned(),
                can_run: false,
                has_source: true,
            },
            "QEMU loaded the guest, but cannot start it.",
        ),
    ]
}

fn save_and_restore() -> Vec<Row> {
    let path = || PathBuf::from("/srv/vm.save");
    let named = |error, at: &str| {
        let at = Location::parse(at.as_ref()).expect("a location");
        crate::save_file::named(error, &at)
    };
    let of_file = |error: &FileError, at: &str| {
        let reasons = error_line(error);
        named(CommandError::Restore { reasons }, at)
    };
    let restore = |error: &FileError| of_file(error, "/srv/vm.save");
    let far = || "tcp:192.0.2.2:4444/vm.save".to_owned();
    let far_restore = |error: &FileError| of_file(error, &far());
    let not_saved = |error: FileError, advice| CommandError::Save {
        reason: error_line(&MigrationError::File(error)),
        advice,
    };
    let no_room = |errno| FileError::Write {
        path: path(),
        source: system(errno),
    };
    let missing = |answers, rest| CommandError::PagesMissing {
        reasons: "lost the server of tcp:192.0.2.2:4444/vm.save".to_owned(),
        qemu: "QMP socket unix:/run/vm.qmp".to_owned(),
        answers,
        rest,
        resume: format!("hotlift restore --lazy --resume FILE --qmp {QMP}"),
    };
    vec![
        then(
            not_saved(
                FileError::Write {
                    path: path(),
                    source: system(Errno::NOENT),
                },
                None,
            ),
            "The folder of the file does not exist.",
            "create the folder, or give another file",
        ),
        row(
            not_saved(no_room(Errno::NOSPC), crate::save::room(&MigrationError::File(no_room(Errno::NOSPC)))),
            "The disk is full.",
        ),
        row(
            not_saved(no_room(Errno::FBIG), crate::save::room(&MigrationError::File(no_room(Errno::FBIG)))),
            "The file exceeds a limit of the process or of the file system.",
        ),
        row(
            not_saved(
                FileError::NotReplaced {
                    path: path(),
                    is: "a symbolic link",
                },
                None,
            ),
            "Something other than a regular file has this name.",
        ),
        then(
            CommandError::Save {
                reason: "its QEMU has ended or does not answer: the QMP connection was closed during a wait for events".to_owned(),
                advice: None,
            },
            "The QEMU of the guest failed during the save.",
            "read QEMU's log; no file was written",
        ),
        then(
            restore(&FileError::Read {
                path: path(),
                source: system(Errno::NOENT),
            }),
            "The file does not exist.",
            "give the name of an existing file",
        ),
        then(
            restore(&FileError::Empty { path: path() }),
            "The file has no content.",
            "give another file, or save the guest again",
        ),
        row(
            restore(&FileError::NotReadable {
                path: path(),
                is: "a character device",
            }),
            "The name is that of a device, a folder or a socket.",
        ),
        then(
            restore(&FileError::NotASave),
            "The file has another format.",
            "give a file of 'hotlift save', or a mapped-ram file of QEMU",
        ),
        row(
            restore(&FileError::Foreign {
                is: "a zstd file",
                instead: "decompress it first ('zstd -d')",
            }),
            "The file was compressed after the save.",
        ),
        row(restore(&FileError::PlainStream), "QEMU wrote the file without mapped-ram."),
        row(
            restore(&FileError::Version { version: 4, own: 3 }),
            "Another version of hotlift wrote the file.",
        ),
        then(
            restore(&FileError::Truncated { position: 1 << 30 }),
            "The file lost its end: its copy or its save was interrupted.",
            "copy the file again; 'hotlift show --verify FILE' reads all of it",
        ),
        row(
            named(
                CommandError::Damaged {
                    reasons: error_line(&MigrationError::File(FileError::Damaged {
                        what: "a block of pages",
                        position: 1 << 20,
                    })),
                },
                "/srv/vm.save",
            ),
            "A checksum of the file is wrong; the guest does not run.",
        ),
        row(restore(&FileError::WithoutSharedRam), "The file lacks the shared memory of the guest."),
        then(
            CommandError::Restore {
                reasons: "load of migration failed: Invalid argument".to_owned(),
            },
            "QEMU could not load the guest.",
            "start QEMU with the command line of the saved VM: 'hotlift show FILE' prints it",
        ),
        row(
            CommandError::Restore {
                reasons: "--lazy needs a file of 'hotlift save', but QEMU wrote this one; restore it without --lazy".to_owned(),
            },
            "A mapped-ram file of QEMU cannot be restored lazily.",
        ),
        then(
            far_restore(&FileError::Server {
                file: far(),
                source: Box::new(ServerError::Connect(Box::new(MigrationError::Transport(connect(
                    TO,
                    Errno::CONNREFUSED,
                ))))),
            }),
            "No 'hotlift serve --files' listens at this address.",
            "start 'hotlift serve --files' on that host",
        ),
        then(
            far_restore(&FileError::Refused {
                file: far(),
                reason: "no save file has that name".to_owned(),
            }),
            "The folder of 'hotlift serve --files' has no save file with this name.",
            "give the name of a save file in that folder",
        ),
        row(missing(true, MissingPagesFrom::There), "The source of the pages failed during a lazy restore."),
        row(missing(false, MissingPagesFrom::There), "The source of the pages failed during a lazy restore, and QEMU does not answer."),
        row(missing(true, MissingPagesFrom::Copy), "The file is damaged, and the guest of a lazy restore runs."),
        row(
            missing(true, MissingPagesFrom::OtherName),
            "The file was replaced during a lazy restore.",
        ),
        row(
            QemuError::NotPaused {
                status: "running".to_owned(),
                migration: "completed".to_owned(),
                refusal: String::new(),
            },
            "'--resume' found no interrupted lazy restore in this QEMU.",
        ),
        row(QemuError::OtherFile, "'--resume' was given another file than the first restore."),
        row(
            CommandError::StillWaits {
                reasons: "/srv/vm.save is empty".to_owned(),
            },
            "'--resume' failed before it sent a page.",
        ),
        row(
            CommandError::NotRunning {
                reasons: "the guest was 'running' before, and is 'paused' in this QEMU".to_owned(),
                qemu: "QMP socket unix:/run/vm.qmp".to_owned(),
                can_run: true,
                has_source: false,
            },
            "QEMU loaded the guest, but could not start it.",
        ),
        then(
            CommandError::Show {
                reason: "/srv/vm.save: cannot read the save file's description".to_owned(),
            },
            "The head of the file is damaged.",
            "use another copy of the file",
        ),
        row(
            CommandError::NothingToSettle {
                problem: "it is in state 'running', and its migration in state 'none'".to_owned(),
            },
            "No migration left the guest of this QEMU paused.",
        ),
    ]
}

fn relays() -> Vec<Row> {
    let main = Channel::Main;
    let mismatch = MigrationError::Mismatch {
        what: "multifd-channels".to_owned(),
        source_has: "at least 3 channels".to_owned(),
        destination_has: "2 channels".to_owned(),
    };
    vec![
        row(
            CommandError::Relay(MigrationError::Transport(connect("unix:/run/b.sock", Errno::CONNREFUSED))),
            "No QEMU or relay listens at the address of '--connect'.",
        ),
        then(
            CommandError::Relay(MigrationError::Closed { channel: main }),
            "The QEMU or the relay at the other end failed.",
            "read the output of the process at the other end",
        ),
        row(
            CommandError::Relay(MigrationError::SpeaksTls),
            "The peer accepts only TLS, and this relay has no certificates.",
        ),
        row(
            SharedError::InsecureQemu {
                address: address("tcp:192.0.2.2:4445"),
            },
            "QEMU's own connection would leave this host.",
        ),
        then(
            CommandError::Relay(mismatch),
            "The two ends have different settings.",
            "set the named option to the same value at both ends",
        ),
        then(
            CommandError::Relay(MigrationError::Timeout {
                waiting_for: "the destination's answer to the start of the stream (check that both sides have the same machine, \
                              multifd-channels and method)"
                    .to_owned(),
                waited: seconds(30),
            }),
            "The destination's QEMU waits for another stream.",
            "compare these settings of both QEMUs",
        ),
        row(
            CommandError::Relay(MigrationError::MemoryLimit {
                channel: main,
                source: hotlift_methods::OverMemoryLimit {
                    wanted: 8 << 20,
                    used: 60 << 20,
                    limit: 64 << 20,
                },
            }),
            "The stream needs more memory than '--memory-limit' allows.",
        ),
        row(
            CommandError::Relay(MigrationError::InDoubt),
            "The connections failed at the handover.",
        ),
        row(
            CommandError::Relay(MigrationError::Released {
                source: Box::new(MigrationError::Closed { channel: main }),
            }),
            "The destination failed after the source had released the guest.",
        ),
        row(
            CommandError::Relay(MigrationError::GivenBack {
                source: Box::new(MigrationError::Closed { channel: main }),
            }),
            "The connections failed while the destination loaded the devices.",
        ),
        row(
            CommandError::Relay(MigrationError::PagesMissing {
                source: Box::new(MigrationError::Closed { channel: main }),
            }),
            "The connections failed in postcopy.",
        ),
        row(
            CommandError::OtherHosts(MonitorError::OtherHosts {
                address: "tcp:0.0.0.0:4446".to_owned(),
                reached: [0, 0, 0, 0].into(),
            }),
            "Other hosts could control this process.",
        ),
    ]
}

fn guest() -> Vec<Row> {
    vec![
        row(
            CommandError::Migration(MigrationError::Transport(connect(TO, Errno::CONNREFUSED))),
            "No 'hotlift guest run --incoming' listens at this address.",
        ),
        row(
            CreateError::Kvm(hotlift_vmm::kvm::KvmError::Open(system(Errno::ACCESS))),
            "This user may not use KVM.",
        ),
        row(
            SharedError::from(LayoutError::Vcpus { got: 9 }),
            "The flags describe a guest that cannot exist.",
        ),
        then(
            SharedError::NotWell {
                problem: "vCPU 0 published 100 writes, its memory has 99".to_owned(),
            },
            "The guest lost a write, which is a bug of hotlift or of the host.",
            "report it with the output of both processes",
        ),
        row(
            CommandError::Deferred,
            "Without a monitor no client could start the incoming migration.",
        ),
        row(
            HostError::NotAllowed { pid: 4711 },
            "'hotlift methods' may not read the memory of another user's process.",
        ),
    ]
}

fn agent() -> Vec<Row> {
    let control = || PathBuf::from("/run/hotlift/agent.sock");
    let to: SocketAddr = ([192, 0, 2, 2], 49152).into();
    let ended = |error: AgentError| CommandError::Agent(Box::new(error));
    vec![
        row(
            CommandError::NoAgentHere {
                control: control(),
                source: system(Errno::NOENT),
            },
            "The agent does not run, or its control socket has another path.",
        ),
        row(
            CommandError::NoAgent {
                control: control(),
                source: QmpError::Timeout {
                    command: "query-agent".to_owned(),
                    waited: seconds(10),
                },
            },
            "The agent does not answer.",
        ),
        row(
            ended(AgentError::Config(ConfigError::File(hotlift_mem::FileError {
                verb: "read",
                path: PathBuf::from("/etc/hotlift/agent.toml"),
                source: system(Errno::NOENT),
            }))),
            "The configuration file is missing.",
        ),
        then(
            ended(AgentError::Config(ConfigError::Key {
                file: PathBuf::from("/etc/hotlift/agent.toml"),
                line: 7,
                key: "max-bandwidth".to_owned(),
                problem: "'5 apples' is not allowed; expected bytes a second as in \"100M\"; \"0\" is unlimited".to_owned(),
            })),
            "The value of the key is not valid.",
            "correct that line; 'hotlift agent check' reads the file",
        ),
        row(
            ended(AgentError::Tls(Box::new(TlsSetupError::Credentials(CredentialsError::NoFolder {
                folders: hotlift_tls::FOLDERS.map(PathBuf::from).to_vec(),
            })))),
            "The host has no certificates.",
        ),
        row(
            ended(AgentError::Certificates {
                dir: PathBuf::from("/etc/pki/hotlift"),
                count: 1,
            }),
            "Other agents would reject these certificates.",
        ),
        then(
            ended(AgentError::Listen(TransportError::Listen {
                uri: "tcp:[::]:16520".to_owned(),
                source: system(Errno::ADDRINUSE),
            })),
            "Another process, or another agent, uses the port.",
            "end that process ('ss -ltnp' names it), or set another port with key 'listen'",
        ),
        then(
            ended(AgentError::Rules(RulesError::Run {
                tool: "nft",
                package: "nftables",
                source: system(Errno::NOENT),
            })),
            "nftables is not installed.",
            "install the package",
        ),
        then(
            ended(AgentError::Rules(RulesError::Refused {
                message: "Operation not permitted".to_owned(),
            })),
            "The agent lacks a right, or the kernel lacks a module.",
            "run the agent by its systemd unit, or as root",
        ),
        then(
            ended(AgentError::Rules(RulesError::NoUser {
                users: "libvirt-qemu".to_owned(),
            })),
            "QEMU runs as another user on this host.",
            "set the key 'users' to the user of QEMU",
        ),
        row(
            ended(AgentError::NotRedirected { count: 1 }),
            "Rules of another program divert migrations from the agent.",
        ),
        then(
            ended(AgentError::Lost { part: "redirect" }),
            "A thread of the agent ended, usually for lack of a resource.",
            "read 'journalctl -u hotlift-agent'; systemd restarts the agent",
        ),
        then(
            CommandError::AgentRefuses {
                reason: "no migration with id 1a2b3c4d is under way".to_owned(),
            },
            "The migration has ended, or the id is wrong.",
            "'hotlift agent list' shows the ids",
        ),
        logged(
            CarryError::NoAgent {
                to,
                source: connect("tcp:192.0.2.2:16520", Errno::CONNREFUSED),
            },
            "No agent runs on the destination host.",
            "start the agent there, or set plaintext = \"allow\"",
        ),
        logged(
            CarryError::AgentUnreached {
                to,
                source: connect("tcp:192.0.2.2:16520", Errno::HOSTUNREACH),
            },
            "The network to the other agent fails.",
            "check the host, the route and the firewall for port 16520",
        ),
        logged(
            TlsError::Theirs {
                subject: "CN=b.example".to_owned(),
                fault: Fault::UnknownCa {
                    issuer: "CN=Other CA".to_owned(),
                },
            },
            "The hosts have certificates of different CAs.",
            "make certificates of one CA for both hosts",
        ),
        logged(
            CarryError::Refused {
                reason: "too many running migrations".to_owned(),
            },
            "The other agent rejected the migration for the given reason.",
            "read the other agent's log",
        ),
        logged(
            CarryError::Silent,
            "The other agent is stopped, or the network fails.",
            "check the other agent: 'systemctl status hotlift-agent'",
        ),
        logged(
            CarryError::NotHere {
                to,
                why: "this host has no such address".to_owned(),
            },
            "The source's agent sent a migration to the wrong host.",
            "check the addresses of the hosts, and '[peers]' of the source's agent.toml",
        ),
        logged(
            CarryError::Connect {
                to,
                source: system(Errno::CONNREFUSED),
            },
            "No QEMU waits at this port of the destination.",
            "read QEMU's log on the destination host",
        ),
        logged(
            CarryError::Deserted,
            "QEMU or libvirt ended the migration while it waited for a free slot.",
            "raise 'migrations' in agent.toml, or migrate fewer domains at once",
        ),
        logged(
            CarryError::Ending,
            "The agent received SIGTERM.",
            "migrate again when the agent runs",
        ),
        logged(
            CarryError::Unsettled,
            "The agent ended during the handover.",
            "check both QEMUs, and send 'cont' if the message requires it",
        ),
    ]
}

fn libvirt() -> Vec<Row> {
    let uri = || "qemu+ssh://b.example/system".to_owned();
    vec![
        row(VirshError::Run(system(Errno::NOENT)), "The program virsh is not installed."),
        row(
            VirshError::Refused {
                at: uri(),
                output: "failed to connect to the hypervisor; Cannot recv data: Connection reset by peer".to_owned(),
            },
            "libvirt at this URI is not reachable.",
        ),
        then(
            VirshError::Silent { at: uri() },
            "libvirt hangs, or ssh waits for a password.",
            "run 'virsh --connect URI list'; ssh needs a key without a passphrase, or an agent",
        ),
        row(
            CommandError::NoGuest {
                domain: "web1".to_owned(),
                uri: "qemu:///system".to_owned(),
            },
            "The domain does not exist, or is shut off.",
        ),
        row(
            CommandError::NoDomain {
                typed: "'web9'".to_owned(),
            },
            "Neither this host nor a destination of the drain has a domain with this name.",
        ),
        row(
            CommandError::NoHost {
                uri: "qemu:///system".to_owned(),
            },
            "The URI of the destination has no host name.",
        ),
        row(
            CommandError::WrongTo {
                flag: "--domain",
                expected: "the destination's libvirt: qemu+ssh://HOST/system",
            },
            "With '--domain', the destination is a libvirt.",
        ),
        row(
            CommandError::NoPort {
                ports: "49152-49215".parse().expect("a range"),
            },
            "Other processes use all ports of the range.",
        ),
        row(CommandError::DiskCopies, "An option of virsh would copy disks."),
        row(
            CommandError::NoAgentThere {
                agent: address("tcp:192.0.2.2:16520"),
                source: connect("tcp:192.0.2.2:16520", Errno::CONNREFUSED).into(),
            },
            "No agent listens at this address.",
        ),
        row(
            CommandError::AgentSilent { limit: seconds(30) },
            "The destination's agent does not answer.",
        ),
        row(
            CommandError::DomainStayed {
                reason: "internal error: unable to execute QEMU command 'blockdev-add'".to_owned(),
            },
            "libvirt or a relay failed before the handover.",
        ),
        row(
            CommandError::DomainInDoubt {
                reason: "it runs on both hosts, and both guests write to its disks: operation failed".to_owned(),
            },
            "The domain runs on both hosts, or libvirt does not report which host runs it.",
        ),
        row(
            CommandError::DomainEnded {
                reason: "the guest powered off".to_owned(),
            },
            "The domain ended during the migration.",
        ),
        row(CommandError::DomainsStayed { stayed: 2, of: 8 }, "Some migrations failed; the table shows each reason."),
        row(CommandError::DomainsEnded { ended: 1, of: 8 }, "Some domains ended during the drain."),
        row(CommandError::DomainsInDoubt { domains: 1 }, "Some domains run on both hosts, or libvirt does not report which host runs them."),
    ]
}

fn certificates() -> Vec<Row> {
    let dir = || PathBuf::from("/etc/pki/hotlift");
    let credentials = |error| SharedError::from(TlsSetupError::Credentials(error));
    let expected = || "192.0.2.2".to_owned();
    vec![
        row(
            SharedError::from(TlsSetupError::Insecure {
                address: address(TO),
                source: Box::new(CredentialsError::NoFolder {
                    folders: hotlift_tls::FOLDERS.map(PathBuf::from).to_vec(),
                }),
            }),
            "The host has no certificates in the usual folders.",
        ),
        then(
            credentials(CredentialsError::NoCa {
                dir: dir(),
                names: ["ca-cert.pem", "ca.crt"],
            }),
            "The folder is incomplete.",
            "copy the CA's certificate to it, or make it with 'hotlift certs host NAME --out DIR'",
        ),
        then(
            credentials(CredentialsError::NoCertificate {
                file: dir().join("server-cert.pem"),
                role: "server",
            }),
            "A process that accepts connections needs server-cert.pem, one that connects needs client-cert.pem.",
            "make it with 'hotlift certs host NAME'",
        ),
        then(
            credentials(CredentialsError::KeyMismatch {
                certificate: dir().join("server-cert.pem"),
                key: dir().join("server-key.pem"),
            }),
            "The files come from different certificates.",
            "copy both files of one certificate again",
        ),
        row(
            credentials(CredentialsError::EncryptedKey {
                file: dir().join("server-key.pem"),
            }),
            "The key needs a passphrase.",
        ),
        row(
            credentials(CredentialsError::CaFirst {
                file: dir().join("server-cert.pem"),
                subject: "CN=Hotlift CA".to_owned(),
            }),
            "The certificates in the file have the wrong order.",
        ),
        row(
            handshake(TlsError::PlaintextPeer),
            "The process on that host does not use TLS.",
        ),
        row(
            SharedError::from(ConversationError::SpeaksTls),
            "The process on that host accepts only TLS.",
        ),
        row(
            SharedError::from(ConversationError::BeginsTls),
            "The other side has certificates, this side has none.",
        ),
        row(
            handshake(TlsError::OursNotValid {
                file: dir().join("client-cert.pem"),
                begins: day(19_000),
                ends: day(20_000),
            }),
            "The certificate of this host expired, or its clock is wrong.",
        ),
        row(
            theirs(Fault::Ended { at: day(20_000) }),
            "The certificate of the other host expired.",
        ),
        row(
            theirs(Fault::NotYetValid { from: day(30_000) }),
            "The clock of one of the hosts is wrong.",
        ),
        row(
            theirs(Fault::UnknownCa {
                issuer: "CN=Other CA".to_owned(),
            }),
            "The hosts have certificates of different CAs.",
        ),
        row(
            theirs(Fault::Revoked),
            "The certificate is on the list of revoked certificates.",
        ),
        row(
            theirs(Fault::RevocationListEnded { at: day(20_000) }),
            "The list of revoked certificates was not renewed.",
        ),
        row(
            theirs(Fault::NameMismatch {
                expected: expected(),
                has: vec!["b.example".to_owned()],
            }),
            "The certificate does not contain the name or address of the connection.",
        ),
        row(
            theirs(Fault::NotAllowed {
                list: "*.example.org".to_owned(),
            }),
            "'--tls-authz' does not allow that host.",
        ),
        row(
            handshake(TlsError::NoCertificate),
            "The other side has no certificate of a CA that this host trusts.",
        ),
        then(
            handshake(TlsError::TimedOut {
                after: seconds(10),
                missing: Missing::Acknowledgement,
            }),
            "The network drops packets.",
            "check the MTU of the path: 'ping -M do -s 1472 HOST'",
        ),
        then(
            handshake(TlsError::Closed),
            "The process on that host ended, or uses no TLS.",
            "read the output of that process",
        ),
        row(
            CertsError::Exists {
                path: dir().join("ca-cert.pem"),
            },
            "An earlier command created this file.",
        ),
        row(
            CertsError::NoCa {
                dir: dir(),
                file: "ca-key.pem",
            },
            "The folder has no CA, or its key is on another host.",
        ),
        row(
            CertsError::NothingToRenew { dir: dir() },
            "The folder has no certificate of a host.",
        ),
        row(
            CertsError::Credentials(CredentialsError::NoFolder {
                folders: vec![dir()],
            }),
            "The folder has no certificates.",
        ),
        then(
            CertsError::Problem { dir: dir() },
            "'hotlift certs show' found a problem, which it prints.",
            "correct the printed problem",
        ),
        row(
            CertsError::Authority(AuthorityError::Wildcard {
                name: "*.example".to_owned(),
            }),
            "Hotlift makes certificates for single hosts only.",
        ),
        row(
            CertsError::Authority(AuthorityError::Ended),
            "An expired CA cannot sign certificates.",
        ),
    ]
}

fn options() -> Vec<Row> {
    let listen = |uri: &str, errno| TransportError::Listen {
        uri: uri.to_owned(),
        source: system(errno),
    };
    let conflict = |option: &str, needs| {
        SharedError::from(OptionError::Conflict {
            option: option.to_owned(),
            needs,
        })
    };
    vec![
        row(
            SharedError::from(OptionError::Value {
                name: "multifd-zstd-level",
                expected: "a value between 0 and 20".to_owned(),
                got: "21".to_owned(),
            }),
            "The value is outside the range of the option.",
        ),
        row(
            conflict(
                "compress=on",
                "multifd=off: it compresses pages on the main channel",
            ),
            "Two options exclude each other. Remove one of them.",
        ),
        row(
            conflict(
                "zero-copy-send=on",
                "tls-creds to be unset: TLS encrypts a copy of each page",
            ),
            "The options exclude each other, because encryption copies each page. Remove one of them.",
        ),
        row(
            SharedError::from(OptionError::NoAccelerator {
                device: "Intel IAA",
                reason: "no device".to_owned(),
            }),
            "The required accelerator is missing.",
        ),
        typed(
            &[
                "migrate",
                "--qmp",
                "/run/vm.qmp",
                "--to",
                "rdma:192.0.2.2:4444",
            ],
            "The address has an unknown form.",
        ),
        typed(
            &["serve", "--listen", "tcp:192.0.2.2:99999"],
            "The port is not a number up to 65535.",
        ),
        typed(
            &[
                "relay",
                "source",
                "--listen=unix:/a",
                "--connect=tcp:192.0.2.2:0",
            ],
            "No process can listen on port 0.",
        ),
        typed(
            &[
                "relay",
                "source",
                "--listen=unix:/a",
                "--connect=tcp:fe80::1:4444",
            ],
            "An IPv6 address needs brackets.",
        ),
        typed(
            &[
                "relay",
                "source",
                "--listen=unix:/a",
                "--connect=tcp:[fe80::1]:4444",
            ],
            "A link-local address is valid on one network only, and the interface names this network.",
        ),
        typed(
            &["settle", "--qmp", "/run/vm.qmp"],
            "A required flag is missing.",
        ),
        typed(
            &["save", "--qmp", "/run/vm.qmp", "vm.save", "--metod", "zstd"],
            "The flag does not exist.",
        ),
        typed(
            &[
                "save",
                "--qmp",
                "/run/vm.qmp",
                "vm.save",
                "--method",
                "lzma",
            ],
            "The option does not have this value.",
        ),
        row(
            listen("tcp::4444", Errno::ADDRINUSE),
            "Another process listens on this port.",
        ),
        row(
            listen("tcp:198.51.100.1:4444", Errno::ADDRNOTAVAIL),
            "This host does not have this address.",
        ),
        row(
            listen("tcp::80", Errno::ACCESS),
            "The system does not allow this user to listen there.",
        ),
        then(
            TerminalError::Output(system(Errno::PIPE)),
            "The reader of standard output ended.",
            "keep the reader running; the migration itself is not affected",
        ),
        then(
            TerminalError::Interrupted,
            "A signal or Ctrl-C ended the command.",
            "none",
        ),
    ]
}

/// Returns the text of the document.
fn render() -> String {
    let groups = [
        ("migrate and serve", migrate()),
        ("save, show, restore and settle", save_and_restore()),
        ("relay", relays()),
        ("agent", agent()),
        ("migrate --domain and drain (libvirt)", libvirt()),
        ("TLS and certificates", certificates()),
        ("Options and addresses", options()),
        ("demo, guest and methods", guest()),
    ];
    let mut text = HEAD.to_owned();
    for (name, rows) in groups {
        let _ = write!(text, "\n## {name}\n");
        for row in rows {
            let _ = write!(
                text,
                "\n```text\n{}\n```\n\nCause: {}",
                row.lines.join("\n"),
                row.cause
            );
            if let Some(next) = row.next {
                let _ = write!(text, " Next step: {next}.");
            }
            let _ = match row.code {
                Some(code) => writeln!(text, " Exit code {code}."),
                None => writeln!(text),
            };
        }
    }
    text
}

#[test]
fn the_errors_in_the_docs_equal_those_of_the_command() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors.md");
    generated::check(&file, &render());
}
