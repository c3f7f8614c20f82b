//! Flag for a property of the destination's QEMU that a multifd stream does not contain.

use clap::Args;
use hotlift_command::security::Switch;

/// The flag, for commands that send a stream with multifd to a QEMU.
#[derive(Debug, Clone, Default, Args)]
pub struct FlushArgs {
    /// Value of QEMU's property of the same name at the destination. With on, each RAM section ends with a sync point, as in
    /// machine types up to 8.0 and in QEMU before 8.1 [default: the value in the source's stream, else that of the
    /// destination's QEMU, else that of the machine type]
    #[arg(
        long,
        value_name = "on|off",
        value_enum,
        hide_possible_values = true,
        hide_short_help = true
    )]
    multifd_flush_after_each_section: Option<Switch>,
}

impl FlushArgs {
    /// Returns the value of the flag; `None` if it was not given.
    #[must_use]
    pub fn value(&self) -> Option<bool> {
        self.multifd_flush_after_each_section
            .map(|switch| switch == Switch::On)
    }
}
