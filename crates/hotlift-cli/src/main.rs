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
mod ramp_args;
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
    /// Without flags, the command migrates once with each page compression method. With a flag that chooses a method, it
    /// migrates once with the given settings.
    Demo(demo::DemoArgs),
    /// Run one built-in guest
    #[command(subcommand)]
    Guest(GuestCommand),
    /// Move the guest of a running QEMU to a host with 'hotlift serve', or a domain of libvirt
    ///
    /// The command sets QEMU's migration capabilities and parameters, and restores them after the migration. --max-bandwidth
    /// limits the bytes on the wire; without it the bandwidth is unlimited. Ctrl-C cancels the migration; the guest stays here
    /// and keeps running.
    ///
    ///   hotlift migrate --qmp /run/vm.qmp --to tcp:HOST:4444 --method zstd --channels 4
    ///
    /// With --domain, libvirt controls the migration ('virsh migrate --live'), and a relay in this command sends the pages to
    /// the agent of the destination ('hotlift agent'). Both QEMUs use only the loopback of their host:
    ///
    ///   hotlift migrate --domain web1 --to qemu+ssh://HOST/system --parallel 4
    ///
    /// Both hosts need certificates ('hotlift certs'), or --insecure.
    ///
    /// Exit codes: 0 the destination has the guest; 1 failed, the guest stayed here; 2 invalid command line; 130 cancelled, the
    /// guest stayed here; 3 unknown whether the destination runs the guest, which is left paused here (see 'hotlift settle').
    #[command(verbatim_doc_comment)]
    Migrate(migrate::MigrateArgs),
    /// Move the domains of this host's libvirt to other hosts, by a plan
    ///
    /// Domains that move fast come first. Domains that write faster than the link sends come last. Several domains move at once
    /// while their writes need at most half of the link. Each move is a 'virsh migrate --live', which the hosts' agents forward.
    /// A domain whose move fails keeps running here. If a destination stops answering, the command starts no further move. Run
    /// the same command again to move the remaining domains.
    ///
    ///   hotlift drain --to b.example,c.example --dry-run
    ///
    /// Exit codes: 0 all domains moved; 1 some domains stayed here or ended by themselves; 2 invalid command line; 130 ended by a
    /// signal, the other domains stayed here; 3 some domains run on both hosts, or on an unknown host.
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
    /// guest; otherwise the command ends it. The command copies QEMU's output to standard error, but to a pipe only while the
    /// command runs. Both hosts need certificates ('hotlift certs'), or --insecure.
    ///
    /// With --files, the command serves save files for 'hotlift restore --lazy tcp:HOST:4444/vm.save' on other hosts, until a
    /// signal ends it:
    ///
    ///   hotlift serve --listen tcp::4444 --files /srv/saved
    ///
    /// Exit codes: 0 the guest is here; 1 failed, the guest is not here; 2 invalid command line; 130 ended by a signal, the guest
    /// is not here; 3 unknown whether the guest runs here, and its QEMU keeps running.
    #[command(verbatim_doc_comment)]
    Serve(serve::ServeArgs),
    /// Relay migrations that QEMU itself starts, with one relay on each host
    ///
    /// Run one relay on each host, and use QEMU's 'migrate' and 'migrate_incoming' as without relays. Without --max-bandwidth
    /// only QEMU's own max-bandwidth limits the migration. Without --zero-page-detection the relay detects zero pages if the
    /// source does not.
    #[command(subcommand)]
    Relay(relay::RelayCommand),
    /// Encrypt, compress and forward the migrations of this host's libvirt, within a bandwidth and CPU limit
    ///
    /// One agent runs on each host. nftables redirects the migration connections of QEMU and libvirt to the agent, which
    /// forwards them to the agent of the other host. Use 'virsh migrate --live' as without agents.
    ///
    ///   hotlift agent check && hotlift agent run
    ///
    /// Both hosts need certificates ('hotlift certs').
    #[command(subcommand, verbatim_doc_comment)]
    Agent(agent::AgentCommand),
    /// Save the guest of a running QEMU to a file, while it runs
    ///
    /// The guest is paused while the last pages are saved. It stays paused afterwards, as after QEMU's own migration, unless
    /// --keep-running is given. A failed save leaves no file, and the guest keeps running.
    ///
    ///   hotlift save --qmp /run/vm.qmp vm.save --method zstd --channels 4
    #[command(verbatim_doc_comment)]
    Save(save::SaveArgs),
    /// Restore a guest from a file into a QEMU
    ///
    /// The command reads files of 'hotlift save' and QEMU's own mapped-ram files. A guest of a truncated or damaged file never
    /// runs; with --lazy, the guest gets no damaged page.
    ///
    ///   hotlift restore vm.save -- qemu-system-x86_64 -machine pc-i440fx-7.2 -m 2G
    ///
    ///   hotlift restore vm.save --qmp /run/vm.qmp
    ///
    ///   hotlift restore --lazy tcp:HOST:4444/vm.save --qmp /run/vm.qmp     from 'hotlift serve --files'
    ///
    /// With --lazy (files of 'hotlift save', QEMU 7.2 and later) the guest runs after some milliseconds, and receives its pages
    /// when it needs them. If this command ends before all pages are loaded, the guest waits for the missing pages; run the
    /// command again with --lazy --resume to load them.
    ///
    /// A QEMU that the command started keeps running if it received the guest; otherwise the command ends it. The exit codes
    /// are those of 'hotlift serve'.
    #[command(verbatim_doc_comment)]
    Restore(restore::RestoreArgs),
    /// Show the content of a save file: machine, RAM, devices, and the pages and bytes stored by each compression method
    ///
    ///   hotlift show vm.save --verify
    #[command(verbatim_doc_comment)]
    Show(show::ShowArgs),
    /// Continue or end a guest that a migration left paused (exit code 3)
    ///
    /// The migration could not determine whether the destination runs the guest, so it kept the complete guest here, paused.
    /// Check the destination first. The command refuses a guest that no migration left paused.
    ///
    ///   hotlift settle --qmp /run/vm.qmp --there     the destination has the guest: end this copy
    ///
    ///   hotlift settle --qmp /run/vm.qmp --here      the destination never runs the guest: run it here
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
    /// With a file, a process or a QEMU, the command measures the ratio, rate and CPU time of every method on a sample of that
    /// memory, on all cores. It changes nothing. It reads the pages of a process through /proc/PID/mem.
    ///
    ///   hotlift methods --measure /srv/memory.img     an image, or a folder of files
    ///
    ///   hotlift methods --qmp /run/vm.qmp
    #[command(verbatim_doc_comment)]
    Methods(methods::MethodsArgs),
    /// List the accelerators of this host, and what is missing to use them
    ///
    /// The command inspects devices, work queues, drivers, permissions and the vendors' libraries, and prints a command for
    /// everything that is missing. It changes nothing. Only the vendors' libraries open queues, to test them.
    Accel(accel::AccelArgs),
    /// Recommend settings for this host: the published rules for its accelerators, or method auto
    ///
    /// The command gives no other advice, because method auto chooses the rest during the migration. To measure a fixed method
    /// on your memory, use 'hotlift methods --measure'.
    #[command(verbatim_doc_comment)]
    Advise(advise::AdviseArgs),
    /// Create and show the certificates with which hosts authenticate each other
    ///
    /// On one host, create a CA and the certificates of this host and of a second host:
    ///
    ///   hotlift certs init
    ///
    ///   hotlift certs host a.example 192.0.2.1
    ///
    ///   hotlift certs host b.example 192.0.2.2 --out b     then copy folder b to b.example:/etc/pki/hotlift
    ///
    /// Hotlift also uses existing certificates of QEMU, libvirt or cert-manager without changes: see 'certs show --dir DIR'.
    #[command(subcommand, verbatim_doc_comment)]
    Certs(certs::CertsCommand),
}

#[derive(Subcommand)]
enum GuestCommand {
    /// Run a built-in guest; receive it from another process, or migrate it to another process
    ///
    /// In two shells, or on two hosts, with the same --guest, --ram and --vcpus:
    ///
    ///   hotlift guest run --incoming tcp:127.0.0.1:4444
    ///
    ///   hotlift guest run --migrate-to tcp:127.0.0.1:4444
    ///
    /// Two hosts need certificates ('hotlift certs'), or --insecure.
    ///
    /// If it is unknown whether the destination runs the guest, the process keeps the guest paused, does not end, and prints the
    /// 'hotlift settle' command to type.
    ///
    /// Exit codes: 0 the destination has the guest, or the guest was received and ran here; 1 failed, the guest stayed; 2
    /// invalid command line; 130 ended by a signal; 3 ended while it was unknown which host runs the guest, or by 'hotlift
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
