"""One migration by `hotlift demo`, which starts both processes and measures itself."""

import json
import subprocess
import tempfile
from pathlib import Path


def version(binary):
    return subprocess.run([binary, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def command(case, image, binary, channels, json_file):
    return [
        binary, "demo", "--guest", "threads", "--workload", "idle",
        "--ram", f"{case.ram_bytes >> 30}G", *_fill(case, image),
        "--method", case.method, *(["--level", str(case.level)] if case.level is not None else []),
        "--channels", str(channels), "--zero-page-detection", "multifd", "--max-bandwidth", "0",
        "--json", str(json_file),
    ]


def _fill(case, image):
    if case.fill == "image":
        # The folder holds the image and nothing else; its zero pages are already in place.
        return ["--fill", str(Path(image).parent), "--zero-share", "0"]
    if case.fill == "touched":
        return ["--zero-share", "1", "--touch"]
    return ["--zero-share", "1"]


def run(case, image, binary, channels=2):
    """One migration; returns the run as `--json` tells it, with the command line."""
    with tempfile.TemporaryDirectory(prefix="hotlift-bench-") as folder:
        out = Path(folder) / "runs.json"
        argv = command(case, image, binary, channels, out)
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}")
        runs = json.loads(out.read_text())
    if len(runs) != 1:
        raise SystemExit(f"{len(runs)} runs in the JSON of one setting, expected 1")
    return {**runs[0], "command": argv}
