#!/usr/bin/env python3
"""Migrates QEMU -> QEMU over limited links, straight and through a pair of relays, and compares.

    bench/relay.py                            every road and way, 3 times
    bench/relay.py --road 1gbit --repeats 7
    bench/relay.py --way qemu-2 --way relay-zstd
    bench/relay.py --report FILE.jsonl...     only the table, from kept runs

Needs root (network namespaces, and the RAM of QEMU is filled through /proc/PID/mem), `iproute2`, and the
`zstd` command. See README.md.
"""

import argparse
import os
import random
import signal
import sys
from pathlib import Path
from statistics import median

import fill
import hotlift
import machine
import qemu
import relayed
import runs
from cases import GIB, SEED, ZERO_SHARE
from network import Link
from ways import PLAIN, ROADS, WAYS


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--road", action="append", choices=ROADS, help="repeatable")
    parser.add_argument("--way", action="append", choices=WAYS, help="repeatable")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way on each road (default 3)")
    runs.add_arguments(parser, "relay")
    runs.add_machine_arguments(parser)
    parser.add_argument("--guest", metavar="ELF", help="guest program; default: the one built with --hotlift")
    return parser.parse_args()


def main():
    args = arguments()
    # As Ctrl-C does, it leaves every `with` block.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    if args.report:
        report(runs.read(args.report))
        return
    args.qemu = args.qemu or qemu.qemu_10_0()
    args.guest = args.guest or guest_program(args.hotlift)
    ways = [WAYS[name] for name in args.way or WAYS]
    versions = {"qemu": qemu.version(args.qemu)}
    if any(way.relay for way in ways):
        versions["hotlift"] = hotlift.version(args.hotlift)
    image = fill.image(args.cache, args.corpus, relayed.RAM_BYTES, ZERO_SHARE, SEED)
    results = runs.Results(args.results, "relay")
    for name in args.road or ROADS:
        for repeat in range(args.repeats):
            # A drift of the machine then favours no way.
            for way in random.sample(ways, len(ways)):
                run = one(way, ROADS[name], image, args, {"repeat": repeat, "versions": versions})
                results.add(run, progress(run))
    report(results.runs)
    print(f"\nraw runs: {results.path}")


def guest_program(binary):
    """The guest program that was assembled last beside a binary of Cargo's, or None."""
    built = Path(binary).parent.glob("build/hotlift-vmm-*/out/hotlift.elf")
    return max(map(str, built), key=os.path.getmtime, default=None)


def one(way, road, image, args, about):
    def measure():
        with machine.WarmMemory(relayed.RAM_BYTES + machine.WarmMemory.AHEAD) as warm, \
                Link(road.rate, road.joined) as link:
            probed = {"link_mbit_s": link.probe()}
            return {**probed, **relayed.run(way, road, link, image, args, warm)}

    # Below 0: ahead of other work on the machine.
    nice = {"nice": os.nice(0)}
    return runs.one(f"{road.name} {way.name}", {"road": road.name, "way": way.name, **about, **nice}, measure)


def progress(run):
    return (f"{run['road']:13} {run['way']:11} {run['wall_ms']:7.0f} ms  down {run['downtime_ms']:4} ms  "
            f"{cpu_s(run):6.2f} CPU s  {run['wire_bytes'] / 1e6:5.0f} MB  load {run['load']:.1f}")


def cpu_s(run, *processes):
    """CPU seconds of these processes, by default of all; without the vCPU, whose loop never sleeps."""
    return sum(thread["cpu_s"] for name, process in run["cpu"].items() if not processes or name in processes
               for thread in process["threads"] if not thread["name"].startswith("CPU "))


def per_gib(run, *processes):
    """CPU seconds per GiB of non-zero pages."""
    return cpu_s(run, *processes) / (run["normal_pages"] * 4096 / GIB)


COLUMNS = (
    ("total s", lambda run: run["wall_ms"] / 1e3),
    ("downtime ms", lambda run: run["downtime_ms"]),
    ("stopped ms", lambda run: nan_if_none(run["stopped_ms"])),
    ("wire MB", lambda run: run["wire_bytes"] / 1e6),
    ("QEMUs s/GiB", lambda run: per_gib(run, "source", "destination")),
    ("near relay", lambda run: per_gib(run, "relay_source")),
    ("far relay", lambda run: per_gib(run, "relay_destination")),
    ("all s/GiB", per_gib),
    ("machine s/GiB", lambda run: run["machine_busy_s"] / (run["normal_pages"] * 4096 / GIB)),
)


def nan_if_none(value):
    return float("nan") if value is None else value


def report(measured):
    """One line a road and way with median (lowest-highest), then what the relay is meant to reach."""
    print("median (lowest-highest)")
    print(f"{'road':14}{'way':12}{'runs':>4}" + "".join(f"{name:>21}" for name, _ in COLUMNS))
    for road in ROADS:
        for way in WAYS:
            mine = of(measured, road, way)
            if mine:
                cells = (runs.spread([value(run) for run in mine]) for _, value in COLUMNS)
                print(f"{road:14}{way:12}{len(mine):>4}" + "".join(f"{cell:>21}" for cell in cells))
    print()
    for line in goals(measured):
        print(line)


def of(measured, road, way):
    return [run for run in measured if (run["road"], run["way"]) == (road, way)]


def goals(measured):
    for road, bar in (("200mbit", 0.35), ("1gbit", 0.6)):
        plain, relayed_runs = fastest_plain(measured, road), of(measured, road, "relay-zstd")
        if plain and relayed_runs:
            share = middle(relayed_runs, "wall_ms") / middle(plain, "wall_ms")
            yield verdict(f"{road}: relay with zstd takes {share:.3f} of {plain[0]['way']}'s time", share, bar)
    for road in ("veth", "loopback"):
        # The same number of channels on both sides: what is left is the relay's.
        plain, relayed_runs = of(measured, road, "qemu-2"), of(measured, road, "relay-none")
        if plain and relayed_runs:
            cost = median(map(per_gib, relayed_runs)) - median(map(per_gib, plain))
            yield verdict(f"{road}: relays with none cost {cost:.2f} core-s/GiB more, all processes", cost, 1.0)
    for road, downtime in (("veth", "downtime_ms"), ("loopback", "downtime_ms"), ("veth-live", "stopped_ms")):
        plain, relayed_runs = of(measured, road, "qemu-2"), of(measured, road, "relay-none")
        if plain and relayed_runs:
            more = middle(relayed_runs, downtime) - middle(plain, downtime)
            yield verdict(f"{road}: relays with none add {more:.1f} ms to {downtime}", more, 20)


def fastest_plain(measured, road):
    groups = [group for way in PLAIN if (group := of(measured, road, way))]
    return min(groups, key=lambda group: middle(group, "wall_ms"), default=None)


def middle(measured, key):
    return median(run[key] for run in measured)


def verdict(words, value, bar):
    return f"{words} (bar {bar}): {'reached' if value <= bar else 'MISSED'}"


if __name__ == "__main__":
    main()
