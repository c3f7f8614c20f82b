//! `hotlift guard`, which `serve` and `restore` start: watches a QEMU that they started.

use std::path::PathBuf;

use clap::Args;
use hotlift_qmp::QmpAddress;

/// Flags of `guard`.
#[derive(Debug, Args)]
pub struct GuardArgs {
    /// QMP socket of the QEMU
    #[arg(long, value_name = "ADDRESS")]
    qmp: QmpAddress,
    /// Folder of the command that started the QEMU; it is removed when that command has ended
    #[arg(long, value_name = "PATH")]
    folder: PathBuf,
}

/// Runs the command.
pub fn run(args: &GuardArgs) {
    hotlift_qemu::guard::run(&args.qmp, &args.folder);
}
