//! The command as a user runs it: processes, signals, exit codes, files left behind.

mod demo;
mod guest_run;
mod hotlift;
