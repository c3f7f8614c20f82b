//! Sends queries to this host's agent over its control socket.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use hotlift_agent::commands::AgentInfo;
use hotlift_agent::config::Config;
use hotlift_agent::error::AgentError;
use hotlift_qmp::{Client, QmpAddress, QmpError};
use hotlift_terminal::output::warn;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::CommandError;

/// Timeout for the agent's answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Where the agent is asked.
#[derive(Debug, Args)]
pub struct ControlArgs {
    /// Control socket of this host's agent [default: /run/hotlift/agent.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Returns the status of this host's agent; `None` if no agent runs. After an error, prints the error and returns `None`.
pub fn of_this_host(control: &ControlArgs) -> Option<AgentInfo> {
    match control.ask("query-agent", &Value::Null) {
        Ok(info) => Some(info),
        Err(CommandError::NoAgentHere { .. }) => None,
        Err(error) => {
            warn!("hotlift: {}", error.line());
            None
        }
    }
}

/// Returns the configuration of this host's agent in `file`; the default configuration if `file` does not exist.
pub fn config_in(file: &Path) -> Result<Config, CommandError> {
    match Config::read(file) {
        Err(error) if error.is_missing() => Ok(Config::default()),
        read => read.map_err(|error| agent_error(error.into())),
    }
}

/// Converts an error of the agent to an error of this command.
pub fn agent_error(error: AgentError) -> CommandError {
    CommandError::Agent(Box::new(error))
}

impl ControlArgs {
    fn path(&self) -> PathBuf {
        let control = self.control.clone();
        control.unwrap_or_else(|| Config::default().control)
    }

    /// Sends a query to the agent, and returns the decoded answer.
    pub fn ask<T: DeserializeOwned>(
        &self,
        command: &str,
        arguments: &Value,
    ) -> Result<T, CommandError> {
        let path = self.path();
        let failed = |source| match source {
            QmpError::Command { desc, .. } => CommandError::AgentRefuses { reason: desc },
            source => CommandError::NoAgent {
                control: path.clone(),
                source,
            },
        };
        // Checked first, since the QMP client would wait for a missing socket, as for a QEMU that is starting.
        if let Err(source) = UnixStream::connect(&path)
            && matches!(
                source.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            )
        {
            let control = path;
            return Err(CommandError::NoAgentHere { control, source });
        }
        let address = QmpAddress::Unix(path.clone());
        let mut client = Client::connect(&address, ANSWER).map_err(failed)?;
        let answer = client.execute(command, arguments).map_err(failed)?;
        serde_json::from_value(answer).map_err(|source| {
            failed(QmpError::Answer {
                command: command.to_owned(),
                source,
            })
        })
    }
}
