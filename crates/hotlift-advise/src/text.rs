//! The advice for people, and what to type.

use hotlift_console::progress;
use hotlift_console::table::{align, new_table};
use hotlift_host::cost::GIB;
use hotlift_host::measure::Candidate;
use serde_json::{Value, json};

use crate::advice::{Advice, Owner};
use crate::choose::{Choice, Goal, rank, second};
use crate::model::{Limit, PROGRESS, Prediction, ZeroPages};
use crate::request::{Origin, Request};
use crate::zero_pages::FIRST_WITH_A_CHOICE;

/// What `hotlift migrate` takes beyond the figures of two ends without relays.
pub const BEYOND: &str =
    "not in the figures: the relay that a QEMU's guest passes at each host; --relays puts them in";

impl Advice {
    /// All of it for people, with what to type.
    #[must_use]
    pub fn text(&self) -> String {
        text(self)
    }
}

fn text(advice: &Advice) -> String {
    let mut text = format!("{}\n{}\n", candidates(advice), recommendation(advice));
    for reason in &advice.reasons {
        text.push_str(&format!("  - {reason}\n"));
    }
    for rule in advice.rules.iter().filter(|rule| rule.applies) {
        text.push_str(&format!("  rule: {}: {}\n", rule.rule, rule.reason));
    }
    if let Some(command) = &advice.command {
        text.push_str(&format!("\n{command}\n"));
    }
    if let Some(beyond) = advice.beyond {
        text.push_str(&format!("{beyond}\n"));
    }
    let speaks = match (advice.owner, &advice.command) {
        (Owner::Hotlift, _) => "over the built-in guest's QMP",
        (_, Some(_)) => "or, with QEMU's own migration",
        (_, None) => "with QEMU's own migration",
    };
    if let Some(best) = best_over_qmp(advice) {
        let what = match advice.owner {
            Owner::Hotlift => String::new(),
            _ => format!(
                " (of what it knows {} is best, by Hotlift's codecs), over QMP",
                best.candidate.name()
            ),
        };
        text.push_str(&format!("\n{speaks}{what}:\n"));
    }
    for command in advice.qmp.as_array().into_iter().flatten() {
        text.push_str(&format!("{command}\n"));
    }
    text.trim_end().to_owned()
}

/// The table.
fn candidates(advice: &Advice) -> String {
    let mut table = new_table(&[
        "method",
        "ch",
        "total s",
        "down ms",
        "wire",
        "CPU s src",
        "dst",
        "limit",
        "ratio",
        "MB/s in",
        "out",
    ]);
    for choice in &advice.candidates {
        let prediction = &choice.prediction;
        let costs = &choice.candidate.costs.content;
        let rate = |seconds: f64| match seconds > 0.0 {
            true => format!("{:.0}", GIB / 1e6 / seconds),
            false => "-".to_owned(),
        };
        let when = |text: String| match prediction.converges {
            true => text,
            false => "never".to_owned(),
        };
        let name = choice.candidate.name();
        table.add_row([
            match choice.eligible {
                true => name,
                false => format!("({name})"),
            },
            choice.settings.channels.to_string(),
            when(seconds(prediction.total_s)),
            when(match prediction.downtime_s * 1e3 {
                few if few < 10.0 => "<10".to_owned(),
                more => format!("{more:.0}"),
            }),
            bytes(prediction.wire_bytes),
            format!("{:.2}", prediction.source_cpu_s),
            format!("{:.2}", prediction.destination_cpu_s),
            limit(prediction.limit).to_owned(),
            format!("{:.2}", costs.ratio),
            rate(costs.encode.thread),
            rate(costs.decode.thread),
        ]);
    }
    align(&mut table);
    table.to_string()
}

fn limit(limit: Limit) -> &'static str {
    match limit {
        Limit::Source => "source",
        Limit::Wire => "link",
        Limit::Destination => "dest.",
        Limit::SharedCores => "cores",
    }
}

fn seconds(time: f64) -> String {
    match time {
        time if time < 10.0 => format!("{time:.2}"),
        time if time < 1000.0 => format!("{time:.1}"),
        time => format!("{time:.0}"),
    }
}

