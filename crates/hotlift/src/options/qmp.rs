//! Options over QMP and HMP: names, types, typed values, and QEMU's error messages.

use std::borrow::Cow;

use serde_json::{Map, Value as Json, json};

use super::values::{AccelPath, Value, Values, parse_size_in};
use super::{Kind, OPTIONS, OptionInfo, Options, option};

/// Prefix of the QMP names of options that QEMU lacks.
pub const OUR_PREFIX: &str = "x-hotlift-";

/// Former name of an option, from an older document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OlderName {
    /// The former name.
    pub name: &'static str,
    /// The present name.
    pub now: &'static str,
    /// Additional option that the former name sets, and its value; `None` if there is none.
    pub also: Option<(&'static str, &'static str)>,
}

/// Option names of QEMU's DSA patch series before its seventh version. There the path of a device alone selected DSA.
pub const OLDER_NAMES: &[OlderName] = &[
    OlderName {
        name: "multifd-dsa-accel",
        now: "accel-path",
        also: Some(("zero-page-detection", "dsa-accel")),
    },
    OlderName {
        name: "multifd-set-normal-page-ratio",
        now: "multifd-normal-page-ratio",
        also: None,
    },
];

/// Type of an option's value in QMP. `Display` writes the type's name in QAPI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QmpType {
    /// An unsigned number of 8 bits.
    Uint8,
    /// An unsigned number of 64 bits.
    Uint64,
    /// A number of bytes, or of bytes per second.
    Size,
    /// `true` or `false`.
    Bool,
    /// One of these names.
    Enum(Vec<&'static str>),
    /// A list of strings.
    Strings,
    /// Any string.
    String,
}

impl std::fmt::Display for QmpType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Uint8 => "uint8",
            Self::Uint64 => "uint64",
            Self::Size => "size",
            Self::Bool => "bool",
            Self::Enum(_) => "enum",
            Self::String => "string",
            Self::Strings => "['str']",
        })
    }
}

/// Rejection of an option over QMP or HMP. The messages are those of QEMU 10.0, because clients search for them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QmpRefusal {
    /// No parameter has the given name.
    #[error("Parameter '{name}' is unexpected")]
    Unexpected {
        /// The name as given.
        name: String,
    },
    /// The value is not a number, or is outside the range.
    #[error("Parameter '{name}' expects {expected}")]
    Expects {
        /// The option's name; with underscores where QEMU's message has them.
        name: String,
        /// The values that the option accepts.
        expected: Cow<'static, str>,
    },
    /// The value is not one of the names that the option accepts.
    #[error("Parameter '{name}' does not accept value '{got}'")]
    NotAccepted {
        /// The option's name, or `capability`.
        name: &'static str,
        /// The value as given.
        got: String,
    },
    /// The value has the wrong JSON type.
    #[error("Invalid parameter type for '{name}', expected: {expected}")]
    Type {
        /// The option's name; for an element of a list, with its index.
        name: String,
        /// Name of the expected JSON type.
        expected: &'static str,
    },
    /// The value of a bandwidth option, typed over HMP, is not a size.
    #[error("Invalid size {got}")]
    Size {
        /// The text as typed.
        got: String,
    },
}

/// Options whose range QEMU does not describe as "a value between LOWEST and HIGHEST", with QEMU's description.
const WORDINGS: &[(&str, &str)] = &[
    // QEMU refuses 0, although its message includes 0 in the range.
    ("announce-step", "a value between 0 and 10000"),
    (
        "throttle-trigger-threshold",
        "an integer in the range of 1 to 100",
    ),
    ("cpu-throttle-initial", "an integer in the range of 1 to 99"),
    (
        "cpu-throttle-increment",
        "an integer in the range of 1 to 99",
    ),
    (
        "max-cpu-throttle",
        "an integer in the range of cpu_throttle_initial to 99",
    ),
    (
        "downtime-limit",
        "an integer in the range of 0 to (2000 * 1000) ms",
    ),
    (
        "xbzrle-cache-size",
        "a power of two no less than the target page size",
    ),
];

