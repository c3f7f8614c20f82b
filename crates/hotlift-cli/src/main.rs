//! The `hotlift` command.

#![forbid(unsafe_code)]

mod accel;
mod advise;
mod agent;
mod agent_control;
mod certs;
mod clock;
mod control_args;
mod demo;
mod differences;
mod drain;
mod error;
mod flush_args;
mod guard;
mod guest_run;
mod libvirt;
mod methods;
mod migrate;
mod output_args;
mod peer;
mod relay;
mod relay_report;
mod report;
mod restore;
mod save;
mod save_file;
mod serve;
mod settle;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use hotlift_command::manual;
use hotlift_command::program::{Program, USAGE};
use hotlift_terminal::output;

use crate::error::CommandError;

/// Moves the memory of a running virtual machine between hosts.
#[derive(Parser)]
#[command(name = "hotlift", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Live-migrate the built-in guest between two processes of this host, and show what it cost
    ///
    /// Without flags: once with each page compression method. A flag that chooses a method makes it
    /// one migration with the settings given.
    Demo(demo::DemoArgs),
    /// Work with one built-in guest
    #[command(subcommand)]
    Guest(GuestCommand),
    /// Move the guest of a running QEMU to a host where 'hotlift serve' waits, or a domain of libvirt
    ///
    /// Sets QEMU's migration capabilities and parameters for the time of the migration, and puts
    /// them back. The bandwidth is unlimited unless max-bandwidth is given, and then it is that of
    /// the wire. Ctrl-C cancels; the guest runs on here.
    ///
    ///   hotlift migrate --qmp /run/vm.qmp --to tcp:HOST:4444 --method zstd --channels 4
    ///
    /// With --domain libvirt does all but move the pages ('virsh migrate --live'). They go from a relay here to the agent of
    /// the destination ('hotlift agent'), and both QEMUs listen and connect on their own loopback only:
    ///
    ///   hotlift migrate --domain web1 --to qemu+ssh://HOST/system --parallel 4
    ///
    /// Both hosts need certificates ('hotlift certs'), or --insecure.
    ///
    /// Exit codes: 0 the destination has the guest, 1 failed and the guest stayed, 2 usage, 130 cancelled and the guest
    /// stayed, 3 nobody knows whether the destination runs the guest, and it is left paused here: 'hotlift settle'.
    #[command(verbatim_doc_comment)]
    Migrate(migrate::MigrateArgs),
    /// Move the domains of this host's libvirt to other hosts, by a plan
    ///
    /// What is quickly done goes first; what is written to faster than the link is comes last. Several go at once while what
    /// they write fits in half of the link. Each is a 'virsh migrate --live', which the hosts' agents carry. A domain that
    /// fails runs on here; once a destination does not answer nothing more is begun. The same command again goes on with
    /// what is left.
    ///
    ///   hotlift drain --to b.example,c.example --dry-run
    ///
    /// Exit codes: 0 all are gone, 1 some stayed here or ended by themselves, 2 usage, 130 ended by a signal and the others
    /// stayed, 3 of some nobody knows where they run, or they run on both hosts.
    #[command(verbatim_doc_comment)]
    Drain(drain::DrainArgs),
    /// Wait on the destination host for 'hotlift migrate', with a QEMU that takes the guest over
    ///
    /// Either a QEMU that waits with '-incoming defer', by its QMP socket:
    ///
    ///   hotlift serve --listen tcp::4444 --qmp /run/vm.qmp
    ///
    /// or the command line of one, started when a source has come:
    ///
    ///   hotlift serve --listen tcp::4444 -- qemu-system-x86_64 -machine pc-i440fx-7.2 -m 2G
    ///
    /// One guest is received. A QEMU that was started runs on when this command ends, if it has the
    /// guest or may have it; if not, it is ended. What it says goes to standard error; if that is a
    /// pipe, only for as long as this command runs. Both hosts need certificates ('hotlift
    /// certs'), or --insecure.
    ///
    /// Or hand out save files, for 'hotlift restore --lazy tcp:HOST:4444/vm.save' on other hosts, until a signal comes:
    ///
    ///   hotlift serve --listen tcp::4444 --files /srv/saved
    ///
    /// Exit codes: 0 the guest is here, 1 failed and the guest is not here, 2 usage, 130 ended by a signal and the guest is
    /// not here, 3 nobody knows whether the guest runs here, and its QEMU is left as it is.
    #[command(verbatim_doc_comment)]
    Serve(serve::ServeArgs),
    /// Pass QEMU's own migrations on, between a QEMU and the relay of another host
    ///
    /// One relay on each host, and QEMU's 'migrate' and 'migrate_incoming' as ever. The bandwidth is
    /// unlimited unless max-bandwidth is given: QEMU paces itself. Zero pages are looked for where
    /// the source has not, unless zero-page-detection is given.
    #[command(subcommand)]
    Relay(relay::RelayCommand),
    /// Carry the migrations of this host's libvirt: encrypted, compressed, within the host's budget
    ///
    /// One process on each host. nftables sends it the connections that QEMU and libvirt make to other hosts for migrations,
    /// and it takes them to the agent of the other host; so 'virsh migrate --live' goes on as ever.
    ///
    ///   hotlift agent check && hotlift agent run
    ///
    /// Both hosts need certificates ('hotlift certs').
    #[command(subcommand, verbatim_doc_comment)]
    Agent(agent::AgentCommand),
    /// Save the guest of a running QEMU in a file, while it runs
    ///
    /// The guest runs until all but the last of it is written, and is left paused then, as by QEMU's
    /// own migration; with --keep-running it runs on. A save that fails leaves no file, and the
    /// guest runs on.
    ///
    ///   hotlift save --qmp /run/vm.qmp vm.save --method zstd --channels 4
    #[command(verbatim_doc_comment)]
    Save(save::SaveArgs),
    /// Restore a guest from a file into a QEMU
    ///
    /// Takes files of 'hotlift save' and QEMU's own mapped-ram files. A file that is cut short or
    /// damaged is refused before the guest runs; with --lazy no damaged page reaches it.
    ///
    ///   hotlift restore vm.save -- qemu-system-x86_64 -machine pc-i440fx-7.2 -m 2G
    ///
    ///   hotlift restore vm.save --qmp /run/vm.qmp
    ///
    ///   hotlift restore --lazy tcp:HOST:4444/vm.save --qmp /run/vm.qmp     from 'hotlift serve --files'
    ///
    /// With --lazy (files of 'hotlift save', QEMU 7.2 and later) the guest runs after some
    /// milliseconds, and gets its pages as it asks for them. If this command ends too early, the
    /// guest waits for the others: --lazy --resume brings them.
    ///
    /// A QEMU that was started runs on when this command ends; if it did not get the guest, it is
    /// ended. Exit codes as of 'serve'.
    #[command(verbatim_doc_comment)]
    Restore(restore::RestoreArgs),
    /// Say what is in a save file: machine, RAM, devices, size by method
    ///
    ///   hotlift show vm.save --verify
    #[command(verbatim_doc_comment)]
    Show(show::ShowArgs),
    /// Say where a guest goes on that a migration has left paused (exit code 3)
    ///
    /// Nobody could know whether the destination runs it, so that it was kept, whole. Look there first. Refused of a guest
    /// that is not left paused by a migration.
    ///
    ///   hotlift settle --qmp /run/vm.qmp --there     the destination has it: end this copy
    ///
    ///   hotlift settle --qmp /run/vm.qmp --here      it does not, and never will: let it run here
    #[command(verbatim_doc_comment)]
    Settle(settle::SettleArgs),
    /// Watch over a QEMU that 'serve' or 'restore' has started
    #[command(hide = true)]
    Guard(guard::GuardArgs),
    /// Write the manual pages and the shells' completions of this command
    #[command(hide = true)]
    Manual {
        /// Folder that becomes like a /usr/share
        dir: PathBuf,
    },
    /// List the page compression methods, and which library does each on this host; measure them on your memory
    ///
    /// With a file, a process or a QEMU, every method runs on a sample of that memory, on all cores at
    /// once: its ratio, rate and CPU time. Nothing is changed; pages of a process are read through
    /// /proc/PID/mem.
    ///
    ///   hotlift methods --measure /srv/memory.img     an image, or a folder of files
    ///
    ///   hotlift methods --qmp /run/vm.qmp
    #[command(verbatim_doc_comment)]
    Methods(methods::MethodsArgs),
    /// List the accelerators of this host, and what is missing to use them
    ///
    /// Looks at devices, work queues, drivers, permissions and the vendors' libraries, and says what
    /// an operator runs for each thing that is missing. Nothing is changed, and no queue is opened but
    /// by the vendors' own libraries, to see whether they work.
    Accel(accel::AccelArgs),
    /// Say what to set on this host: the published rules for its accelerators, or method auto
    ///
    /// Method auto finds out the rest while a migration runs. What a fixed method does with your memory:
    /// 'hotlift methods --measure'.
    #[command(verbatim_doc_comment)]
    Advise(advise::AdviseArgs),
    /// Make and show the certificates by which hosts know each other
    ///
    /// On one host, and for a second one:
    ///
    ///   hotlift certs init
    ///
    ///   hotlift certs host a.example 192.0.2.1
    ///
    ///   hotlift certs host b.example 192.0.2.2 --out b     then copy folder b to b.example:/etc/pki/hotlift
    ///
    /// Certificates that are there already, for QEMU and libvirt or from cert-manager, need no change: 'certs show --dir'
    /// says what they are.
    #[command(subcommand, verbatim_doc_comment)]
    Certs(certs::CertsCommand),
}