/// A downtime. Below 10 ms it is other work's time slices that decide.
fn milliseconds(seconds: f64) -> String {
    match seconds * 1e3 {
        few if few < 10.0 => "less than 10 ms".to_owned(),
        more => format!("{more:.0} ms"),
    }
}

fn bytes(bytes: f64) -> String {
    progress::bytes(progress::rounded(bytes))
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn goal(goal: Goal) -> &'static str {
    match goal {
        Goal::Fastest => "fastest",
        Goal::LeastCpu => "least CPU",
        Goal::ShortestDowntime => "shortest downtime",
    }
}

fn recommendation(advice: &Advice) -> String {
    let Some(best) = advice.candidates.first() else {
        return String::new();
    };
    let prediction = &best.prediction;
    let outcome = match prediction.converges {
        true => format!(
            "{} s in all, the guest stands still for {}",
            seconds(prediction.total_s),
            milliseconds(prediction.downtime_s)
        ),
        false => "does not converge".to_owned(),
    };
    format!(
        "{}: {}, {}, zero-page-detection={}: {outcome}",
        goal(advice.goal),
        best.candidate.name(),
        counted(usize::from(best.settings.channels), "channel"),
        advice.zero_pages.mode.name(),
    )
}

/// Why, in five lines: memory, link and cores, the next best, the dirty rate, CPU.
pub fn reasons(advice: &Advice, rate_known: bool) -> Vec<String> {
    let Some(best) = advice.candidates.first() else {
        return Vec::new();
    };
    vec![
        memory(advice),
        pace(advice, best),
        next(advice, best),
        convergence(advice, best, rate_known),
        cpu(advice, best),
    ]
}

fn memory(advice: &Advice) -> String {
    let load = &advice.load;
    let sample = &advice.sample;
    format!(
        "memory: {} ({}), {} never touched, {} zero, by {} pages; zero pages: {}",
        progress::bytes(sample.ram_bytes),
        sample.memory,
        percent(load.untouched_share),
        percent(load.zero_share),
        sample.pages,
        advice.zero_pages.reason,
    )
}

fn pace(advice: &Advice, best: &Choice) -> String {
    let machine = &advice.machine;
    let carries = format!("carries {}/s", bytes(machine.bandwidth));
    let link = match &advice.other {
        _ if !machine.bandwidth.is_finite() => "no link limits it".to_owned(),
        Some(far) if far.bandwidth.total_cmp(&machine.bandwidth).is_eq() => format!(
            "the link to {} {carries}, measured over {}, {:.1} ms there and back",
            far.address,
            counted(usize::from(far.connections), "connection"),
            far.round_trip * 1e3,
        ),
        _ => format!("the link {carries}"),
    };
    let hosts = match (machine.same_host, &advice.other) {
        (true, _) => format!("both ends together have {:.1} cores", machine.source_cores),
        (false, Some(_)) => format!(
            "the hosts have {:.1} and {:.1} cores to spare",
            machine.source_cores, machine.destination_cores
        ),
        (false, None) => format!(
            "each host has {:.1} cores to spare, as far as this one tells",
            machine.source_cores
        ),
    };
    format!(
        "pace: {link}, {hosts}; {} is limited by {}",
        best.candidate.name(),
        match best.prediction.limit {
            Limit::Wire => "the link",
            Limit::Source => "the source's CPU",
            Limit::Destination => "the destination's CPU",
            Limit::SharedCores => "the cores that both share",
        }
    )
}

fn counted(count: usize, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        more => format!("{more} {what}s"),
    }
}

fn next(advice: &Advice, best: &Choice) -> String {
    let others = advice
        .candidates
        .iter()
        .skip(1)
        .filter(|choice| choice.eligible);
    let mut names = Vec::new();
    for (i, choice) in others.take(2).enumerate() {
        let prediction = &choice.prediction;
        let name = match prediction.converges {
            false => format!("{} does not converge", choice.candidate.name()),
            true => match advice.goal {
                Goal::Fastest => format!(
                    "{} takes {} s",
                    choice.candidate.name(),
                    seconds(prediction.total_s)
                ),
                Goal::LeastCpu => format!(
                    "{} takes {:.2} s of CPU",
                    choice.candidate.name(),
                    prediction.cpu_s()
                ),
                Goal::ShortestDowntime => format!(
                    "{} stops it for {} in {} s",
                    choice.candidate.name(),
                    milliseconds(prediction.downtime_s),
                    seconds(prediction.total_s)
                ),
            },
        };
        let is_near = |number: fn(Goal, &Prediction) -> f64| {
            number(advice.goal, prediction) < number(advice.goal, &best.prediction) * 1.05
        };
        let alike = i == 0
            && prediction.converges
            && is_near(rank)
            && (advice.goal != Goal::ShortestDowntime || is_near(second));
        names.push(match alike {
            true => format!("{name} (as good as {})", best.candidate.name()),
            false => name,
        });
    }
    match names.is_empty() {
        true => format!(
            "next: nothing but {} is there to choose",
            best.candidate.name()
        ),
        false => format!("next: {}", names.join(", ")),
    }
}

