mod docs;
mod fake;

use std::os::unix::net::UnixStream;
use std::time::Duration;

use hotlift_qmp::Socket;
use serde_json::json;

use super::complete::complete;
use super::table::{COMMANDS, INFO};
use super::terminal::serve_pipe;
use super::*;
use fake::Fake;

/// Executes lines, and returns the whole output.
fn typed(fake: &Fake, lines: &[&str]) -> String {
    lines.iter().map(|line| run_line(fake, line)).collect()
}

/// Answers that were observed from `human-monitor-command` of QEMU 10.0.2.
#[test]
fn errors_of_a_line_have_qemus_text() {
    for (line, answer) in [
        ("", ""),
        ("foo", "unknown command: 'foo'\r\n"),
        ("info foo", "unknown command: 'info foo'\r\n"),
        ("help foo", "unknown command: 'foo'\r\n"),
        ("INFO status", "unknown command: 'INFO'\r\n"),
        ("  info   status  ", "VM status: running\r\n"),
        (
            "migrate",
            "migrate: string expected\r\nTry \"help migrate\" for more information\r\n",
        ),
        (
            "migrate -d",
            "migrate: string expected\r\nTry \"help migrate\" for more information\r\n",
        ),
        (
            "migrate -x tcp:1:1",
            "migrate: unsupported option -x\r\nTry \"help migrate\" for more information\r\n",
        ),
        (
            "migrate_continue",
            "migrate_continue: string expected\r\nTry \"help migrate_continue\" for more information\r\n",
        ),
        (
            "migrate_continue pre-switchover",
            "Error: Migration not in expected state: none\r\n",
        ),
        (
            "c extra",
            "cont|c: extraneous characters at the end of line\r\nTry \"help c\" for more information\r\n",
        ),
        (
            "info status x",
            "status: extraneous characters at the end of line\r\nTry \"help info status\" for more information\r\n",
        ),
        (
            "migrate_set_capability multifd",
            "Expected 'on' or 'off'\r\nTry \"help migrate_set_capability\" for more information\r\n",
        ),
        (
            "migrate_set_capability multifd maybe",
            "Expected 'on' or 'off'\r\nTry \"help migrate_set_capability\" for more information\r\n",
        ),
        (
            "migrate_set_capability foo on",
            "Error: invalid parameter value: foo\r\n",
        ),
        (
            "migrate_set_parameter",
            "migrate_set_parameter: string expected\r\nTry \"help migrate_set_parameter\" for more information\r\n",
        ),
        (
            "migrate_set_parameter foo 1",
            "Error: invalid parameter value: foo\r\n",
        ),
        (
            "migrate_set_parameter max-bandwidth 1x",
            "Error: Invalid size 1x\r\n",
        ),
        (
            "migrate_set_parameter max-bandwidth \"1 G\"",
            "Error: Invalid size 1 G\r\n",
        ),
        (
            "migrate_set_parameter multifd-channels 0",
            "Error: Parameter 'multifd_channels' expects a value between 1 and 255\r\n",
        ),
        (
            "migrate_set_parameter multifd-channels 300",
            "Error: Parameter 'multifd-channels' expects uint8_t\r\n",
        ),
        (
            "migrate_set_parameter multifd-channels -1",
            "Error: Parameter 'multifd-channels' expects uint8_t\r\n",
        ),
        (
            "migrate_set_parameter multifd-channels abc",
            "Error: Parameter 'multifd-channels' expects uint64\r\n",
        ),
        (
            "migrate_set_parameter multifd-channels 4 # x",
            "migrate_set_parameter: extraneous characters at the end of line\r\nTry \"help migrate_set_parameter\" for more information\r\n",
        ),
        (
            "migrate_set_parameter multifd-compression foo",
            "Error: Parameter 'multifd-compression' does not accept value 'foo'\r\n",
        ),
        (
            "migrate_set_parameter cpu-throttle-tailslow maybe",
            "Error: Parameter 'cpu-throttle-tailslow' expects 'on' or 'off'\r\n",
        ),
    ] {
        assert_eq!(run_line(&Fake::default(), line), answer, "{line}");
    }
}

