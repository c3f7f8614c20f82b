#!/usr/bin/env python3
"""Measures the pause of a guest with and without the ramp of the downtime limit.

    sudo bench/downtime.py --qemu QEMU --repeats 5 --out bench/results/DATE-downtime
    bench/downtime.py --table bench/results/DATE-downtime/runs.jsonl

Two network namespaces with a veth pair that `tc tbf` limits; a QEMU with KVM in each. `hotlift migrate` and `serve` move the guest
with method none. `pause` is the time between QEMU's events STOP and RESUME, `downtime` is QEMU's own figure.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median

from common import HOTLIFT, MIB, read_runs, size, stamp
from restore_vm import Qemu, Rig

HOSTS = (("downtime-a", "10.77.0.1"), ("downtime-b", "10.77.0.2"))
# Name, pages written per second, MiB that they are in.
GUESTS = (("idle", 20, 64), ("20 % of 1 Gbit/s", 6000, 256), ("60 %", 18000, 256), ("rewrites 8 MiB", 60000, 8))
WAYS = ("on", "off")


def run(*words, check=True):
    subprocess.run(words, check=check, stderr=None if check else subprocess.DEVNULL)


def inside(host, *words):
    return ["ip", "netns", "exec", HOSTS[host][0], *words]


def connect(link):
    remove()
    for name, _ in HOSTS:
        run("ip", "netns", "add", name)
    run("ip", "link", "add", "veth", "netns", HOSTS[0][0], "type", "veth", "peer", "name", "veth", "netns", HOSTS[1][0])
    for host, (_, address) in enumerate(HOSTS):
        run(*inside(host, "ip", "addr", "add", f"{address}/24", "dev", "veth"))
        run(*inside(host, "ip", "link", "set", "veth", "up"))
        run(*inside(host, "ip", "link", "set", "lo", "up"))
        if link != "none":
            run(*inside(host, "tc", "qdisc", "add", "dev", "veth", "root", "tbf", "rate", link, "burst", "256k", "limit", "2m"))


def remove():
    for name, _ in HOSTS:
        run("ip", "netns", "del", name, check=False)


def at(events, name):
    """Returns the times of QEMU's events `name`, in seconds."""
    times = (event["timestamp"] for event in events if event.get("event") == name)
    return [time["seconds"] + time["microseconds"] / 1e6 for time in times]


def measure(args, way, rate, working_set):
    guest = argparse.Namespace(
        qemu=args.qemu, hotlift=args.hotlift, ram=args.ram, rate=rate, working_set=working_set * MIB, fill=None
    )
    to = f"tcp:{HOSTS[1][1]}:4444"
    with tempfile.TemporaryDirectory(prefix="hotlift-downtime-") as folder, Rig(guest, Path(folder), args.ram) as rig:
        rig.source.ask("migrate-set-parameters", downtime_limit=args.limit)
        there = Path(folder) / "there"
        there.mkdir()
        memory = rig.machine(f"memory-backend-ram,id=pc.ram,size={args.ram}")
        target = Qemu(args.qemu, there, args.ram, [*memory, *rig.guest, "-incoming", "defer"])
        serve = None
        try:
            line = [args.hotlift, "serve", "--listen", to, "--qmp", target.free_qmp, "--insecure"]
            serve = subprocess.Popen(inside(1, *line), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if not any("listening" in line for line in serve.stdout):
                raise RuntimeError("hotlift serve does not listen")
            line = [args.hotlift, "migrate", "--qmp", rig.source.free_qmp, "--to", to, "--insecure", "--method=none"]
            line += ["--channels=2", "--json", f"--downtime-ramp={way}"]
            moved = subprocess.run(inside(0, *line), capture_output=True, text=True, timeout=args.timeout)
            if moved.returncode:
                raise RuntimeError(moved.stderr[-500:])
            report = json.loads(moved.stdout)
            # Receives the last events.
            rig.source.ask("query-status")
            target.ask("query-status")
            passes = at(rig.source.events, "MIGRATION_PASS")
            return {
                "downtime": report["qemu"]["downtime"],
                "pause": round((at(target.events, "RESUME")[-1] - at(rig.source.events, "STOP")[-1]) * 1e3),
                "total": report["qemu"]["total-time"],
                "rounds": report["qemu"]["ram"]["dirty-sync-count"],
                "limit": report.get("downtime_limit"),
                "durations": [round((end - begin) * 1e3) for begin, end in zip(passes, passes[1:])],
            }
        finally:
            if serve:
                serve.kill()
            target.end()


def table(paths):
    runs = read_runs(*paths)
    print("| guest | ramp | runs | downtime, ms | rounds | total, s |\n|---|---|---|---|---|---|")
    for guest, way in dict.fromkeys((run["guest"], run["way"]) for run in runs):
        these = [run for run in runs if (run["guest"], run["way"]) == (guest, way)]
        middle = lambda key: median(run[key] for run in these)
        print(f"| {guest} | {way} | {len(these)} | {middle('downtime'):.0f} | {middle('rounds'):.0f} | {middle('total') / 1e3:.1f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", nargs="+", type=Path, metavar="RUNS", help="print the medians of kept runs")
    parser.add_argument("--qemu", type=Path, help="QEMU of both hosts")
    parser.add_argument("--hotlift", type=Path, default=HOTLIFT)
    parser.add_argument("--link", default="1gbit", help="rate of the link, as for tc; or none")
    parser.add_argument("--ram", type=size, default=size("1G"))
    parser.add_argument("--limit", type=int, default=300, help="the operator's downtime limit, ms")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout", type=int, default=90, help="seconds of a migration")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.table:
        return table(args.table)
    if not args.qemu or not args.out:
        parser.error("--qemu and --out are needed")
    args.out.mkdir(parents=True, exist_ok=True)
    connect(args.link)
    try:
        with open(args.out / "runs.jsonl", "a") as kept:
            for _ in range(args.repeats):
                for guest, rate, working_set in GUESTS:
                    for way in WAYS:
                        of = {"guest": guest, "way": way, "link": args.link, "limit_most": args.limit}
                        print(json.dumps({**stamp(), **of, **measure(args, way, rate, working_set)}), file=kept, flush=True)
    finally:
        remove()


if __name__ == "__main__":
    main()