fn convergence(advice: &Advice, best: &Choice, rate_known: bool) -> String {
    let prediction = &best.prediction;
    let rate = advice.load.dirty_rate;
    let settles = progress::rounded(prediction.settles_pages_per_s);
    let enough = progress::rounded(prediction.settles_pages_per_s * PROGRESS);
    let guest = match (rate_known, rate > 0.0) {
        (false, _) => "the dirty rate is not known and was taken for 0".to_owned(),
        (true, false) => "the guest dirties nothing".to_owned(),
        (true, true) => format!("the guest dirties {} pages/s", progress::rounded(rate)),
    };
    match prediction.converges {
        true => format!(
            "rounds: {guest}; {settles} pages/s are settled: {} rounds, and it converges at any rate below {enough}",
            prediction.rounds
        ),
        false => format!(
            "rounds: {guest}, and {settles} pages/s are settled: it does not converge, as it would below {enough}; slow \
             the guest down (auto-converge at the QEMU) or allow for more downtime than {:.1} s",
            prediction.downtime_s
        ),
    }
}

fn cpu(advice: &Advice, best: &Choice) -> String {
    let prediction = &best.prediction;
    let per_core = |cpu: f64| cpu / prediction.total_s.max(1e-9);
    let none = advice
        .candidates
        .iter()
        .find(|choice| choice.candidate.method == "none");
    let beside = none.map_or(String::new(), |none| match none.prediction.converges {
        true => format!("; without compression {:.2} s", none.prediction.cpu_s()),
        false => "; without compression it does not converge".to_owned(),
    });
    format!(
        "CPU: {:.2} s at the source ({:.1} cores), {:.2} s at the destination ({:.1} cores), by {}{beside}",
        prediction.source_cpu_s,
        per_core(prediction.source_cpu_s),
        prediction.destination_cpu_s,
        per_core(prediction.destination_cpu_s),
        runs_on_words(&best.candidate),
    )
}

fn runs_on_words(candidate: &Candidate) -> &str {
    match candidate.method {
        "none" => "copies alone",
        _ => &candidate.runs_on,
    }
}

/// `hotlift migrate` with the settings; `None` if there is nothing to recommend.
pub fn command(advice: &Advice, request: &Request) -> Option<String> {
    let best = advice.candidates.first()?;
    let qmp = match &request.origin {
        Origin::Qmp(address) => address.to_string(),
        Origin::Process(_) | Origin::File(_) => "VM.qmp".to_owned(),
    };
    // A survey may have been answered by a 'hotlift bench --serve': the port is the same if that is how it is started.
    let to = request.to.as_ref();
    let to = to.map_or("tcp:HOST:4444".to_owned(), ToString::to_string);
    let mut command = format!(
        "hotlift migrate --qmp {} --to {} --method {}",
        quoted(&qmp),
        quoted(&to),
        best.candidate.method
    );
    if let Some(level) = best.candidate.level {
        command.push_str(&format!(" --level {level}"));
    }
    command.push_str(&format!(" --channels {}", best.settings.channels));
    // The rest is as both QEMUs can have it, which the relays find out; and no device looks for a relay.
    if advice.zero_pages.mode == ZeroPages::None {
        command.push_str(" --zero-page-detection none");
    }
    // Nor does a relay slow a guest down: that is QEMU's to do, as the reasons say.
    command.push_str(&format!(" --downtime-limit {}", downtime_limit(best)));
    for (name, value) in &request.security {
        command.push_str(&format!(" {}", quoted(&format!("--{name}={value}"))));
    }
    Some(command)
}

