//! Runs each input of the fuzz targets' corpus once, without a fuzzer, so that fixed defects stay fixed.

#![allow(clippy::print_stdout)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use hotlift_fuzz::TARGETS;

#[test]
fn each_corpus_input_satisfies_the_checks_of_its_decoder() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let folders = fs::read_dir(&corpus).unwrap();
    let folders = folders.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let targets: BTreeSet<_> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(folders.collect::<BTreeSet<_>>(), targets);
    for (name, target) in TARGETS {
        let inputs = fs::read_dir(corpus.join(name)).unwrap();
        let inputs: Vec<_> = inputs.map(|entry| entry.unwrap().path()).collect();
        assert!(!inputs.is_empty(), "{name} has no corpus");
        for input in inputs {
            // Shown if a guarantee is violated.
            println!("{}", input.display());
            target(&fs::read(&input).unwrap());
        }
    }
}
