#!/usr/bin/env python3
"""Compares what `hotlift advise` predicts with the migrations themselves, on this machine.

    bench/advise.py --repeats 5                    # every method, in random order, several times
    bench/advise.py --report bench/results/*-advise.jsonl

Both ends run here and share its cores. In each repeat a guest of the same settings is sampled while it runs
(`hotlift advise --pid`), and right after that each method migrates one (`hotlift demo`): what other work takes from the
machine, it takes from both alike, as far as it holds still.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import machine

HERE = Path(__file__).resolve().parent
METHODS = ("none", "lz4", "zlib", "zstd", "qatzip", "uadk", "qpl")
LEVELS = {"zlib": 1, "zstd": 1, "qatzip": 1}


def guest_flags(args):
    flags = ["--ram", args.ram, "--zero-share", str(args.zero_share), "--workload", args.workload, "--rate", str(args.rate)]
    return flags + (["--fill", args.fill] if args.fill else [])


def advise(args):
    """All predictions, from a guest that runs."""
    with subprocess.Popen([args.hotlift, "guest", "run", *guest_flags(args)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          stdin=subprocess.DEVNULL, text=True) as guest:
        try:
            for line in guest.stdout:
                if "pages with data" in line:
                    break
            rate = 0 if args.workload == "idle" else args.rate
            command = [args.hotlift, "advise", "--json", "--pid", str(guest.pid), "--same-host", "--channels", str(args.channels),
                       "--dirty-rate", str(rate), "--ram", args.ram]
            if args.bandwidth:
                command += ["--bandwidth", args.bandwidth]
            return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        finally:
            guest.terminate()


def migrate(args, method):
    """The figures of one migration."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [args.hotlift, "demo", "--quiet", "--method", method, "--channels", str(args.channels), "--json", out.name,
                   *guest_flags(args)]
        if method in LEVELS:
            command += ["--level", str(LEVELS[method])]
        if args.bandwidth:
            command += ["--max-bandwidth", args.bandwidth]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return json.load(open(out.name))[0]


def run(args):
    path = HERE / "results" / f"{datetime.now(timezone.utc):%Y-%m-%d}-advise.jsonl"
    for repeat in range(args.repeats):
        advice = advise(args)
        methods = [method for method in METHODS if method in args.method]
        random.shuffle(methods)
        for method in methods:
            load = machine.load()
            candidate = next(c for c in advice["candidates"] if c["method"] == method and c["level"] in (None, LEVELS.get(method)))
            found = migrate(args, method)
            record = {
                "time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "repeat": repeat, "method": method, "load": load,
                "machine": machine.facts(), "command": sys.argv,
                "cores_free": advice["machine"]["cores"],
                "predicted": {
                    "total_s": candidate["prediction"]["total_s"], "source_cpu_s": candidate["prediction"]["source_cpu_s"],
                    "destination_cpu_s": candidate["prediction"]["destination_cpu_s"],
                    "wire_bytes": candidate["prediction"]["wire_bytes"],
                },
                "found": {
                    "total_s": found["total_ms"] / 1e3, "source_cpu_s": found["source"]["cpu_s"],
                    "destination_cpu_s": found["destination"]["cpu_s"], "wire_bytes": found["transferred_bytes"],
                },
            }
            with open(path, "a") as out:
                out.write(json.dumps(record) + "\n")
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    report([path])


def report(paths):
    records = [json.loads(line) for path in paths for line in open(path)]
    print("| method | runs | total s, predicted / found | error | CPU s of both, predicted / found | error | wire, error | load |")
    print("|---|---|---|---|---|---|---|---|")
    for method in METHODS:
        mine = [record for record in records if record["method"] == method]
        if not mine:
            continue

        def median(of, side):
            return statistics.median(of(record[side]) for record in mine)

        def pair(of):
            predicted, found = median(of, "predicted"), median(of, "found")
            return predicted, found, 100 * (predicted / found - 1)

        total = pair(lambda figures: figures["total_s"])
        cpu = pair(lambda figures: figures["source_cpu_s"] + figures["destination_cpu_s"])
        wire = pair(lambda figures: figures["wire_bytes"])
        load = statistics.median(record["load"] for record in mine)
        print(f"| {method} | {len(mine)} | {total[0]:.2f} / {total[1]:.2f} | {total[2]:+.0f} % | {cpu[0]:.2f} / {cpu[1]:.2f} | {cpu[2]:+.0f} % "
              f"| {wire[2]:+.0f} % | {load:.1f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hotlift", default=str(HERE.parent / "target/release/hotlift"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--ram", default="1G")
    parser.add_argument("--fill", help="folder that RAM is filled with; else the generated mix")
    parser.add_argument("--zero-share", type=float, default=0.25)
    parser.add_argument("--workload", default="idle")
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--channels", type=int, default=os.cpu_count())
    parser.add_argument("--bandwidth", help="bytes a second, as in 50M")
    parser.add_argument("--report", nargs="+", metavar="FILE")
    args = parser.parse_args()
    args.method = args.method or METHODS
    if args.report:
        report(args.report)
    else:
        run(args)


if __name__ == "__main__":
    main()
