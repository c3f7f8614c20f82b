#!/usr/bin/env python3
"""Measures how long a saved VM takes to run again, and to have all its pages: Hotlift's ways beside QEMU's.

    sudo bench/restore.py --ram 512M,2G,8G --repeats 5 --qemu "$(scripts/qemu-10.0)/qemu-system-x86_64" --out bench/results/DATE-restore
    bench/restore.py --table bench/results/DATE-restore/runs.jsonl

The guest is `hotlift-vmm/guest/hotlift.s` on one vCPU under KVM. It checks and writes pages of its working set at random, as
fast as it can unless there is a --rate; all of its RAM has content. One QEMU runs it and is saved in each way; then a new QEMU is
started for each restore. All ways run in turn, in another order each time (`--seed`).

| way | file | restored by |
|---|---|---|
| lazy | hotlift save --method zstd | hotlift restore --lazy --qmp |
| lazy-11 | the same | the same, into the QEMU of --newer-qemu, which counts how long its faults take |
| lazy-remote | the same, at a `hotlift serve --files` on loopback with TLS | hotlift restore --lazy --qmp |
| eager | the same | hotlift restore --qmp |
| mapped-ram | QEMU's, multifd | migrate-incoming file:, multifd |
| zstd | migrate "exec:zstd -1 > FILE" | migrate-incoming "exec:zstd -dc FILE" |
| raw | the RAM itself, and the devices | mem-path=FILE,share=off, x-ignore-shared |

Times begin with the request to restore at a QEMU that waits for it; what QEMU takes to start stands apart. The guest runs
at QEMU's event RESUME. CPU is that of QEMU without its vCPU, and of what is beside it, until all pages are in. A guest
from a raw file reads its pages by page faults, in its vCPU: it never says that it has all, and their CPU is not counted.
"warm" means that the file was read just before, "cold" that none of it is in the page cache.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

from common import HOTLIFT, MIB, add_guest_options, read_runs, size, stamp
from restore_vm import FULL_SPEED, Counter, Rig, cpu_seconds, restore_content, source

# The last way's file is the RAM itself, so it is saved after all others.
WAYS = ("lazy", "lazy-11", "lazy-remote", "eager", "mapped-ram", "zstd", "raw")
CACHES = ("warm", "cold")
SAMPLE_S = 0.05
# Seconds watched after the guest's first step.
WATCHED_S = 3


def main():
    arguments = parse()
    if arguments.table:
        runs = read_runs(*arguments.table)
        return print(table([run for run in runs if "failed" not in run and run["kind"] == "restore"]))
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with open(arguments.out / "runs.jsonl", "a") as kept:
        for ram in arguments.ram:
            for run in measure(arguments, ram):
                print(json.dumps(run), file=kept, flush=True)
                print(line(run), flush=True)
                failed += "failed" in run
    if failed:
        raise SystemExit(f"{failed} runs failed")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    several = lambda of: lambda text: [of(word) for word in text.split(",")]
    parser.add_argument("--ram", type=several(size), default=[MIB << 9, MIB << 11, MIB << 13])
    add_guest_options(parser, rate=FULL_SPEED, working_set="64M")
    parser.add_argument("--ways", type=several(str), default=WAYS, help=",".join(WAYS))
    parser.add_argument("--caches", type=several(str), default=CACHES, help=",".join(CACHES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--qemu", type=Path, default="qemu-system-x86_64")
    parser.add_argument("--newer-qemu", type=Path, help="10.1 or later, for way lazy-11, which is left out without")
    parser.add_argument("--hotlift", type=Path, default=HOTLIFT)
    parser.add_argument("--files", type=Path, help="folder for the saved VMs, 2.7 times the RAM; a temporary one by default")
    parser.add_argument("--out", type=Path, default=Path("hotlift-restore"))
    parser.add_argument("--table", type=Path, nargs="+", metavar="RUNS", help="print the table of kept runs")
    return parser.parse_args()


def measure(arguments, ram):
    """Saves a VM in each way, restores it, and yields the result of each."""
    ways = [way for way in WAYS if way in arguments.ways and (way != "lazy-11" or arguments.newer_qemu)]
    about = {"ram_bytes": ram, "working_set": arguments.working_set, "rate": arguments.rate,
             "fill": arguments.fill.resolve().name if arguments.fill else "generated", **versions(arguments)}
    with tempfile.TemporaryDirectory(prefix="hotlift-restore-", dir=arguments.files) as folder, \
            Rig(arguments, Path(folder), ram) as rig:
        for saved_by in dict.fromkeys(map(rig.saved_by, ways)):
            yield {"kind": "save", "way": saved_by, **stamp(), **about, **rig.save(saved_by)}
        rig.end_source()
        shuffled = random.Random(arguments.seed)
        for repeat in range(arguments.repeats):
            turns = [(way, cache) for way in ways for cache in arguments.caches]
            shuffled.shuffle(turns)
            for way, cache in turns:
                run = {"kind": "restore", "way": way, "cache": cache, "repeat": repeat, **stamp(), **about}
                try:
                    yield run | restored(rig, way, cache)
                except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                    yield run | {"failed": str(error)}


def restored(rig, way, cache):
    """Runs one restore; returns times in milliseconds since the request, and the guest's progress at each."""
    files = rig.files(way)
    for path in files:
        set_cache(path, cache)
    saved = rig.saved(way)
    with rig.waiting(way) as qemu, source(rig.arguments.hotlift, way, files[-1]) as words:
        progress, over = [], threading.Event()
        start = time.time()
        watch = threading.Thread(target=sample, args=(qemu, saved, start, progress, over))
        watch.start()
        try:
            before = cpu_seconds(qemu)
            report, beside = restore_content(rig, qemu, way, words)
            runs = qemu.event("RESUME")
            whole = None if way == "raw" else qemu.completed()
            cpu = {"qemu": cpu_seconds(qemu) - before, "beside": beside}
            latency = qemu.ask("query-migrate").get("postcopy-latency")
            time.sleep(max(0, runs + WATCHED_S - time.time()))
        finally:
            over.set()
            watch.join()
        errors = Counter(qemu, saved).errors()
        written = progress[-1][1] if progress else 0
        if errors or not written:
            raise RuntimeError(f"the guest found {errors} pages that are not what it wrote, and wrote {written}")
        in_ms = lambda moment: None if moment is None else round((moment - start) * 1e3, 2)
        # Before the guest runs, its table is being loaded.
        counts = [[in_ms(at), count if at > runs else 0] for at, count in progress]
        return {
            "file_bytes": sum(allocated(path) for path in files),
            "start_ms": qemu.start_ms,
            "runs_ms": in_ms(runs),
            "all_ms": in_ms(whole),
            "cpu_s": {key: round(value, 3) for key, value in cpu.items()},
            "report": report,
            "qemu_fault_us": latency and latency / 1e3,
            "progress": counts,
        }


