//! QEMU's settings for a migration, and settings that no QEMU has.

use hotlift::Options;
use hotlift::options::Kind;
use hotlift_qmp::QmpError;
use hotlift_vmm::workload::Workload;
use serde_json::{Value, json};

use super::Stop;
use super::process::Process;
use crate::cell::Cell;
use crate::certificates::{self, Certificates};
use crate::error::BenchError;

/// Bandwidth limit above any link, in bytes per second. With QEMU's default of 128 MiB/s the bench would only measure
/// that limit.
const UNLIMITED: u64 = 1_000_000_000_000;

/// Returns an error if `cell` has settings that no QEMU has.
pub fn refuse_what_is_ours(cell: &Cell) -> Result<(), Stop> {
    let (vcpus, workload) = (cell.guest.vcpus, cell.guest.workload);
    if vcpus > 1 && workload != Workload::Idle {
        return Err(Stop::Lacks(format!(
            "its guest that writes has one vCPU, not {vcpus}"
        )));
    }
    let options = cell.migration.options().map_err(BenchError::from)?;
    let method = options.stream.method_name().to_owned();
    for given in cell.migration.given() {
        let (name, value) = (given.option.name, given.text.as_str());
        let ours = match name {
            "accel-path" | "multifd-normal-page-ratio" | "multifd-packet-size" => true,
            // In QEMU, certificates are objects with names.
            "tls-creds" => !value.is_empty() && value != certificates::CERTIFICATES,
            "tls-hostname" | "tls-authz" => !value.is_empty(),
            // QEMU has no such limits or settings.
            "max-channels" | "memory-limit" | "settle-timeout" | "silence-timeout"
            | "cpu-limit" | "goal" | "qemu-reads" => true,
            // QEMU does not encrypt without certificates.
            "insecure" => true,
            "zero-page-detection" => !["none", "legacy", "multifd"].contains(&value),
            // QEMU's accelerator methods use their device whenever there is one.
            "accelerator" => {
                value == "required" && !["qpl", "qatzip", "uadk"].contains(&method.as_str())
            }
            // The bench does not send migrate-continue or migrate-start-postcopy.
            "pause-before-switchover"
            | "postcopy-ram"
            | "postcopy-preempt"
            | "postcopy-blocktime" => value == "on",
            _ => false,
        };
        if ours {
            return Err(Stop::Lacks(format!("has no {name}={value}")));
        }
    }
    Ok(())
}

/// Name of the QEMU object for the certificates.
const CREDENTIALS: &str = "hotlift-bench";

/// Adds the certificates to the QEMU of one side, in the TLS role "client" or "server".
pub fn add_certificates(
    qemu: &mut Process,
    certificates: &Certificates,
    endpoint: &str,
) -> Result<(), Stop> {
    let object = json!({
        "qom-type": "tls-creds-x509", "id": CREDENTIALS, "endpoint": endpoint,
        "dir": certificates.folder(), "verify-peer": true,
    });
    let added = qemu.qmp.client().execute("object-add", &object);
    added.map(|_| ()).map_err(|error| lacks(&error))
}

/// Sets the capabilities and parameters in the QEMU of one side.
pub fn set(qemu: &mut Process, cell: &Cell, options: &Options) -> Result<(), Stop> {
    qemu.qmp
        .set_capabilities(&capabilities(cell, options)?)
        .map_err(|error| lacks(&error))?;
    let known = qemu.qmp.query_parameters()?;
    let wanted = parameters(cell, options, &|name| known.contains_key(name))?;
    qemu.qmp
        .set_parameters(&wanted)
        .map_err(|error| lacks(&error))
}

/// Returns QEMU's migration capabilities that the migration mode needs or `cell` sets. `return-path` is always
/// included. It makes QEMU's downtime end like Hotlift's, at the destination's message. Otherwise the downtime would
/// end at the last byte that the source has written.
fn capabilities(cell: &Cell, options: &Options) -> Result<Vec<(&'static str, bool)>, Stop> {
    let mut wanted = vec![
        ("multifd", options.stream.multifd()),
        ("compress", options.stream.compress),
        ("xbzrle", options.stream.xbzrle),
        ("auto-converge", options.auto_converge.on),
        ("events", true),
        (
            "return-path",
            options.return_path || !cell.migration.has("return-path"),
        ),
    ];
    for given in cell.migration.given() {
        let info = given.option;
        if info.kind == Kind::Capability && !wanted.iter().any(|(known, _)| *known == info.name) {
            wanted.push((info.name, info.read_json(options) == json!(true)));
        }
    }
    Ok(wanted)
}