#[test]
fn every_command_reaches_qmp_with_its_arguments() {
    for (line, command, arguments) in [
        ("migrate -d tcp:h:1", "migrate", json!({"uri": "tcp:h:1"})),
        (
            "migrate -d -r tcp:h:1",
            "migrate",
            json!({"uri": "tcp:h:1", "resume": true}),
        ),
        (
            "migrate -dr \"unix:/a b\"",
            "migrate",
            json!({"uri": "unix:/a b", "resume": true}),
        ),
        (
            "migrate_incoming tcp::4444",
            "migrate-incoming",
            json!({"uri": "tcp::4444", "exit-on-error": false}),
        ),
        ("migrate_cancel", "migrate_cancel", json!(null)),
        ("migrate_pause", "migrate-pause", json!(null)),
        (
            "migrate_recover tcp::4445",
            "migrate-recover",
            json!({"uri": "tcp::4445"}),
        ),
        ("stop", "stop", json!(null)),
        ("s", "stop", json!(null)),
        ("cont", "cont", json!(null)),
        ("c", "cont", json!(null)),
        ("quit", "quit", json!(null)),
        ("q", "quit", json!(null)),
        (
            "migrate_set_capability xbzrle on",
            "migrate-set-capabilities",
            json!({"capabilities": [{"capability": "xbzrle", "state": true}]}),
        ),
        (
            "migrate_set_capability return_path on",
            "migrate-set-capabilities",
            json!({"capabilities": [{"capability": "return-path", "state": true}]}),
        ),
        (
            "migrate_set_parameter max_bandwidth 10G",
            "migrate-set-parameters",
            json!({"max-bandwidth": 10_u64 << 30}),
        ),
        (
            "migrate_set_parameter accelerator off",
            "migrate-set-parameters",
            json!({"x-hotlift-accelerator": "off"}),
        ),
        (
            "migrate_set_parameter x-hotlift-mem-prealloc on",
            "migrate-set-parameters",
            json!({"x-hotlift-mem-prealloc": true}),
        ),
        (
            "migrate_set_parameter multifd-dsa-accel /dev/dsa/wq4.0",
            "migrate-set-parameters",
            json!({"multifd-dsa-accel": ["/dev/dsa/wq4.0"]}),
        ),
        (
            "migrate_set_parameter accel-path dsa:/dev/dsa/wq4.0 dsa:/dev/dsa/wq4.1",
            "migrate-set-parameters",
            json!({"accel-path": ["dsa:/dev/dsa/wq4.0", "dsa:/dev/dsa/wq4.1"]}),
        ),
    ] {
        let fake = Fake::default();
        assert_eq!(run_line(&fake, line), "", "{line}");
        assert_eq!(fake.executed(), [(command.to_owned(), arguments)], "{line}");
    }
}

#[test]
fn the_commands_of_qemus_multi_thread_document_work_unchanged() {
    let fake = Fake::default();
    let capabilities = run_line(&fake, "info migrate_capabilities");
    assert!(
        capabilities.contains("\r\ncompress: off\r\n"),
        "{capabilities}"
    );
    let parameters = run_line(&fake, "info migrate_parameters");
    for line in [
        "compress-threads: 8",
        "decompress-threads: 2",
        "compress-level: 1",
    ] {
        assert!(
            parameters.contains(&format!("\r\n{line}\r\n")),
            "{parameters}"
        );
    }
    let printed = typed(
        &fake,
        &[
            "migrate_set_capability compress on",
            "migrate_set_parameter compress_threads 12",
            "migrate_set_parameter compress_level 1",
            "migrate_set_parameter decompress_threads 3",
            "migrate -d tcp:destination.host:4444",
        ],
    );
    assert_eq!(printed, "");
    let options = fake.options.lock().unwrap().clone();
    assert!(options.stream.compress && !options.stream.multifd());
    assert_eq!(
        (options.stream.compress_threads, options.decompress_threads),
        (12, 3)
    );
    let info = run_line(&fake, "info migrate");
    let first = info.lines().next().unwrap_or_default();
    assert!(
        first.starts_with("Capabilities: ") && first.contains(" compress: on "),
        "{first}"
    );
}

