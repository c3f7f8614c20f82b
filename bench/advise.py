#!/usr/bin/env python3
"""Compares what `hotlift advise` predicts with the migrations themselves, on this machine.

    sudo bench/advise.py --repeats 3                       # every case, some 10 minutes on a quiet machine
    sudo bench/advise.py --case idle --method none         # one of them
    bench/advise.py --report bench/results/DATE-advise.jsonl

In each repeat and for each case a guest that runs is sampled (`hotlift advise --pid --to`), and right after that each
method migrates one of the same settings (`hotlift bench --to`), in random order. Both talk to one `hotlift bench --serve`.
Both ends run here and share its cores: what other work takes from the machine, it takes from both alike, as far as it
holds still. Cases with a link have a network namespace for each end (root) and a token bucket between them.

The report has, for each case and method, the median of the quotients predicted / found, and says which of them are not
within 20 %. Loaded machine: read the CPU columns. Quiet machine: all of them.
"""

import argparse
import json
import os
import random
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import machine
import network

HERE = Path(__file__).resolve().parent
LEVELS = {"zlib": 1, "zstd": 1, "qatzip": 1}
ALL = ("none", "lz4", "zlib", "zstd", "qatzip", "uadk", "qpl")
WITHIN = 0.20
PORT = 4443
# A process that says nothing for so long will not any more.
SAYS = 60
# Migrations that are not predicted to converge are given up after so long.
NEVER = 40
# Downtimes below are of other work's time slices; quotients of them say nothing.
LEAST_DOWNTIME = 0.03


@dataclass
class Case:
    methods: tuple
    rate: int = 0
    working_set: str = "64M"
    link: int = None  # bit/s
    prealloc: bool = False

    def flags(self, args):
        workload = "random" if self.rate else "idle"
        return ["--ram", args.ram, "--zero-share", str(args.zero_share), "--workload", workload, "--rate", str(self.rate or 1),
                "--working-set", self.working_set] + (["--fill", args.fill] if args.fill else [])


CASES = {
    "idle": Case(ALL),
    "idle-prealloc": Case(("none", "zstd"), prealloc=True),
    "idle-1gbit": Case(("none", "lz4", "zstd"), link=10**9),
    "writing": Case(("none", "lz4", "zstd"), rate=20_000),
    "writing-200mbit": Case(("none", "zstd"), rate=2_000, link=2 * 10**8),
    "too-fast-200mbit": Case(("none",), rate=30_000, working_set="128M", link=2 * 10**8),
}


def warm(args):
    """Has the host back memory for both ends, which it takes away from what lies free for 2 s (machine.WarmMemory)."""
    with machine.WarmMemory(3 * size(args.ram)):
        pass


def size(text):
    return int(text[:-1]) << {"M": 20, "G": 30}[text[-1]]


def wait_for(process, words):
    """Reads what a process says until a line has `words`."""
    deadline = time.monotonic() + SAYS
    os.set_blocking(process.stdout.fileno(), False)
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while words.encode() not in said:
            if not selector.select(max(deadline - time.monotonic(), 0)):
                raise SystemExit(f"never said '{words}', but: {said.decode()}")
            piece = process.stdout.read()
            if not piece:
                raise SystemExit(f"ended before it said '{words}': {said.decode()}")
            said += piece


