//! Tests `hotlift drain`: the domain it selects, and its report of a failed move.

use crate::scripted_virsh::{HERE, Hosts};

const B: &str = "qemu+ssh://b/system";

#[test]
fn a_domain_named_like_the_id_of_another_is_moved_and_the_other_stays() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(101, "other", "running");
    hosts.domain(7, "101", "running");
    let (code, output) = hosts.hotlift(&["drain", "--to=b", "--domain=101"]);
    assert_eq!(code, Some(0), "{output}");
    assert_eq!(hosts.names(B), ["101"], "{output}");
    assert_eq!(hosts.names(HERE), ["other"], "{output}");
}

#[test]
fn persistent_domains_stay_persistent_and_transient_ones_transient() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "defined", "running");
    hosts.define(1);
    hosts.domain(2, "transient", "running");
    hosts.on(HERE, "migrate", r#"echo "$flags" > "$dir/options""#);
    let (code, output) = hosts.hotlift(&["drain", "--to=b"]);
    assert_eq!(code, Some(0), "{output}");
    for (id, is_defined) in [(1, true), (2, false)] {
        let options = hosts.of(B, id, "options");
        for option in ["--persistent", "--undefinesource"] {
            assert_eq!(options.contains(option), is_defined, "{options}");
        }
    }
}

/// Drains one domain whose migration fails after `lines` of the shell.
fn failed(lines: &str) -> (Option<i32>, String) {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "web1", "running");
    let lines = format!("{lines}\necho 'error: it failed' >&2\nexit 1");
    hosts.on(HERE, "migrate", &lines);
    hosts.hotlift(&["drain", "--to=b"])
}

#[test]
fn a_domain_that_runs_on_both_hosts_is_not_reported_as_stayed() {
    let (code, output) = failed(r#"cp -r "$dir" "$there""#);
    assert_eq!(code, Some(3), "{output}");
    assert!(output.contains("it runs on both hosts"), "{output}");
}

#[test]
fn a_domain_that_libvirt_does_not_list_is_not_taken_to_be_gone() {
    // A broken connection, or a domain without permission: virsh prints the same for both.
    let refuse = "echo \"error: failed to get domain '$domain'\" >&2; exit 1";
    let lines = format!(
        "cp -r \"$dir\" \"$there\"; echo '{refuse}' > \"$host/on-domstate\"",
        refuse = refuse.replace('\'', r"'\''")
    );
    let (code, output) = failed(&lines);
    assert_eq!(code, Some(3), "{output}");
    assert!(output.contains("here it is unknown"), "{output}");
}

#[test]
fn a_domain_that_ends_while_it_moves_is_reported_as_ended() {
    let (code, output) = failed(r#"rm -r "$dir""#);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("web1 to b: ended: it failed"), "{output}");
    assert!(output.contains("1 of 1 domains ended"), "{output}");
}

#[test]
fn a_domain_whose_guest_powers_off_while_it_moves_is_ended_once_its_qemu_exits() {
    for ending in ["in shutdown (user)", "paused (shutting down)"] {
        let hosts = Hosts::new(&[B]);
        hosts.domain(1, "web1", "running");
        hosts.define(1);
        let lines = format!(
            "echo '{ending}' > \"$dir/state\"; echo 'error: domain is not running' >&2; exit 1"
        );
        hosts.on(HERE, "migrate", &lines);
        // The first answer is that of a QEMU that has not ended.
        let ends = r#"cat "$dir/state"; echo "shut off (shutdown)" > "$dir/state"; exit"#;
        hosts.on(HERE, "domstate", ends);
        let (code, output) = hosts.hotlift(&["drain", "--to=b"]);
        assert_eq!(code, Some(1), "{ending}: {output}");
        let words = "web1 to b: ended: the guest powered off: domain is not running";
        assert!(output.contains(words), "{ending}: {output}");
        assert!(
            output.contains("1 of 1 domains ended"),
            "{ending}: {output}"
        );
    }
}

const C: &str = "qemu+ssh://c/system";

#[test]
fn a_domain_that_ends_during_planning_is_skipped_and_the_others_move() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "web1", "running");
    hosts.domain(2, "web2", "running");
    let ends = r#"[ "$(cat "$dir/name")" = web1 ] && rm -r "$dir" && exit 1"#;
    hosts.on(HERE, "domstats", ends);
    let (code, output) = hosts.hotlift(&["drain", "--to=b"]);
    assert_eq!(code, Some(0), "{output}");
    assert!(output.contains("skipped web1: it has ended"), "{output}");
    assert_eq!(hosts.names(B), ["web2"], "{output}");
}

