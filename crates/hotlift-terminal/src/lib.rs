//! The terminal of the commands of `hotlift`: output, tables, progress and signals.
//!
//! | file | subject |
//! |---|---|
//! | `output`, `output_file` | standard output and standard error; files for results |
//! | `progress`, `table`, `width` | the progress display; tables; fitting text to a terminal |
//! | `signals` | Ctrl-C and other signals |
//! | `error` | errors that several commands share |

#![forbid(unsafe_code)]

pub mod error;
pub mod output;
pub mod output_file;
pub mod progress;
pub mod signals;
pub mod table;
pub mod width;
