//! `qat`: QATzip beside zstd and none, CPU of sender and receiver.

use hotlift_vmm::workload::Workload;

use super::{
    Block, Column, DESTINATION_CPU, DOWN_MS, MBPS, NONE, PAGES_PER_SECOND, Published, SOURCE_CPU,
    Suite, TOTAL_MS,
};

const COLUMNS: &[Column] = &[
    TOTAL_MS,
    DOWN_MS,
    MBPS,
    PAGES_PER_SECOND,
    SOURCE_CPU,
    DESTINATION_CPU,
];

/// The published series.
pub static SUITE: Suite = Suite {
    name: "qat",
    source: "Yuan Liu, Yichen Wang: \"Implement QATzip compression method\", v6, July 2024",
    machine: "two Sapphire Rapids hosts with 4 QAT devices, a guest of 16 vCPUs and 64 GB that does not \
              write, 54 GB of it Silesia",
    differs: &[
        "the rows of qatzip in software are ours alone: what the method costs where there is no device",
        "of the pages a second of all but the last three rows nothing was published",
    ],
    ram_gib: 64,
    columns: COLUMNS,
    blocks: &[
        Block {
            title: "1 GB/s, qatzip (QAT)",
            method: "qatzip",
            options: &[("max-bandwidth", "1G"), ("accelerator", "required")],
            workload: Workload::Idle,
            zero_share: 0.15,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[21_607.0, 77.0, 8051.0, NONE, 88.0, 125.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[20_336.0, 25.0, 8557.0, NONE, 110.0, 190.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[20_208.0, 22.0, 8613.0, NONE, 125.0, 300.0],
                ),
            ],
        },
        Block {
            title: "1 GB/s, qatzip in software",
            method: "qatzip",
            options: &[("max-bandwidth", "1G"), ("accelerator", "off")],
            workload: Workload::Idle,
            zero_share: 0.15,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[NONE, NONE, NONE, NONE, NONE, NONE],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[NONE, NONE, NONE, NONE, NONE, NONE],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[NONE, NONE, NONE, NONE, NONE, NONE],
                ),
            ],
        },
        Block {
            title: "1 GB/s, zstd",
            method: "zstd",
            options: &[("max-bandwidth", "1G")],
            workload: Workload::Idle,
            zero_share: 0.15,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[78_351.0, 96.0, 2199.0, NONE, 204.0, 80.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[39_324.0, 31.0, 4389.0, NONE, 406.0, 160.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[20_515.0, 22.0, 8438.0, NONE, 800.0, 340.0],
                ),
            ],
        },
        Block {
            title: "10 GB/s, qatzip (QAT)",
            method: "qatzip",
            options: &[("max-bandwidth", "10G"), ("accelerator", "required")],
            workload: Workload::Idle,
            zero_share: 0.15,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[22_450.0, 77.0, 7748.0, NONE, 80.0, 125.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[13_017.0, 24.0, 13_401.0, NONE, 180.0, 285.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[10_255.0, 22.0, 17_037.0, NONE, 280.0, 590.0],
                ),
            ],
        },
        Block {
            title: "10 GB/s, qatzip in software",
            method: "qatzip",
            options: &[("max-bandwidth", "10G"), ("accelerator", "off")],
            workload: Workload::Idle,
            zero_share: 0.15,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[NONE, NONE, NONE, NONE, NONE, NONE],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[NONE, NONE, NONE, NONE, NONE, NONE],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[NONE, NONE, NONE, NONE, NONE, NONE],
                ),
            ],
        },
        Block {
            title: "10 GB/s, zstd",
            method: "zstd",
            options: &[("max-bandwidth", "10G")],
            workload: Workload::Idle,
            zero_share: 0.15,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[78_339.0, 76.0, 2199.0, NONE, 204.0, 80.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[39_466.0, 21.0, 4373.0, NONE, 406.0, 160.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[20_126.0, 77.0, 8595.0, NONE, 810.0, 340.0],
                ),
            ],
        },
        Block {
            title: "1.25 GB/s, qatzip (QAT)",
            method: "qatzip",
            options: &[("max-bandwidth", "1250000000"), ("accelerator", "required")],
            workload: Workload::Idle,
            zero_share: 0.15,
            zero_touched: false,
            rows: &[Published(
                "8 channels",
                &[("multifd-channels", "8")],
                &[16_630.0, 28.0, 10_467.0, 2_940_235.0, 160.0, 360.0],
            )],
        },
        Block {
            title: "1.25 GB/s, qatzip in software",
            method: "qatzip",
            options: &[("max-bandwidth", "1250000000"), ("accelerator", "off")],
            workload: Workload::Idle,
            zero_share: 0.15,
            zero_touched: false,
            rows: &[Published(
                "8 channels",
                &[("multifd-channels", "8")],
                &[NONE, NONE, NONE, NONE, NONE, NONE],
            )],
        },
        Block {
            title: "1.25 GB/s, zstd",
            method: "zstd",
            options: &[("max-bandwidth", "1250000000")],
            workload: Workload::Idle,
            zero_share: 0.15,
            zero_touched: false,
            rows: &[Published(
                "8 channels",
                &[("multifd-channels", "8")],
                &[20_165.0, 24.0, 8579.0, 2_391_465.0, 810.0, 340.0],
            )],
        },
        Block {
            title: "1.25 GB/s, none",
            method: "none",
            options: &[("max-bandwidth", "1250000000")],
            workload: Workload::Idle,
            zero_share: 0.15,
            zero_touched: false,
            rows: &[Published(
                "8 channels",
                &[("multifd-channels", "8")],
                &[46_063.0, 40.0, 10_848.0, 330_240.0, 45.0, 85.0],
            )],
        },
    ],
    more: None,
};