#[test]
fn a_domain_that_libvirt_cannot_measure_stays_and_the_others_move() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "web1", "running");
    hosts.domain(2, "web2", "running");
    let refuses = r#"[ "$(cat "$dir/name")" = web1 ] && echo "error: timed out" >&2 && exit 1"#;
    hosts.on(HERE, "domstats", refuses);
    let (code, plan) = hosts.hotlift(&["drain", "--to=b", "--dry-run"]);
    assert_eq!(code, Some(0), "{plan}");
    let of_web2 = plan.lines().find(|line| line.contains("web2"));
    // The command waited for its sample.
    assert!(of_web2.is_some_and(|line| !line.contains('?')), "{plan}");
    let (code, output) = hosts.hotlift(&["drain", "--to=b"]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("1 of 2 domains stayed"), "{output}");
    assert_eq!(hosts.names(B), ["web2"], "{output}");
}

#[test]
fn an_unreachable_destination_is_skipped_if_another_answers() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "web1", "running");
    let (code, output) = hosts.hotlift(&["drain", "--to=c,b"]);
    assert_eq!(code, Some(0), "{output}");
    assert!(output.contains("skipped c: "), "{output}");
    assert_eq!(hosts.names(B), ["web1"], "{output}");
    hosts.domain(1, "web1", "running");
    let (code, output) = hosts.hotlift(&["drain", "--to=c"]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains(&format!("libvirt at {C}")), "{output}");
    let (code, output) = hosts.hotlift(&["drain", "--to=c,d"]);
    assert_eq!(code, Some(1), "{output}");
    for uri in [C, "qemu+ssh://d/system"] {
        assert!(output.contains(&format!("libvirt at {uri}: ")), "{output}");
    }
}

#[test]
fn a_missing_local_libvirt_is_named_and_no_destination_is_contacted() {
    let hosts = Hosts::new(&[B]);
    let here = "--connect=qemu:///missing";
    let (code, output) = hosts.hotlift(&["drain", "--to=c,b", here]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("libvirt at qemu:///missing: "), "{output}");
    assert!(!output.contains("qemu+ssh"), "{output}");
}

#[test]
fn a_paused_domain_is_named_and_the_host_is_not_reported_empty() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "web1", "running");
    hosts.domain(2, "web2", "paused");
    let (code, output) = hosts.hotlift(&["drain", "--to=b"]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("web2: it is paused here"), "{output}");
    assert_eq!(hosts.names(B), ["web1"], "{output}");
    assert_eq!(hosts.names(HERE), ["web2"], "{output}");
}

#[test]
fn names_are_literal_and_an_unknown_one_stops_the_drain_before_it_starts() {
    let hosts = Hosts::new(&[B]);
    for (id, name) in [(1, "web1"), (2, " a,b "), (3, "a"), (4, "off")] {
        hosts.domain(id, name, if name == "off" { "shut off" } else { "running" });
    }
    let (code, output) = hosts.hotlift(&["drain", "--to=b", "--domain= a,b ", "--domain=wbe1"]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("no domain is named 'wbe1'"), "{output}");
    assert_eq!(hosts.names(HERE).len(), 4, "{output}");
    let line = ["drain", "--to=b", "--domain= a,b ", "--domain=off"];
    // The second run finds no domain left.
    for _ in 0..2 {
        let (code, output) = hosts.hotlift(&line);
        assert_eq!(code, Some(0), "{output}");
        assert_eq!(hosts.names(B), [" a,b "], "{output}");
    }
}

/// Lines for `domjobinfo`: at first no memory moves, then each call finds a new round.
const ROUNDS: &str = r#"
round=$(cat "$dir/round" 2>&1) || round=0
echo $((round + 1)) >"$dir/round"
printf 'time_elapsed: 100\nmemory_iteration: %s\nmemory_remaining: 4096\n' "$round"
exit 0"#;

