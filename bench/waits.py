#!/usr/bin/env python3
"""How often the threads of a migration wait and touch new memory, while something else runs it.

    bench/waits.py compress decompress -- bench/pair.py --case compress --pairs 1

Follows every thread whose name begins with one of the words, in any process, until the command ends. The
kernel counts for each (proc_pid_status(5), proc_pid_stat(5)): switches that the thread asked for (it waited:
futexes, sockets), switches that it did not ask for, and page faults that needed no disk. What a thread does
after it was last looked at, at most PERIOD_S before its end, is not counted.
"""

import collections
import subprocess
import sys
import time
from pathlib import Path

PERIOD_S = 0.05
# Its names are those of QEMU's and Hotlift's processes.
PROCESSES = ("qemu-system-x86", "hotlift")


def threads(words):
    """(process, thread, name) of those that run now."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not (process / "comm").read_text().startswith(PROCESSES):
                continue
            for task in (process / "task").iterdir():
                name = (task / "comm").read_text().strip()
                if name.startswith(words):
                    yield process.name, task, name
        except OSError:
            pass


def counts(task):
    status = dict(line.split(":\t") for line in (task / "status").read_text().splitlines() if ":\t" in line)
    # Fields 10 and 12 of stat, counted behind the name in brackets.
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return (int(status["voluntary_ctxt_switches"]), int(status["nonvoluntary_ctxt_switches"]), int(fields[7]))


def main():
    split = sys.argv.index("--")
    words = tuple(sys.argv[1:split])
    latest = {}
    command = subprocess.Popen(sys.argv[split + 1:])
    while command.poll() is None:
        for process, task, name in threads(words):
            try:
                latest[process, task.name] = (name.split("_")[0], counts(task))
            except OSError:
                pass
        time.sleep(PERIOD_S)
    sums = collections.defaultdict(lambda: [0, 0, 0, 0])
    for (process, _), (name, counted) in latest.items():
        for index, count in enumerate((1, *counted)):
            sums[process, name][index] += count
    print(f"{'process':>8} {'threads':12} {'number':>6} {'waits':>10} {'preempted':>10} {'page faults':>12}")
    for (process, name), row in sums.items():
        print(f"{process:>8} {name:12} {row[0]:6} {row[1]:10} {row[2]:10} {row[3]:12}")
    raise SystemExit(command.returncode)


main()
