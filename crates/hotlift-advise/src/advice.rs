//! The advice: samples the memory, measures hosts and link, predicts each candidate, and chooses.

use std::path::Path;

use hotlift_host::accel::{self, Devices};
use hotlift_host::measure::{self, Measured};
use hotlift_host::memory::{self, Folder, Image, Process};
use hotlift_host::sample::{Memory, Sample};
use hotlift_host::survey::{self, Far};
use hotlift_mem::PAGE_SIZE;
use hotlift_qmp::Version;
use serde::Serialize;
use serde_json::Value;

use crate::choose::{self, Choice, Goal, Question};
use crate::error::AdviseError;
use crate::model::{Load, Machine};
use crate::qemu::{self, Asked};
use crate::request::{Origin, Request};
use crate::rules::{self, Rule};
use crate::text;
use crate::zero_pages::{self, Detection};

/// The QEMU that is told what to do if none was asked for its version.
pub(crate) const USUAL: Version = Version {
    major: 10,
    minor: 0,
    micro: 0,
};

/// What the memory belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A built-in guest, which migrates by itself.
    Hotlift,
    /// A QEMU; its version, if it was asked.
    Qemu(Option<Version>),
    /// Something that is to be a guest's, of whichever kind.
    Unknown,
}

/// The advice. Times in seconds, costs in seconds of a core for a GiB of pages with content.
#[derive(Debug, Serialize)]
pub struct Advice {
    pub(crate) goal: Goal,
    pub(crate) sample: Sample,
    pub(crate) load: Load,
    pub(crate) measured: Measured,
    /// The other host; `null` if none was asked.
    pub(crate) other: Option<Far>,
    /// What was predicted with. A link without limit has no bandwidth.
    pub(crate) machine: Machine,
    pub(crate) devices: Devices,
    pub(crate) rules: Vec<Rule>,
    pub(crate) zero_pages: Detection,
    /// Best first; the first is recommended.
    pub(crate) candidates: Vec<Choice>,
    /// Why.
    pub(crate) reasons: Vec<String>,
    /// For a QEMU between two hosts with relays; `null` where it does not apply.
    pub(crate) command: Option<String>,
    /// What of that command is not in the figures.
    pub(crate) beyond: Option<&'static str>,
    /// For the own migration of a QEMU, or of a built-in guest, with the best method that it knows; `null` if there is none.
    pub(crate) qmp: Value,
    #[serde(skip)]
    pub(crate) owner: Owner,
    /// The older of the QEMUs at both ends, as far as they are known.
    #[serde(skip)]
    pub(crate) qemu: Version,
}

/// Samples, measures, and says what to do. `step` is told what is done now, in a line for people.
///
/// # Errors
/// If the memory cannot be read, or a host or a QEMU cannot be asked.
pub fn advise(request: &Request, step: &dyn Fn(&str)) -> Result<Advice, AdviseError> {
    let sampling = || step("sampling memory");
    let mut dirty_rate = request.dirty_rate.map(|rate| rate as f64);
    let (memory, owner) = match &request.origin {
        Origin::File(path) => {
            sampling();
            (of_file(request, path)?, Owner::Unknown)
        }
        Origin::Process(pid) => {
            sampling();
            of_process(*pid, None)?
        }
        Origin::Qmp(address) => {
            step("asking for the version, and for the dirty rate: 1 s");
            // Whose socket it is comes first: nothing is said to something else.
            let pid = qemu::process(address)?;
            let asked = qemu::ask(address, dirty_rate.is_none())?;
            dirty_rate = dirty_rate.or(asked.dirty_rate);
            sampling();
            of_process(pid, Some(&asked))?
        }
    };
    let mut sample = Sample::draw(memory.as_ref(), request.sample_bytes, request.seed)?;
    sample.ram_bytes = request.ram_bytes.unwrap_or(sample.ram_bytes);
    // The other host first: on the same one, memory that this process has had would come back warm.
    let other = match &request.to {
        Some(to) => {
            step("measuring the link to the other host, and that host: some 5 s");
            Some(survey::ask(
                to,
                &sample,
                request.most_channels(measure::cores()),
                request.tls.as_deref(),
            )?)
        }
        None => None,
    };
    step("measuring every method on the sample: 10 s at most, and what a turn takes");
    let measured = measure::measure(&sample, request.accelerators)?;
    predict(request, owner, sample, measured, other, dirty_rate)
}

/// The memory of a process, and whose it is. `asked` is what the process has said over QMP.
fn of_process(pid: u32, asked: Option<&Asked>) -> Result<(Box<dyn Memory>, Owner), AdviseError> {
    let owner = match memory::name_of(pid) {
        Some(name) if name.contains("hotlift") => Owner::Hotlift,
        Some(name) if name.contains("qemu") || name.contains("kvm") => {
            Owner::Qemu(asked.map(|asked| asked.version))
        }
        _ => Owner::Unknown,
    };
    let ram_bytes = asked.and_then(|asked| asked.ram_bytes);
    Ok((Box::new(Process::open(pid, ram_bytes)?), owner))
}

