use super::*;
use crate::options::AutoConvergeOptions;

fn set(options: &mut Options, name: &str, value: &Json) -> Result<(), String> {
    let parameters = Map::from_iter([(name.to_owned(), value.clone())]);
    options
        .set_parameters(&parameters)
        .map_err(|error| error.to_string())
}

/// Returns the answer of `query-migrate-parameters` for all options.
fn all(options: &Options) -> Vec<Json> {
    OPTIONS
        .iter()
        .map(|option| option.read_json(options))
        .collect()
}

#[test]
fn every_parameter_reads_back_and_those_of_hotlift_have_a_prefix() {
    for option in OPTIONS {
        let mut options = Options::default();
        let value = option.read_json(&options);
        let name = option.qmp_name();
        assert_eq!(name.starts_with(OUR_PREFIX), option.kind == Kind::Ours);
        if option.kind == Kind::Capability {
            options
                .set_capability(&name, !value.as_bool().unwrap())
                .unwrap();
            assert_eq!(option.read_json(&options), json!(!value.as_bool().unwrap()));
            assert!(set(&mut options, &name, &value).is_err(), "{name}");
        } else {
            set(&mut options, &name, &value).unwrap();
            assert!(options.set_capability(&name, true).is_err(), "{name}");
            assert_eq!(option.read_json(&options), value, "{name}");
        }
    }
}

/// Compares with the messages of QEMU 10.0.2 (and 7.2 for `compress`).
#[test]
fn a_parameter_is_refused_with_the_text_of_qemu() {
    let past_64_bits: Json = serde_json::from_str("18446744073709551616").unwrap();
    for (name, value, expected) in [
        (
            "multifd-channels",
            json!(0),
            "Parameter 'multifd_channels' expects a value between 1 and 255",
        ),
        (
            "multifd-channels",
            json!(256),
            "Parameter 'multifd-channels' expects uint8_t",
        ),
        (
            "multifd-channels",
            json!(-1),
            "Parameter 'multifd-channels' expects uint8_t",
        ),
        (
            "multifd-channels",
            json!("x"),
            "Parameter 'multifd-channels' expects uint64",
        ),
        (
            "multifd-channels",
            json!(1.5),
            "Parameter 'multifd-channels' expects uint64",
        ),
        (
            "multifd-channels",
            json!(true),
            "Parameter 'multifd-channels' expects uint64",
        ),
        (
            "multifd-channels",
            Json::Null,
            "Parameter 'multifd-channels' expects uint64",
        ),
        (
            "multifd-channels",
            json!({}),
            "Parameter 'multifd-channels' expects uint64",
        ),
        (
            "multifd_channels",
            json!(3),
            "Parameter 'multifd_channels' is unexpected",
        ),
        (
            "compress-threads",
            json!(0),
            "Parameter 'compress_threads' expects a value between 1 and 255",
        ),
        (
            "max-bandwidth",
            json!("1G"),
            "Parameter 'max-bandwidth' expects uint64",
        ),
        (
            "max-bandwidth",
            past_64_bits,
            "Parameter 'max-bandwidth' expects uint64",
        ),
        (
            "downtime-limit",
            json!(2_000_001),
            "Parameter 'downtime_limit' expects an integer in the range of 0 to (2000 * 1000) ms",
        ),
        (
            "downtime-limit",
            json!(-1),
            "Parameter 'downtime_limit' expects an integer in the range of 0 to (2000 * 1000) ms",
        ),
        (
            "downtime-limit",
            json!(1.0),
            "Parameter 'downtime-limit' expects uint64",
        ),
        (
            "multifd-compression",
            json!("foo"),
            "Parameter 'multifd-compression' does not accept value 'foo'",
        ),
        (
            "multifd-compression",
            json!(5),
            "Invalid parameter type for 'multifd-compression', expected: string",
        ),
        (
            "cpu-throttle-tailslow",
            json!("on"),
            "Invalid parameter type for 'cpu-throttle-tailslow', expected: boolean",
        ),
        (
            "xbzrle-cache-size",
            json!(4097),
            "Parameter 'xbzrle_cache_size' expects a power of two no less than the target page size",
        ),
        (
            "announce-rounds",
            json!(1001),
            "Parameter 'announce_rounds' expects a value between 0 and 1000",
        ),
        (
            "announce-step",
            json!(0),
            "Parameter 'announce_step' expects a value between 0 and 10000",
        ),
        (
            "throttle-trigger-threshold",
            json!(0),
            "Parameter 'throttle_trigger_threshold' expects an integer in the range of 1 to 100",
        ),
        (
            "cpu-throttle-increment",
            json!(100),
            "Parameter 'cpu_throttle_increment' expects an integer in the range of 1 to 99",
        ),
        (
            "max-cpu-throttle",
            json!(5),
            "Parameter 'max_cpu_throttle' expects an integer in the range of cpu_throttle_initial to 99",
        ),
        (
            "multifd-zstd-level",
            json!(21),
            "Parameter 'multifd_zstd_level' expects a value between 0 and 20",
        ),
        (
            "accel-path",
            json!("dsa:/x"),
            "Invalid parameter type for 'accel-path', expected: array",
        ),
        (
            "accel-path",
            json!(["dsa:/x", 5]),
            "Invalid parameter type for 'accel-path[1]', expected: string",
        ),
        (
            "accel-path",
            json!(["foo"]),
            "Parameter 'accel-path' does not accept value 'foo'",
        ),
        ("nope", json!(1), "Parameter 'nope' is unexpected"),
        (
            "accelerator",
            json!("off"),
            "Parameter 'accelerator' is unexpected",
        ),
    ] {
        let mut options = Options::default();
        assert_eq!(
            set(&mut options, name, &value),
            Err(expected.to_owned()),
            "{name} {value}"
        );
        assert_eq!(all(&options), all(&Options::default()), "{name}");
    }
}

