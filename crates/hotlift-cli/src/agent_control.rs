//! This host's agent, asked over its control socket.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use hotlift_agent::commands::AgentInfo;
use hotlift_agent::config::Config;
use hotlift_agent::error::AgentError;
use hotlift_qmp::{Client, QmpAddress, QmpError};
use hotlift_terminal::output::complain;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::CommandError;

/// How long the agent may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Where the agent is asked.
#[derive(Debug, Args)]
pub struct ControlArgs {
    /// The agent's control socket [default: /run/hotlift/agent.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// What this host's agent says of itself; `None` if there is none, or if it does not answer, which is then said.
pub fn of_this_host(control: &ControlArgs) -> Option<AgentInfo> {
    match control.ask("query-agent", &Value::Null) {
        Ok(info) => Some(info),
        Err(CommandError::NoAgentHere { .. }) => None,
        Err(error) => {
            complain!("hotlift: {}", error.line());
            None
        }
    }
}

/// The configuration of this host's agent in `file`; that of an agent of which nothing is said if there is none.
pub fn config_in(file: &Path) -> Result<Config, CommandError> {
    match Config::read(file) {
        Err(error) if error.is_no_file() => Ok(Config::default()),
        read => read.map_err(|error| agent_error(error.into())),
    }
}

/// A failure of the agent as one of this command.
pub fn agent_error(error: AgentError) -> CommandError {
    CommandError::Agent(Box::new(error))
}

impl ControlArgs {
    fn path(&self) -> PathBuf {
        let control = self.control.clone();
        control.unwrap_or_else(|| Config::default().control)
    }

    /// Asks the agent.
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
        // The client would wait for a socket that is not there, as for that of a QEMU that is starting.
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
