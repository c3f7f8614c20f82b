//! Checks during a drain that the destinations answer.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use hotlift_terminal::error::error_line;

use crate::drain::plan::{Plan, short};
use crate::libvirt::virsh::{Libvirt, VirshError};

/// Interval of queries to a destination. A destination that does not answer two queries counts as lost.
const PEER_POLL_INTERVAL: Duration = Duration::from_secs(3);

/// Returns the text for the operator: the destination `to` is lost, because of `error`.
pub fn lost_for(to: &Libvirt, error: &VirshError) -> String {
    format!("lost {}: {}", short(to.uri()), error_line(error))
}

/// Starts threads that check that each destination of the plan answers: a migration to a lost one cannot succeed, and may never
/// end. Calls `lost` once for each lost destination. The threads run until the process ends.
pub fn watch(plan: &Plan, lost: impl Fn(UnreachableHost) + Clone + Send + 'static) {
    let uris = plan.steps.iter().filter_map(|step| step.to.as_deref());
    for uri in uris.collect::<BTreeSet<_>>() {
        let (to, lost) = (Libvirt::at(uri), lost.clone());
        thread::spawn(move || lost(until_lost(&to)));
    }
}

/// A destination that does not answer.
#[derive(Debug)]
pub struct UnreachableHost {
    /// URI of the destination's libvirt.
    pub uri: String,
    /// Reason for the operator.
    pub reason: String,
}

fn until_lost(to: &Libvirt) -> UnreachableHost {
    let mut failures = 0;
    loop {
        match to.ask(&["uri"]) {
            Ok(_) => failures = 0,
            Err(error) => {
                failures += 1;
                if failures == 2 {
                    let uri = to.uri().to_owned();
                    let reason = lost_for(to, &error);
                    return UnreachableHost { uri, reason };
                }
            }
        }
        thread::sleep(PEER_POLL_INTERVAL);
    }
}
