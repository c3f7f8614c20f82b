//! Tests that a monitor command never makes a guest run on both sides.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::lost_message::loses_final_message;
use crate::machine::{Machine, Program};

fn running(machine: &mut Machine) -> Value {
    machine.execute("query-status", &json!({}))["running"].clone()
}

#[test]
fn a_guest_in_doubt_is_not_continued_without_confirmation() {
    let mut source = Machine::start(Program::Hotlift, &[]);
    let mut destination = Machine::waiting(Program::Hotlift);
    let uri = loses_final_message(&destination.listen());
    // Short, since the source's query gets no answer.
    let ten_minutes = json!({ "x-hotlift-settle-timeout": 1 });
    source.execute("migrate-set-parameters", &ten_minutes);
    source.execute("migrate", &json!({ "uri": uri }));
    source.reaches("failed");
    // The destination's migration stays active as long as the source may query it, so this polls the run state.
    let deadline = Instant::now() + Duration::from_secs(60);
    while running(&mut destination) != true {
        assert!(Instant::now() < deadline, "the guest has not arrived");
        std::thread::sleep(Duration::from_millis(20));
    }
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
    // A client that sends 'stop' has checked the other side.
    source.execute("stop", &json!({}));
    source.execute("cont", &json!({}));
    assert_eq!(running(&mut source), true);
}
