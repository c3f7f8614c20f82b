"""A process of a run."""

import subprocess
from pathlib import Path


class Process:
    """Killed when the `with` block ends, if it has not ended by itself; what it says on stderr is kept in `folder`."""

    def __init__(self, command, folder, name, **popen):
        self._log = open(Path(folder) / f"{name}.log", "w+b")
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=self._log, **popen)
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._process.kill()
        self._process.wait()

    def stderr(self):
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()
