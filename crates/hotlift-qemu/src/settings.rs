//! Capabilities and parameters of a QEMU: changed for one migration, and restored.

use hotlift_qmp::{Qemu, QmpError};
use hotlift_terminal::output::complain;
use serde_json::{Map, Value};

use crate::capabilities::{self, CAPABILITIES, PREEMPT, Purpose, Treatment, capability};
use crate::error::{QemuError, Side};
use crate::record::{Change, Record};

/// What was changed, with the values from before.
#[derive(Debug)]
pub struct Changed(Record);

/// What a migration through relays asks of either QEMU: `channels` multifd channels without
/// compression (0 for multifd off), events, and a return path.
#[must_use]
pub fn for_relay(
    purpose: Purpose,
    channels: u8,
) -> (Vec<(&'static str, bool)>, Map<String, Value>) {
    let is_set = |name: &str| match name {
        "multifd" => channels > 0,
        _ => true,
    };
    let of_row = |row: &capabilities::Capability| match row.treatment(purpose) {
        Treatment::Off => Some((row.name, false)),
        Treatment::Set => Some((row.name, is_set(row.name))),
        Treatment::Alike | Treatment::Kept | Treatment::Refused => None,
    };
    let mut parameters = Map::new();
    if channels > 0 {
        parameters.insert("multifd-channels".to_owned(), channels.into());
    }
    parameters.insert("multifd-compression".to_owned(), "none".into());
    // The way to the relay is a UNIX socket of this host.
    parameters.insert("tls-creds".to_owned(), "".into());
    (CAPABILITIES.iter().filter_map(of_row).collect(), parameters)
}

/// What a restore asks of a QEMU that is to run its guest before it has the pages; with `preempt` those that it asks for have
/// a connection of their own.
#[must_use]
pub fn for_lazy_restore(preempt: bool) -> (Vec<(&'static str, bool)>, Map<String, Value>) {
    let (mut capabilities, parameters) = for_relay(Purpose::Restore, 0);
    let wanted = [("postcopy-ram", true), (PREEMPT, preempt)];
    capabilities.retain(|(name, _)| wanted.iter().all(|(wanted, _)| wanted != name));
    capabilities.extend(wanted);
    (capabilities, parameters)
}

/// The capabilities that the other QEMU must have alike, as this one has them.
#[must_use]
pub fn alike(now: Vec<(String, bool)>) -> Vec<(String, bool)> {
    let is_alike = |name: &str| {
        let purpose = Purpose::Migrate {
            ignore_shared: false,
        };
        capability(name).is_some_and(|row| row.treatment(purpose) == Treatment::Alike)
    };
    now.into_iter().filter(|(name, _)| is_alike(name)).collect()
}

/// Checks that a QEMU has no setting that a command with this purpose refuses.
///
/// # Errors
/// [`QemuError::Setting`] with the first one; those of QMP.
pub fn check(qemu: &mut Qemu, side: Side, purpose: Purpose) -> Result<(), QemuError> {
    let failed = |error| side.error(error);
    let now = qemu.query_capabilities().map_err(failed)?;
    capabilities::check_capabilities(purpose, &now)?;
    let now = qemu.query_parameters().map_err(failed)?;
    let defaults = match now
        .keys()
        .all(|name| capabilities::parameter(name).is_some())
    {
        true => Map::new(),
        false => qemu.migration_defaults().map_err(failed)?,
    };
    let default = |name: &str| {
        let experimental = format!("x-{name}");
        defaults
            .get(name)
            .or_else(|| defaults.get(&experimental))
            .cloned()
    };
    capabilities::check_parameters(&now, default)
}

/// Restores what an earlier command has left changed in `qemu`, whose migration is not under way, and reports it. `ready`
/// waits until QEMU lets it be changed.
///
/// # Errors
/// [`QemuError::InUse`] if that command is still at work; those of QMP.
pub fn restore_left(
    qemu: &mut Qemu,
    side: Side,
    ready: impl FnOnce(&mut Qemu) -> Result<(), QmpError>,
) -> Result<(), QemuError> {
    let failed = |error| side.error(error);
    let Some(left) = Changed::left(qemu).map_err(failed)? else {
        return Ok(());
    };
    if let Some(process) = left.0.owner_at_work() {
        return Err(QemuError::InUse { process });
    }
    ready(qemu).map_err(failed)?;
    let restored = left.undo(qemu).map_err(failed)?;
    complain!("hotlift: an earlier command left settings of QEMU changed; restored: {restored}");
    Ok(())
}

impl Changed {
    /// What an earlier command has changed in `qemu`, and not restored.
    ///
    /// # Errors
    /// Those of QMP.
    pub fn left(qemu: &mut Qemu) -> Result<Option<Self>, QmpError> {
        Ok(Record::of(qemu)?.map(Self))
    }

    /// Changes what differs. If QEMU refuses, what was changed is restored.
    ///
    /// # Errors
    /// Those of QMP.
    pub fn apply(
        qemu: &mut Qemu,
        capabilities: &[(&str, bool)],
        parameters: &Map<String, Value>,
    ) -> Result<Self, QmpError> {
        let has = qemu.query_capabilities()?;
        let changes_of = |(name, set): &(&str, bool)| {
            let (_, before) = has.iter().find(|(has, _)| has == name)?;
            (before != set).then(|| Change {
                name: (*name).to_owned(),
                before: *before,
                set: *set,
            })
        };
        let had = qemu.query_parameters()?;
        let change_of = |(name, set): (&String, &Value)| {
            let before = had.get(name);
            let differs = before != Some(set) && !is_unset(before, set);
            differs.then(|| Change {
                name: name.clone(),
                before: before.cloned().unwrap_or_default(),
                set: set.clone(),
            })
        };
        let changed = Self(Record::new(
            capabilities.iter().filter_map(changes_of).collect(),
            parameters.iter().filter_map(change_of).collect(),
        ));
        // Before the settings: a command that is killed in between leaves nothing to guess.
        if !changed.is_empty() {
            changed.0.put(qemu)?;
        }
        let is_new = |(name, set): &&(&str, bool)| !has.contains(&((*name).to_owned(), *set));
        // Also what this QEMU does not know: it is refused by name if it is to be on.
        let capabilities: Vec<_> = capabilities.iter().filter(is_new).copied().collect();
        let changes = changed.0.parameters.iter();
        let parameters = changes.map(|it| (it.name.clone(), it.set.clone()));
        let parameters = Value::Object(parameters.collect());
        let set = qemu.set_capabilities(&capabilities);
        if let Err(error) = set.and_then(|()| qemu.set_parameters(&parameters)) {
            let _ = changed.undo(qemu);
            return Err(error);
        }
        Ok(changed)
    }

    fn is_empty(&self) -> bool {
        self.0.capabilities.is_empty() && self.0.parameters.is_empty()
    }

    /// Restores the values from before, where QEMU still has those that were set, and returns them in one line. QEMU refuses
    /// while a migration is under way.
    ///
    /// # Errors
    /// Those of QMP.
    pub fn undo(&self, qemu: &mut Qemu) -> Result<String, QmpError> {
        if self.is_empty() {
            return Ok(String::new());
        }
        let mut restored = Vec::new();
        let now = qemu.query_capabilities()?;
        let mut capabilities = Vec::new();
        for Change { name, before, set } in &self.0.capabilities {
            if now.iter().any(|(has, state)| has == name && state == set) {
                capabilities.push((name.as_str(), *before));
                restored.push(format!("{name} {}", if *before { "on" } else { "off" }));
            }
        }
        qemu.set_capabilities(&capabilities)?;
        let now = qemu.query_parameters()?;
        let mut parameters = Map::new();
        for Change { name, before, set } in &self.0.parameters {
            let now = now.get(name);
            if now == Some(set) || is_unset(now, set) {
                parameters.insert(name.clone(), before.clone());
                restored.push(format!("{name} {}", capabilities::text(before)));
            }
        }
        qemu.set_parameters(&Value::Object(parameters))?;
        Record::remove(qemu)?;
        Ok(match restored.is_empty() {
            true => "nothing, all were changed since".to_owned(),
            false => restored.join(", "),
        })
    }
}

/// A parameter that is to be empty and that this QEMU does not report is empty.
fn is_unset(now: Option<&Value>, wanted: &Value) -> bool {
    wanted == "" && now.is_none()
}
