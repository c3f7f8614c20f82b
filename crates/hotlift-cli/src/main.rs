//! The `hotlift` command.

#![forbid(unsafe_code)]

mod args;
mod demo;
mod error;
mod events;
mod guest_run;
mod migration_args;
mod progress;
mod report;
mod signals;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Moves the memory of a running virtual machine between hosts.
#[derive(Parser)]
#[command(name = "hotlift", version, about, max_term_width = 100)]
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
    /// List the page compression methods, and which library does each on this host
    Methods,
}

#[derive(Subcommand)]
enum GuestCommand {
    /// Run a built-in guest; take it over from another process, or hand it to one
    ///
    /// In two shells, or on two hosts, with the same --guest, --ram and --vcpus:
    ///
    ///   hotlift guest run --incoming tcp::4444
    ///
    ///   hotlift guest run --migrate-to tcp:HOST:4444
    #[command(verbatim_doc_comment)]
    Run(guest_run::GuestRunArgs),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Guest(GuestCommand::Run(args)) => guest_run::run(&args),
        Command::Methods => {
            println!("{}", report::methods());
            Ok(())
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hotlift: {}", error.line());
            if let Some(advice) = error.advice() {
                eprintln!("hotlift: {advice}");
            }
            error.exit_code()
        }
    }
}
