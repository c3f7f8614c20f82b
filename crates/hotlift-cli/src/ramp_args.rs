//! The flag for the downtime limit of a source's QEMU, for commands that move running guests.

use std::time::Duration;

use clap::Args;
use hotlift_command::security::Switch;
use hotlift_qemu::downtime_limit::LimitArgs;

/// The flag.
#[derive(Debug, Args)]
pub struct RampArgs {
    /// Begin with a low downtime limit, and raise it to 'downtime-limit' only as far as the migration needs; off: set it at
    /// once
    #[arg(
        long,
        value_name = "on|off",
        default_value = "on",
        value_enum,
        hide_possible_values = true
    )]
    downtime_ramp: Switch,
}

impl RampArgs {
    /// Returns the downtime limit of a migration, with the one that was given for it.
    pub fn limit(&self, own: Option<Duration>) -> LimitArgs {
        LimitArgs {
            own,
            ramps: self.downtime_ramp == Switch::On,
        }
    }
}
