//! A monitor never makes a second guest of one.

use serde_json::{Value, json};

use crate::lost_word::loses_the_last_word;
use crate::machine::{Machine, Program};

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