#[test]
fn the_commands_of_the_qpl_qatzip_and_dsa_letters_work_unchanged() {
    for (method, bandwidth) in [
        ("qpl", "100G"),
        ("zstd", "1G"),
        ("qatzip", "10G"),
        ("none", "1G"),
    ] {
        let fake = Fake::default();
        let printed = typed(
            &fake,
            &[
                "migrate_set_capability multifd on",
                "migrate_set_parameter multifd-channels 8",
                "migrate_set_parameter downtime-limit 100",
                &format!("migrate_set_parameter max-bandwidth {bandwidth}"),
                &format!("migrate_set_parameter multifd-compression {method}"),
                "migrate_set_parameter multifd-qatzip-level 9",
                "migrate_set_parameter zero-page-detection dsa-accel",
                "migrate_set_parameter accel-path dsa:/dev/dsa/wq4.0 dsa:/dev/dsa/wq4.1",
                "migrate_set_parameter multifd-normal-page-ratio 50",
                "migrate_set_parameter multifd-set-normal-page-ratio 60",
                "migrate_set_parameter multifd-packet-size 1M",
            ],
        );
        assert_eq!(printed, "");
        let options = fake.options.lock().unwrap().clone();
        assert!(options.stream.multifd() && options.zero_pages.devices);
        assert_eq!(options.stream.multifd_channels, 8);
        assert_eq!(
            options.switchover.downtime_limit,
            Duration::from_millis(100)
        );
        assert_eq!(options.stream.multifd_compression.name, method);
        assert_eq!(options.stream.levels.qatzip, 9);
        assert_eq!(
            (
                options.zero_pages.accel_path.len(),
                options.zero_pages.normal_page_ratio
            ),
            (2, 60)
        );
        assert_eq!(options.stream.multifd_packet_size, 1 << 20);
        let parameters = run_line(&fake, "info migrate_parameters");
        for line in [
            "downtime-limit: 100 ms",
            "accel-path: dsa:/dev/dsa/wq4.0 dsa:/dev/dsa/wq4.1",
            "tls-creds: ''",
        ] {
            assert!(
                parameters.contains(&format!("\r\n{line}\r\n")),
                "{parameters}"
            );
        }
    }
}