impl OptionInfo {
    /// Returns the option's name in QMP and HMP. An option that QEMU lacks has the prefix `x-hotlift-`.
    #[must_use]
    pub fn qmp_name(&self) -> Cow<'static, str> {
        match self.kind {
            Kind::Capability | Kind::Parameter => Cow::Borrowed(self.name),
            Kind::Ours => Cow::Owned(format!("{OUR_PREFIX}{}", self.name)),
        }
    }

    /// Returns the type of the option's value in QMP.
    #[must_use]
    pub fn qmp_type(&self) -> QmpType {
        match self.values {
            Values::Number { highest, .. } if highest <= u64::from(u8::MAX) => QmpType::Uint8,
            Values::Number { .. } => QmpType::Uint64,
            Values::Size | Values::PowerOfTwo | Values::Pages { .. } => QmpType::Size,
            Values::Switch => QmpType::Bool,
            Values::Method | Values::ZeroPages | Values::Accelerator | Values::Goal => {
                QmpType::Enum(self.values.names())
            }
            Values::AccelPath => QmpType::Strings,
            Values::Text(_) | Values::Cores => QmpType::String,
        }
    }

    /// Returns the option's value in `options`, as QMP reports it.
    #[must_use]
    pub fn read_json(&self, options: &Options) -> Json {
        match self.read(options) {
            Value::Number(number) => json!(number),
            Value::Switch(on) => json!(on),
            Value::AccelPath(paths) => paths.iter().map(ToString::to_string).collect(),
            name => json!(name.to_string()),
        }
    }

    /// Converts a value that was typed in HMP to JSON for QMP. A bandwidth without a suffix is in MiB/s. A switch is on or off.
    /// All other values are as in [`Values`]. Does not check the range.
    ///
    /// # Errors
    /// [`QmpRefusal`] if the text does not have the format of the option's type.
    pub fn typed(&self, text: &str) -> Result<Json, QmpRefusal> {
        let hexadecimal = || u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
        match self.qmp_type() {
            QmpType::Size if self.is_bandwidth() => {
                const MIB: u32 = 20;
                parse_size_in(text, MIB)
                    .map(Json::from)
                    .ok_or_else(|| QmpRefusal::Size {
                        got: text.to_owned(),
                    })
            }
            QmpType::Size | QmpType::Uint64 => parse_size_in(text, 0)
                .or_else(hexadecimal)
                .map(Json::from)
                .ok_or_else(|| self.expects("a non-negative number below 2^64")),
            QmpType::Uint8 => {
                let decimal = text.parse::<i64>().ok().map(Json::from);
                decimal
                    .or_else(|| hexadecimal().map(Json::from))
                    .ok_or_else(|| self.expects("uint64"))
            }
            QmpType::Bool => match text {
                "on" | "yes" | "true" | "y" => Ok(json!(true)),
                "off" | "no" | "false" | "n" => Ok(json!(false)),
                _ => Err(self.expects("'on' or 'off'")),
            },
            QmpType::Enum(_) | QmpType::String => Ok(json!(text)),
            QmpType::Strings => Ok(text
                .split([' ', ','])
                .filter(|path| !path.is_empty())
                .collect()),
        }
    }

    /// Returns true if the option is a bandwidth. QEMU's HMP reads bandwidths in MiB/s, and QMP in bytes per second.
    #[must_use]
    pub fn is_bandwidth(&self) -> bool {
        self.values == Values::Size && self.unit == "bytes/s"
    }

    fn expects(&self, expected: impl Into<Cow<'static, str>>) -> QmpRefusal {
        QmpRefusal::Expects {
            name: self.qmp_name().into_owned(),
            expected: expected.into(),
        }
    }

    /// Returns the error for a value outside the range. It names the option with underscores, as QEMU's range errors do.
    fn out_of_range(&self) -> QmpRefusal {
        let wording = WORDINGS.iter().find(|(name, _)| *name == self.name);
        let expected = wording.map_or_else(
            || Cow::Owned(self.values.to_string()),
            |(_, text)| Cow::Borrowed(*text),
        );
        QmpRefusal::Expects {
            name: self.qmp_name().replace('-', "_"),
            expected,
        }
    }

    fn not_a(&self, expected: &'static str) -> QmpRefusal {
        QmpRefusal::Type {
            name: self.qmp_name().into_owned(),
            expected,
        }
    }

    /// Checks only the JSON type. QEMU checks the types of all parameters of a command before it checks any range.
    fn check_type(&self, json: &Json) -> Result<(), QmpRefusal> {
        let number = || json.is_u64() || json.is_i64();
        match self.qmp_type() {
            QmpType::Uint8 if number() && json.as_u64().is_none_or(|n| n > u8::MAX.into()) => {
                Err(self.expects("uint8_t"))
            }
            QmpType::Uint8 | QmpType::Uint64 | QmpType::Size if !number() => {
                Err(self.expects("uint64"))
            }
            QmpType::Uint8 | QmpType::Uint64 | QmpType::Size => Ok(()),
            QmpType::Bool if !json.is_boolean() => Err(self.not_a("boolean")),
            QmpType::Bool => Ok(()),
            QmpType::Enum(names) => {
                let got = json.as_str().ok_or_else(|| self.not_a("string"))?;
                if names.contains(&got) {
                    return Ok(());
                }
                Err(QmpRefusal::NotAccepted {
                    name: self.name,
                    got: got.to_owned(),
                })
            }
            QmpType::String if !json.is_string() => Err(self.not_a("string")),
            QmpType::String => Ok(()),
            QmpType::Strings => {
                let items = json.as_array().ok_or_else(|| self.not_a("array"))?;
                match items.iter().position(|item| !item.is_string()) {
                    None => Ok(()),
                    Some(index) => Err(QmpRefusal::Type {
                        name: format!("{}[{index}]", self.qmp_name()),
                        expected: "string",
                    }),
                }
            }
        }
    }

    /// Converts `json` to the option's value and checks its range. The type must have been checked.
    fn value(&self, json: &Json) -> Result<Value, QmpRefusal> {
        match json {
            Json::Array(items) => items
                .iter()
                .filter_map(Json::as_str)
                .map(|text| {
                    AccelPath::parse(text).ok_or_else(|| QmpRefusal::NotAccepted {
                        name: self.name,
                        got: text.to_owned(),
                    })
                })
                .collect::<Result<_, _>>()
                .map(Value::AccelPath),
            Json::Bool(on) => Ok(Value::Switch(*on)),
            Json::String(text) => self.values.parse(text).ok_or_else(|| self.out_of_range()),
            number => self
                .values
                .parse(&number.to_string())
                .ok_or_else(|| self.out_of_range()),
        }
    }
}

