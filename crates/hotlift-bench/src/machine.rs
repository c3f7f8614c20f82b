//! Properties of this machine, and guest sizes that fit into its memory.

use std::collections::BTreeMap;
use std::fs;

use hotlift_terminal::progress::bytes;

use super::cell::memory;
use super::record::Machine;

/// Memory that stays free for other processes when guest sizes are chosen, in bytes.
const LEFT_FREE: u64 = 512 << 20;

/// Smallest RAM that a guest is scaled down to, in bytes.
const MIN_RAM: u64 = 64 << 20;

/// Returns the present state of this machine. The caller supplies the versions and the name of the destination host.
pub fn current_state(versions: BTreeMap<String, String>, destination: Option<String>) -> Machine {
    let cpus = read("/proc/cpuinfo");
    let cpu = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or("unknown", |(_, name)| name.trim());
    let load = read("/proc/loadavg");
    Machine {
        cpu: cpu.to_owned(),
        cores: cores(),
        memory_bytes: meminfo("MemTotal"),
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        load: load
            .split(' ')
            .next()
            .and_then(|load| load.parse().ok())
            .unwrap_or_default(),
        versions,
        command: std::env::args().collect(),
        destination,
        cipher: None,
    }
}

/// Returns the number of CPU cores that this process may use; 1 if unknown.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Returns the bytes of memory that are available without swapping.
pub fn available() -> u64 {
    meminfo("MemAvailable")
}

/// Halves `wanted`, the RAM of a guest in bytes, until `ends` guests fit into the available memory. Returns the
/// resulting RAM, and a message if it is less than `wanted`.
pub fn fitting(wanted: u64, ends: u64) -> (u64, Option<String>) {
    let free = available();
    let mut ram = wanted;
    while memory(ram, ends) + LEFT_FREE > free && ram > MIN_RAM {
        ram = (ram / 2).next_multiple_of(2 << 20);
    }
    let words = (ram < wanted).then(|| {
        format!(
            "RAM is {} instead of {}: {ends} guests have to fit into {} of free memory",
            bytes(ram),
            bytes(wanted),
            bytes(free)
        )
    });
    (ram, words)
}

fn meminfo(name: &str) -> u64 {
    read("/proc/meminfo")
        .lines()
        .find_map(|line| {
            let value = line.strip_prefix(name)?.strip_prefix(':')?;
            value.trim().strip_suffix(" kB")?.parse::<u64>().ok()
        })
        .map_or(0, |kib| kib << 10)
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_shrink_to_the_free_memory_with_a_note() {
        let (ram, words) = fitting(1 << 50, 2);
        assert!(memory(ram, 2) <= available().max(memory(MIN_RAM, 2)));
        assert!(words.unwrap().contains("instead of"));
        assert_eq!(fitting(MIN_RAM, 1), (MIN_RAM, None));
    }

    #[test]
    fn the_description_of_the_machine_is_complete() {
        let machine = current_state(BTreeMap::new(), None);
        assert!(machine.cores > 0 && machine.memory_bytes > 0, "{machine:?}");
        assert!(!machine.kernel.is_empty() && !machine.command.is_empty());
    }
}