/// Returns QEMU's migration parameters: a bandwidth above QEMU's default, the method, and those that `cell` sets.
/// `knows` returns true for a parameter that this QEMU has.
fn parameters(cell: &Cell, options: &Options, knows: &dyn Fn(&str) -> bool) -> Result<Value, Stop> {
    let bandwidth = match options.stream.max_bandwidth {
        0 => UNLIMITED,
        limit => limit,
    };
    let mut wanted = json!({
        "max-bandwidth": bandwidth,
        "downtime-limit": u64::try_from(options.switchover.downtime_limit.as_millis()).unwrap_or(u64::MAX),
    });
    if options.stream.multifd() {
        wanted["multifd-channels"] = options.stream.channels().into();
        wanted["multifd-compression"] = options.stream.multifd_compression.name.into();
        if let Some((name, level)) = options.stream.level_option() {
            wanted[name] = level.into();
        }
    }
    if certificates::wants(&cell.migration) {
        wanted["tls-creds"] = CREDENTIALS.into();
        wanted["tls-hostname"] = certificates::NAME.into();
    }
    let zero_pages = options.zero_page_detection_name();
    if knows("zero-page-detection") {
        wanted["zero-page-detection"] = zero_pages.into();
    } else if zero_pages == "none" {
        // QEMU before 9.0 detects zero pages in the migration thread, and has no parameter to turn that off.
        return Err(Stop::Lacks("has no zero-page-detection=none".to_owned()));
    }
    if options.stream.compress {
        wanted["compress-level"] = options.stream.levels.compress.into();
        wanted["compress-threads"] = options.stream.compress_threads.into();
        wanted["decompress-threads"] = options.decompress_threads.into();
        if knows("compress-wait-thread") {
            wanted["compress-wait-thread"] = options.compress_wait_thread.into();
        } else if !options.compress_wait_thread {
            // QEMU before 3.1 always waits for compression threads.
            return Err(Stop::Lacks("has no compress-wait-thread=off".to_owned()));
        }
    }
    for given in cell.migration.given() {
        let info = given.option;
        // Parameters of multifd are already set above, or unused.
        let is_done = info.name == "zero-page-detection" || info.name.starts_with("multifd-");
        if info.kind == Kind::Parameter && !is_done && wanted.get(info.name).is_none() {
            wanted[info.name] = info.read_json(options);
        }
    }
    Ok(wanted)
}

/// Converts a rejected setting to [`Stop::Lacks`]. All values are in range, so a rejection means that this QEMU lacks
/// the setting.
fn lacks(error: &QmpError) -> Stop {
    let words = hotlift_terminal::error::error_line(error);
    match error {
        QmpError::Command { .. } | QmpError::NoCapability { .. } => Stop::Lacks(words),
        _ => Stop::Failed(words),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use hotlift_command::args::GuestArgs;
    use hotlift_command::migration_args::MigrationArgs;

    use super::*;

    fn cell(flags: &[&str], options: &[(&str, &str)]) -> Cell {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            guest: GuestArgs,
        }
        let migration = options
            .iter()
            .fold(MigrationArgs::default(), |all, (name, value)| {
                all.with(name, value).unwrap()
            });
        Cell {
            engine: crate::record::Engine::Qemu,
            kind: hotlift_vmm::GuestKind::Threads,
            guest: Line::parse_from([&"t"].into_iter().chain(flags)).guest,
            migration,
            link: None,
            neighbour: None,
        }
    }

    #[test]
    fn every_option_that_names_a_row_is_set_in_qemu_or_reported_as_missing() {
        for info in hotlift::options::OPTIONS {
            let default = info.default();
            let value = match info.name {
                "zero-page-detection" => "none",
                "accel-path" => "dsa:/dev/dsa/wq0.0",
                "max-cpu-throttle" => "99",
                "accelerator" => "required",
                _ if default == "off" => "on",
                _ => &default,
            };
            let cell = cell(&["--workload=idle"], &[(info.name, value)]);
            let Ok(options) = cell.migration.options() else {
                continue;
            };
            let refused = refuse_what_is_ours(&cell).is_err();
            let capabilities = capabilities(&cell, &options).ok().unwrap();
            let parameters = parameters(&cell, &options, &|_| true).ok().unwrap();
            let given = capabilities.contains(&(info.name, true))
                || parameters.get(info.name).is_some()
                // Belongs to a method other than the row's method.
                || info.name.ends_with("-level")
                // Set on the QEMU command line instead.
                || info.name == "mem-prealloc";
            assert!(refused || given, "{}: {parameters}", info.name);
        }
        let bandwidth = cell(&[], &[("avail-switchover-bandwidth", "1000")]);
        let options = bandwidth.migration.options().unwrap();
        let parameters = parameters(&bandwidth, &options, &|_| true).ok().unwrap();
        assert_eq!(parameters["avail-switchover-bandwidth"], 1000, "bytes/s");
    }

    #[test]
    fn downtime_of_qemu_ends_at_the_destinations_resume_unless_disabled() {
        let return_path = |given: &[(&str, &str)]| {
            let cell = cell(&["--workload=idle"], given);
            let options = cell.migration.options().unwrap();
            let wanted = capabilities(&cell, &options).ok().unwrap();
            let mut found = wanted.iter().filter(|(name, _)| *name == "return-path");
            let (_, on) = *found.next().expect("it is set");
            assert_eq!(found.next(), None, "set once");
            on
        };
        assert!(return_path(&[]));
        assert!(return_path(&[("return-path", "on")]));
        assert!(!return_path(&[("return-path", "off")]));
    }

    #[test]
    fn unsupported_work_is_reported_as_missing_in_qemu() {
        let none = cell(&[], &[("zero-page-detection", "none")]);
        let options = none.migration.options().unwrap();
        assert!(parameters(&none, &options, &|_| true).is_ok());
        assert!(matches!(
            parameters(&none, &options, &|_| false),
            Err(Stop::Lacks(_))
        ));
        for (waits, lacks) in [("on", false), ("off", true)] {
            let compress = cell(&[], &[("compress", "on"), ("compress-wait-thread", waits)]);
            let options = compress.migration.options().unwrap();
            let old = parameters(&compress, &options, &|_| false);
            assert_eq!(matches!(old, Err(Stop::Lacks(_))), lacks, "{waits}");
        }
        let refused = |flags: &[&str], options: &[(&str, &str)]| {
            matches!(
                refuse_what_is_ours(&cell(flags, options)),
                Err(Stop::Lacks(_))
            )
        };
        assert!(refused(&["--workload=random", "--vcpus=2"], &[]));
        assert!(!refused(&["--workload=idle", "--vcpus=2"], &[]));
        assert!(refused(
            &[],
            &[("accelerator", "required"), ("multifd-packet-size", "1M")]
        ));
        assert!(refused(&[], &[("pause-before-switchover", "on")]));
    }
}