def sample(qemu, saved, start, progress, over):
    counter = Counter(qemu, saved)
    number = 0
    while not over.wait(max(0, start + number * SAMPLE_S - time.time())):
        progress.append((time.time(), counter.writes()))
        number += 1


def set_cache(path, cache):
    with open(path, "rb") as file:
        if cache == "cold":
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while file.read(8 * MIB):
                pass


def allocated(path):
    """A mapped-ram file has holes."""
    return os.stat(path).st_blocks * 512


def versions(arguments):
    first = lambda program: subprocess.check_output([program, "--version"], text=True).splitlines()[0]
    models = [text for text in open("/proc/cpuinfo") if text.startswith("model name")]
    host = {"cpu": models[0].split(": ")[1].strip(), "cores": len(models), "kernel": os.uname().release}
    return {"versions": {"qemu": first(arguments.qemu), "hotlift": first(arguments.hotlift)}, "host": host}


def line(run):
    name = f"{run['ram_bytes'] // MIB} MiB {run['way']}"
    if "failed" in run:
        return f"{name}: failed: {run['failed']}"
    if run["kind"] == "save":
        return f"{name}: saved in {run['seconds']:.1f} s, {run['file_bytes'] / MIB:.0f} MiB"
    whole = "" if run["all_ms"] is None else f", has all pages after {run['all_ms']:.0f} ms"
    cpu = sum(run["cpu_s"].values())
    return f"{name} {run['cache']} {run['repeat'] + 1}: runs after {run['runs_ms']:.0f} ms{whole}; {cpu:.2f} CPU s"


def first_second(run):
    """Returns the writes of the guest in its first second."""
    until = run["runs_ms"] + 1000
    return max((count for at, count in run["progress"] if at <= until), default=0)


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def table(runs):
    """Returns Markdown: medians of each way by RAM and cache."""
    out = ["| RAM, file | way | runs after, ms: p50, p95 | from the connection on | all pages, s | CPU s | file, MiB | "
           "request to page, us: p50, p99 | writes in the first second / eager's |", "|---|---|---|---|---|---|---|---|---|"]
    for ram in sorted({run["ram_bytes"] for run in runs}):
        for cache in CACHES:
            of = {way: [run for run in runs if (run["ram_bytes"], run["cache"], run["way"]) == (ram, cache, way)] for way in WAYS}
            eager = median(map(first_second, of["eager"])) if of["eager"] else 0
            out += [row(f"{ram / (MIB << 10):g} GiB, {cache}", way, mine, eager) for way, mine in of.items() if mine]
    starts = [run["start_ms"] for run in runs]
    out.append(f"\nQEMU was ready {median(starts):.0f} ms after its start ({min(starts):.0f} to {max(starts):.0f}).")
    faults = [run["qemu_fault_us"] for run in runs if run["qemu_fault_us"]]
    if faults:
        out.append(f"The newer QEMU counts {median(faults):.0f} us a fault on average ({min(faults):.0f} to {max(faults):.0f}).")
    return "\n".join(out)


def row(name, way, runs, eager):
    mid = lambda value: median(map(value, runs))
    tail = lambda times: f"{median(times):.0f}, {percentile(times, 0.95):.0f}"
    is_lazy = way.startswith("lazy")
    cells = [
        name,
        way,
        tail([run["runs_ms"] for run in runs]),
        tail([run["report"]["running_ms"] for run in runs]) if is_lazy else "–",
        "–" if way == "raw" else f"{mid(lambda run: run['all_ms']) / 1e3:.2f}",
        f"{mid(lambda run: sum(run['cpu_s'].values())):.2f}",
        f"{mid(lambda run: run['file_bytes']) / MIB:.0f}",
        ", ".join(f"{mid(lambda run: run['report']['request_us'][i]):.0f}" for i in (0, 1)) if is_lazy else "–",
        f"{mid(first_second) / eager:.2f}" if eager else "–",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
