//! `hotlift show`: what is in a save file.

use clap::Args;
use hotlift::file::{Description, Location, describe};
use hotlift::{Control, MigrationError};
use hotlift_console::error::{ConsoleError, error_line};
use hotlift_console::output_args::OutputArgs;
use hotlift_console::progress::bytes;
use hotlift_console::security::SecurityArgs;
use hotlift_console::signals::Interrupt;
use hotlift_console::table::{align, new_table};
use hotlift_console::width;

use crate::error::CommandError;
use crate::restore::location;

/// Flags of `show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// File that 'hotlift save' has written, or tcp:HOST:PORT/NAME at a 'hotlift serve --files'
    #[arg(value_name = "FILE", value_parser = location())]
    file: Location,
    /// Read all pages, and check that they are what was written
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    security: SecurityArgs,
}

/// Runs the command.
pub fn run(args: &ShowArgs) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch()?;
    let control = Control::new();
    let tls = match args.file.server() {
        Some(server) => args.security.tls(server)?,
        None => None,
    };
    let file = args.file.clone().with_tls(tls);
    let described = interrupt.cancelling(&control, || describe(&file, args.verify, &control));
    let description = described.map_err(|error| match error {
        MigrationError::Cancelled => ConsoleError::Interrupted.into(),
        // It begins as this command's own error does.
        MigrationError::File(error) => CommandError::Show {
            reason: error_line(&error),
        },
        error => CommandError::Show {
            reason: error_line(&error),
        },
    })?;
    Ok(args.output.print(&description, || table(&description))?)
}

fn table(file: &Description) -> String {
    let mut table = new_table(&["save file", ""]);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    row("machine", file.info.machine.clone());
    row("UUID", file.info.uuid.clone());
    row("written by", format!("hotlift {}", file.info.hotlift));
    for block in file.ram.iter().filter(|block| block.pages > 0) {
        let pages = bytes(block.pages * 4096);
        let name = format!("RAM block {}", block.name);
        row(
            &name,
            format!("{}, of which {pages} have content", bytes(block.bytes)),
        );
    }
    let empty = file.ram.iter().filter(|block| block.pages == 0).count();
    if empty > 0 {
        row("RAM blocks without content", empty.to_string());
    }
    let devices = bytes(file.device_bytes as u64);
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
        match file.verified_blocks {
            Some(blocks) => format!("all good: {blocks} blocks were read"),
            None => "not read (--verify)".to_owned(),
        },
    );
    align(&mut table);
    width::wrap(&mut table, 1);
    table.to_string()
}
