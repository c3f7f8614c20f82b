//! `hotlift advise`: recommends settings for this host, by its accelerators and by the kernel's permissions for this user.

use std::path::PathBuf;

use clap::Args;
use hotlift_host::accel::{Devices, devices};
use hotlift_host::page_faults::{PageFaults, page_faults};
use hotlift_host::rules::{Rule, rules};
use hotlift_terminal::width;
use serde::Serialize;

use crate::error::CommandError;
use crate::output_args;

/// Flags of `advise`.
#[derive(Debug, Args)]
pub struct AdviseArgs {
    /// Print devices and rules as one line of JSON
    #[arg(long)]
    json: bool,
    /// Inspect the /sys, /dev and /proc of this folder instead of the host's
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    root: PathBuf,
}

#[derive(Debug, Serialize)]
struct Advice {
    devices: Devices,
    rules: Vec<Rule>,
    page_faults: PageFaults,
}

/// Runs `hotlift advise`.
pub fn run(args: &AdviseArgs) -> Result<(), CommandError> {
    let devices = devices(&args.root)?;
    let advice = Advice {
        rules: rules(&devices),
        devices,
        page_faults: page_faults(),
    };
    Ok(output_args::print(args.json, &advice, || {
        width::folded(&text(&advice))
    })?)
}

fn text(advice: &Advice) -> String {
    let mut text = usable(&advice.devices);
    for rule in advice.rules.iter().filter(|rule| rule.applies) {
        text.push_str(&format!(
            "\n\n{}, {}\n  {} ({})",
            rule.set, rule.when, rule.reason, rule.from
        ));
    }
    text.push_str("\n\n");
    text.push_str(&advice.page_faults.text());
    text
}

/// Returns one line that lists the usable devices.
fn usable(devices: &Devices) -> String {
    let counted = |name, count| (count > 0).then(|| format!("{name} ({count})"));
    let of = [
        counted("IAA", devices.iaa),
        counted("QAT", devices.qat),
        devices.dsa.then(|| "DSA".to_owned()),
    ];
    let names: Vec<_> = of.into_iter().flatten().collect();
    if names.is_empty() {
        return "no accelerator can be used here; 'hotlift accel' lists what is missing".to_owned();
    }
    let shared = match devices.shared_virtual_memory {
        true => "with",
        false => "without",
    };
    format!(
        "usable here: {}, {shared} shared virtual memory (SVM)",
        names.join(", ")
    )
}