/// For a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:+=,@%".contains(c);
    match word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

fn downtime_limit(choice: &Choice) -> u64 {
    progress::rounded((choice.settings.downtime_limit * 1e3).round())
}

/// The best that whoever has the guest accepts.
fn best_over_qmp(advice: &Advice) -> Option<&Choice> {
    let known = |choice: &&Choice| {
        advice.owner == Owner::Hotlift || choice.candidate.is_known_to(advice.qemu)
    };
    let mut eligible = advice.candidates.iter().filter(|choice| choice.eligible);
    eligible.find(known)
}

/// The same for the own migration of a QEMU or a built-in guest, of what it accepts.
pub fn qmp(advice: &Advice) -> Value {
    let Some(best) = best_over_qmp(advice) else {
        return Value::Null;
    };
    let mut parameters = json!({
        "multifd-compression": best.candidate.method,
        "multifd-channels": best.settings.channels,
        "downtime-limit": downtime_limit(best),
        // 0 is unlimited.
        "max-bandwidth": match advice.machine.bandwidth.is_finite() {
            true => progress::rounded(advice.machine.bandwidth),
            false => 0,
        },
    });
    let is_hotlift = advice.owner == Owner::Hotlift;
    if is_hotlift || (advice.qemu.major, advice.qemu.minor) >= FIRST_WITH_A_CHOICE {
        parameters["zero-page-detection"] = match advice.zero_pages.mode {
            // QEMU has no DSA.
            ZeroPages::DsaAccel if !is_hotlift => ZeroPages::Multifd,
            mode => mode,
        }
        .name()
        .into();
    }
    if let Some(level) = best.candidate.level {
        parameters[format!("multifd-{}-level", best.candidate.method)] = level.into();
    }
    let mut capabilities = vec![json!({ "capability": "multifd", "state": true })];
    if !best.prediction.converges {
        capabilities.push(json!({ "capability": "auto-converge", "state": true }));
    }
    json!([
        { "execute": "migrate-set-capabilities", "arguments": { "capabilities": capabilities } },
        { "execute": "migrate-set-parameters", "arguments": parameters },
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advice::USUAL;
    use crate::model::{Load, Machine, Settings};
    use crate::zero_pages::Detection;
    use hotlift_console::migration_args::{RoleArgs, role};
    use hotlift_host::accel::Devices;
    use hotlift_host::cost::{Codec, Costs, Relays};
    use hotlift_host::loopback::Loopback;
    use hotlift_host::measure::Measured;
    use hotlift_host::sample::Sample;

    fn choice(method: &'static str, level: Option<u8>, total_s: f64, converges: bool) -> Choice {
        Choice {
            candidate: Candidate {
                method,
                level,
                runs_on: String::new(),
                on_device: false,
                measured_bytes: 0,
                costs: Costs {
                    as_they_are: false,
                    content: Codec::NONE,
                    zeros: Codec::NONE,
                },
            },
            settings: Settings {
                channels: 2,
                zero_pages: ZeroPages::DsaAccel,
                downtime_limit: 0.3,
            },
            prediction: Prediction {
                total_s,
                downtime_s: 0.1,
                rounds: 3,
                wire_bytes: 0.0,
                source_cpu_s: 1.0,
                destination_cpu_s: 1.0,
                converges,
                settles_pages_per_s: 1000.0,
                limit: Limit::Wire,
            },
            eligible: true,
        }
    }

    fn advice(candidates: Vec<Choice>) -> Advice {
        Advice {
            goal: Goal::Fastest,
            sample: Sample::default(),
            load: Load {
                pages: 0.0,
                untouched_share: 0.0,
                zero_share: 0.0,
                dirty_rate: 500.0,
                working_set: 0.0,
            },
            measured: Measured {
                cores: 2,
                cores_free: 2.0,
                zero_scan: 0.1,
                look: 0.1,
                loopback: Loopback {
                    first_touch: 0.1,
                    send: 0.1,
                    receive: 0.1,
                    relays: Relays {
                        send: 0.1,
                        near: 0.1,
                        far: 0.1,
                        receive: 0.1,
                    },
                },
                candidates: Vec::new(),
            },
            machine: Machine {
                look: 0.1,
                send: 0.1,
                receive: 0.1,
                first_touch: 0.1,
                ..crate::model::tests::machine(2.0, 1e9)
            },
            other: None,
            owner: Owner::Unknown,
            qemu: USUAL,
            devices: Devices::default(),
            rules: Vec::new(),
            zero_pages: Detection {
                mode: ZeroPages::DsaAccel,
                cpu_with_s: 0.0,
                cpu_without_s: 0.0,
                total_with_s: 0.0,
                total_without_s: 0.0,
                reason: String::new(),
            },
            candidates,
            reasons: Vec::new(),
            command: None,
            beyond: None,
            qmp: Value::Null,
        }
    }

    #[test]
    fn qemu_is_told_nothing_that_it_refuses() {
        let advice = advice(vec![
            choice("lz4", None, 10.0, true),
            choice("zstd", Some(3), 12.0, false),
        ]);
        let qmp = qmp(&advice);
        let parameters = &qmp[1]["arguments"];
        assert_eq!(parameters["multifd-compression"], "zstd");
        assert_eq!(parameters["multifd-zstd-level"], 3);
        assert_eq!(parameters["zero-page-detection"], "multifd");
        // Slowed down for the method that is set, not for the one that is recommended.
        assert!(qmp[0].to_string().contains("auto-converge"), "{qmp}");
        let only_lz4 = super::qmp(&self::advice(vec![choice("lz4", None, 10.0, true)]));
        assert!(only_lz4.is_null(), "{only_lz4}");
    }

    #[test]
    fn a_relay_is_told_nothing_that_it_refuses() {
        let request = Request {
            origin: Origin::Qmp("/run/the vm".parse().unwrap()),
            sample_bytes: 1 << 20,
            goal: Goal::Fastest,
            to: Some("tcp:[::1]:4444".parse().unwrap()),
            tls: None,
            security: vec![("tls-creds".to_owned(), "/etc/pki".to_owned())],
            bandwidth: None,
            same_host: false,
            cores: None,
            channels: None,
            dirty_rate: None,
            working_set_bytes: None,
            ram_bytes: None,
            downtime_limit_ms: 300,
            to_qemu: None,
            mem_prealloc: false,
            relays: false,
            accelerators: true,
            seed: 1,
        };
        let mut advice = advice(vec![choice("zstd", Some(3), 12.0, true)]);
        let command = command(&advice, &request).unwrap();
        assert_eq!(
            command,
            "hotlift migrate --qmp 'unix:/run/the vm' --to 'tcp:[::1]:4444' --method zstd --level 3 --channels 2 \
             --downtime-limit 300 --tls-creds=/etc/pki",
            "no device looks for zero pages of a relay"
        );
        #[derive(clap::Parser)]
        struct Migrate {
            #[command(flatten)]
            _args: RoleArgs<role::Migrate>,
        }
        advice.candidates[0].prediction.converges = false;
        let never_ends = super::command(&advice, &request).unwrap();
        let options = never_ends
            .split(" --method")
            .nth(1)
            .map(|rest| format!("--method{rest}"));
        let options = options.unwrap_or_default();
        let words = std::iter::once("t").chain(options.split(' '));
        let taken = <Migrate as clap::Parser>::try_parse_from(words);
        assert!(taken.is_ok(), "{never_ends}");
        advice.zero_pages.mode = ZeroPages::None;
        let command = super::command(&advice, &request).unwrap();
        assert!(
            command.contains(" --zero-page-detection none "),
            "{command}"
        );
    }

    #[test]
    fn reasons_claim_no_more_than_was_predicted() {
        let advice = advice(vec![
            choice("zstd", Some(1), 22.0, true),
            choice("zlib", Some(1), 22.7, true),
            choice("zstd", Some(3), 56.1, true),
            choice("none", None, 99.0, false),
        ]);
        let reasons = reasons(&advice, true);
        assert_eq!(
            reasons[2],
            "next: zlib 1 takes 22.7 s (as good as zstd 1), zstd 3 takes 56.1 s"
        );
        assert!(
            reasons[3].contains("1000 pages/s are settled"),
            "{reasons:?}"
        );
        assert!(reasons[3].ends_with("at any rate below 900"), "{reasons:?}");
        assert!(
            reasons[4].ends_with("without compression it does not converge"),
            "{reasons:?}"
        );
    }
}