/// The numbers are from a migration of QEMU 7.2; the layout is from QEMU 10.0.2.
#[test]
fn a_migration_is_shown_in_the_lines_of_qemu() {
    let fake = Fake::migrating(&[json!({
        "status": "completed", "total-time": 11, "downtime": 2, "setup-time": 1,
        "ram": {
            "transferred": 349_184, "mbps": 368.893, "remaining": 0, "total": 67_641_344, "duplicate": 16465,
            "normal": 49, "normal-bytes": 200_704, "dirty-sync-count": 2, "page-size": 4096,
            "multifd-bytes": 0, "pages-per-second": 0, "dirty-pages-rate": 0, "downtime-bytes": 349_184,
            "precopy-bytes": 0, "postcopy-bytes": 0, "postcopy-requests": 0,
            "dirty-sync-missed-zero-copy": 3,
        },
        "xbzrle-cache": {
            "cache-size": 67_108_864, "bytes": 1024, "pages": 1, "cache-miss": 2, "cache-miss-rate": 0.5,
            "encoding-rate": 1.239, "overflow": 4,
        },
        "cpu-throttle-percentage": 20,
        "socket-address": [{"type": "inet", "host": "::1", "port": "44"}, {"type": "unix", "path": "/a"}],
        "x-hotlift-time-left": 7,
    })]);
    let lines = "Migration status: completed\ntotal time: 11 ms\ndowntime: 2 ms\nsetup: 1 ms\n\
                 transferred ram: 341 kbytes\nthroughput: 368.89 mbps\nremaining ram: 0 kbytes\n\
                 total ram: 66056 kbytes\nduplicate: 16465 pages\nnormal: 49 pages\n\
                 normal bytes: 196 kbytes\ndirty sync count: 2\npage size: 4 kbytes\n\
                 multifd bytes: 0 kbytes\npages-per-second: 0\ndowntime ram: 341 kbytes\n\
                 Zero-copy-send fallbacks happened: 3 times\ncache size: 67108864 bytes\n\
                 xbzrle transferred: 1 kbytes\nxbzrle pages: 1 pages\nxbzrle cache miss: 2 pages\n\
                 xbzrle cache miss rate: 0.50\nxbzrle encoding rate: 1.24\nxbzrle overflow: 4\n\
                 cpu throttle percentage: 20\nsocket address: [\n\ttcp:[::1]:44\n\tunix:/a\n]\n";
    let plain = run_line(&fake, "info migrate").replace("\r\n", "\n");
    let (_, shown) = plain.split_once('\n').unwrap();
    assert_eq!(shown, lines);
    let all = run_line(&fake, "info migrate -a").replace("\r\n", "\n");
    assert_eq!(all, format!("{plain}x-hotlift-time-left: 7\n"));
}

#[test]
fn a_failed_migration_shows_its_error_and_none_shows_nothing() {
    let fake = Fake::migrating(&[json!({"status": "failed", "error-desc": "no route"})]);
    let text = run_line(&fake, "info migrate");
    assert!(
        text.ends_with("\r\nMigration status: failed (no route)\r\n"),
        "{text}"
    );
    assert_eq!(
        run_line(&Fake::default(), "info migrate").lines().count(),
        1
    );
}

#[test]
fn help_has_every_command_and_every_option_with_its_unit() {
    let fake = Fake::default();
    let help = run_line(&fake, "help");
    for command in COMMANDS {
        assert!(help.contains(&command.usage()), "{}", command.names[0]);
        for name in command.names {
            let one = run_line(&fake, &format!("? {name}"));
            assert!(
                one.contains(command.help) || command.names[0] == "info",
                "{one}"
            );
        }
    }
    for what in INFO {
        assert!(run_line(&fake, "info").contains(what.help));
        assert!(run_line(&fake, &format!("help info {}", what.names[0])).contains(what.help));
    }
    let parameters = run_line(&fake, "help migrate_set_parameter");
    let capabilities = run_line(&fake, "help migrate_set_capability");
    for row in hotlift::options::OPTIONS {
        let is_capability = row.kind == hotlift::options::Kind::Capability;
        let text = if is_capability {
            &capabilities
        } else {
            &parameters
        };
        let line = text
            .lines()
            .find(|line| line.contains(&format!("  {} -- ", row.qmp_name())));
        let line = line.unwrap_or_else(|| panic!("{} is not in {text}", row.name));
        assert!(
            line.contains(&row.values.to_string()) && line.contains(&row.default()),
            "{line}"
        );
        assert_eq!(
            line.contains("MiB/s without a suffix"),
            row.unit == "bytes/s",
            "{line}"
        );
    }
}

