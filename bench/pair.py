#!/usr/bin/env python3
"""Runs QEMU -> QEMU and Hotlift -> Hotlift on the same work in turn, and compares them.

    bench/pair.py                           every case, 5 pairs
    bench/pair.py --case none --pairs 9
    bench/pair.py --only qemu
    bench/pair.py --report FILE.jsonl...    only the table, from kept runs

Needs root (the RAM of QEMU is filled through /proc/PID/mem) and the `zstd` command. See README.md.
"""

import argparse

import fill
import hotlift
import machine
import qemu
import runs
from cases import CASES, GIB, IMAGE_BYTES, SEED, ZERO_SHARE

SIDES = ("qemu", "hotlift")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=5, help="runs of each side in each case (default 5)")
    parser.add_argument("--only", choices=SIDES, help="measure one side only")
    runs.add_arguments(parser, "pair")
    add_common_arguments(parser)
    return parser.parse_args()


def add_common_arguments(parser):
    parser.add_argument("--case", action="append", choices=CASES, help="repeatable")
    parser.add_argument("--channels", type=int, default=2)
    runs.add_machine_arguments(parser)
    parser.add_argument("--qemu-7", metavar="BINARY", default="qemu-system-x86_64",
                        help="for case compress, which QEMU 9.1 took out; default: Debian 12's 7.2")
    parser.add_argument("--hotlift-flag", metavar="FLAG", action="append", default=[],
                        help="a further flag of hotlift demo, such as --zero-copy-send=off; repeatable")
    parser.add_argument("--fill-image", metavar="FILE",
                        help="raw RAM image of 2 GiB, alone in its folder, instead of the generated one")


def main():
    args = arguments()
    if args.report:
        report(runs.read(args.report))
        return
    cases = [CASES[name] for name in args.case or CASES]
    sides = runners(args, image_of(args, cases))
    results = runs.Results(args.results, "pair")
    for pair in range(args.pairs):
        for case in cases:
            # Every second pair runs in the other order: a steady drift then favours neither side.
            order = list(sides) if pair % 2 == 0 else list(reversed(sides))
            for side in (side for side in order if side in case.sides):
                run = one(side, sides[side], case, pair)
                results.add(run, progress(run))
    report(results.runs)
    print(f"\nraw runs: {results.path}")


def image_of(args, cases):
    """The file that fills guest RAM, or None if no case needs it."""
    if not any(case.fill == "image" for case in cases):
        return None
    return args.fill_image or fill.image(args.cache, args.corpus, IMAGE_BYTES, ZERO_SHARE, SEED)


def runners(args, image):
    """Side -> (version for a case, function that runs one case)."""
    sides = {}
    if args.only != "hotlift":
        sides["qemu"] = (
            lambda case: qemu.version(qemu_for(args, case)),
            lambda case, warm: qemu.run(case, image, qemu_for(args, case), warm, args.accel, args.channels))
    if args.only != "qemu":
        sides["hotlift"] = (lambda _: hotlift.version(args.hotlift), lambda case, warm: hotlift.run(
            case, image, args.hotlift, warm, args.channels, flags=args.hotlift_flag))
    return sides


def qemu_for(args, case):
    """The QEMU that has what the case asks for."""
    if case.method == "compress":
        return args.qemu_7
    return args.qemu or qemu.qemu_10_0()


def one(side, runner, case, pair):
    version, migrate = runner

    def measure():
        with machine.WarmMemory(case.ram_bytes + machine.WarmMemory.AHEAD) as warm:
            return migrate(case, warm)

    about = {"side": side, "version": version(case), "case": case.name, "pair": pair}
    return runs.one(f"{side} {case.name}", about, measure)


def progress(run):
    return (f"{run['case']:14} {run['side']:8} {run['total_ms']:6.0f} ms  "
            f"{run['source']['cpu_s']:6.2f} + {run['destination']['cpu_s']:6.2f} CPU s  load {run['load']:.1f}")


def per_gib(run, end):
    """CPU seconds per GiB of non-zero pages; per GiB of RAM where there are none."""
    return run[end]["cpu_s"] / ((moved_bytes(run) or run["ram_bytes"]) / GIB)


def ratio(run):
    """Bytes of non-zero pages per byte sent, headers and zero-page lists included."""
    return moved_bytes(run) / run["transferred_bytes"] if moved_bytes(run) else float("nan")


def moved_bytes(run):
    """Bytes of non-zero pages; 0 where there are only the few of firmware and devices."""
    moved = run["normal_pages"] * 4096
    return moved if moved > run["ram_bytes"] / 100 else 0


COLUMNS = (
    ("total ms", lambda run: run["total_ms"]),
    ("downtime ms", lambda run: run["downtime_ms"]),
    ("source s/GiB", lambda run: per_gib(run, "source")),
    ("dest s/GiB", lambda run: per_gib(run, "destination")),
    ("ratio", ratio),
)


def report(measured):
    """One line a case and side with median (lowest-highest), then the ratios pair by pair."""
    print("median (lowest-highest)")
    print(f"{'case':15}{'side':10}{'runs':>4}" + "".join(f"{name:>24}" for name, _ in COLUMNS))
    for case in CASES:
        for side in SIDES:
            mine = [run for run in measured if (run["case"], run["side"]) == (case, side)]
            if mine:
                cells = (runs.spread([value(run) for run in mine]) for _, value in COLUMNS)
                print(f"{case:15}{side:10}{len(mine):>4}" + "".join(f"{cell:>24}" for cell in cells))
        both = pairs_of(case, measured)
        if both:
            cells = (runs.spread([quotient(value(theirs), value(ours)) for theirs, ours in both]) for _, value in COLUMNS)
            print(f"{case:15}{'hl/qemu':10}{len(both):>4}" + "".join(f"{cell:>24}" for cell in cells))


def pairs_of(case, measured):
    """Neighbouring runs of the two sides. Pair numbers start again with each call of this script,
    so the n-th run of one side belongs to the n-th of the other."""
    by_side = [[run for run in measured if (run["case"], run["side"]) == (case, side)] for side in SIDES]
    return list(zip(*by_side))


def quotient(theirs, ours):
    return ours / theirs if theirs else float("nan")


if __name__ == "__main__":
    main()
