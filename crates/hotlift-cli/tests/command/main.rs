//! Tests the `hotlift` command as a user runs it: processes, signals, exit codes, and files that remain.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test prints its progress"
)]

mod accel;
mod accelerated;
mod advise;
mod agent;
mod certs;
mod demo;
mod drain;
mod environment;
mod file_server;
mod guest_run;
mod help;
mod hmp;
mod hotlift;
mod killed;
mod lost_message;
mod manual;
mod methods;
mod qemu_commands;
mod saved_guest;
mod scripted_virsh;
mod settle;
mod terminal;
mod unread;