#[test]
fn names_and_values_are_completed() {
    for (line, start, words) in [
        ("migrate_set_p", 0, vec!["migrate_set_parameter"]),
        (
            "info migrate_",
            5,
            vec!["migrate_capabilities", "migrate_parameters"],
        ),
        ("migrate_set_capability auto", 23, vec!["auto-converge"]),
        ("migrate_set_capability multifd o", 31, vec!["on", "off"]),
        (
            "migrate_set_parameter x-hotlift-a",
            22,
            vec!["x-hotlift-accelerator"],
        ),
        (
            "migrate_set_parameter multifd-compression z",
            42,
            vec!["zlib", "zstd"],
        ),
        ("help info v", 10, vec!["version"]),
        ("stop ", 5, vec![]),
        ("nothing x", 8, vec![]),
    ] {
        let words: Vec<String> = words.into_iter().map(str::to_owned).collect();
        assert_eq!(complete(line), (start, words), "{line}");
    }
    let all: Vec<_> = COMMANDS.iter().map(|row| row.names[0].to_owned()).collect();
    assert_eq!(complete(""), (0, all));
}

/// Serves the lines of a client over a socket pair, and returns the output.
fn client(fake: &Fake, lines: &[u8]) -> String {
    use std::io::{Read, Write};
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| serve_client(fake, Socket::Unix(theirs)));
        let mut received = String::new();
        (&ours).write_all(lines).unwrap();
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        (&ours).read_to_string(&mut received).unwrap();
        server.join().unwrap().unwrap();
        received
    })
}

#[test]
fn a_socket_has_a_greeting_and_a_prompt_before_each_line_and_ends_with_quit() {
    let received = client(&Fake::default(), b"info status\r\nfoo\nquit\ninfo status\n");
    let (greeting, rest) = received.split_once("\r\n").unwrap();
    assert!(
        greeting.starts_with("Hotlift ") && greeting.ends_with("type 'help' for more information")
    );
    assert_eq!(
        rest,
        "(qemu) VM status: running\r\n(qemu) unknown command: 'foo'\r\n(qemu) "
    );
}

#[test]
fn migrate_without_d_waits_for_the_end_at_a_socket_and_in_a_pipe() {
    for (end, output) in [
        (
            json!({"status": "completed"}),
            "Migration status: completed",
        ),
        (
            json!({"status": "failed", "error-desc": "x"}),
            "Migration status: failed (x)",
        ),
        (
            json!({"status": "cancelled"}),
            "Migration status: cancelled",
        ),
    ] {
        let looks = [json!({"status": "setup"}), json!({"status": "active"}), end];
        let received = client(&Fake::migrating(&looks), b"migrate tcp:h:1\n");
        assert!(
            received.ends_with(&format!("(qemu) {output}\r\n(qemu) ")),
            "{received}"
        );
        let mut received = Vec::new();
        serve_pipe(
            &Fake::migrating(&looks),
            &mut &b"migrate tcp:h:1"[..],
            &mut received,
        )
        .unwrap();
        let received = String::from_utf8(received).unwrap();
        assert!(
            received.ends_with(&format!("(qemu) {output}\n(qemu) ")),
            "{received}"
        );
    }
    // `human-monitor-command` does not wait for the end of the migration.
    let fake = Fake::migrating(&[json!({"status": "active"})]);
    let output = run_line(&fake, "migrate tcp:h:1");
    assert!(output.contains("continuing detached"), "{output}");
    assert_eq!(fake.executed().len(), 1);
}

#[test]
fn an_endless_line_and_invalid_text_end_in_an_error_without_using_memory() {
    let endless = vec![b'x'; 1 << 20];
    let mut received = Vec::new();
    serve_pipe(&Fake::default(), &mut &endless[..], &mut received).unwrap();
    assert!(
        String::from_utf8(received)
            .unwrap()
            .ends_with("a line has at most 4095 bytes\n")
    );
    let received = client(&Fake::default(), &[b'x'; 8000]);
    assert!(
        received.ends_with("a line has at most 4095 bytes\r\n"),
        "{received}"
    );
    let received = client(
        &Fake::default(),
        b"\xff\xc3(\0\n\"\\\nmigrate_set_parameter \"\n",
    );
    assert!(received.contains("unknown command"), "{received}");
}
