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

/// Move the memory of running virtual machines between hosts
#[derive(Parser)]
#[command(name = "hotlift", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Live-migrate the built-in guest between two processes of this host, and show the figures
    ///
    /// Without flags, it migrates once with each page compression method. With a flag that chooses a method, it migrates once
    /// with the given settings.
    Demo(demo::DemoArgs),
    /// Run one built-in guest
    #[command(subcommand)]
    Guest(GuestCommand),
    /// Move the guest of a running QEMU to a host with 'hotlift serve', or a domain of libvirt
    ///
    /// Sets QEMU's migration capabilities and parameters, and restores them after the migration. The bandwidth is unlimited
    /// unless max-bandwidth limits it, which counts bytes on the wire. Ctrl-C cancels; the guest stays here and keeps running.
    ///
    ///   hotlift migrate --qmp /run/vm.qmp --to tcp:HOST:4444 --method zstd --channels 4
    ///
    /// With --domain, libvirt does everything but move the pages ('virsh migrate --live'). A relay here sends them to the agent
    /// of the destination ('hotlift agent'); both QEMUs use only the loopback of their host:
    ///
    ///   hotlift migrate --domain web1 --to qemu+ssh://HOST/system --parallel 4
    ///
    /// Both hosts need certificates ('hotlift certs'), or --insecure.
    ///
    /// Exit codes: 0 the destination has the guest, 1 failed and the guest stayed, 2 usage, 130 cancelled and the guest stayed,
    /// 3 unknown whether the destination runs the guest, which is left paused here: 'hotlift settle'.
    #[command(verbatim_doc_comment)]
    Migrate(migrate::MigrateArgs),
    /// Move the domains of this host's libvirt to other hosts, by a plan
    ///
    /// Domains that move fast come first; domains that write faster than the link sends come last. Several move at once while
    /// their writes need at most half of the link. Each move is a 'virsh migrate --live', which the hosts' agents forward. A
    /// domain whose move fails keeps running here. If a destination does not answer, no further move starts. Run the same
    /// command again to move the remaining domains.
    ///
    ///   hotlift drain --to b.example,c.example --dry-run
    ///
    /// Exit codes: 0 all domains moved, 1 some stayed here or ended by themselves, 2 usage, 130 ended by a signal and the
    /// others stayed, 3 unknown which host runs some of them, or both hosts do.
    #[command(verbatim_doc_comment)]
    Drain(drain::DrainArgs),
    /// Wait on the destination host for 'hotlift migrate', with a QEMU that receives the guest
    ///
    /// Give the QMP socket of a QEMU that waits with '-incoming defer':
    ///
    ///   hotlift serve --listen tcp::4444 --qmp /run/vm.qmp
    ///
    /// or the command line of a QEMU, which is started when a source connects:
    ///
    ///   hotlift serve --listen tcp::4444 -- qemu-system-x86_64 -machine pc-i440fx-7.2 -m 2G
    ///
    /// The command receives one guest. A QEMU that the command started keeps running afterwards if it has or may have the
    /// guest; otherwise it is ended. QEMU's output is copied to standard error; if that is a pipe, only while this command
    /// runs. Both hosts need certificates ('hotlift certs'), or --insecure.
    ///
    /// With --files, it serves save files for 'hotlift restore --lazy tcp:HOST:4444/vm.save' on other hosts, until a signal:
    ///
    ///   hotlift serve --listen tcp::4444 --files /srv/saved
    ///
    /// Exit codes: 0 the guest is here, 1 failed and the guest is not here, 2 usage, 130 ended by a signal and the guest is not
    /// here, 3 unknown whether the guest runs here; its QEMU is not ended.
    #[command(verbatim_doc_comment)]
    Serve(serve::ServeArgs),
    /// Relay migrations that QEMU itself starts, with one relay on each host
    ///
    /// Run one relay on each host, and use QEMU's 'migrate' and 'migrate_incoming' as without relays. The bandwidth is
    /// unlimited unless max-bandwidth is given: QEMU limits itself. The relay detects zero pages if the source does not, unless
    /// zero-page-detection is given.
    #[command(subcommand)]
    Relay(relay::RelayCommand),
    /// Forward the migrations of this host's libvirt: encrypted, compressed, within the host's budget
    ///
    /// One agent runs on each host. nftables redirects the migration connections of QEMU and libvirt to the agent, which
    /// forwards them to the agent of the other host. 'virsh migrate --live' is used as without agents.
    ///
    ///   hotlift agent check && hotlift agent run
    ///
    /// Both hosts need certificates ('hotlift certs').
    #[command(subcommand, verbatim_doc_comment)]
    Agent(agent::AgentCommand),
    /// Save the guest of a running QEMU to a file, while it runs
    ///
    /// The guest runs until only the last pages are missing, and is then left paused, as by QEMU's own migration; with
    /// --keep-running it continues. A failed save leaves no file, and the guest keeps running.
    ///
    ///   hotlift save --qmp /run/vm.qmp vm.save --method zstd --channels 4
    #[command(verbatim_doc_comment)]
    Save(save::SaveArgs),
    /// Restore a guest from a file into a QEMU
    ///
    /// Reads files of 'hotlift save' and QEMU's own mapped-ram files. It rejects a truncated or damaged file before the guest
    /// runs; with --lazy, no damaged page reaches the guest.
    ///
    ///   hotlift restore vm.save -- qemu-system-x86_64 -machine pc-i440fx-7.2 -m 2G
    ///
    ///   hotlift restore vm.save --qmp /run/vm.qmp
    ///
    ///   hotlift restore --lazy tcp:HOST:4444/vm.save --qmp /run/vm.qmp     from 'hotlift serve --files'
    ///
    /// With --lazy (files of 'hotlift save', QEMU 7.2 and later) the guest runs after some milliseconds, and receives its pages
    /// when it needs them. If this command ends before all pages are loaded, the guest waits for the missing pages: --lazy
    /// --resume loads them.
    ///
    /// A QEMU that the command started keeps running afterwards, unless it did not receive the guest: then it is ended. Exit
    /// codes as of 'serve'.
    #[command(verbatim_doc_comment)]
    Restore(restore::RestoreArgs),
    /// Show the content of a save file: machine, RAM, devices, and the pages and bytes stored by each compression method
    ///
    ///   hotlift show vm.save --verify
    #[command(verbatim_doc_comment)]
    Show(show::ShowArgs),
    /// Continue or end a guest that a migration left paused (exit code 3)
    ///
    /// The migration could not determine whether the destination runs the guest, and kept it here, complete. Check the
    /// destination first. The command refuses a guest that no migration left paused.
    ///
    ///   hotlift settle --qmp /run/vm.qmp --there     the destination has it: end this copy
    ///
    ///   hotlift settle --qmp /run/vm.qmp --here      it does not and never will: run it here
    #[command(verbatim_doc_comment)]
    Settle(settle::SettleArgs),
    /// Watch a QEMU that 'serve' or 'restore' started
    #[command(hide = true)]
    Guard(guard::GuardArgs),
    /// Write the manual pages and the shells' completions of this command
    #[command(hide = true)]
    Manual {
        /// Folder with the layout of /usr/share
        dir: PathBuf,
    },
    /// List the page compression methods and their libraries on this host; measure them on your memory
    ///
    /// With a file, a process or a QEMU, it measures the ratio, rate and CPU time of every method on a sample of that memory,
    /// on all cores. It changes nothing; it reads pages of a process through /proc/PID/mem.
    ///
    ///   hotlift methods --measure /srv/memory.img     an image, or a folder of files
    ///
    ///   hotlift methods --qmp /run/vm.qmp
    #[command(verbatim_doc_comment)]
    Methods(methods::MethodsArgs),
    /// List the accelerators of this host, and what is missing to use them
    ///
    /// Inspects devices, work queues, drivers, permissions and the vendors' libraries, and prints a command for everything that
    /// is missing. It changes nothing, and only the vendors' libraries open queues, to test them.
    Accel(accel::AccelArgs),
    /// Recommend settings for this host: the published rules for its accelerators, or method auto
    ///
    /// Method auto chooses everything else during the migration. To measure a fixed method on your memory: 'hotlift methods
    /// --measure'.
    #[command(verbatim_doc_comment)]
    Advise(advise::AdviseArgs),
    /// Create and show the certificates with which hosts authenticate each other
    ///
    /// On one host, also for a second one:
    ///
    ///   hotlift certs init
    ///
    ///   hotlift certs host a.example 192.0.2.1
    ///
    ///   hotlift certs host b.example 192.0.2.2 --out b     then copy folder b to b.example:/etc/pki/hotlift
    ///
    /// Existing certificates for QEMU and libvirt, or from cert-manager, need no change: 'certs show --dir' shows them.
    #[command(subcommand, verbatim_doc_comment)]
    Certs(certs::CertsCommand),
}

#[derive(Subcommand)]
enum GuestCommand {
    /// Run a built-in guest; receive it from another process, or migrate it to one
    ///
    /// In two shells, or on two hosts, with the same --guest, --ram and --vcpus:
    ///
    ///   hotlift guest run --incoming tcp:127.0.0.1:4444
    ///
    ///   hotlift guest run --migrate-to tcp:127.0.0.1:4444
    ///
    /// Two hosts need certificates ('hotlift certs'), or --insecure.
    ///
    /// If it is unknown whether the destination runs the guest, the process does not end: it keeps the guest paused and prints
    /// the 'hotlift settle' command to type. Exit codes: 0 the destination has the guest (or it was received and ran here), 1
    /// failed and the guest stayed, 2 usage, 130 ended by a signal, 3 ended while the host of the guest was unknown, or by
    /// 'hotlift settle --there'.
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
        program.warn("bench is a separate program: hotlift-bench, from the package of that name");
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
            ExitCode::from(error.exit_code())
        }
    };
    output::finish();
    code
}
