//! Connections that belong to no migration, counted by the reason to drop them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::lock::lock;

/// Reasons that are counted apart. A peer's own words are part of some, so that their number has a limit.
const REASONS: usize = 64;

/// The counts of one migration. Clones are the same counts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Strangers(Arc<Mutex<BTreeMap<String, u64>>>);

impl Strangers {
    /// Counts a connection that is dropped for the reason `why`.
    pub(crate) fn turn_away(&self, why: &str) {
        let mut counts = lock(&self.0);
        let known = counts.len() < REASONS || counts.contains_key(why);
        let why = if known { why } else { "for other reasons" };
        *counts.entry(why.to_owned()).or_default() += 1;
    }

    /// Returns the count of each reason.
    pub(crate) fn counts(&self) -> BTreeMap<String, u64> {
        lock(&self.0).clone()
    }
}
