//! Tests `serve --control`: a QMP client queries, limits and ends the destination's side of a migration.

use hotlift_qmp::{Client, QmpAddress};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::hotlift::{Hotlift, Running};
use crate::need;
use crate::operator::{has_moved, machine, serve, succeeds};
use crate::vm::{DEADLINE, PC_10, Release, Vm, folder, until};

/// A running guest, a QEMU that waits for it, and a `serve` of the latter with one client.
struct Watched {
    here: Vm,
    there: Vm,
    serve: Running,
    uri: String,
    control: Client,
    folder: TempDir,
}

impl Watched {
    /// Starts one whose rate limit almost stops a migration, until [`Self::pace`] raises it. `None` if QEMU 10 cannot run.
    fn crawling() -> Option<Self> {
        let here = Vm::running(Release::V10, &machine(PC_10))?;
        let there = Vm::waiting(Release::V10, &machine(PC_10))?;
        let folder = folder();
        let socket = folder.path().join("control");
        let control = format!("--control={}", socket.display());
        let (serve, uri) = serve(&["--qmp", &there.free_qmp(), &control]);
        let control = Client::connect(&QmpAddress::Unix(socket), DEADLINE).expect("QMP");
        let mut watched = Self {
            here,
            there,
            serve,
            uri,
            control,
            folder,
        };
        watched.pace(1);
        Some(watched)
    }

    fn ask(&mut self, command: &str, arguments: &Value) -> Value {
        let answer = self.control.execute(command, arguments);
        answer.unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    fn pace(&mut self, bytes_per_second: u64) {
        let parameters = json!({ "max-bandwidth": bytes_per_second });
        self.ask("migrate-set-parameters", &parameters);
    }

    /// Starts `migrate`, and waits until `serve` reports its stream.
    fn migrate(&mut self) -> Running {
        let qmp = self.here.free_qmp();
        let migrate = ["migrate", "--qmp", &qmp, "--to", &self.uri, "--method=zstd"];
        let migrate = Hotlift::start(&migrate);
        until(
            || "no migration is seen".to_owned(),
            || {
                let info = self.ask("query-migrate", &Value::Null);
                let passed = info["ram"]["transferred"].as_u64();
                (info["status"] == "active" && passed > Some(0)).then_some(())
            },
        );
        migrate
    }

    /// Waits for the last message to a client, and checks that nothing is left behind.
    fn sends_shutdown_event(&mut self) -> Value {
        let goodbye = until(
            || "no SHUTDOWN".to_owned(),
            || {
                let event = self.control.wait_event(DEADLINE).expect("an event");
                event.filter(|event| event.name == "SHUTDOWN")
            },
        );
        until(
            || "the socket's file stays".to_owned(),
            || (!self.folder.path().join("control").exists()).then_some(()),
        );
        goodbye.data
    }
}

#[test]
fn a_serve_can_be_queried_and_throttled_and_names_unsupported_commands() {
    let mut watched = need!(Watched::crawling());
    assert_eq!(watched.ask("query-migrate", &Value::Null), json!({}));
    for name in ["migrate", "migrate-incoming", "stop", "cont"] {
        let refused = watched.control.execute(name, &json!({}));
        let words = refused.expect_err("no guest is here").to_string();
        assert!(words.contains(name), "{words}");
    }
    let migrate = watched.migrate();
    // It stays here while checked: without a limit it would have moved by then.
    let mut count = watched.here.count().expect("the guest has counted");
    for _ in 0..20 {
        count = watched.here.continues_from(count);
    }
    assert_eq!(watched.there.count(), None);

    watched.pace(1 << 34);
    succeeds(migrate);
    assert_eq!(watched.sends_shutdown_event()["reason"], "host-signal");
    succeeds(watched.serve);
    has_moved(&mut watched.here, &mut watched.there);
}

#[test]
fn a_serve_ended_by_a_monitor_client_leaves_the_guest_at_the_source() {
    for (command, code) in [("migrate_cancel", 1), ("quit", 0)] {
        let mut watched = need!(Watched::crawling());
        let migrate = watched.migrate();
        watched.ask(command, &Value::Null);
        let (status, output) = migrate.wait();
        let output = output.join("\n");
        assert_eq!(status.code(), Some(1), "{command}: {output}");
        assert!(output.contains("cancelled"), "{command}: {output}");
        watched.sends_shutdown_event();
        let (status, output) = watched.serve.wait();
        assert_eq!(status.code(), Some(code), "{command}: {output:?}");

        assert!(watched.here.is_running(), "{command}");
        let before = watched.here.count().expect("the guest has counted");
        watched.here.continues_from(before);
        assert_eq!(watched.there.count(), None, "{command}: it has run there");
        assert!(!watched.there.is_running(), "{command}");
    }
}
