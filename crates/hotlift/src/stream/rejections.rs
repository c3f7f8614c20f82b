//! Counts rejected connections, which belong to no migration, by the reason of the rejection.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::lock::lock;

/// Maximum count of different reasons. Needed because some reasons contain text that a peer has sent.
const REASONS: usize = 64;

/// Counts of rejected connections of one migration. All clones share the same counts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rejections(Arc<Mutex<BTreeMap<String, u64>>>);

impl Rejections {
    /// Counts a rejected connection. `why` is the reason.
    pub(crate) fn reject(&self, why: &str) {
        let mut counts = lock(&self.0);
        let known = counts.len() < REASONS || counts.contains_key(why);
        let why = if known { why } else { "for other reasons" };
        *counts.entry(why.to_owned()).or_default() += 1;
    }

    /// Returns the count of rejected connections for each reason.
    pub(crate) fn counts(&self) -> BTreeMap<String, u64> {
        lock(&self.0).clone()
    }
}
