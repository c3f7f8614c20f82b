//! Operations on a guest's pages: each connects a source of pages to a sink.
//!
//! | file | from | to |
//! |---|---|---|
//! | `migrate` | the guest of this process | a stream |
//! | `receive` | a stream | the guest of this process |
//! | `relay/pass_on` | a stream | a stream (relay), or a file (save) |
//! | `relay/restore` | a file, all of it | a stream |
//! | `lazy` | a save file, pages on demand | a stream |

pub mod lazy;
pub(crate) mod migrate;
pub(crate) mod receive;
pub mod relay;
