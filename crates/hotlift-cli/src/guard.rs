//! `hotlift guard`: watches a QEMU that `serve` or `restore` started. Only these two commands start it.

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

/// Runs `hotlift guard`.
pub fn run(args: &GuardArgs) {
    hotlift_qemu::guard::run(&args.qmp, &args.folder);
}
