#!/usr/bin/env python3
"""Draws kept runs of `bench/restore.py` as one SVG: what the guest has done by when, one line a way to restore it.

    bench/progress.py bench/results/DATE-restore/runs.jsonl > docs/restore.svg
"""

import argparse
from statistics import median

from common import read_runs
from picture import WIDTH, curves, frame, level, text

# In the order of restore.py's table; readable on white and on GitHub's dark background.
COLOURS = {"lazy": "#d9480f", "eager": "#e8a33d", "mapped-ram": "#3b82c4", "zstd": "#7c5cbf", "raw": "#8a8f98"}
NAMES = {"lazy": "Hotlift, lazy", "eager": "Hotlift, eager", "mapped-ram": "mapped-ram", "zstd": "exec:zstd", "raw": "raw file"}
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 380, 64, 130, 66, 48
GIB = 1 << 30
STEP_MS = 50


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--cache", default="warm")
    arguments = parser.parse_args()
    runs = read_runs(*arguments.runs)
    is_of_it = lambda run: (run["kind"], run["ram_bytes"]) == ("restore", arguments.gib * GIB) and run["cache"] == arguments.cache
    runs = [run for run in runs if is_of_it(run) and "failed" not in run]
    if not runs:
        raise SystemExit(f"no run of {arguments.gib:g} GiB, {arguments.cache}, in {arguments.runs}")
    print(draw(arguments, runs))


def draw(arguments, runs):
    last = min(max(run["progress"][-1][0] for run in runs), 1.5 * max(run["runs_ms"] for run in runs) + 1000)
    times = [number * STEP_MS for number in range(int(last / STEP_MS) + 1)]
    lines = {}
    for way in COLOURS:
        mine = [run["progress"] for run in runs if run["way"] == way]
        if mine:
            # The time up to which all of them were watched.
            watched = min(progress[-1][0] for progress in mine)
            lines[way] = [median(by_then(progress, at) for progress in mine) / 1e6 for at in times if at <= watched]
    most = max(max(line) for line in lines.values()) or 1
    x_of = lambda at: LEFT + (WIDTH - LEFT - RIGHT) * at / times[-1]
    y_of = lambda count: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * count / most
    out = []
    for count in steps(most):
        out.append(level(LEFT, WIDTH - RIGHT, y_of(count), f"{count:g}"))
    for seconds in steps(times[-1] / 1e3):
        out.append(text(x_of(seconds * 1e3), HEIGHT - BOTTOM + 20, f"{seconds:g}", 12, anchor="middle"))
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "seconds since it was asked for", 12, anchor="middle"))
    named = {NAMES[way]: (COLOURS[way], [(x_of(at), y_of(count)) for at, count in zip(times, line)]) for way, line in lines.items()}
    out += curves(named, WIDTH - RIGHT, NAMES["lazy"])
    working_set, fill = runs[0]["working_set"] >> 20, runs[0]["fill"].capitalize()
    return frame(HEIGHT, "Million pages that a guest has checked and written since its restore was asked for",
                 f"{arguments.gib:g} GiB, 90 % {fill}, {working_set} MiB of it in use, file {arguments.cache}; medians", out)


def by_then(progress, at):
    return max((count for moment, count in progress if moment <= at), default=0)


def steps(most):
    """Returns four to eight round numbers from 0 on."""
    step = next(step for power in range(-3, 9) for step in (10.0 ** power, 2 * 10.0 ** power, 5 * 10.0 ** power) if most / step <= 8)
    return [number * step for number in range(int(most / step) + 1)]


if __name__ == "__main__":
    main()
