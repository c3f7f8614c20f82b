"""One migration by `hotlift demo`, which starts both processes and measures itself."""

import json
import subprocess
import tempfile
from pathlib import Path

import machine


def version(binary):
    return subprocess.run([binary, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def command(case, image, binary, channels, json_file, flags=()):
    return [
        binary, "demo", "--guest", "threads", "--workload", "idle",
        "--ram", f"{case.ram_bytes >> 30}G", *_fill(case, image),
        *_method(case, channels), "--zero-page-detection", "multifd", "--max-bandwidth", "0",
        "--json", str(json_file), *flags,
    ]


def _method(case, channels):
    if case.method == "compress":
        # The threads are the default, which is QEMU's.
        return ["--compress=on", f"--compress-level={case.level}"]
    level = ["--level", str(case.level)] if case.level is not None else []
    return ["--method", case.method, *level, "--channels", str(channels)]


def _fill(case, image):
    if case.fill == "image":
        # The folder holds the image and nothing else; its zero pages are already in place.
        return ["--fill", str(Path(image).parent), "--zero-share", "0"]
    if case.fill == "touched":
        return ["--zero-share", "1", "--zero-touched"]
    return ["--zero-share", "1"]


def run(case, image, binary, warm, channels=2, wrapper=(), flags=()):
    """One migration; returns the run as `--json` tells it, with the command line.

    `warm` (machine.WarmMemory) feeds the destination. `wrapper` is a command that runs the command, such as a profiler.
    """
    with tempfile.TemporaryDirectory(prefix="hotlift-bench-") as folder:
        out = Path(folder) / "runs.json"
        argv = command(case, image, binary, channels, out, flags)
        with open(Path(folder) / "output", "w+") as output:
            process = subprocess.Popen([*wrapper, *argv], stdout=output, stderr=subprocess.STDOUT)
            warm.follow(lambda: _second_largest(process.pid))
            if process.wait() != 0:
                output.seek(0)
                raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}:\n{output.read()}")
        runs = json.loads(out.read_text())
    if len(runs) != 1:
        raise SystemExit(f"{len(runs)} runs in the JSON of one setting, expected 1")
    return {**runs[0], "command": argv}


def _second_largest(pid):
    """Bytes in memory of the destination: the source, filled before the start, is the largest."""
    sizes = sorted(map(machine.resident, machine.descendants(pid)), reverse=True)
    return sizes[1] if len(sizes) > 1 else 0
