//! Whether the destinations of a drain answer.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

use hotlift_console::error::error_line;

use crate::drain::plan::{Plan, short};
use crate::libvirt::virsh::{Libvirt, VirshError};
use hotlift_mem::lock;

/// Between two looks whether a destination answers; at the second time that it does not it is lost.
const PEER_LOOK: Duration = Duration::from_secs(3);

/// Why a destination is lost.
pub fn lost_for(to: &Libvirt, error: &VirshError) -> String {
    format!("{} is lost: {}", short(to.uri()), error_line(error))
}

/// Watches whether a destination answers: a migration to one that does not may go on for ever, and cannot end well.
pub struct Watch {
    uri: String,
    lost: Arc<Mutex<Option<String>>>,
}

impl Watch {
    /// Of all destinations of a plan.
    pub fn all(plan: &Plan) -> Vec<Self> {
        let uris: BTreeSet<_> = plan
            .steps
            .iter()
            .filter_map(|step| step.to.as_deref())
            .collect();
        uris.into_iter().map(Self::new).collect()
    }

    fn new(uri: &str) -> Self {
        let lost = Arc::new(Mutex::new(None));
        let (of_thread, to) = (Arc::downgrade(&lost), Libvirt::at(uri));
        // It ends with the command, or when nobody looks any more.
        thread::spawn(move || watch(&of_thread, &to));
        Self {
            uri: uri.to_owned(),
            lost,
        }
    }
}

fn watch(lost: &Weak<Mutex<Option<String>>>, to: &Libvirt) {
    let mut failures = 0;
    while let Some(lost) = lost.upgrade() {
        match to.ask(&["uri"]) {
            Ok(_) => failures = 0,
            Err(error) => {
                failures += 1;
                if failures == 2 {
                    let reason = lost_for(to, &error);
                    *lock(&lost) = Some(reason);
                    return;
                }
            }
        }
        drop(lost);
        thread::sleep(PEER_LOOK);
    }
}

/// The destinations that are lost, and why.
pub fn lost(watches: &[Watch]) -> Vec<(String, String)> {
    let reason = |watch: &Watch| {
        let lost = lock(&watch.lost);
        Some((watch.uri.clone(), lost.clone()?))
    };
    watches.iter().filter_map(reason).collect()
}
