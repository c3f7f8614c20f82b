//! Terminal output of the commands of `hotlift`: results, tables, progress; also the handling of signals.
//!
//! | file | subject |
//! |---|---|
//! | `output`, `output_file` | standard output and standard error; files for results |
//! | `progress`, `table`, `width` | progress display; tables; text that fits the width of a terminal |
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
