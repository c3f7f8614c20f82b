//! Tests that the example's guest continues in another process after a migration.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

fn start(role: &str, address: &str) -> (Child, BufReader<impl Read>) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_example-vmm"))
        .args([role, address])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    (child, output)
}

/// Returns the number after `text` in the next line of `output`.
fn number_in(output: &mut impl BufRead, text: &str) -> u32 {
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    let (_, after) = line.split_once(text).expect(&line);
    let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().expect(&line)
}

#[test]
fn a_guest_counts_on_in_another_process() {
    if !hotlift_testkit::qemu::has_kvm() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", folder.path().join("vm").display());
    let (mut destination, mut received) = start("receive", &address);
    let mut line = String::new();
    received.read_line(&mut line).unwrap();
    assert_eq!(line, "waiting\n");
    let (mut source, mut sent) = start("send", &address);
    let moved_at = number_in(&mut sent, "moved at count ");
    let count = number_in(&mut received, "received, count ");
    assert!(source.wait().unwrap().success());
    assert!(destination.wait().unwrap().success());
    // The source migrates after 1000 steps, and the destination waits for 1000 more. A guest that was restarted would
    // not reach the sum.
    assert!(moved_at >= 1000, "{moved_at}");
    assert!(count >= moved_at + 1000, "{count} after {moved_at}");
}