/// Returns the row of an option by its exact QMP name, with dashes, or by a name of [`OLDER_NAMES`]. Returns `None` for an
/// unknown name.
#[must_use]
pub fn qmp_option(name: &str) -> Option<&'static OptionInfo> {
    let older = OLDER_NAMES.iter().find(|older| older.name == name);
    let name = older.map_or(name, |older| older.now);
    OPTIONS.iter().find(|option| option.qmp_name() == name)
}

impl Options {
    /// Sets a capability by its QMP name.
    ///
    /// # Errors
    /// [`QmpRefusal::NotAccepted`] if there is no such capability.
    pub fn set_capability(&mut self, name: &str, state: bool) -> Result<(), QmpRefusal> {
        let option = qmp_option(name)
            .filter(|option| option.kind == Kind::Capability)
            .ok_or_else(|| QmpRefusal::NotAccepted {
                name: "capability",
                got: name.to_owned(),
            })?;
        (option.access.store)(self, Value::Switch(state));
        Ok(())
    }

    /// If `name` is in [`OLDER_NAMES`], also sets the additional option of that row, if there is one.
    pub(super) fn set_along(&mut self, name: &str) {
        let older = OLDER_NAMES.iter().find(|older| older.name == name);
        if let Some((name, value)) = older.and_then(|older| older.also) {
            // Both are in the table, so this does not fail.
            let _ = self.set(name, value);
        }
    }

    /// Sets parameters by their QMP names. After an error, no parameter is changed. The checks are in QEMU's order: all types,
    /// then all names, then all ranges.
    ///
    /// # Errors
    /// [`QmpRefusal`] for the first invalid parameter.
    pub fn set_parameters(&mut self, parameters: &Map<String, Json>) -> Result<(), QmpRefusal> {
        let known = |name: &str| qmp_option(name).filter(|row| row.kind != Kind::Capability);
        for (name, json) in parameters {
            if let Some(option) = known(name) {
                option.check_type(json)?;
            }
        }
        let mut changed = self.clone();
        let mut refused = None;
        for (name, json) in parameters {
            let option =
                known(name).ok_or_else(|| QmpRefusal::Unexpected { name: name.clone() })?;
            match option.value(json) {
                Ok(value) => (option.access.store)(&mut changed, value),
                Err(error) => refused = refused.or(Some(error)),
            }
            changed.set_along(name);
        }
        if let Some(refused) = refused {
            return Err(refused);
        }
        if changed.auto_converge.max < changed.auto_converge.initial
            && let Ok(option) = option("max-cpu-throttle")
        {
            return Err(option.out_of_range());
        }
        *self = changed;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
