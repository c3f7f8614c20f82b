//! Recommends settings for the accelerators of a host: published rules, and the method `auto` where no rule applies.

use serde::Serialize;

use crate::accel::Devices;

/// Source of the rules: docs/devel/migration/qatzip-compression.rst, "How To Choose Between QATzip and QPL".
const QEMU: &str = "QEMU's documentation of qatzip";

/// A recommended setting, with its condition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Rule {
    /// The setting, as typed on the command line.
    pub set: &'static str,
    /// Condition of the setting. If the devices do not decide the condition, the operator must judge.
    pub when: &'static str,
    /// Reason for the setting.
    pub reason: &'static str,
    /// Publication that contains the rule.
    pub from: &'static str,
    /// True if the devices meet the condition, as far as they decide it.
    pub applies: bool,
}

/// Returns all rules. If several rules set the method, the first one whose condition is true applies.
#[must_use]
pub fn rules(devices: &Devices) -> Vec<Rule> {
    let (has_iaa, has_qat) = (devices.iaa > 0, devices.qat > 0);
    let only_qat_is_fast = has_iaa && has_qat && !devices.shared_virtual_memory;
    let iaa_is_fast = has_iaa && devices.shared_virtual_memory;
    let more_qat = devices.qat > devices.iaa && !only_qat_is_fast;
    let fallback_condition = if more_qat { "otherwise" } else { "in any case" };
    vec![
        Rule {
            set: "--method qatzip",
            when: "in any case: there is no shared virtual memory (SVM)",
            reason: "qpl does not perform well without it",
            from: QEMU,
            applies: only_qat_is_fast,
        },
        Rule {
            set: "--method qatzip",
            when: "if the network is the limit: there is more QAT than IAA",
            reason: "it saves much of the host's CPU time for compression",
            from: QEMU,
            applies: more_qat,
        },
        Rule {
            set: "--method qpl",
            when: fallback_condition,
            reason: "in all other cases prefer IAA",
            from: QEMU,
            applies: iaa_is_fast,
        },
        Rule {
            set: "--method auto",
            when: fallback_condition,
            reason: "it chooses a method for each packet during the migration",
            from: "Hotlift: no published rule applies",
            applies: !only_qat_is_fast && !iaa_is_fast,
        },
        Rule {
            set: "--mem-prealloc=on",
            when: "at a destination with IAA or QAT",
            reason: "a device waits for the kernel at memory that was never touched: qpl on 2 channels took 51 s instead of \
                     30 s (60 GiB, about 8.6 Gbit/s)",
            from: "the patch series of qpl",
            applies: has_iaa || has_qat,
        },
        Rule {
            set: "--zero-page-detection dsa-accel",
            when: "if at least 40 % of the pages are zero, and the guest is a built-in one",
            reason: "half of the pages zero: 22 % less CPU and 8 % less time at the source; all zero: 22 % and 20 % \
                     (100 GB, 8 channels)",
            from: "the patch series for zero pages on DSA, v5 to v7",
            applies: devices.dsa,
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the settings of the rules that apply to `devices`, each with the first word of its condition.
    fn spoken(devices: Devices) -> Vec<String> {
        let all = rules(&devices);
        let spoken = all.iter().filter(|rule| rule.applies);
        let words = |rule: &Rule| {
            let when = rule.when.split(' ').next().unwrap_or_default();
            format!("{} {when}", rule.set.trim_start_matches("--method "))
        };
        spoken.map(words).collect()
    }

    const IAA_AND_MORE_QAT: Devices = Devices {
        iaa: 1,
        qat: 4,
        dsa: false,
        shared_virtual_memory: true,
    };

    #[test]
    fn iaa_or_qat_is_chosen_by_the_rules_of_qemus_documentation() {
        let of = |devices| {
            let mut rules = spoken(devices);
            assert_eq!(rules.pop().as_deref(), Some("--mem-prealloc=on at"));
            rules.join(", ")
        };
        let both = IAA_AND_MORE_QAT;
        assert_eq!(of(both), "qatzip if, qpl otherwise");
        let more_iaa = Devices { iaa: 8, ..both };
        assert_eq!(of(more_iaa), "qpl in");
        let no_svm = |devices| Devices {
            shared_virtual_memory: false,
            ..devices
        };
        assert_eq!(of(no_svm(both)), "qatzip in");
        assert_eq!(of(no_svm(more_iaa)), "qatzip in");
        let qat = Devices { iaa: 0, ..both };
        assert_eq!(of(no_svm(qat)), "qatzip if, auto otherwise");
        let slow_iaa = Devices { qat: 0, ..both };
        assert_eq!(of(no_svm(slow_iaa)), "auto in");
    }

    #[test]
    fn without_a_device_only_auto_is_recommended() {
        assert_eq!(spoken(Devices::default()), ["auto in"]);
        let dsa = Devices {
            dsa: true,
            ..Devices::default()
        };
        assert_eq!(
            spoken(dsa),
            ["auto in", "--zero-page-detection dsa-accel if"]
        );
    }
}
