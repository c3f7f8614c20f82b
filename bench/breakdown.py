#!/usr/bin/env python3
"""Says where the CPU time of migrations goes, thread by thread, by sampling `hotlift-bench` with perf.

    sudo bench/breakdown.py --symbols -- --method none --ram 2G --zero-share 0.1 --fill FOLDER --with-qemu QEMU

What stands behind -- are flags of `hotlift-bench`; each cell runs once. A thread's CPU seconds are those of the run's
record; perf has their shares. It slows the run: take shares from here, and times from `hotlift-bench`. cpu-clock is the
event: it needs no hardware counters, which virtual machines often lack. Needs `perf` (linux-perf).
"""

import argparse
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from common import ROOT, read_runs

ENDS = ("source", "destination")
LEAST_SHOWN_S = 0.002
# Odd, so that it does not run in step with a 250 or 1000 Hz tick.
RATE_HZ = 4999

# The first match wins; without a match the category is "program" in user space and "system call" in the kernel.
CODEC = re.compile(r"ZSTD_|HIST_|HUF_|FSE_|XXH|LZ4|inflate|deflate|igzip|isal_|adler32|crc32|huffman|longest_match|"
                   r"fill_window|compress_block|send_tree|set_long_offset|gen_icf|encode_deflate|zlib_rs", re.I)
CODEC_LIBRARY = re.compile(r"/lib(z|zstd|isal|qpl)\.so")
ZERO_TEST = re.compile(r"is_zero|hotlift_mem.*zero")
USER_COPY = re.compile(r"mem(cpy|move|set|pcpy)|copy_nonoverlapping")
KERNEL_COPY = re.compile(r"^(rep_movs_alternative|rep_stos_alternative|_copy_(to|from)_iter|copy_user|memcpy|"
                         r"__memcpy|memcpy_orig|simple_copy_to_iter|_copy_(to|from)_user)")
PAGE_FAULT = re.compile(r"exc_page_fault|handle_mm_fault|faultin_page|do_anonymous_page")
WAITING = re.compile(r"futex|__schedule|schedule|eventfd|ppoll|epoll")
CATEGORIES = ("codec", "zero test", "user copy", "program", "kernel copy", "page fault", "wait/wake", "system call")


def category(stack):
    """Returns the stack of one sample: [(symbol, library)], the innermost first."""
    symbol, library = stack[0]
    if "kernel" in library or library.startswith("["):
        frames = [name for name, where in stack if "kernel" in where]
        if any(PAGE_FAULT.search(name) for name in frames):
            return "page fault"
        if KERNEL_COPY.match(symbol):
            return "kernel copy"
        if any(WAITING.search(name) for name in frames) and not any("tcp" in name for name in frames):
            return "wait/wake"
        return "system call"
    if CODEC_LIBRARY.search(library) or CODEC.search(symbol):
        return "codec"
    if ZERO_TEST.search(symbol):
        return "zero test"
    if USER_COPY.search(symbol):
        return "user copy"
    return "program"


def samples(data):
    """Yields (process, thread name, stack) of each sample."""
    script = subprocess.run(["perf", "script", "-i", data, "-F", "comm,pid,tid,ip,sym,dso"],
                            check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace")
    head = re.compile(r"^(\S.*?)\s+(\d+)/(\d+)\s*$")
    frame = re.compile(r"^\s+[0-9a-f]+ (.*) \((.*)\)$")
    for block in script.stdout.split("\n\n"):
        lines = block.strip("\n").splitlines()
        if len(lines) < 2 or not (found := head.match(lines[0])):
            continue
        stack = [match.groups() for line in lines[1:] if (match := frame.match(line))]
        if stack:
            yield int(found[2]), found[1], stack


def measure(bench, flags, data):
    """Returns the records of the runs that completed, in their order."""
    with tempfile.TemporaryDirectory(prefix="hotlift-breakdown-") as out:
        perf = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(RATE_HZ), "-g", "-o", data, "--"]
        subprocess.run([*perf, bench, "--repeats", "1", "--out", out, *flags], check=True)
        return [run for run in read_runs(Path(out) / "runs.jsonl") if "completed" in run["outcome"]]


