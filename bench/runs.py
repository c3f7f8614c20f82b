"""Raw runs of a comparison: what every one tells besides its figures, and the file that they are appended to."""

import datetime
import json
import os
import sys
from pathlib import Path
from statistics import median

import machine

HERE = Path(__file__).resolve().parent


def add_arguments(parser, name):
    """What the comparison `name` and others take alike."""
    parser.add_argument("--results", metavar="FILE", help=f"default: bench/results/DATE-{name}.jsonl, appended")
    parser.add_argument("--report", nargs="+", metavar="FILE", help="print the table of these files and end")


def add_machine_arguments(parser):
    """Where programs and data are."""
    parser.add_argument("--accel", default="kvm" if os.access("/dev/kvm", os.W_OK) else "tcg")
    parser.add_argument("--qemu", metavar="BINARY", help="default: what scripts/qemu-10.0 fetches")
    parser.add_argument("--hotlift", metavar="BINARY", default=str(HERE.parent / "target/release/hotlift"))
    parser.add_argument("--corpus", metavar="FOLDER", default="/work/shared/silesia", help=".zst files")
    parser.add_argument("--cache", metavar="FOLDER", default=os.environ.get("HOTLIFT_CACHE", str(HERE.parent / ".cache")))


def read(files):
    return [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]


def now():
    return datetime.datetime.now(datetime.timezone.utc)


def one(what, about, measure):
    """The run that `measure()` makes; ends the program if its guest has not arrived whole."""
    before = {"date": now().isoformat(timespec="seconds"), **about, "load": machine.load()}
    run = {**before, **measure(), "machine": machine.facts()}
    if run["status"] != "completed" or not run["verified"]:
        raise SystemExit(f"{what}: status {run['status']}, verified {run['verified']}")
    return run


class Results:
    """The runs so far, each on its way to the file as soon as it is made."""

    def __init__(self, file, name):
        self.path = Path(file or HERE / "results" / f"{now():%Y-%m-%d}-{name}.jsonl")
        self.runs = []

    def add(self, run, line):
        self.runs.append(run)
        with open(self.path, "a") as out:
            out.write(json.dumps(run) + "\n")
        print(line, file=sys.stderr, flush=True)


def spread(values):
    if any(value != value for value in values):
        return "-"

    def text(value):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"

    return f"{text(median(values))} ({text(min(values))}-{text(max(values))})"
