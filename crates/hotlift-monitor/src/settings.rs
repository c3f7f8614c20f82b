//! Settings of a monitor: capabilities and parameters, which clients set and query.

use std::sync::{Mutex, MutexGuard};

use hotlift::options::{Kind, OPTIONS, QmpRefusal};
use hotlift::{Control, Options};
use hotlift_methods::METHODS;
use hotlift_qmp::MigrationCapabilityStatus;
use hotlift_qmp::qapi::{Member, Type, needed, to_value};
use hotlift_qmp::server::Refusal;
use serde_json::{Map, Value};

use crate::command_table::check_members;
use hotlift_mem::lock;

/// Error for a client that starts a migration or changes capabilities while a migration is active.
pub const IN_PROGRESS: &str = "There's a migration process in progress";

static CAPABILITY: &[Member] = &[needed("capability", Type::Str), needed("state", Type::Bool)];

/// Migration options, which clients change.
pub struct Settings(Mutex<Options>);

impl Settings {
    /// Creates settings from the options of the command line. If they do not mention multifd, it is off, as in QEMU.
    pub fn new(mut options: Options) -> Self {
        options.stream.multifd.get_or_insert(false);
        Self::as_given(options)
    }

    /// Creates settings from the options of the command line, without a change.
    pub fn as_given(options: Options) -> Self {
        Self(Mutex::new(options))
    }

    fn lock(&self) -> MutexGuard<'_, Options> {
        lock(&self.0)
    }

    /// Returns the options for a migration. If multifd is off, the parameters of multifd are reset, since QEMU ignores them.
    pub fn for_migration(&self) -> Options {
        let mut options = self.lock().clone();
        if !options.stream.multifd() {
            options.stream.multifd_compression = &METHODS[0];
            options.zero_pages.devices = false;
        }
        options
    }

    /// Returns true if clients receive migration events (capability `events`).
    pub fn has_events(&self) -> bool {
        self.lock().events
    }

    /// Answers `query-migrate-capabilities`.
    pub fn capabilities(&self) -> Value {
        let options = self.lock();
        let capabilities: Vec<_> = OPTIONS
            .iter()
            .filter(|option| option.kind == Kind::Capability)
            .map(|option| MigrationCapabilityStatus {
                capability: option.name.to_owned(),
                state: option.read_json(&options) == true,
            })
            .collect();
        to_value(&capabilities)
    }

    /// Executes `migrate-set-capabilities`: sets all wanted capabilities, or none if one is refused.
    pub fn set_capabilities(&self, wanted: &Value, is_running: bool) -> Result<(), Refusal> {
        let mut options = self.lock();
        let mut changed = options.clone();
        for (index, item) in wanted.as_array().into_iter().flatten().enumerate() {
            let name = format!("capabilities[{index}]");
            let Value::Object(item) = item else {
                return Err(Refusal::generic(format!(
                    "Invalid parameter type for '{name}', expected: object"
                )));
            };
            check_members(CAPABILITY, item, &format!("{name}."))?;
            let capability = item["capability"].as_str().unwrap_or_default();
            changed
                .set_capability(capability, item["state"] == true)
                .map_err(refused)?;
        }
        if is_running {
            return Err(Refusal::generic(IN_PROGRESS));
        }
        if changed.stream.multifd() && changed.stream.xbzrle {
            return Err(Refusal::generic("Multifd is not compatible with xbzrle"));
        }
        if changed.stream.multifd() && changed.stream.compress {
            return Err(Refusal::generic("Multifd is not compatible with compress"));
        }
        if changed.postcopy.preempt && !changed.postcopy.ram {
            return Err(Refusal::generic("Postcopy preempt requires postcopy-ram"));
        }
        check_zero_copy(&changed)?;
        *options = changed;
        Ok(())
    }

    /// Answers `query-migrate-parameters`.
    pub fn parameters(&self) -> Value {
        let options = self.lock();
        let parameters: Map<_, _> = OPTIONS
            .iter()
            .filter(|option| option.kind != Kind::Capability)
            .map(|option| (option.qmp_name().into_owned(), option.read_json(&options)))
            .collect();
        Value::Object(parameters)
    }

    /// Executes `migrate-set-parameters`: sets all wanted parameters, or none if one is refused. While a migration is active
    /// (`running`), accepts only parameters that take effect in it.
    pub fn set_parameters(
        &self,
        parameters: &Map<String, Value>,
        running: Option<&Control>,
        is_live: &dyn Fn(&str) -> bool,
    ) -> Result<(), Refusal> {
        let mut options = self.lock();
        let mut changed = options.clone();
        changed.set_parameters(parameters).map_err(refused)?;
        check_zero_copy(&changed)?;
        if let Some(control) = running {
            let fixed = OPTIONS.iter().find(|option| {
                !is_live(option.name) && option.read_json(&options) != option.read_json(&changed)
            });
            if let Some(option) = fixed {
                return Err(Refusal::generic(format!(
                    "Parameter '{}' cannot be changed while a migration runs",
                    option.qmp_name()
                )));
            }
            control.change(&changed);
        }
        *options = changed;
        Ok(())
    }
}

fn check_zero_copy(options: &Options) -> Result<(), Refusal> {
    let fits = options.stream.multifd() && options.stream.multifd_compression.flag == 0;
    if options.stream.zero_copy_send && !fits {
        return Err(Refusal::generic(
            "Zero copy only available for non-compressed non-TLS multifd migration",
        ));
    }
    Ok(())
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn refused(refusal: QmpRefusal) -> Refusal {
    Refusal::generic(refusal.to_string())
}
