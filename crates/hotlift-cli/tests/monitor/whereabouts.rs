//! A monitor never makes a second guest of one.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use serde_json::{Value, json};

use crate::machine::{Machine, Program};

/// The destination's last word on the return path: type SHUT, 4 bytes, status 0.
const SHUT: &[u8] = &[0, 1, 0, 4, 0, 0, 0, 0];

/// Carries one connection to `to`, and cuts it instead of passing SHUT on. Returns where it listens.
fn loses_the_last_word(to: &str) -> String {
    let to = to.strip_prefix("tcp:").expect("TCP").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = format!("tcp:{}", listener.local_addr().expect("an address"));
    thread::spawn(move || {
        let (near, _) = listener.accept().expect("a source");
        let far = TcpStream::connect(to).expect("a destination");
        let both = [near, far];
        let copies = both.each_ref().map(|one| one.try_clone().expect("a copy"));
        let forward = thread::spawn(move || {
            let [mut near, mut far] = copies;
            // It ends when the connection is cut.
            let _ = std::io::copy(&mut near, &mut far);
        });
        let [mut near, mut far] = both;
        let (mut said, mut chunk) = (Vec::new(), [0; 4096]);
        while let Ok(length @ 1..) = far.read(&mut chunk) {
            said.extend_from_slice(&chunk[..length]);
            if said.windows(SHUT.len()).any(|words| words == SHUT) {
                break;
            }
            near.write_all(&chunk[..length]).expect("it listens");
        }
        for stream in [near, far] {
            let _ = stream.shutdown(Shutdown::Both);
        }
        forward.join().expect("no panic");
    });
    at
}

fn running(machine: &mut Machine) -> Value {
    machine.tell("query-status", &json!({}))["running"].clone()
}

#[test]
fn a_guest_in_doubt_is_not_continued_by_those_who_have_not_looked() {
    let mut source = Machine::start(Program::Hotlift, &[]);
    let mut destination = Machine::waiting(Program::Hotlift);
    let uri = loses_the_last_word(&destination.listen());
    source.tell("migrate", &json!({ "uri": uri }));
    source.reaches("failed");
    destination.reaches("completed");
    assert_eq!(running(&mut destination), true);
    assert_eq!(running(&mut source), false);
    for command in ["cont", "migrate"] {
        let arguments = match command {
            "migrate" => json!({ "uri": uri }),
            _ => json!({}),
        };
        let (_, why) = source.ask(command, &arguments).expect_err("it is in doubt");
        assert!(why.contains("'stop'"), "{command}: {why}");
        assert_eq!(running(&mut source), false);
    }
    // Whoever says so has looked.
    source.tell("stop", &json!({}));
    source.tell("cont", &json!({}));
    assert_eq!(running(&mut source), true);
}
