//! Flags of every command with a monitor.

use std::sync::Arc;

use clap::Args;
use hotlift_monitor::{HmpAddress, MonitorError, Monitors, Sockets};
use hotlift_qmp::QmpAddress;
use hotlift_qmp::server::{Commands, Events};

/// `--control`, `--monitor` and what belongs to them.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Control")]
pub struct ControlArgs {
    /// Serve QMP at this address, as QEMU does: PATH, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    control: Option<QmpAddress>,
    /// Serve the human monitor (HMP) at this address: stdio, PATH, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    monitor: Option<HmpAddress>,
    /// Permissions of the UNIX sockets of --control and --monitor, in octal
    #[arg(
        long,
        value_name = "MODE",
        default_value = "600",
        value_parser = mode,
        hide_short_help = true
    )]
    control_mode: u32,
    /// Allow --control and --monitor on addresses that other hosts can reach, although they have no authentication
    #[arg(long, hide_short_help = true)]
    control_from_other_hosts: bool,
}

fn mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "expected permissions in octal, such as 600".to_owned())
}

impl ControlArgs {
    /// Returns true if at least one monitor was requested.
    pub fn is_given(&self) -> bool {
        self.control.is_some() || self.monitor.is_some()
    }

    /// Returns true if a monitor uses the terminal, as standard input and output.
    pub fn has_terminal(&self) -> bool {
        matches!(self.monitor, Some(HmpAddress::Stdio))
    }

    /// Starts the requested monitors; the drop of the result stops them.
    pub fn serve(
        &self,
        commands: &Arc<dyn Commands>,
        events: &Events,
    ) -> Result<Monitors, MonitorError> {
        let sockets = Sockets {
            qmp: self.control.clone(),
            hmp: self.monitor.clone(),
            mode: self.control_mode,
            from_other_hosts: self.control_from_other_hosts,
        };
        sockets.serve(commands, events)
    }
}
