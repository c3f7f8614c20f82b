//! `multithread`: compression by threads on the main channel, of an idle guest and one that writes.

use hotlift_vmm::workload::Workload;

use super::{Block, Column, DOWN_MS, MBPS, Published, RAM_KB, Suite, TOTAL_MS, TRANSFERRED_KB};

const COLUMNS: &[Column] = &[TOTAL_MS, DOWN_MS, TRANSFERRED_KB, MBPS, RAM_KB];

/// The published table.
pub static SUITE: Suite = Suite {
    name: "multithread",
    source: "Liang Li: docs/multi-thread-compression.txt of QEMU, 2015",
    machine: "two hosts with 2 Xeon E5-2680 and a NIC of 1 Gbit/s, a Linux guest of 4 vCPUs and 4 GB",
    differs: &[
        "max-bandwidth is the published NIC's 125 MB/s; --link 1gbit makes it a link of that rate",
        "9 % of RAM hold data, as much as the published guest has sent; the rest was never touched",
        "what the published application writes, and how fast, is not said: here --rate pages a second at \
         random in --working-set",
    ],
    ram_gib: 4,
    columns: COLUMNS,
    blocks: &[
        Block {
            title: "idle guest",
            method: "none",
            options: &[("multifd", "off"), ("max-bandwidth", "125000000")],
            workload: Workload::Idle,
            zero_share: 0.91,
            zero_touched: false,
            rows: &[Published(
                "original way",
                &[],
                &[3333.0, 100.0, 363_536.0, 893.73, 4_211_524.0],
            )],
        },
        Block {
            title: "idle guest",
            method: "compress",
            options: &[
                ("compress-threads", "8"),
                ("decompress-threads", "2"),
                ("compress-level", "1"),
                ("max-bandwidth", "125000000"),
            ],
            workload: Workload::Idle,
            zero_share: 0.91,
            zero_touched: false,
            rows: &[Published(
                "8 + 2 threads, level 1",
                &[],
                &[1833.0, 27.0, 107_819.0, 482.22, 4_211_524.0],
            )],
        },
        Block {
            title: "random-writing guest",
            method: "none",
            options: &[("multifd", "off"), ("max-bandwidth", "125000000")],
            workload: Workload::Random,
            zero_share: 0.91,
            zero_touched: false,
            rows: &[Published(
                "original way",
                &[],
                &[37_369.0, 337.0, 4_274_143.0, 936.99, 4_211_524.0],
            )],
        },
        Block {
            title: "random-writing guest",
            method: "compress",
            options: &[
                ("compress-threads", "8"),
                ("decompress-threads", "2"),
                ("compress-level", "1"),
                ("max-bandwidth", "125000000"),
            ],
            workload: Workload::Random,
            zero_share: 0.91,
            zero_touched: false,
            rows: &[Published(
                "8 + 2 threads, level 1",
                &[],
                &[15_989.0, 173.0, 1_699_824.0, 870.95, 4_211_524.0],
            )],
        },
    ],
    more: None,
};