def advise(args, case, prefix, to):
    """All predictions, from a guest that runs."""
    command = [args.hotlift, "guest", "run", *case.flags(args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL) as guest:
        try:
            wait_for(guest, "pages with data")
            warm(args)
            command = [*prefix, args.hotlift, "advise", "--json", "--pid", str(guest.pid), "--same-host", "--insecure", "--to", to,
                       "--channels", str(args.channels), "--dirty-rate", str(case.rate), "--working-set", case.working_set,
                       "--ram", args.ram]
            command += ["--mem-prealloc"] if case.prealloc else []
            return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        finally:
            guest.terminate()


def migrate(args, case, method, channels, prefix, to):
    """The record of one migration; None if it did not converge."""
    warm(args)
    with tempfile.TemporaryDirectory() as out:
        command = [*prefix, args.hotlift, "bench", "--insecure", "--to", to, "--repeats", "1", "--out", out, "--method", method,
                   "--channels", str(channels), "--time-limit", str(NEVER), *case.flags(args)]
        if case.prealloc:
            command += ["--with", "mem-prealloc=on"]
        if method in LEVELS:
            command += ["--level", str(LEVELS[method])]
        done = subprocess.run(command, capture_output=True, text=True)
        record = json.loads((Path(out) / "runs.jsonl").read_text())
    completed = record["outcome"].get("completed")
    if not completed:
        print(record["outcome"], file=sys.stderr)
        return None
    if done.returncode or not completed["verified"]:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return completed


def quantities(source, destination_cpu_s, source_cpu_s):
    return {
        "total_s": source["total_ms"] / 1e3, "downtime_s": source["downtime_ms"] / 1e3, "wire_bytes": source["transferred_bytes"],
        "source_cpu_s": source_cpu_s, "destination_cpu_s": destination_cpu_s, "rounds": source["rounds"],
    }


def run(args):
    path = HERE / "results" / f"{datetime.now(timezone.utc):%Y-%m-%d}-advise.jsonl"
    path = Path(args.out) if args.out else path
    for repeat in range(args.repeats):
        for name in args.case:
            one_case(args, path, repeat, name, CASES[name])
    print(file=sys.stderr)
    report([path])


def one_case(args, path, repeat, name, case):
    with network.Link(case.link, joined=case.link is not None) as link:
        address = f"{link.address}:{PORT}"
        server = [*network.TIED, *link.prefixes[1], args.hotlift, "bench", "--insecure", "--serve", f"tcp:{address}"]
        with subprocess.Popen(server, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as other:
            try:
                wait_for(other, "waiting for")
                advice = advise(args, case, link.prefixes[0], f"tcp:{address}")
                methods = [method for method in case.methods if method in args.method]
                random.shuffle(methods)
                for method in methods:
                    one_run(args, path, repeat, name, case, method, advice, link.prefixes[0], f"tcp:{address}")
            finally:
                other.terminate()


def one_run(args, path, repeat, name, case, method, advice, prefix, to):
    load = machine.load()
    candidate = next(c for c in advice["candidates"] if c["method"] == method and c["level"] in (None, LEVELS.get(method)))
    found = migrate(args, case, method, candidate["settings"]["channels"], prefix, to)
    prediction = candidate["prediction"]
    record = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "case": name, "repeat": repeat, "method": method,
        "load": load, "machine": machine.facts(), "command": sys.argv[1:], "channels": candidate["settings"]["channels"],
        "measured": advice["machine"],
        "costs": candidate["costs"],
        "predicted": {key: prediction[key] for key in
                      ("converges", "total_s", "downtime_s", "wire_bytes", "source_cpu_s", "destination_cpu_s", "rounds")},
        "found": {"converges": False} if found is None else {
            "converges": True,
            **quantities(found["source"], found["destination"]["side"]["cpu_s"], found["source"]["side"]["cpu_s"]),
        },
    }
    with open(path, "a") as out:
        out.write(json.dumps(record) + "\n")
    print(".", end="", flush=True, file=sys.stderr)


COLUMNS = {
    "total": lambda figures: figures["total_s"],
    "CPU of both": lambda figures: figures["source_cpu_s"] + figures["destination_cpu_s"],
    "source": lambda figures: figures["source_cpu_s"],
    "destination": lambda figures: figures["destination_cpu_s"],
    "wire": lambda figures: figures["wire_bytes"],
    "downtime": lambda figures: figures["downtime_s"] if figures["downtime_s"] >= LEAST_DOWNTIME else None,
}


def report(paths):
    records = [json.loads(line) for path in paths for line in open(path)]
    records = [record for record in records if "case" in record]
    print("Medians of predicted / found (a * marks what is not within 20 %); downtimes below 30 ms are not compared.\n")
    print(f"| case | method | runs | total s found | {' | '.join(COLUMNS)} | rounds | load |")
    print("|---|---|---|---|" + "---|" * len(COLUMNS) + "---|---|")
    outside, quotients = [], 0
    for name, method in dict.fromkeys((record["case"], record["method"]) for record in records):
        mine = [record for record in records if (record["case"], record["method"]) == (name, method)]
        agree = sum(record["predicted"]["converges"] == record["found"]["converges"] for record in mine)
        load = statistics.median(record["load"] for record in mine)
        done = [record for record in mine if record["predicted"]["converges"] and record["found"]["converges"]]
        if agree < len(mine):
            outside.append(f"{name} {method}: {len(mine) - agree} of {len(mine)} converge otherwise than predicted")
        if not done:
            words = "does not converge, as predicted" if agree == len(mine) else "converges otherwise than predicted"
            print(f"| {name} | {method} | {len(mine)} | {words} |" + " |" * (len(COLUMNS) + 1) + f" {load:.1f} |")
            continue
        cells = []
        for column, of in COLUMNS.items():
            pairs = [(of(record["predicted"]), of(record["found"])) for record in done]
            pairs = [predicted / found for predicted, found in pairs if predicted is not None and found]
            if not pairs:
                cells.append("")
                continue
            median = statistics.median(pairs)
            quotients += 1
            bad = abs(median - 1) > WITHIN
            if bad:
                outside.append(f"{name} {method}: {column} {median:.2f}")
            cells.append(f"{median:.2f}{'*' if bad else ''}")
        total = statistics.median(record["found"]["total_s"] for record in done)
        rounds = "/".join(f"{statistics.median(record[side]['rounds'] for record in done):g}" for side in ("predicted", "found"))
        print(f"| {name} | {method} | {len(done)} | {total:.2f} | {' | '.join(cells)} | {rounds} | {load:.1f} |")
    print(f"\n{quotients - sum(': ' in line and 'converge' not in line for line in outside)} of {quotients} within 20 %")
    for line in outside:
        print(f"NOT within 20 %: {line}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hotlift", default=str(HERE.parent / "target/release/hotlift"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--method", action="append", choices=ALL)
    parser.add_argument("--ram", default="512M")
    parser.add_argument("--fill", help="folder that RAM is filled with; else the generated mix")
    parser.add_argument("--zero-share", type=float, default=0.25)
    parser.add_argument("--channels", type=int, default=os.cpu_count())
    parser.add_argument("--out", help="file that runs are added to [default: bench/results/DATE-advise.jsonl]")
    parser.add_argument("--report", nargs="+", metavar="FILE")
    args = parser.parse_args()
    args.case = args.case or list(CASES)
    args.method = args.method or ALL
    if args.report:
        report(args.report)
    else:
        run(args)


if __name__ == "__main__":
    main()
