//! `iaa`: compression by IAA beside software, by channels, bandwidth and prefault.

use hotlift_vmm::workload::Workload;

use super::{
    Block, Column, DOWN_MS, MBPS, PAGES_PER_SECOND, Published, SOURCE_CPU, Suite, TOTAL_MS,
};

const COLUMNS: &[Column] = &[TOTAL_MS, DOWN_MS, MBPS, PAGES_PER_SECOND, SOURCE_CPU];

/// The published series.
pub static SUITE: Suite = Suite {
    name: "iaa",
    source: "Yuan Liu: \"Live Migration With IAA\", v8, 10 June 2024",
    machine: "two Sapphire Rapids hosts with 4 IAA devices each, a guest of 16 vCPUs and 64 GB that does \
              not write, 90 % of it Silesia, downtime-limit 100 ms",
    differs: &[
        "the published CPU column does not say of which side it is; ours is the source's",
        "the second table without prefault is headed 100G where it was published, among those of 1G; it is \
         taken for 1G",
    ],
    ram_gib: 64,
    columns: COLUMNS,
    blocks: &[
        Block {
            title: "100G, none",
            method: "none",
            options: &[
                ("max-bandwidth", "100G"),
                ("mem-prealloc", "on"),
                ("downtime-limit", "100"),
            ],
            workload: Workload::Idle,
            zero_share: 0.1,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[7493.0, 64.0, 66_782.0, 2_549_993.0, 205.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[5901.0, 49.0, 84_832.0, 5_289_304.0, 283.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[5789.0, 58.0, 86_488.0, 4_674_351.0, 266.0],
                ),
            ],
        },
        Block {
            title: "100G, QPL (IAA)",
            method: "qpl",
            options: &[
                ("max-bandwidth", "100G"),
                ("mem-prealloc", "on"),
                ("downtime-limit", "100"),
                ("accelerator", "required"),
            ],
            workload: Workload::Idle,
            zero_share: 0.1,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[7330.0, 23.0, 34_537.0, 5_261_385.0, 216.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[5219.0, 31.0, 48_899.0, 6_498_718.0, 405.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[5250.0, 22.0, 49_073.0, 5_578_875.0, 768.0],
                ),
            ],
        },
        Block {
            title: "100G, QPL (software)",
            method: "qpl",
            options: &[
                ("max-bandwidth", "100G"),
                ("mem-prealloc", "on"),
                ("downtime-limit", "100"),
                ("accelerator", "off"),
            ],
            workload: Workload::Idle,
            zero_share: 0.1,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[73_535.0, 21.0, 3887.0, 515_976.0, 202.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[37_299.0, 27.0, 7668.0, 1_637_228.0, 403.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[18_964.0, 38.0, 15_093.0, 3_074_972.0, 795.0],
                ),
            ],
        },
        Block {
            title: "100G, zstd",
            method: "zstd",
            options: &[
                ("max-bandwidth", "100G"),
                ("mem-prealloc", "on"),
                ("downtime-limit", "100"),
            ],
            workload: Workload::Idle,
            zero_share: 0.1,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[78_291.0, 24.0, 2201.0, 435_601.0, 212.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[39_544.0, 21.0, 4366.0, 1_036_449.0, 457.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[20_180.0, 26.0, 8581.0, 1_958_901.0, 894.0],
                ),
            ],
        },
        Block {
            title: "100G, QPL (IAA) without prefault",
            method: "qpl",
            options: &[
                ("max-bandwidth", "100G"),
                ("mem-prealloc", "off"),
                ("downtime-limit", "100"),
                ("accelerator", "required"),
            ],
            workload: Workload::Idle,
            zero_share: 0.1,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[51_431.0, 68.0, 4884.0, 227_428.0, 202.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[29_988.0, 92.0, 8392.0, 405_648.0, 403.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[22_868.0, 89.0, 11_039.0, 222_222.0, 795.0],
                ),
            ],
        },
        Block {
            title: "1G, none",
            method: "none",
            options: &[
                ("max-bandwidth", "1G"),
                ("mem-prealloc", "on"),
                ("downtime-limit", "100"),
            ],
            workload: Workload::Idle,
            zero_share: 0.1,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[57_758.0, 66.0, 8643.0, 264_617.0, 28.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[57_216.0, 58.0, 8726.0, 266_773.0, 28.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[56_708.0, 53.0, 8804.0, 270_223.0, 28.0],
                ),
            ],
        },
        Block {
            title: "1G, QPL (IAA)",
            method: "qpl",
            options: &[
                ("max-bandwidth", "1G"),
                ("mem-prealloc", "on"),
                ("downtime-limit", "100"),
                ("accelerator", "required"),
            ],
            workload: Workload::Idle,
            zero_share: 0.1,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[30_129.0, 34.0, 8345.0, 2_224_761.0, 26.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[30_317.0, 39.0, 8300.0, 2_025_220.0, 58.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[29_615.0, 35.0, 8514.0, 2_250_122.0, 130.0],
                ),
            ],
        },
        Block {
            title: "1G, QPL (software)",
            method: "qpl",
            options: &[
                ("max-bandwidth", "1G"),
                ("mem-prealloc", "on"),
                ("downtime-limit", "100"),
                ("accelerator", "off"),
            ],
            workload: Workload::Idle,
            zero_share: 0.1,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[93_358.0, 41.0, 3064.0, 534_588.0, 202.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[47_266.0, 52.0, 6067.0, 1_392_941.0, 403.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[33_134.0, 45.0, 8706.0, 2_433_242.0, 480.0],
                ),
            ],
        },
        Block {
            title: "1G, zstd",
            method: "zstd",
            options: &[
                ("max-bandwidth", "1G"),
                ("mem-prealloc", "on"),
                ("downtime-limit", "100"),
            ],
            workload: Workload::Idle,
            zero_share: 0.1,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[95_750.0, 24.0, 1802.0, 477_236.0, 263.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[48_907.0, 24.0, 3536.0, 1_002_142.0, 411.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[25_568.0, 32.0, 6783.0, 1_696_437.0, 783.0],
                ),
            ],
        },
        Block {
            title: "1G, QPL (IAA) without prefault",
            method: "qpl",
            options: &[
                ("max-bandwidth", "1G"),
                ("mem-prealloc", "off"),
                ("downtime-limit", "100"),
                ("accelerator", "required"),
            ],
            workload: Workload::Idle,
            zero_share: 0.1,
            zero_touched: false,
            rows: &[
                Published(
                    "2 channels",
                    &[("multifd-channels", "2")],
                    &[50_908.0, 66.0, 4935.0, 240_301.0, 200.0],
                ),
                Published(
                    "4 channels",
                    &[("multifd-channels", "4")],
                    &[31_334.0, 94.0, 8030.0, 451_310.0, 400.0],
                ),
                Published(
                    "8 channels",
                    &[("multifd-channels", "8")],
                    &[29_010.0, 103.0, 8690.0, 629_132.0, 620.0],
                ),
            ],
        },
    ],
    more: None,
};
