//! `hotlift bench`: migrations in many settings, in turn, kept as records.

pub mod record;
pub mod report;
