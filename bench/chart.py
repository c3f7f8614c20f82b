#!/usr/bin/env python3
"""Draws kept runs of `hotlift-bench --with-qemu` as one SVG: CPU per GiB of both ends, by method, for QEMU and Hotlift.

    bench/chart.py bench/results/2026-11-23-suites/runs.jsonl > docs/cpu-per-gib.svg
"""

import sys
from statistics import median

from common import read_runs
from picture import WIDTH, frame, text

METHODS = ("none", "zstd", "zlib")
SIDES = ("qemu", "hotlift")
NAMES = {"qemu": "QEMU 10.0", "hotlift": "Hotlift"}
# Source and destination; readable on white and on GitHub's dark background.
COLOURS = {("qemu", "source"): "#8a8f98", ("qemu", "destination"): "#b9bdc4",
           ("hotlift", "source"): "#d9480f", ("hotlift", "destination"): "#f59f5b"}
LEFT, RIGHT, BAR, GAP, GROUP, TOP = 150, 150, 20, 4, 26, 66


def main():
    runs = read_runs(*sys.argv[1:])
    runs = [run for run in runs if run["suite"] == "matrix" and "completed" in run["outcome"]]
    beside_qemu = {run["series"] for run in runs if run["row"]["engine"] == "qemu"}
    runs = [run for run in runs if run["series"] in beside_qemu and has_content(run["row"])]
    bars = []
    for method in METHODS:
        for side in SIDES:
            mine = [run["outcome"]["completed"] for run in runs if (run["row"]["method"], run["row"]["engine"]) == (method, side)]
            if not mine:
                raise SystemExit(f"no run of {method} by {side} in {sys.argv[1:]}")
            ends = {end: median(run[end]["side"]["core_s_per_gib"] for run in mine) for end in ("source", "destination")}
            bars.append((method, side, ends, len(mine)))
    print(draw(bars))


def has_content(row):
    return row["guest"]["zero_share"] < 0.5 and row["guest"]["workload"] == "idle"


def draw(bars):
    # Each method has its own scale: zlib needs forty times as much as none.
    height = TOP + len(METHODS) * (2 * (BAR + GAP) + GROUP) + 34
    out = []
    y = TOP
    for method in METHODS:
        of_method = [bar for bar in bars if bar[0] == method]
        longest = max(sum(ends.values()) for _, _, ends, _ in of_method)
        out.append(text(16, y + BAR + GAP, method, 14, "600"))
        for _, side, ends, _ in of_method:
            out.append(text(LEFT - 8, y + BAR - 5, NAMES[side], 12, anchor="end"))
            x = LEFT
            for end, seconds in ends.items():
                width = (WIDTH - LEFT - RIGHT) * seconds / longest
                out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
                           f'fill="{COLOURS[side, end]}"/>')
                x += width
            figures = " + ".join(f"{seconds:.2f}" for seconds in ends.values())
            out.append(text(x + 8, y + BAR - 5, figures, 12))
            y += BAR + GAP
        y += GROUP
    out.append(text(16, height - 14, "Dark: source. Light: destination.", 12))
    return frame(height, "CPU seconds per GiB of non-zero pages, source + destination",
                 "2 GiB, 90 % Silesia, 2 channels over loopback; medians; each method on its own scale", out)


if __name__ == "__main__":
    main()
