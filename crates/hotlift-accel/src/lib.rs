//! Accelerators of the host.
//!
//! | folder | subject |
//! |---|---|
//! | `idxd/` | work queues of Intel's DSA and IAA; zero page detection by DSA |

pub mod idxd;
