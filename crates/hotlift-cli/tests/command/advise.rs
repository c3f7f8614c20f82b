//! Tests `hotlift advise` on this host and on simulated hosts.

use serde_json::Value;

use crate::accel::Host;
use crate::hotlift::Hotlift;

fn advise(flags: &[&str]) -> Vec<String> {
    let (status, output) = Hotlift::start(&[&["advise"], flags].concat()).wait();
    assert!(status.success(), "{output:?}");
    output
}

#[test]
fn a_host_without_accelerators_is_advised_to_take_auto() {
    let host = Host::new();
    let text = advise(&["--root", host.path().to_str().expect("UTF-8")]).join("\n");
    assert!(
        text.starts_with("no accelerator can be used here"),
        "{text}"
    );
    assert!(text.contains("--method auto, in any case\n"), "{text}");
    assert_eq!(text.matches("--method").count(), 1, "{text}");
}

#[test]
fn only_rules_of_usable_devices_are_printed() {
    let host = Host::new();
    host.process(crate::accel::RAW_IO);
    host.idxd("iax1");
    host.idxd("iax3");
    host.idxd("dsa0");
    host.put("sys/bus/dsa/devices/iax3/wq3.0/state", "disabled");
    let root = host.path().to_str().expect("UTF-8");
    let text = advise(&["--root", root]).join("\n");
    let usable = "usable here: IAA (1), DSA, with shared virtual memory (SVM)\n";
    assert!(text.starts_with(usable), "{text}");
    for set in [
        "--method qpl, in any case\n",
        "--mem-prealloc=on, at a destination",
        "--zero-page-detection dsa-accel, if at least 40 %",
    ] {
        assert!(text.contains(set), "{set}: {text}");
    }
    assert_eq!(text.matches("--method").count(), 1, "{text}");
    let json = advise(&["--json", "--root", root]).join("\n");
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["devices"]["iaa"], 1, "{json}");
    let rules = json["rules"].as_array().expect("rules");
    let applies = |set: &str| {
        let mut of = rules.iter().filter(|rule| rule["set"] == set);
        of.any(|rule| rule["applies"] == true)
    };
    // This kernel's answer, whichever it is.
    let missing = json["page_faults"]["missing"].as_bool().expect("a word");
    assert_eq!(missing, json["page_faults"]["set"].is_null(), "{json}");
    assert!(text.contains("\n\npage faults: "), "{text}");
    assert!(applies("--method qpl"), "{json}");
    assert!(!applies("--method auto"), "{json}");
}

#[test]
fn advice_is_printed_for_this_host_with_any_hardware() {
    let text = advise(&[]).join("\n");
    assert!(text.contains("\n--method "), "{text}");
}
