"""Functions that the scripts share: sizes, the options of a guest, kept runs."""

import json
import os
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOTLIFT = ROOT / "target/dist/hotlift"
MIB = 1 << 20


def size(text):
    """Returns the bytes of a size such as 512M or 1.5G."""
    return int(float(text[:-1]) * {"M": MIB, "G": MIB << 10}[text[-1].upper()])


def add_guest_options(parser, rate, working_set):
    """Adds the options of a guest, with their defaults."""
    parser.add_argument("--rate", type=int, default=rate, help="pages a second that a guest writes at most")
    parser.add_argument("--working-set", type=size, default=size(working_set), help="memory that it writes to")
    parser.add_argument("--fill", type=Path, help="folder of files, .zst or not; generated text if there is none")


def read_runs(*paths):
    """Returns the runs in files with one JSON object per line."""
    return [json.loads(line) for path in paths for line in open(path)]


def stamp():
    """Returns time and load, in the format of a run."""
    return {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "load": os.getloadavg()[0]}
