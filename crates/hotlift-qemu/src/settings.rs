//! Capabilities and parameters of a QEMU: changed for one migration, and put back.

use hotlift_qmp::{Qemu, QmpError};
use serde_json::{Map, Value, json};

/// Off in both QEMUs: each changes what the stream is made of, or waits for a hand of its own.
const OFF: &[&str] = &[
    "xbzrle",
    "compress",
    "postcopy-ram",
    "postcopy-preempt",
    "x-colo",
    "background-snapshot",
    "mapped-ram",
    "zero-copy-send",
    "pause-before-switchover",
];

/// Capabilities that both QEMUs must have alike, and that do not matter otherwise.
pub const ALIKE: &[&str] = &["x-ignore-shared", "dirty-bitmaps", "switchover-ack"];

/// What was changed, with the values from before.
#[derive(Debug)]
pub struct Changed {
    capabilities: Vec<(String, bool)>,
    parameters: Map<String, Value>,
}

/// What a migration through relays asks of either QEMU: `channels` multifd channels without
/// compression (0 for multifd off), events, and a return path.
#[must_use]
pub fn for_relay(channels: u8) -> (Vec<(&'static str, bool)>, Map<String, Value>) {
    let mut capabilities: Vec<_> = OFF.iter().map(|name| (*name, false)).collect();
    capabilities.extend([
        ("events", true),
        ("return-path", true),
        ("multifd", channels > 0),
    ]);
    let mut parameters = Map::new();
    if channels > 0 {
        parameters.insert("multifd-channels".to_owned(), channels.into());
    }
    parameters.insert("multifd-compression".to_owned(), "none".into());
    // The way to the relay is a UNIX socket of this host.
    parameters.insert("tls-creds".to_owned(), "".into());
    (capabilities, parameters)
}

/// Gives requested pages a connection of their own.
pub const PREEMPT: &str = "postcopy-preempt";

/// What a restore asks of a QEMU that is to run its guest before it has the pages; with `preempt` those that it asks for have
/// a connection of their own.
#[must_use]
pub fn for_lazy_restore(preempt: bool) -> (Vec<(&'static str, bool)>, Map<String, Value>) {
    let (mut capabilities, parameters) = for_relay(0);
    let wanted = [("postcopy-ram", true), (PREEMPT, preempt)];
    capabilities.retain(|(name, _)| wanted.iter().all(|(wanted, _)| wanted != name));
    capabilities.extend(wanted);
    (capabilities, parameters)
}

impl Changed {
    /// What a lazy restore has turned on of a QEMU that still waits for pages, where these capabilities are as they are.
    #[must_use]
    pub fn by_lazy_restore(now: &[(String, bool)]) -> Self {
        let turned_on = now
            .iter()
            .filter(|(name, state)| *state && ["postcopy-ram", PREEMPT].contains(&name.as_str()));
        Self {
            capabilities: turned_on.map(|(name, _)| (name.clone(), false)).collect(),
            parameters: Map::new(),
        }
    }

    /// Changes what differs. If QEMU refuses, what was changed is put back.
    ///
    /// # Errors
    /// Those of QMP.
    pub fn apply(
        qemu: &mut Qemu,
        capabilities: &[(&str, bool)],
        parameters: &Map<String, Value>,
    ) -> Result<Self, QmpError> {
        let has = qemu.query_capabilities()?;
        let differing: Vec<_> = capabilities
            .iter()
            .filter(|(name, state)| !has.contains(&((*name).to_owned(), *state)))
            .copied()
            .collect();
        let had = qemu.query_parameters()?;
        let wanted: Map<_, _> = parameters
            .iter()
            .filter(|(name, value)| had.get(*name) != Some(value) && !is_unset(&had, name, value))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        let mut changed = Self {
            capabilities: Vec::new(),
            parameters: Map::new(),
        };
        qemu.set_capabilities(&differing)?;
        changed.capabilities = has
            .into_iter()
            .filter(|(name, _)| differing.iter().any(|(differing, _)| differing == name))
            .collect();
        if let Err(error) = qemu.set_parameters(&Value::Object(wanted.clone())) {
            let _ = changed.undo(qemu);
            return Err(error);
        }
        changed.parameters = had
            .into_iter()
            .filter(|(name, _)| wanted.contains_key(name))
            .collect();
        Ok(changed)
    }

    /// Puts the values from before back. QEMU refuses while a migration is under way.
    ///
    /// # Errors
    /// Those of QMP.
    pub fn undo(&self, qemu: &mut Qemu) -> Result<(), QmpError> {
        let capabilities: Vec<_> = self
            .capabilities
            .iter()
            .map(|(name, state)| (name.as_str(), *state))
            .collect();
        qemu.set_capabilities(&capabilities)?;
        qemu.set_parameters(&json!(self.parameters))
    }
}

/// A parameter that is to be empty and that this QEMU does not tell of is empty.
fn is_unset(had: &Map<String, Value>, name: &str, wanted: &Value) -> bool {
    wanted == "" && !had.contains_key(name)
}
