#!/usr/bin/env python3
"""Measures how long a guest waits for its pages in postcopy: straight from QEMU to QEMU, and through two relays.

    sudo bench/postcopy.py --ram 1G --repeats 5 --qemu "$(scripts/qemu-11)/qemu-system-x86_64" --fill FOLDER --out DIR
    bench/postcopy.py --table DIR/postcopy.jsonl

The guest is that of restore.py. It is switched over as soon as the migration is under way, so that nearly all of its RAM
follows in postcopy. QEMU 10.1 or later counts how long each page fault took at the destination (capability
`postcopy-blocktime`); the median is the upper end of the power of two that it lies in. Both ways run in turn.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import restore_vm
from common import HOTLIFT, MIB, add_guest_options, read_runs, size, stamp
from restore_vm import FULL_SPEED, Qemu, Rig

WAYS = ("straight", "relays", "straight preempt", "relays preempt")


# Older machine types create the preempt channel before the stream, which relays pass through.
restore_vm.MACHINE = "pc-i440fx-10.0"


def main():
    arguments = parse()
    if arguments.table:
        return print(table(read_runs(arguments.table)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    with open(arguments.out / "postcopy.jsonl", "a") as kept:
        for _ in range(arguments.repeats):
            for way in WAYS:
                with tempfile.TemporaryDirectory(prefix="hotlift-postcopy-") as folder:
                    run = {"way": way, "ram_bytes": arguments.ram, **stamp(), **moved(arguments, Path(folder), way)}
                print(json.dumps(run), file=kept, flush=True)
                print(json.dumps(run), flush=True)
    print(table(read_runs(arguments.out / "postcopy.jsonl")))


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ram", type=size, default=1 << 30)
    add_guest_options(parser, rate=FULL_SPEED, working_set="64M")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--qemu", type=Path, default="qemu-system-x86_64", help="10.1 or later")
    parser.add_argument("--hotlift", type=Path, default=HOTLIFT)
    parser.add_argument("--out", type=Path, default=Path("hotlift-postcopy"))
    parser.add_argument("--table", type=Path, metavar="RUNS", help="print the table of kept runs")
    return parser.parse_args()


def moved(arguments, folder, way):
    """Runs one migration, and returns QEMU's counts."""
    capabilities = ["postcopy-ram", *(["postcopy-preempt"] if "preempt" in way else [])]
    with Rig(arguments, folder, arguments.ram) as rig:
        there = folder / "there"
        there.mkdir()
        options = [*rig.machine(f"memory-backend-ram,id=pc.ram,size={arguments.ram}"), *rig.guest, "-incoming", "defer"]
        destination = Qemu(arguments.qemu, there, arguments.ram, options)
        relays = []
        try:
            destination.capabilities(*capabilities, "postcopy-blocktime")
            incoming = f"unix:{there}/incoming"
            destination.ask("migrate-incoming", uri=incoming)
            to = incoming
            if "relays" in way:
                relays.append(relay(arguments, "destination", "tcp:127.0.0.1:0", incoming, "--multifd=off"))
                relays.append(relay(arguments, "source", f"unix:{folder}/relay", relays[0][1], "--method=zstd", "--channels=2"))
                to = relays[1][1]
            rig.source.capabilities(*capabilities)
            # Slow, so that precopy has not sent all pages before the switchover.
            rig.source.ask("migrate-set-parameters", max_bandwidth=32 << 20)
            rig.source.ask("migrate", uri=to)
            while rig.source.ask("query-migrate")["status"] != "active":
                time.sleep(0.01)
            rig.source.ask("migrate-start-postcopy")
            runs = destination.event("RESUME")
            whole = destination.completed()
            counted = destination.ask("query-migrate")
            reports = []
            for process, _ in relays:
                out, err = process.communicate(timeout=60)
                if process.returncode:
                    raise RuntimeError(err)
                reports.append(json.loads(out.splitlines()[-1]))
            return {
                "postcopy_s": whole - runs,
                "fault_us": counted["postcopy-latency"] / 1e3,
                "fault_us_p50": middle(counted["postcopy-latency-dist"]),
                "faults": sum(counted["postcopy-latency-dist"]),
                "reports": reports,
            }
        finally:
            destination.end()
            for process, _ in relays:
                process.kill()


def relay(arguments, side, listen, connect, *options):
    words = [arguments.hotlift, "relay", side, "--listen", listen, "--connect", connect, "--insecure", "--json", "--quiet", *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    if "listening on" not in line:
        raise RuntimeError(f"{line}{process.stderr.read()}")
    return process, line.split()[-1]


def middle(buckets):
    """Bucket n has the faults of 2^n to 2^(n+1) microseconds."""
    half, below = sum(buckets) / 2, 0
    for number, count in enumerate(buckets):
        below += count
        if below >= half:
            return 2 << number
    return 0


def table(runs):
    out = ["| RAM | way | faults | wait of a fault, us: mean, median below | until all pages are there, s |", "|---|---|---|---|---|"]
    for way in WAYS:
        mine = [run for run in runs if run["way"] == way]
        if mine:
            mid = lambda key: median(run[key] for run in mine)
            ram = f"{mine[0]['ram_bytes'] / (MIB << 10):g} GiB"
            out.append(f"| {ram} | {way} | {mid('faults'):.0f} | {mid('fault_us'):.0f}, {mid('fault_us_p50'):.0f} | {mid('postcopy_s'):.2f} |")
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main())
