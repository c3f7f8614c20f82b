//! The terminal of the commands of `hotlift`: output, tables, progress and signals.
//!
//! | file | subject |
//! |---|---|
//! | `output`, `output_file` | standard output and standard error; files for results |
//! | `progress`, `table`, `width` | the progress display; tables; what fits a terminal |
//! | `signals` | Ctrl-C and its like |
//! | `error` | why a command failed, where several can fail so |

#![forbid(unsafe_code)]

pub mod error;
pub mod output;
pub mod output_file;
pub mod progress;
pub mod signals;
pub mod table;
pub mod width;
