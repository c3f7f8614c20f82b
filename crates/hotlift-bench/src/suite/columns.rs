//! Columns of the published tables. Each column has Hotlift's figure with the published definition.

use serde::{Deserialize, Deserializer, de};

use crate::figures;
use crate::record::{Completed, Record};

/// A column of a published table, with Hotlift's figure of the same definition.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    /// Heading of the column.
    pub name: &'static str,
    /// Computes Hotlift's figure; NaN where the figure has no meaning.
    pub figure: fn(&Record, &Completed) -> f64,
}

const fn column(name: &'static str, figure: fn(&Record, &Completed) -> f64) -> Column {
    Column { name, figure }
}

/// All columns of the published tables.
pub const ALL: &[Column] = &[
    column("total ms", |_, run| run.source.total_ms),
    column("down ms", |_, run| run.source.downtime_ms),
    column("setup ms", |_, run| run.source.setup_ms),
    column("Mbit/s", |_, run| {
        (figures::MBPS.of)(run).unwrap_or(f64::NAN)
    }),
    column("pages/s", |_, run| run.source.pages_per_second),
    column("CPU % src", |_, run| run.source.side.cpu_percent),
    column("CPU % dst", |_, run| run.destination.side.cpu_percent),
    column(figures::SOURCE_CPU.name, |_, run| {
        (figures::SOURCE_CPU.of)(run).unwrap_or(f64::NAN)
    }),
    column(figures::DESTINATION_CPU.name, |_, run| {
        (figures::DESTINATION_CPU.of)(run).unwrap_or(f64::NAN)
    }),
    column("core-s/GiB", |_, run| {
        figures::both_cpu(run).unwrap_or(f64::NAN)
    }),
    column("sent kB", |_, run| {
        (figures::BYTES.of)(run).map_or(f64::NAN, |bytes| bytes / 1024.0)
    }),
    column("RAM kB", |record, _| {
        record.row.guest.ram_bytes as f64 / 1024.0
    }),
];

impl<'de> Deserialize<'de> for Column {
    fn deserialize<D: Deserializer<'de>>(text: D) -> Result<Self, D::Error> {
        let name = String::deserialize(text)?;
        let found = ALL.iter().find(|column| column.name == name);
        let unknown = || de::Error::custom(format!("no column is called {name:?}"));
        found.copied().ok_or_else(unknown)
    }
}
