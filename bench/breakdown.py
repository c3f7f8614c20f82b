#!/usr/bin/env python3
"""Says where the CPU time of a migration goes, thread by thread, by sampling with perf.

    bench/breakdown.py qemu --case none
    bench/breakdown.py hotlift --case zstd --symbols

Needs root and `perf` (linux-perf). cpu-clock is the event: it needs no hardware counters, which
virtual machines often lack. perf slows the run, so take shares from here and times from pair.py.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections import Counter, defaultdict

import hotlift
import machine
import pair
import qemu
from cases import CASES

ENDS = ("source", "destination")
LEAST_SHOWN_S = 0.002
RATE_HZ = 4999  # odd, so that it does not step along with a 250 or 1000 Hz tick
PERF = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(RATE_HZ), "-g"]

# First match wins; what matches none is "program" in user space and "system call" in the kernel.
CODEC = re.compile(r"ZSTD_|HUF_|FSE_|XXH|inflate|deflate|igzip|isal_|adler32|crc32|huffman|longest_match|"
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
    """Of one sample: [(symbol, library)], the innermost first."""
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


@contextlib.contextmanager
def attached(data, pids):
    """perf on running processes; entered only when perf records, so that no start is missed."""
    control, told = os.pipe(), os.pipe()
    argv = [*PERF, "-o", data, "-D", "-1", "--control", f"fd:{control[0]},{told[1]}", "-p", ",".join(map(str, pids))]
    perf = subprocess.Popen(argv, pass_fds=(control[0], told[1]))
    os.write(control[1], b"enable\n")
    os.read(told[0], 16)
    try:
        yield
    finally:
        perf.send_signal(signal.SIGINT)
        perf.wait()
        for end in (*control, *told):
            os.close(end)


def record_qemu(args, case, image, warm, data):
    sides = {}

    def during(source, destination):
        sides.update({source: "source", destination: "destination"})
        return attached(data, (source, destination))

    run = qemu.run(case, image, pair.qemu_for(args, case), warm, args.accel, args.channels, during)
    return run, sides


def record_hotlift(args, case, image, warm, data):
    """perf starts the command and follows its children; the fill is left out by thread name."""
    run = hotlift.run(case, image, args.hotlift, warm, args.channels, wrapper=[*PERF, "-o", data, "--"])
    return run, None


def samples(data):
    """(pid, thread name, stack) of each sample."""
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


def sides_by_name(taken, names):
    """Process -> end, by the threads that only one end has."""
    votes = defaultdict(Counter)
    for pid, name, _ in taken:
        ends = [end for end in names if name in names[end]]
        if len(ends) == 1:
            votes[pid][ends[0]] += 1
    return {pid: count.most_common(1)[0][0] for pid, count in votes.items()}


def table(run, sides, data, symbols):
    taken = list(samples(data))
    # The kernel keeps 15 bytes of a thread's name.
    names = {end: {thread["name"][:15] for thread in run[end]["threads"]} for end in ENDS}
    attached_to_running = sides is not None
    sides = sides or sides_by_name(taken, names)
    counts = {end: defaultdict(Counter) for end in ENDS}
    hot = {end: Counter() for end in ENDS}
    for pid, name, stack in taken:
        end = sides.get(pid)
        # A command followed from its start has threads that only fill RAM or check it.
        if end and (attached_to_running or name in names[end]):
            kind = category(stack)
            counts[end][name][kind] += 1
            hot[end][kind, stack[0][0]] += 1
    print(f"\n{'CPU s':38}{'total':>8}" + "".join(f"{kind:>13}" for kind in CATEGORIES))
    for end in ENDS:
        total = sum(counts[end].values(), Counter())
        for name, kinds in sorted(counts[end].items()):
            if sum(kinds.values()) > RATE_HZ * LEAST_SHOWN_S:
                row(f"{end} {name}", kinds)
        row(f"{end} = {run[end]['cpu_s']:.2f} s by clock", total)
        shares(end, total, pair.per_gib(run, end))
        for (kind, symbol), count in hot[end].most_common(symbols):
            print(f"    {count / sum(total.values()):6.1%}  {kind:12} {symbol}")


def row(label, kinds):
    cells = "".join(f"{kinds[kind] / RATE_HZ:>13.3f}" for kind in CATEGORIES)
    print(f"{label:38}{sum(kinds.values()) / RATE_HZ:>8.3f}{cells}")


def shares(end, total, s_per_gib):
    everything = sum(total.values()) or 1
    cells = "".join(f"{total[kind] / everything:>13.1%}" for kind in CATEGORIES)
    print(f"{end + ' share':38}{'':8}{cells}")
    cells = "".join(f"{total[kind] / everything * s_per_gib:>13.3f}" for kind in CATEGORIES)
    print(f"{end + ' s per GiB':38}{s_per_gib:>8.3f}{cells}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("side", choices=pair.SIDES)
    parser.add_argument("--symbols", type=int, nargs="?", const=15, default=0, help="also the N hottest (15)")
    parser.add_argument("--keep", metavar="FILE", help="keep perf's data there, for perf report")
    pair.add_common_arguments(parser)
    args = parser.parse_args()
    for case in (CASES[name] for name in args.case or ["none"]):
        image = pair.image_of(args, [case])
        with tempfile.TemporaryDirectory(prefix="hotlift-bench-") as folder, \
                machine.WarmMemory(case.ram_bytes + machine.WarmMemory.AHEAD) as warm:
            data = args.keep or f"{folder}/perf.data"
            record = record_qemu if args.side == "qemu" else record_hotlift
            run, sides = record(args, case, image, warm, data)
            print(f"{args.side} {case.name}: {run['total_ms']:.0f} ms, load {machine.load():.1f}", end="")
            table(run, sides, data, args.symbols)


if __name__ == "__main__":
    main()