def names(run):
    """Returns end -> names of its threads; the kernel keeps 15 bytes of each."""
    completed = run["outcome"]["completed"]
    return {end: {thread["name"][:15]: thread["cpu_s"] for thread in completed[end]["side"]["threads"]} for end in ENDS}


def of_runs(taken, runs):
    """(run's index, end, thread) -> Counter of (category, symbol).

    A process belongs to the end whose own thread names it has, and to the run of its engine that is next: processes of
    one cell end before those of the next start, so that their ids follow the order of the runs.
    """
    by_process, is_qemu = defaultdict(lambda: defaultdict(Counter)), {}
    for process, name, stack in taken:
        by_process[process][name][category(stack), stack[0][0]] += 1
        is_qemu[process] = is_qemu.get(process, False) or name.startswith("qemu-system")
    found, next_run = defaultdict(Counter), Counter()
    for process in sorted(by_process):
        engine = "qemu" if is_qemu[process] else "hotlift"
        threads = by_process[process]
        mine = [i for i, run in enumerate(runs) if run["row"]["engine"] == engine]
        votes = Counter()
        for end in ENDS:
            own = {name for i in mine for name in names(runs[i])[end]}
            other = {name for i in mine for at in ENDS if at != end for name in names(runs[i])[at]}
            votes[end] = sum(sum(threads[name].values()) for name in own - other if name in threads)
        end, weight = votes.most_common(1)[0]
        if not weight or next_run[engine, end] == len(mine):
            continue
        index = mine[next_run[engine, end]]
        next_run[engine, end] += 1
        for name in names(runs[index])[end]:
            if name in threads:
                found[index, end, name] += threads[name]
    return found


def table(index, run, found, symbols):
    completed = run["outcome"]["completed"]
    row = run["row"]
    print(f"\n{row['engine']} {row['method']} {row['level'] or ''}, {completed['source']['total_ms']:.0f} ms, "
          f"load {run['machine']['load']:.1f}")
    print(f"{'CPU s':38}{'total':>8}" + "".join(f"{kind:>13}" for kind in CATEGORIES))
    for end in ENDS:
        total, hot = Counter(), Counter()
        for name, seconds in names(run)[end].items():
            counts = found.get((index, end, name), Counter())
            everything = sum(counts.values())
            if not everything:
                continue
            shares = Counter()
            for (kind, symbol), count in counts.items():
                shares[kind] += seconds * count / everything
                hot[kind, symbol] += seconds * count / everything
            total.update(shares)
            if seconds > LEAST_SHOWN_S:
                line(f"{end} {name}", shares)
        line(f"{end}, of {completed[end]['side']['cpu_s']:.2f} s", total)
        gib = completed["source"]["normal_pages"] * 4096 / (1 << 30)
        if gib > 0.01:
            line(f"{end}, s per GiB", Counter({kind: seconds / gib for kind, seconds in total.items()}))
        for (kind, symbol), seconds in hot.most_common(symbols):
            print(f"    {seconds / sum(total.values()):6.1%}  {kind:12} {symbol}")


def line(label, kinds):
    print(f"{label:38}{sum(kinds.values()):>8.3f}" + "".join(f"{kinds[kind]:>13.3f}" for kind in CATEGORIES))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", metavar="BINARY", default=str(ROOT / "target/dist/hotlift-bench"))
    parser.add_argument("--symbols", type=int, nargs="?", const=15, default=0, help="also the N hottest (15)")
    parser.add_argument("--keep", metavar="FILE", help="keep perf's data there, for perf report")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of hotlift-bench, behind --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hotlift-breakdown-") as folder:
        data = args.keep or f"{folder}/perf.data"
        runs = measure(args.bench, args.flags, data)
        found = of_runs(list(samples(data)), runs)
    for index, run in enumerate(runs):
        table(index, run, found, args.symbols)


if __name__ == "__main__":
    main()