#[derive(Subcommand)]
enum GuestCommand {
    /// Run a built-in guest; take it over from another process, or hand it to one
    ///
    /// In two shells, or on two hosts, with the same --guest, --ram and --vcpus:
    ///
    ///   hotlift guest run --incoming tcp:127.0.0.1:4444
    ///
    ///   hotlift guest run --migrate-to tcp:127.0.0.1:4444
    ///
    /// Two hosts need certificates ('hotlift certs'), or --insecure.
    ///
    /// If nobody knows whether the destination runs the guest, the process does not end: it keeps the guest paused, and
    /// prints the 'hotlift settle' to type. Exit codes: 0 the destination has the guest (or it was received and has run
    /// here), 1 failed and the guest stayed, 2 usage, 130 ended by a signal, 3 ended while nobody knew, or by 'hotlift
    /// settle --there'.
    #[command(verbatim_doc_comment)]
    Run(guest_run::GuestRunArgs),
}

/// Commands on the first screen of help: the most common tasks.
const FIRST: [&str; 9] = [
    "migrate", "serve", "drain", "save", "restore", "show", "agent", "certs", "demo",
];

fn main() -> ExitCode {
    let program = Program::start(Cli::command()).with_first(&FIRST);
    if program.first_word().is_some_and(|word| word == "bench") {
        // Handled before clap: a hidden subcommand would appear in the completions, and answer '--help'.
        program.warn("bench is a program of its own: hotlift-bench, from the package of that name");
        output::finish();
        return ExitCode::from(USAGE);
    }
    let command = program.read::<Cli>().command;
    let outcome = match command {
        Command::Demo(args) => demo::run(&args),
        Command::Guest(GuestCommand::Run(args)) => guest_run::run(&args),
        Command::Migrate(args) => migrate::run(&args),
        Command::Drain(args) => drain::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Save(args) => save::run(&args),
        Command::Restore(args) => restore::run(&args),
        Command::Show(args) => show::run(&args),
        Command::Settle(args) => settle::run(&args),
        Command::Guard(args) => {
            guard::run(&args);
            Ok(())
        }
        Command::Relay(command) => relay::run(&command),
        Command::Agent(command) => agent::run(&command),
        Command::Accel(args) => accel::run(&args),
        Command::Advise(args) => advise::run(&args),
        Command::Certs(command) => certs::run(&command),
        Command::Manual { dir } => manual::write(&dir, &Cli::command()).map_err(CommandError::from),
        Command::Methods(args) => methods::run(&args),
    };
    let code = match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            program.fail(&error.line(), error.advice().as_deref(), error.is_usage());
            error.exit_code()
        }
    };
    output::finish();
    code
}