/// The memory in an image, or in the files of a folder.
fn of_file(request: &Request, path: &Path) -> Result<Box<dyn Memory>, AdviseError> {
    Ok(match path.is_dir() {
        true if request.ram_bytes.is_none() => return Err(AdviseError::NoRam),
        true => Box::new(Folder::read(path, request.sample_bytes, request.seed)?),
        false => Box::new(Image::open(path)?),
    })
}

impl Request {
    /// What is predicted with.
    fn machine(&self, owner: Owner, measured: &Measured, other: Option<&Far>) -> Machine {
        let loopback = &measured.loopback;
        let (send, receive) = other
            .filter(|far| !far.over_loopback)
            .and_then(|far| far.cpu_a_gib)
            .unwrap_or((loopback.send, loopback.receive));
        let link = other.map(|far| match far.over_loopback {
            true => f64::INFINITY,
            false => far.bandwidth,
        });
        let relays = self.relays || (matches!(owner, Owner::Qemu(_)) && self.to_qemu.is_none());
        let source_cores = self.cores.unwrap_or(measured.cores_free);
        let (destination_cores, all_cores) = match other {
            Some(far) => (self.cores.unwrap_or(far.host.cores_free), far.host.cores),
            None => (source_cores, measured.cores),
        };
        // Cores that are given are not shared: they are what is spared.
        let share = |cores: f64, all: usize| match self.cores {
            Some(_) => 1.0,
            None => (cores / all.max(1) as f64).min(1.0),
        };
        Machine {
            source_cores,
            destination_cores,
            source_share: share(source_cores, measured.cores),
            destination_share: share(destination_cores, all_cores),
            same_host: self.same_host
                || other.map_or(self.bandwidth.is_none(), |far| far.same_host),
            zero_scan: measured.zero_scan,
            look: measured.look,
            send,
            receive,
            first_touch: match (self.mem_prealloc, other) {
                (true, _) => 0.0,
                (false, Some(far)) => far.host.first_touch,
                (false, None) => loopback.first_touch,
            },
            bandwidth: self.bandwidth.or(link).unwrap_or(f64::INFINITY),
            round_trip: other.map_or(0.0, |far| far.round_trip),
            relays: relays.then_some(loopback.relays),
        }
    }
}

/// Predicts with what was measured, and chooses.
fn predict(
    request: &Request,
    owner: Owner,
    sample: Sample,
    mut measured: Measured,
    other: Option<Far>,
    dirty_rate: Option<f64>,
) -> Result<Advice, AdviseError> {
    let page = PAGE_SIZE as f64;
    let pages = sample.ram_bytes as f64 / page;
    let load = Load {
        pages,
        untouched_share: sample.share(sample.untouched),
        zero_share: sample.share(sample.zero),
        dirty_rate: dirty_rate.unwrap_or(0.0),
        working_set: request
            .working_set_bytes
            .map_or(pages, |bytes| bytes as f64 / page),
    };
    let machine = request.machine(owner, &measured, other.as_ref());
    if let Some(far) = &other {
        measured.decoded_by(&far.host);
    }
    let devices = accel::devices()?;
    let question = Question {
        goal: request.goal,
        most_channels: request.most_channels(measured.cores),
        downtime_limit: f64::from(request.downtime_limit_ms) / 1e3,
        to_qemu: request.to_qemu,
    };
    // A core sends this many bytes a second uncompressed: below that the wire is what is waited for.
    let limited = machine.bandwidth * machine.send < f64::from(question.most_channels);
    let zeros = load.zero_share + load.untouched_share;
    // A relay's pages come out of a socket, and a QEMU knows no DSA.
    let own_guest = machine.relays.is_none() && request.to_qemu.is_none();
    let looked_at = Devices {
        dsa: devices.dsa && own_guest,
        ..devices
    };
    let rules = rules::rules(&looked_at, limited, zeros);
    // The versions that it goes by: of the QEMU that sends, and of one that receives.
    let source = match owner {
        Owner::Qemu(version) => version,
        Owner::Hotlift | Owner::Unknown => None,
    };
    let old = [source, request.to_qemu].into_iter().flatten().min();
    let finders = zero_pages::finders(old, &rules);
    let all = |zero_pages| {
        choose::choose(
            &question, &measured, &load, &machine, &devices, &rules, zero_pages,
        )
    };
    let mut candidates = all(finders.detect);
    let zero_pages = zero_pages::decide(&finders, &candidates, request.goal, &load, &machine);
    if zero_pages.mode != finders.detect {
        candidates = all(zero_pages.mode);
    }
    let mut advice = Advice {
        goal: request.goal,
        sample,
        load,
        measured,
        other,
        machine,
        devices,
        rules,
        zero_pages,
        candidates,
        reasons: Vec::new(),
        command: None,
        beyond: None,
        qmp: serde_json::Value::Null,
        owner,
        qemu: old.unwrap_or(USUAL),
    };
    advice.reasons = text::reasons(&advice, dirty_rate.is_some());
    if owner != Owner::Hotlift && request.to_qemu.is_none() {
        advice.command = text::command(&advice, request);
        advice.beyond = machine.relays.is_none().then_some(text::BEYOND);
    }
    advice.qmp = text::qmp(&advice);
    Ok(advice)
}
