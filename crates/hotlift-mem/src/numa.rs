//! NUMA node of memory.

use std::collections::BTreeMap;
use std::ptr;

use crate::{PAGE_SIZE, RamBlock};

/// Number of sampled pages of a block, evenly distributed. Few suffice: a guest's memory is on one node, half on each of two,
/// or spread over all.
const SAMPLES: usize = 64;

impl RamBlock {
    /// Returns the node that has most of this block's allocated memory. Returns `None` if no sampled page is allocated, or if
    /// the kernel does not report nodes.
    #[must_use]
    pub fn numa_node(&self) -> Option<u32> {
        let step = self.pages().div_ceil(SAMPLES).max(1);
        let at = |page: usize| self.host_addr().wrapping_add(page * PAGE_SIZE).cast();
        let pages: Vec<*mut libc::c_void> = (0..self.pages()).step_by(step).map(at).collect();
        let mut nodes: Vec<libc::c_int> = vec![-1; pages.len()];
        // SAFETY: `move_pages` without target nodes moves nothing and touches no page; it reads as many addresses as it writes
        // results.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                pages.len(),
                pages.as_ptr(),
                ptr::null::<libc::c_int>(),
                nodes.as_mut_ptr(),
                0,
            )
        };
        if result != 0 {
            return None;
        }
        let mut count = BTreeMap::new();
        for node in nodes {
            // A negative value is an error: no page is allocated there.
            if let Ok(node) = u32::try_from(node) {
                *count.entry(node).or_insert(0_usize) += 1;
            }
        }
        let most = count.into_iter().max_by_key(|&(_, pages)| pages)?;
        Some(most.0)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Backing;

    #[test]
    fn resident_memory_is_on_a_node_of_this_host_and_the_query_allocates_none() {
        for backing in [Backing::Private, Backing::Shared] {
            let block = RamBlock::new("ram", 512 * PAGE_SIZE, backing).unwrap();
            assert_eq!(block.numa_node(), None);
            block.write(0, &[1]).unwrap();
            let Some(node) = block.numa_node() else {
                hotlift_testkit::skip!("numa", "the kernel does not report where pages are");
                return;
            };
            let folder = format!("/sys/devices/system/node/node{node}");
            assert!(fs::metadata(folder).is_ok(), "node {node}");
        }
    }
}
