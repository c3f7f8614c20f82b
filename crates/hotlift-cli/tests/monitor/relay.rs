//! Tests a relay next to a QEMU over QMP: queries, bandwidth limits and cancel.

use hotlift_qmp::{Client, QmpAddress};
use hotlift_testkit::qemu::Release;
use serde_json::json;

use crate::hotlift::Hotlift;
use crate::machine::{DEADLINE, Machine, Program};

#[test]
fn a_relay_can_be_queried_throttled_and_cancelled_and_names_unsupported_commands() {
    if Release::V10.program().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let mut relay = Hotlift::start(&[
        "relay",
        "source",
        &format!("--listen=unix:{}", path("in")),
        &format!("--connect=unix:{}", path("out")),
        &format!("--qmp={}", path("qmp")),
        "--multifd=off",
        "--forever",
    ]);
    relay.wait_for("listening on");
    let mut qmp = Client::connect(&QmpAddress::Unix(path("qmp").into()), DEADLINE).unwrap();
    let nothing = json!({});
    for name in ["migrate-incoming", "stop", "cont"] {
        let refused = qmp.execute(name, &nothing).unwrap_err().to_string();
        assert!(refused.contains(name), "{refused}");
    }
    let refused = qmp.execute("migrate-set-parameters", &json!({ "multifd-channels": 5 }));
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("multifd-channels")
    );
    qmp.execute("migrate-set-parameters", &json!({ "max-bandwidth": 1 }))
        .unwrap();

    let mut destination = Machine::start(Program::Qemu, &["-incoming", "defer"]);
    let incoming = json!({ "uri": format!("unix:{}", path("out")), "exit-on-error": false });
    destination.execute("migrate-incoming", &incoming);
    let mut source = Machine::start(Program::Qemu, &[]);
    // All of this machine fits into sockets and the relay: at full speed the migration may end before the cancel.
    let slowly = json!({ "max-bandwidth": 10_000 });
    source.execute("migrate-set-parameters", &slowly);
    source.execute("migrate", &json!({ "uri": format!("unix:{}", path("in")) }));
    let start = std::time::Instant::now();
    let reaches = |qmp: &mut Client, status: &str| {
        loop {
            let info = qmp.execute("query-migrate", &json!({})).unwrap();
            if info["status"] == status {
                return info;
            }
            assert!(start.elapsed() < DEADLINE, "not {status}, but {info}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    let active = reaches(&mut qmp, "active");
    assert!(active["ram"]["transferred"].is_u64(), "{active}");
    qmp.execute("migrate_cancel", &nothing).unwrap();
    // By then it waits for the next migration, or has reported the end of this one.
    relay.wait_for("cancelled");
    source.reaches("failed");
    assert_eq!(
        source.execute("query-status", &json!({}))["status"],
        "running"
    );
    qmp.execute("quit", &nothing).unwrap();
    let (status, output) = relay.wait();
    assert!(status.success(), "{output:?}");
    assert_eq!(
        std::fs::read_dir(folder.path())
            .unwrap()
            .filter(|entry| { entry.as_ref().unwrap().file_name() != "out" })
            .count(),
        0
    );
}
