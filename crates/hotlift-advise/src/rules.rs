//! Published advice on accelerators, as rules.
//!
//! The first three are those of QEMU's documentation, "How To Choose Between QATzip and QPL"
//! (docs/devel/migration/qatzip-compression.rst); the fourth is what the figures of the series that brought `qpl`
//! show, the fifth those of the series for zero pages on DSA (100 GB, 8 channels, 2024).

use hotlift_host::accel::Devices;
use hotlift_host::measure::Candidate;
use serde::Serialize;

/// A rule, and whether it holds here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Rule {
    /// What to do, and when.
    pub rule: &'static str,
    /// Why.
    pub reason: &'static str,
    /// Its conditions are met here.
    pub applies: bool,
}

/// Zero pages that DSA is worth the setting up for: the published case has half of the pages zero.
const MANY_ZEROS: f64 = 0.4;

/// All rules. `limited` says that the wire is what a migration without compression would wait for.
pub fn rules(devices: &Devices, limited: bool, zero_share: f64) -> Vec<Rule> {
    let iaa = devices.iaa > 0;
    let qat = devices.qat > 0;
    let qatzip = limited && devices.qat > devices.iaa;
    let no_svm = iaa && !devices.shared_virtual_memory;
    vec![
        Rule {
            rule: "qatzip where the network is the limit and there is more QAT than IAA",
            reason: "it saves a lot of the host CPU that compression takes",
            applies: qatzip,
        },
        Rule {
            rule: "qatzip, not qpl, where there is no shared virtual memory (SVM)",
            reason: "qpl does not perform well without it",
            applies: no_svm,
        },
        Rule {
            rule: "else qpl before qatzip",
            reason: "for all other cases QEMU's documentation puts IAA first",
            applies: iaa && !qatzip && !no_svm,
        },
        Rule {
            rule: "mem-prealloc=on at a destination with IAA or QAT",
            reason: "a device that meets memory which was never touched waits for the kernel: qpl on 2 channels took \
                     51 s in place of 30 s (60 GiB, about 8.6 Gbit/s)",
            applies: iaa || qat,
        },
        Rule {
            rule: "zero-page-detection=dsa-accel where DSA is there and many pages are zero",
            reason: "half of the pages zero: 22 % less CPU and 8 % less time at the source; all zero: 22 % and 20 %",
            applies: devices.dsa && zero_share >= MANY_ZEROS,
        },
    ]
}

/// Whether DSA is to look for zero pages.
pub fn finds_zeros_by_device(rules: &[Rule]) -> bool {
    matches!(rules, [.., zeros] if zeros.applies)
}

/// Whether a method may be recommended on these devices.
pub fn allows(devices: &Devices, candidate: &Candidate) -> bool {
    match candidate.method {
        "qpl" => candidate.on_device && devices.shared_virtual_memory,
        "uadk" | "qatzip" => candidate.on_device,
        _ => true,
    }
}

/// Of two methods on devices that are predicted alike, the one that the rules put first.
pub fn preferred(rules: &[Rule]) -> Option<&'static str> {
    match rules {
        [more_qat, no_svm, ..] if more_qat.applies || no_svm.applies => Some("qatzip"),
        [_, _, otherwise, ..] if otherwise.applies => Some("qpl"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(devices: Devices, limited: bool) -> Option<&'static str> {
        preferred(&rules(&devices, limited, 0.0))
    }

    #[test]
    fn iaa_or_qat_is_chosen_as_qemus_documentation_has_it() {
        let both = Devices {
            iaa: 1,
            qat: 4,
            dsa: false,
            shared_virtual_memory: true,
        };
        assert_eq!(
            first(both, true),
            Some("qatzip"),
            "little bandwidth, more QAT"
        );
        assert_eq!(first(both, false), Some("qpl"), "much bandwidth");
        let more_iaa = Devices { iaa: 8, ..both };
        assert_eq!(first(more_iaa, true), Some("qpl"));
        let no_svm = Devices {
            shared_virtual_memory: false,
            ..more_iaa
        };
        assert_eq!(first(no_svm, true), Some("qatzip"));
        assert_eq!(first(Devices::default(), true), None, "no device, no rule");
    }

    #[test]
    fn dsa_is_for_many_zero_pages() {
        let dsa = Devices {
            dsa: true,
            ..Devices::default()
        };
        let applies = |devices: &Devices, zero_share| rules(devices, true, zero_share)[4].applies;
        assert!(applies(&dsa, 0.5));
        assert!(!applies(&dsa, 0.1));
        assert!(!applies(&Devices::default(), 0.9));
    }
}
