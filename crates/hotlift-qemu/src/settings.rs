//! Capabilities and parameters of a QEMU: changed for one migration, and restored.

use hotlift_qmp::{Qemu, QmpError};
use hotlift_terminal::output::warn;
use serde_json::{Map, Value, json};

use crate::capabilities::{self, CAPABILITIES, PREEMPT, Purpose, Treatment, capability};
use crate::error::{QemuError, Side};
use crate::record::{Change, Record};

/// Parameter that Hotlift may change several times during one migration.
pub(crate) const DOWNTIME_LIMIT: &str = "downtime-limit";

/// Settings that were changed for a migration, with their previous values.
#[derive(Debug)]
pub struct Changed(Record);

/// Returns the settings that a migration through relays needs in both QEMUs: events, a return path, and `channels` multifd
/// channels without compression (0: multifd off).
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
    // TLS is off: the connection between QEMU and the relay is a UNIX socket of this host.
    parameters.insert("tls-creds".to_owned(), "".into());
    (CAPABILITIES.iter().filter_map(of_row).collect(), parameters)
}

/// Returns the settings of a QEMU for a lazy restore. With `preempt`, requested pages use a separate connection.
#[must_use]
pub fn for_lazy_restore(preempt: bool) -> (Vec<(&'static str, bool)>, Map<String, Value>) {
    let (mut capabilities, parameters) = for_relay(Purpose::Restore, 0);
    let wanted = [("postcopy-ram", true), (PREEMPT, preempt)];
    capabilities.retain(|(name, _)| wanted.iter().all(|(wanted, _)| wanted != name));
    capabilities.extend(wanted);
    (capabilities, parameters)
}

/// Selects the capabilities in `now` that must have the same value in the other QEMU.
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

/// Checks that QEMU has no setting that this command refuses.
///
/// # Errors
/// [`QemuError::Setting`] with the first refused setting; QMP errors.
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

/// Restores the settings that an earlier command has changed in `qemu` and not restored, and logs this. No migration may be
/// active. `ready` waits until QEMU accepts changes.
///
/// # Errors
/// [`QemuError::InUse`] if the earlier command still runs; QMP errors.
pub fn restore_left(
    qemu: &mut Qemu,
    side: Side,
    ready: impl FnOnce(&mut Qemu) -> Result<(), QmpError>,
) -> Result<(), QemuError> {
    let failed = |error| side.error(error);
    let Some(unrestored) = Changed::unrestored(qemu).map_err(failed)? else {
        return Ok(());
    };
    if let Some(process) = unrestored.0.owner_at_work() {
        return Err(QemuError::InUse { process });
    }
    ready(qemu).map_err(failed)?;
    let restored = unrestored.undo(qemu).map_err(failed)?;
    warn!("hotlift: an earlier command left settings of QEMU changed; restored: {restored}");
    Ok(())
}

impl Changed {
    /// Reads the settings that an earlier command has changed in `qemu` and not restored; `None` if there are none.
    ///
    /// # Errors
    /// QMP errors.
    pub fn unrestored(qemu: &mut Qemu) -> Result<Option<Self>, QmpError> {
        Ok(Record::of(qemu)?.map(Self))
    }

    /// Changes the settings whose values differ. If QEMU refuses a change, restores the previous values. `limits` are the
    /// values of `downtime-limit` that [`Changed::set_limit`] may set.
    ///
    /// # Errors
    /// QMP errors.
    pub fn apply(
        qemu: &mut Qemu,
        capabilities: &[(&str, bool)],
        parameters: &Map<String, Value>,
        limits: &[u64],
    ) -> Result<Self, QmpError> {
        let has = qemu.query_capabilities()?;
        let changes_of = |(name, set): &(&str, bool)| {
            let (_, before) = has.iter().find(|(has, _)| has == name)?;
            (before != set).then(|| Change {
                name: (*name).to_owned(),
                before: *before,
                set: *set,
                later: Vec::new(),
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
                later: match name.as_str() {
                    DOWNTIME_LIMIT => limits.iter().copied().map(Value::from).collect(),
                    _ => Vec::new(),
                },
            })
        };
        let mut changed = Self(Record::new(
            capabilities.iter().filter_map(changes_of).collect(),
            parameters.iter().filter_map(change_of).collect(),
        ));
        // The record is stored before the settings change. If the command is killed in between, a later command still finds
        // every change.
        if !changed.is_empty() {
            changed.0.put(qemu)?;
        }
        // The record in QEMU includes the values that may be set later. This process knows which value it has set.
        for change in &mut changed.0.parameters {
            change.later.clear();
        }
        let is_new = |(name, set): &&(&str, bool)| !has.contains(&((*name).to_owned(), *set));
        // Capabilities that this QEMU does not know are included: if one must be on, the error names it.
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

    /// Returns true if `downtime-limit` has the value that this command has set. Returns false if another client has changed
    /// it. That client's value is not replaced when the settings are restored.
    ///
    /// # Errors
    /// QMP errors.
    pub fn has_own_limit(&mut self, qemu: &mut Qemu) -> Result<bool, QmpError> {
        let is_limit = |change: &&mut Change<Value>| change.name == DOWNTIME_LIMIT;
        let Some(change) = self.0.parameters.iter_mut().find(is_limit) else {
            return Ok(false);
        };
        let is_held = qemu.query_parameters()?.get(DOWNTIME_LIMIT) == Some(&change.set);
        if !is_held {
            // No QEMU can have the value null, so this setting is not restored.
            change.set = Value::Null;
        }
        Ok(is_held)
    }

    /// Sets `downtime-limit` to `limit` milliseconds. Returns false, and changes nothing, if another client has changed the
    /// value.
    ///
    /// # Errors
    /// QMP errors.
    pub fn set_limit(&mut self, qemu: &mut Qemu, limit: u64) -> Result<bool, QmpError> {
        let is_held = self.has_own_limit(qemu)?;
        if is_held {
            qemu.set_parameters(&json!({ DOWNTIME_LIMIT: limit }))?;
            let changes = self.0.parameters.iter_mut();
            for change in changes.filter(|change| change.name == DOWNTIME_LIMIT) {
                change.set = limit.into();
            }
        }
        Ok(is_held)
    }

    fn is_empty(&self) -> bool {
        self.0.capabilities.is_empty() && self.0.parameters.is_empty()
    }

    /// Restores each previous value, unless another client has changed the setting again. Returns the restored settings in one
    /// line. QEMU refuses this during a migration.
    ///
    /// # Errors
    /// QMP errors.
    pub fn undo(&self, qemu: &mut Qemu) -> Result<String, QmpError> {
        if self.is_empty() {
            return Ok(String::new());
        }
        let mut restored = Vec::new();
        let now = qemu.query_capabilities()?;
        let mut capabilities = Vec::new();
        for Change {
            name, before, set, ..
        } in &self.0.capabilities
        {
            if now.iter().any(|(has, state)| has == name && state == set) {
                capabilities.push((name.as_str(), *before));
                restored.push(format!("{name} {}", if *before { "on" } else { "off" }));
            }
        }
        qemu.set_capabilities(&capabilities)?;
        let now = qemu.query_parameters()?;
        let mut parameters = Map::new();
        for Change {
            name,
            before,
            set,
            later,
        } in &self.0.parameters
        {
            let now = now.get(name);
            let is_ours = |now| now == set || later.contains(now);
            if now.is_some_and(is_ours) || is_unset(now, set) {
                parameters.insert(name.clone(), before.clone());
                restored.push(format!("{name} {}", capabilities::text(before)));
            }
        }
        qemu.set_parameters(&Value::Object(parameters))?;
        Record::remove(qemu)?;
        Ok(match restored.is_empty() {
            true => "none, all were changed later".to_owned(),
            false => restored.join(", "),
        })
    }
}

/// Returns true if the parameter must be empty, and is empty: QEMU does not report an empty parameter.
fn is_unset(now: Option<&Value>, wanted: &Value) -> bool {
    wanted == "" && now.is_none()
}
