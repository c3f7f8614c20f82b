#!/usr/bin/env python3
"""Draws kept runs of `hotlift-bench --suite auto` as one SVG: total time by link rate, one line per method; auto is the lowest.

    bench/envelope.py bench/results/2026-11-24-auto/runs.jsonl > docs/auto.svg
"""

import math
import sys
from statistics import median

from common import read_runs
from picture import WIDTH, curves, frame, level, text

# In the order of the legend; readable on white and on GitHub's dark background.
METHODS = {"none": "#8a8f98", "lz4": "#3b82c4", "zstd 1": "#7c5cbf", "auto": "#d9480f"}
RATES = {"200mbit": 0.2, "500mbit": 0.5, "1gbit": 1, "2.5gbit": 2.5, "5gbit": 5, "10gbit": 10}
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 380, 64, 96, 66, 48
SECONDS = (0.3, 20)


def main():
    times = {}
    for run in read_runs(*sys.argv[1:]):
        row = run["row"]
        method = row["method"] + (f" {row['level']}" if row.get("level") else "")
        if is_of_the_picture(row) and method in METHODS and "completed" in run["outcome"]:
            seconds = run["outcome"]["completed"]["source"]["total_ms"] / 1e3
            times.setdefault((method, row["link"]), []).append(seconds)
    if not times:
        raise SystemExit(f"no run of 512 MiB, 90 % Silesia, in {sys.argv[1:]}")
    print(draw(times))


def is_of_the_picture(row):
    guest = row["guest"]
    fills = (guest["ram_bytes"], guest["workload"], guest["zero_share"]) == (512 << 20, "idle", 0.1)
    return fills and "silesia" in guest["fill"] and row["link"] in RATES


def x_of(rate):
    low, high = math.log(0.2), math.log(10)
    return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(rate) - low) / (high - low)


def y_of(seconds):
    low, high = map(math.log, SECONDS)
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log(seconds) - low) / (high - low)


def draw(times):
    out = [level(LEFT, WIDTH - RIGHT, y_of(seconds), f"{seconds:g} s") for seconds in (0.5, 1, 2, 5, 10, 20)]
    for rate in RATES.values():
        out.append(text(x_of(rate), HEIGHT - BOTTOM + 20, f"{rate:g}", 12, anchor="middle"))
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "Gbit/s", 12, anchor="middle"))
    points = lambda method: [(x_of(rate), y_of(median(times[method, link])))
                             for link, rate in RATES.items() if (method, link) in times]
    out += curves({method: (colour, points(method)) for method, colour in METHODS.items()}, WIDTH - RIGHT, "auto")
    return frame(HEIGHT, "Seconds to migrate 512 MiB, 90 % Silesia, by the rate of the wire",
                 "both ends on two cores; medians; both axes are logarithmic", out)


if __name__ == "__main__":
    main()
