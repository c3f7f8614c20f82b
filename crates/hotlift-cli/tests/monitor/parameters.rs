//! Tests changes of parameters during a migration, and parameters that QEMU does not have.

use serde_json::{Value, json};

use crate::machine::{Machine, Program};

/// Parameters with a value other than the default, and true if they take effect during a migration.
const OTHERS: &[(&str, &str, bool)] = &[
    ("announce-initial", "60", false),
    ("announce-max", "600", false),
    ("announce-rounds", "6", false),
    ("announce-step", "101", false),
    ("compress-level", "2", false),
    ("compress-threads", "3", false),
    ("compress-wait-thread", "false", false),
    ("decompress-threads", "3", false),
    ("throttle-trigger-threshold", "51", true),
    ("cpu-throttle-initial", "21", true),
    ("cpu-throttle-increment", "11", true),
    ("cpu-throttle-tailslow", "true", true),
    ("max-cpu-throttle", "98", true),
    ("max-bandwidth", "2", true),
    ("avail-switchover-bandwidth", "1000", true),
    ("downtime-limit", "301", true),
    ("multifd-channels", "3", false),
    ("multifd-compression", "\"zstd\"", false),
    ("multifd-zlib-level", "2", false),
    ("multifd-zstd-level", "2", false),
    ("multifd-qatzip-level", "2", false),
    ("zero-page-detection", "\"legacy\"", false),
    ("accel-path", "[\"dsa:/dev/dsa/wq0.0\"]", false),
    ("multifd-normal-page-ratio", "1", false),
    ("multifd-packet-size", "65536", false),
    ("tls-creds", "\"/etc/pki/hotlift\"", false),
    ("tls-hostname", "\"host\"", false),
    ("tls-authz", "\"*.example.org\"", false),
    ("xbzrle-cache-size", "8192", false),
    ("max-postcopy-bandwidth", "1000", true),
    ("x-hotlift-insecure", "true", false),
    ("x-hotlift-accelerator", "\"off\"", false),
    ("x-hotlift-goal", "\"least-cpu\"", true),
    ("x-hotlift-qemu-reads", "\"zlib\"", false),
    ("x-hotlift-cpu-limit", "\"0.5\"", true),
    ("x-hotlift-mem-prealloc", "true", false),
    ("x-hotlift-max-channels", "65", false),
    ("x-hotlift-memory-limit", "1048576", false),
    ("x-hotlift-settle-timeout", "61", false),
    ("x-hotlift-silence-timeout", "41", false),
];

fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn all_parameters_are_set_while_idle_and_the_live_ones_alone_during_a_migration() {
    let mut source = Machine::start(Program::Hotlift, &[]);
    let defaults = source.execute("query-migrate-parameters", &json!({}));
    let named: Vec<_> = OTHERS.iter().map(|(name, ..)| *name).collect();
    for name in defaults.as_object().unwrap().keys() {
        assert!(named.contains(&name.as_str()), "{name} is not tried");
    }
    for (name, other, _) in OTHERS {
        for value in [value(other), defaults[name].clone()] {
            source.execute("migrate-set-parameters", &json!({ *name: value }));
            let now = source.execute("query-migrate-parameters", &json!({}));
            assert_eq!(now[name], value, "{name}");
        }
    }
    let mut destination = Machine::waiting(Program::Hotlift);
    let uri = destination.listen();
    source.execute(
        "migrate-set-parameters",
        &json!({ "max-bandwidth": 10_000 }),
    );
    source.execute("migrate", &json!({ "uri": uri }));
    source.reaches("active");
    for (name, other, live) in OTHERS {
        let before = source.execute("query-migrate-parameters", &json!({}));
        let answer = source.ask("migrate-set-parameters", &json!({ *name: value(other) }));
        let now = source.execute("query-migrate-parameters", &json!({}));
        if *live {
            assert_eq!(answer, Ok(json!({})), "{name}");
            assert_eq!(now[name], value(other));
        } else {
            let (_, desc) = answer.unwrap_err();
            let refused = format!("Parameter '{name}' cannot be changed while a migration runs");
            assert_eq!(desc, refused);
            assert_eq!(now[name], before[name]);
        }
    }
    source.execute("migrate-set-parameters", &json!({ "max-bandwidth": 0 }));
    source.reaches("completed");
}

#[test]
fn flags_of_the_command_line_are_the_values_at_the_start() {
    let flags = ["--multifd=on", "--method=zlib", "--max-bandwidth=5M"];
    let mut machine = Machine::start(Program::Hotlift, &flags);
    let parameters = machine.execute("query-migrate-parameters", &json!({}));
    assert_eq!(parameters["multifd-compression"], "zlib");
    assert_eq!(parameters["max-bandwidth"], 5 << 20);
    let capabilities = machine.execute("query-migrate-capabilities", &json!({}));
    for item in capabilities.as_array().unwrap() {
        assert_eq!(item["state"], item["capability"] == "multifd", "{item}");
    }
}
