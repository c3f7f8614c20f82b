//! Location of a save file on the command line, and errors about its content.

use clap::builder::{OsStringValueParser, TypedValueParser};
use hotlift::file::Location;

use crate::error::CommandError;

/// Returns the parser for the location of a save file.
pub fn location() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text| Location::parse(&text))
}

/// Adds the name of the file to an error about its content.
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
