//! Assembles the guest program.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let (object, elf) = (out.join("hotlift.o"), out.join("hotlift.elf"));
    println!("cargo::rerun-if-changed=guest");
    run(Command::new("as")
        .args(["--64", "-o"])
        .arg(&object)
        .arg("guest/hotlift.s"));
    run(Command::new("ld")
        // A program of 1.5 KiB needs only one segment; old linkers do not know the warning.
        .args(["-T", "guest/hotlift.ld", "--build-id=none", "-o"])
        .arg(&elf)
        .arg(&object));
}

fn run(command: &mut Command) {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("cannot run {program} (Debian package binutils): {error}"));
    let output_text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} failed:\n{output_text}");
}