#[test]
fn every_number_accepts_exactly_its_range_over_qmp() {
    for option in OPTIONS {
        let Values::Number { lowest, highest } = option.values else {
            continue;
        };
        let mut options = Options {
            auto_converge: AutoConvergeOptions {
                // max-cpu-throttle may not be below it.
                initial: 1,
                ..AutoConvergeOptions::default()
            },
            ..Options::default()
        };
        let name = option.qmp_name();
        for good in [lowest, highest] {
            set(&mut options, &name, &json!(good)).unwrap();
            assert_eq!(option.read_json(&options), json!(good), "{name}");
        }
        let below = i64::try_from(lowest).unwrap() - 1;
        for bad in [json!(below), json!(highest + 1)] {
            set(&mut options, &name, &bad).unwrap_err();
            assert_eq!(option.read_json(&options), json!(highest), "{name}");
        }
    }
}

#[test]
fn a_command_sets_all_parameters_or_none_and_checks_types_before_ranges() {
    let mut options = Options::default();
    let command =
        json!({"announce-max": 1, "multifd-channels": 0, "nope": 1, "downtime-limit": "x"});
    let error = options.set_parameters(command.as_object().unwrap());
    assert_eq!(
        error.unwrap_err().to_string(),
        "Parameter 'downtime-limit' expects uint64"
    );
    assert_eq!(options.announce.max, 550);
    let command = json!({"max-cpu-throttle": 30, "cpu-throttle-initial": 30, "announce-max": 1});
    options
        .set_parameters(command.as_object().unwrap())
        .unwrap();
    assert_eq!((options.auto_converge.max, options.announce.max), (30, 1));
    assert!(set(&mut options, "cpu-throttle-initial", &json!(31)).is_err());
}

#[test]
fn values_typed_at_a_monitor_have_qemus_units() {
    let typed = |name: &str, text: &str| {
        let json = option(name).unwrap().typed(text);
        json.map_err(|error| error.to_string())
    };
    for (name, text, json) in [
        ("max-bandwidth", "1G", json!(1_u64 << 30)),
        ("max-bandwidth", "100", json!(100_u64 << 20)),
        ("max-bandwidth", "1.5G", json!(3_u64 << 29)),
        ("max_bandwidth", "100G", json!(100_u64 << 30)),
        ("avail-switchover-bandwidth", "2", json!(2_u64 << 20)),
        ("downtime-limit", "100", json!(100)),
        ("downtime-limit", "1k", json!(1024)),
        ("downtime-limit", "0x10", json!(16)),
        ("compress_threads", "12", json!(12)),
        ("multifd-channels", "-1", json!(-1)),
        ("xbzrle-cache-size", "64k", json!(65536)),
        ("multifd-packet-size", "1M", json!(1 << 20)),
        ("cpu-throttle-tailslow", "on", json!(true)),
        ("multifd-compression", "qpl", json!("qpl")),
        (
            "accel-path",
            "dsa:/dev/dsa/wq4.0 dsa:/dev/dsa/wq4.1",
            json!(["dsa:/dev/dsa/wq4.0", "dsa:/dev/dsa/wq4.1"]),
        ),
    ] {
        assert_eq!(typed(name, text), Ok(json), "{name} {text}");
    }
    for (name, text, expected) in [
        ("max-bandwidth", "1x", "Invalid size 1x"),
        (
            "downtime-limit",
            "abc",
            "Parameter 'downtime-limit' expects a non-negative number below 2^64",
        ),
        (
            "xbzrle-cache-size",
            "-1",
            "Parameter 'xbzrle-cache-size' expects a non-negative number below 2^64",
        ),
        (
            "multifd-channels",
            "abc",
            "Parameter 'multifd-channels' expects uint64",
        ),
        (
            "multifd-channels",
            "1k",
            "Parameter 'multifd-channels' expects uint64",
        ),
        (
            "cpu-throttle-tailslow",
            "maybe",
            "Parameter 'cpu-throttle-tailslow' expects 'on' or 'off'",
        ),
    ] {
        assert_eq!(typed(name, text), Err(expected.to_owned()), "{name} {text}");
    }
}

#[test]
fn names_of_older_documents_have_their_documented_meaning() {
    let mut options = Options::default();
    set(
        &mut options,
        "multifd-dsa-accel",
        &json!(["/dev/dsa/wq4.0"]),
    )
    .unwrap();
    let mut typed = Options::default();
    typed.set("multifd_dsa_accel", "/dev/dsa/wq4.0").unwrap();
    for options in [options, typed] {
        assert!(options.zero_pages.devices);
        assert_eq!(
            options.zero_pages.accel_path,
            [AccelPath::Dsa("/dev/dsa/wq4.0".into())]
        );
    }
    for older in OLDER_NAMES {
        assert_eq!(option(older.name).unwrap().name, older.now);
    }
}