/// Lines for `migrate` that wait until the downtime limits that were set are `limits`, then run `then`.
fn once_set(limits: &str, then: &str) -> String {
    let is_set = format!(r#"[ "$(cat "$dir/limits" 2>&1 | tr '\n' ' ')" = "{limits} " ]"#);
    format!(
        "tries=0\nuntil {is_set} || [ $tries -ge 200 ]; do sleep 0.1; tries=$((tries + 1)); done\n{then}"
    )
}

/// Returns hosts with one domain whose migration fails or not, and that record its downtime limits in `limits`.
fn ramped(migrate: &str) -> Hosts {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "web1", "running");
    hosts.on(HERE, "migrate", migrate);
    hosts.on(HERE, "domjobinfo", ROUNDS);
    let noted = r#"echo "$downtime" >>"$dir/limits""#;
    hosts.on(HERE, "migrate-setmaxdowntime", noted);
    hosts
}

const FAILS: &str = "echo 'error: it failed' >&2\nexit 1";

#[test]
fn the_downtime_limit_is_low_once_memory_moves_and_rises_as_rounds_need_it() {
    let hosts = ramped(&once_set("9 300", ""));
    let early = r#"[ "$(cat "$dir/round")" -gt 1 ] || echo early >>"$dir/limits"
echo "$downtime" >>"$dir/limits""#;
    hosts.on(HERE, "migrate-setmaxdowntime", early);
    let (code, output) = hosts.hotlift(&["drain", "--to=b", "--json"]);
    assert_eq!(code, Some(0), "{output}");
    assert_eq!(hosts.of(B, 1, "limits"), "9\n300\n", "{output}");
    let line = "web1 to b: downtime-limit 300 of 300 ms, raised because";
    assert!(output.contains(line), "{output}");
    let figures = r#""downtime_limit":{"ms":300,"most_ms":300,"reason":"raised because"#;
    assert!(output.contains(figures), "{output}");
}

#[test]
fn the_downtime_limit_of_a_domain_that_stays_is_restored() {
    let hosts = ramped(&once_set("9", FAILS));
    // The memory still moves in the first round.
    let first = ROUNDS.replace("$((round + 1))", "1");
    hosts.on(HERE, "domjobinfo", &first);
    let (code, output) = hosts.hotlift(&["drain", "--to=b"]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("web1 to b: stayed"), "{output}");
    assert_eq!(hosts.of(HERE, 1, "limits"), "9\n300\n", "{output}");
    assert_eq!(hosts.of(HERE, 1, "downtime"), "300\n", "{output}");
}

#[test]
fn a_downtime_limit_of_another_client_stays() {
    // The third call finds the other limit. Further ones would raise it.
    let wait = r#"tries=0
until [ "$(cat "$dir/round" 2>&1)" = 3 ] || [ $tries -ge 200 ]; do sleep 0.1; tries=$((tries + 1)); done
sleep 2"#;
    let hosts = ramped(&format!("{wait}\n{FAILS}"));
    let other = format!(r#"[ -f "$dir/limits" ] && echo 75 >"$dir/downtime"{ROUNDS}"#);
    hosts.on(HERE, "domjobinfo", &other);
    let (code, output) = hosts.hotlift(&["drain", "--to=b"]);
    assert_eq!(code, Some(1), "{output}");
    let line = "web1 to b: downtime-limit as another client has set it";
    assert!(output.contains(line), "{output}");
    assert_eq!(hosts.of(HERE, 1, "limits"), "9\n", "{output}");
    assert_eq!(hosts.of(HERE, 1, "downtime"), "75\n", "{output}");
}

#[test]
fn the_downtime_limit_is_not_touched_without_the_ramp_or_in_postcopy() {
    let options: [&[&str]; 2] = [&["--downtime-ramp=off"], &["--", "--postcopy"]];
    for options in options {
        let hosts = ramped("sleep 1");
        let asked = r#"echo it >"$dir/asked-for-limit""#;
        hosts.on(HERE, "migrate-getmaxdowntime", asked);
        let line = [&["drain", "--to=b", "--json"][..], options].concat();
        let (code, output) = hosts.hotlift(&line);
        assert_eq!(code, Some(0), "{output}");
        assert!(output.contains(r#""downtime_limit":null"#), "{output}");
        for file in ["limits", "asked-for-limit", "round"] {
            assert!(!hosts.has(B, 1, file), "{options:?}: {file}");
        }
    }
}
