//! The advice for people, and what to type.

use serde_json::{Value, json};

use super::choose::{Choice, Goal, rank};
use super::model::{GIB, Limit};
use super::{Advice, Origin};
use crate::progress;
use crate::report::{align, new_table};

/// All of it.
pub fn text(advice: &Advice) -> String {
    let mut text = format!("{}\n{}\n", candidates(advice), recommendation(advice));
    for reason in &advice.reasons {
        text.push_str(&format!("  - {reason}\n"));
    }
    for rule in advice.rules.iter().filter(|rule| rule.applies) {
        text.push_str(&format!("  rule: {}: {}\n", rule.rule, rule.reason));
    }
    text.push_str(&format!(
        "\n{}\n\nor, with QEMU's own migration, over QMP:\n",
        advice.command
    ));
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
        let costs = &choice.candidate.costs;
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
            when(format!("{:.0}", prediction.downtime_s * 1e3)),
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
            "{} s in all, the guest stands still for {:.0} ms",
            seconds(prediction.total_s),
            prediction.downtime_s * 1e3
        ),
        false => "does not converge".to_owned(),
    };
    format!(
        "{}: {}, {}, zero-page-detection={}: {outcome}",
        goal(advice.goal),
        best.candidate.name(),
        match best.settings.channels {
            1 => "1 channel".to_owned(),
            more => format!("{more} channels"),
        },
        advice.zero_page_detection,
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
        "memory: {} of {}; of {} sampled pages {} were never touched, {} are zero: finding a GiB of these takes {:.2} s of a core",
        progress::bytes(sample.ram_bytes),
        sample.memory,
        sample.pages,
        percent(load.untouched_share),
        percent(load.zero_share),
        advice.machine.zero_scan,
    )
}

fn pace(advice: &Advice, best: &Choice) -> String {
    let machine = &advice.machine;
    let link = match machine.bandwidth.is_finite() {
        true => format!("the link carries {}/s", bytes(machine.bandwidth)),
        false => "no link limits it".to_owned(),
    };
    let hosts = match machine.same_host {
        true => "both ends together have",
        false => "each host has, as far as this one tells,",
    };
    format!(
        "pace: {link}, {hosts} {:.1} cores; {} is limited by {}",
        machine.cores,
        best.candidate.name(),
        match best.prediction.limit {
            Limit::Wire => "the link",
            Limit::Source => "the source's CPU",
            Limit::Destination => "the destination's CPU",
            Limit::SharedCores => "the cores that both share",
        }
    )
}

fn next(advice: &Advice, best: &Choice) -> String {
    let others = advice
        .candidates
        .iter()
        .skip(1)
        .filter(|choice| choice.eligible);
    let mut names = Vec::new();
    for choice in others.take(2) {
        let prediction = &choice.prediction;
        names.push(match prediction.converges {
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
                    "{} stops it for {:.0} ms in {} s",
                    choice.candidate.name(),
                    prediction.downtime_s * 1e3,
                    seconds(prediction.total_s)
                ),
            },
        });
    }
    let alike = advice.candidates.get(1).is_some_and(|next| {
        next.eligible
            && rank(advice.goal, &next.prediction) < rank(advice.goal, &best.prediction) * 1.05
    });
    let closeness = if alike { " (as good as the same)" } else { "" };
    match names.is_empty() {
        true => format!(
            "next: nothing but {} is there to choose",
            best.candidate.name()
        ),
        false => format!("next: {}{closeness}", names.join(", ")),
    }
}

fn convergence(advice: &Advice, best: &Choice, rate_known: bool) -> String {
    let prediction = &best.prediction;
    let rate = advice.load.dirty_rate;
    let settles = progress::rounded(prediction.settles_pages_per_s);
    let guest = match (rate_known, rate > 0.0) {
        (false, _) => "the dirty rate is not known and was taken for 0".to_owned(),
        (true, false) => "the guest dirties nothing".to_owned(),
        (true, true) => format!("the guest dirties {} pages/s", progress::rounded(rate)),
    };
    match prediction.converges {
        true => format!(
            "rounds: {guest}; {settles} pages/s are settled: {} rounds, and it converges at any rate below that",
            prediction.rounds
        ),
        false => format!(
            "rounds: {guest}, and only {settles} pages/s are settled: it does not converge; slow the guest down \
             (auto-converge=on) or allow for more downtime than {:.1} s",
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
    let beside = none.map_or(String::new(), |none| {
        format!("; without compression {:.2} s", none.prediction.cpu_s())
    });
    format!(
        "CPU: {:.2} s at the source ({:.1} cores), {:.2} s at the destination ({:.1} cores), by {}{beside}",
        prediction.source_cpu_s,
        per_core(prediction.source_cpu_s),
        prediction.destination_cpu_s,
        per_core(prediction.destination_cpu_s),
        best.candidate.runs_on_words(),
    )
}

impl super::measure::Candidate {
    fn runs_on_words(&self) -> &str {
        match self.method {
            "none" => "copies alone",
            _ => &self.runs_on,
        }
    }
}

/// `hotlift migrate` with the settings.
pub fn command(advice: &Advice, origin: &Origin) -> String {
    let Some(best) = advice.candidates.first() else {
        return String::new();
    };
    let qmp = origin
        .qmp
        .as_ref()
        .map_or("VM.qmp".to_owned(), ToString::to_string);
    let mut command = format!(
        "hotlift migrate --qmp {} --to tcp:HOST:4444 --method {}",
        quoted(&qmp),
        best.candidate.method
    );
    if let Some(level) = best.candidate.level {
        command.push_str(&format!(" --level {level}"));
    }
    command.push_str(&format!(" --channels {}", best.settings.channels));
    command.push_str(&format!(
        " --zero-page-detection {}",
        advice.zero_page_detection
    ));
    command.push_str(&format!(" --downtime-limit {}", downtime_limit(best)));
    if !best.prediction.converges {
        command.push_str(" --auto-converge on");
    }
    command
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

/// The same for a QEMU, or for a Hotlift that is steered over QMP.
pub fn qmp(advice: &Advice) -> Value {
    let Some(best) = advice.candidates.first() else {
        return Value::Null;
    };
    let mut parameters = json!({
        "multifd-compression": best.candidate.method,
        "multifd-channels": best.settings.channels,
        "zero-page-detection": advice.zero_page_detection,
        "downtime-limit": downtime_limit(best),
        // 0 is unlimited.
        "max-bandwidth": match advice.machine.bandwidth.is_finite() {
            true => progress::rounded(advice.machine.bandwidth),
            false => 0,
        },
    });
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
