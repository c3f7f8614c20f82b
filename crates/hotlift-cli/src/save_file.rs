//! Location of a save file, and errors of its content.

use clap::builder::{OsStringValueParser, TypedValueParser};
use hotlift::file::Location;

use crate::error::CommandError;

/// Returns the parser of a save file's location.
pub fn location() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text| Location::parse(&text))
}

/// Names the file in an error of its content.
pub fn named(error: CommandError, file: &Location) -> CommandError {
    let of_file = |reasons: String| {
        let file = file.to_string();
        match reasons.contains(&file) {
            true => reasons,
            false => format!("{file}: {reasons}"),
        }
    };
    match error {
        CommandError::Restore { reasons } => CommandError::Restore {
            reasons: of_file(reasons),
        },
        CommandError::Damaged { reasons } => CommandError::Damaged {
            reasons: of_file(reasons),
        },
        CommandError::Show { reason } => CommandError::Show {
            reason: of_file(reason),
        },
        error => error,
    }
}
