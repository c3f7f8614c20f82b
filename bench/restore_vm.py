"""VMs for restore.py: their guest, their files in each way, and the QEMUs that restore them."""

import contextlib
import json
import os
import random
import socket
import subprocess
import tempfile
import time
from array import array
from pathlib import Path

from common import MIB, ROOT

PAGE = 4096
VMM = ROOT / "crates/hotlift-vmm"
MACHINE = "pc-i440fx-7.2"
PATIENCE_S = 600
ZERO_SHARE = 0.1
CHANNELS = 2
SEED = 5
# Pages per second: more than any CPU writes.
FULL_SPEED = 50_000_000

# `hotlift-vmm/guest/hotlift.s`: LOAD, head, TABLE, bytes of a record, ERRORS.
LOAD, HEAD_BLOCKS, TABLE, RECORD, ERRORS = 0x100000, 16, 0x200000, 16, 8


class Qemu:
    """A QEMU with the guest, and two QMP sockets: one for this script, and `free_qmp` for a command."""

    def __init__(self, program, folder, ram, options):
        self.folder, self.ram = folder, ram
        own, self.free_qmp = folder / "own.qmp", folder / "free.qmp"
        started = time.monotonic()
        line = [program, "-nodefaults", "-display", "none", "-vga", "none", "-serial", "null", "-bios", "qboot.rom",
                "-accel", "kvm", "-m", f"{ram >> 10}k", "-name", "restored,debug-threads=on"]
        for path in (own, self.free_qmp):
            path.unlink(missing_ok=True)
            line += ["-qmp", f"unix:{path},server=on,wait=off"]
        self.said = open(folder / "stderr", "w+")
        self.process = subprocess.Popen([*line, *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.said)
        self.pid = self.process.pid
        try:
            self.connect(own)
        except BaseException:
            self.end()
            raise
        self.start_ms = round((time.monotonic() - started) * 1e3, 1)

    def connect(self, path):
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(str(path))
                break
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"QEMU does not start: {self.last_words()}")
            time.sleep(0.005)
        sock.settimeout(PATIENCE_S)
        self.stream = sock.makefile("rw")
        self.events = []
        self.read()
        self.ask("qmp_capabilities")
        self.capabilities("events")

    def read(self):
        line = self.stream.readline()
        if not line:
            raise RuntimeError(f"QEMU has ended: {self.last_words()}")
        return json.loads(line)

    def ask(self, command, **arguments):
        arguments = {name.replace("_", "-"): value for name, value in arguments.items()}
        self.stream.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.stream.flush()
        while "event" in (answer := self.read()):
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{command}: {answer['error']['desc']}")
        return answer["return"]

    def capabilities(self, *on, off=()):
        states = [(name, True) for name in on] + [(name, False) for name in off]
        self.ask("migrate-set-capabilities", capabilities=[{"capability": name, "state": state} for name, state in states])

    def events_until(self, is_it):
        """Waits for the first event that `is_it` accepts, and returns its time; earlier events are dropped."""
        while True:
            event = self.events.pop(0) if self.events else self.read()
            if "event" not in event:
                continue
            if event["event"] == "MIGRATION" and event["data"]["status"] == "failed":
                raise RuntimeError(f"{self.ask('query-migrate').get('error-desc', 'failed')} {self.last_words()}")
            if is_it(event):
                moment = event["timestamp"]
                return moment["seconds"] + moment["microseconds"] / 1e6

    def event(self, name):
        # The migration may complete before or after the guest runs: the events in between are still needed.
        passed = []
        moment = self.events_until(lambda event: passed.append(event) or event["event"] == name)
        self.events = passed + self.events
        return moment

    def completed(self):
        return self.events_until(lambda event: event["event"] == "MIGRATION" and event["data"]["status"] == "completed")

    def last_words(self):
        lines = (self.folder / "stderr").read_text().strip().splitlines()
        return lines[-1] if lines else ""

    def end(self):
        self.process.kill()
        self.process.wait()
        self.said.close()


class Counter:
    """Counts the guest's writes since it was saved, from its table. A missing page has no new writes; to
    read it would fetch it."""

    def __init__(self, qemu, saved):
        self.qemu, self.saved = qemu, saved
        self.at = ram_in(qemu)
        self.memory = open(f"/proc/{qemu.pid}/mem", "rb", buffering=0)
        self.pagemap = open(f"/proc/{qemu.pid}/pagemap", "rb", buffering=0)

    def present(self, offset, pages):
        entries = array("Q", os.pread(self.pagemap.fileno(), 8 * pages, (self.at + offset) // PAGE * 8))
        return [entry >> 63 for entry in entries]

    def writes(self):
        count = 0
        sums = self.saved["sums"]
        for page, there in enumerate(self.present(TABLE, len(sums))):
            if there:
                records = os.pread(self.memory.fileno(), PAGE, self.at + TABLE + page * PAGE)
                count += versions(records) - sums[page]
        return count

    def errors(self):
        return int.from_bytes(os.pread(self.memory.fileno(), 8, self.at + self.saved["block"] + ERRORS), "little")


def versions(records):
    """The first half of a record is the number of writes to its page."""
    return sum(array("Q", records)[::2])


def ram_in(qemu):
    found = []
    for text in open(f"/proc/{qemu.pid}/maps"):
        words = text.split()
        start, end = (int(word, 16) for word in words[0].split("-"))
        if end - start == qemu.ram and words[1].startswith("rw"):
            found.append(start)
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} mappings of QEMU may be its RAM")
    return found[0]


def cpu_seconds(qemu):
    """Returns the CPU seconds of QEMU and of its ended children, without its vCPU."""
    ticks = lambda path, fields: sum(map(int, Path(path).read_text().rpartition(")")[2].split()[11:11 + fields]))
    total = ticks(f"/proc/{qemu.pid}/stat", 4)
    for task in Path(f"/proc/{qemu.pid}/task").iterdir():
        if (task / "comm").read_text().startswith("CPU "):
            total -= ticks(task / "stat", 2)
    return total / os.sysconf("SC_CLK_TCK")


class Rig:
    """A VM that runs and is saved, and its files."""

    def __init__(self, arguments, folder, ram):
        self.arguments, self.folder, self.ram = arguments, folder, ram
        self.states = {}
        elf, assembled = folder / "guest.elf", folder / "guest.o"
        subprocess.check_call(["as", "--64", "-o", assembled, VMM / "guest/hotlift.s"])
        subprocess.check_call(["ld", "-T", VMM / "guest/hotlift.ld", "--no-warn-rwx-segments", "--build-id=none", "-o", elf, assembled])
        write_ram(folder / "ram", ram, arguments.working_set // PAGE, arguments.fill)
        settings = f"workload=random rate={arguments.rate} ws={arguments.working_set} seed={SEED}"
        self.guest = ["-kernel", elf, "-append", settings]
        self.source = Qemu(arguments.qemu, folder, ram, [*self.machine(self.backend("on")), *self.guest])
        self.source.ask("migrate-set-parameters", max_bandwidth=0, downtime_limit=3000, multifd_channels=CHANNELS)

    def __enter__(self):
        deadline = time.monotonic() + 60
        while not all(self.table_sums()):
            if time.monotonic() > deadline:
                raise RuntimeError("the guest does not write")
            time.sleep(0.05)
        return self

    def __exit__(self, *_):
        self.end_source()

    def machine(self, backend):
        return ["-object", backend, "-machine", f"{MACHINE},graphics=off,memory-backend=pc.ram"]

    def backend(self, share):
        return f"memory-backend-file,id=pc.ram,mem-path={self.folder / 'ram'},size={self.ram},share={share}"

    @staticmethod
    def saved_by(way):
        """Returns the way whose file a way uses."""
        return "hotlift" if way in ("lazy", "lazy-11", "lazy-remote", "eager") else way

    def files(self, way):
        names = ["ram", "devices"] if way == "raw" else [f"vm.{self.saved_by(way)}"]
        return [self.folder / name for name in names]

    def saved(self, way):
        return self.states[self.saved_by(way)]

    def table_sums(self):
        with open(self.folder / "ram", "rb") as file:
            file.seek(TABLE)
            table = file.read(self.arguments.working_set // PAGE * RECORD)
        return [versions(table[at:at + PAGE]) for at in range(0, len(table), PAGE)]

    def save(self, way):
        """Saves the running guest; it keeps running, except for the last way, whose file is its RAM."""
        qemu, path, report = self.source, self.files(way)[-1], None
        start = time.time()
        if way == "hotlift":
            report, _ = run_hotlift(self.arguments.hotlift, "save", path, "--qmp", qemu.free_qmp, "--method=zstd",
                                    f"--channels={CHANNELS}", "--downtime-limit=3000")
        else:
            on, uri = {"mapped-ram": (("mapped-ram", "multifd"), f"file:{path}"),
                       "zstd": ((), f"exec:zstd -1 -q -f -o {path}"),
                       "raw": (("x-ignore-shared",), f"exec:cat > {path}")}[way]
            qemu.capabilities(*on)
            qemu.ask("migrate", uri=uri)
        qemu.completed()
        seconds = time.time() - start
        self.states[way] = {"sums": self.table_sums(), "block": self.block()}
        if way != "raw":
            time.sleep(0.5)
            qemu.capabilities(off=("mapped-ram", "multifd"))
            qemu.ask("cont")
        for file in self.files(way):
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        return {"seconds": seconds, "file_bytes": sum(os.stat(file).st_blocks * 512 for file in self.files(way)), "report": report}

    def block(self):
        with open(self.folder / "ram", "rb") as file:
            file.seek(LOAD + HEAD_BLOCKS)
            return int.from_bytes(file.read(8), "little")

    def end_source(self):
        self.source.end()

    @contextlib.contextmanager
    def waiting(self, way):
        """Returns a QEMU that waits for the guest in this way."""
        backend = self.backend("off") if way == "raw" else f"memory-backend-ram,id=pc.ram,size={self.ram}"
        program = self.arguments.newer_qemu if way == "lazy-11" else self.arguments.qemu
        qemu = Qemu(program, self.folder, self.ram, [*self.machine(backend), *self.guest, "-incoming", "defer"])
        try:
            qemu.ask("migrate-set-parameters", max_bandwidth=0, multifd_channels=CHANNELS)
            yield qemu
        finally:
            qemu.end()


def restore_content(rig, qemu, way, words):
    """Restores the guest from the file of `words`. Returns Hotlift's report, and the CPU seconds of all but QEMU."""
    path = rig.files(way)[-1]
    if way == "lazy-11":
        qemu.capabilities("postcopy-ram", "postcopy-blocktime")
    if rig.saved_by(way) == "hotlift":
        how = f"--channels={CHANNELS}" if way == "eager" else "--lazy"
        return run_hotlift(rig.arguments.hotlift, "restore", *words, "--qmp", qemu.free_qmp, how)
    on, uri = {"mapped-ram": (("mapped-ram", "multifd"), f"file:{path}"),
               "zstd": ((), f"exec:zstd -dc {path}"),
               "raw": (("x-ignore-shared",), f"exec:cat {path}")}[way]
    qemu.capabilities(*on)
    qemu.ask("migrate-incoming", uri=uri)
    return None, 0


@contextlib.contextmanager
def source(hotlift, way, path):
    """Yields the arguments that name a file: for lazy-remote at a file server on loopback, whose CPU is not counted."""
    if way != "lazy-remote":
        yield (path,)
        return
    with tempfile.TemporaryDirectory(prefix="hotlift-pki-") as folder:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.check_call([hotlift, "certs", "init", "--dir", f"{folder}/ca"], **quiet)
        subprocess.check_call([hotlift, "certs", "host", "localhost", "127.0.0.1", "--dir", f"{folder}/ca", "--out", f"{folder}/pki"], **quiet)
        words = [hotlift, "serve", "--listen=tcp:127.0.0.1:0", f"--files={path.parent}", f"--tls={folder}/pki"]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            address = server.stdout.readline().split()[-1]
            yield f"{address}/{path.name}", f"--tls={folder}/pki"
        finally:
            server.kill()
            server.wait()


def run_hotlift(program, *words):
    process = subprocess.Popen([program, *words, "--json", "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said, errors = process.stdout.read(), process.stderr.read()
    # Not `wait`, which does not return the resource usage.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"hotlift {words[0]}: {errors.strip()}")
    return json.loads(said), usage.ru_utime + usage.ru_stime


def write_ram(path, ram, own_pages, fill):
    """Writes content for all RAM after the guest's table, a part of it zero pages; no two pages are equal."""
    base = -(-(TABLE + own_pages * RECORD) // (2 * MIB)) * 2 * MIB
    corpus = content(fill)
    chance = random.Random(SEED)
    pages = len(corpus) // PAGE
    # Not truncated: it may be the RAM of a QEMU that has put a program there.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        file.truncate(ram)
        file.seek(base)
        for number in range((ram - base) // PAGE):
            turn, page = divmod(number, pages)
            if page == 0:
                # Another constant each time, so that no window finds a repetition.
                changed = corpus.translate(bytes(byte ^ turn * 37 & 0xff for byte in range(256)))
            if chance.random() < ZERO_SHARE:
                file.seek(PAGE, os.SEEK_CUR)
                continue
            page_bytes = changed[page * PAGE:(page + 1) * PAGE]
            if number < own_pages:
                # The record of a page that was never written.
                slot = number % 64 * 64
                page_bytes = page_bytes[:slot] + bytes(RECORD) + page_bytes[slot + RECORD:]
            file.write(page_bytes)


def content(fill):
    """Returns all files of a folder, concatenated, or words."""
    if fill is None:
        chance = random.Random(SEED)
        words = [bytes(chance.choices(b"etaoinshrdlu", k=chance.randint(2, 9))) + b" " for _ in range(4000)]
        return b"".join(chance.choices(words, k=3 << 20))
    packed = sorted(fill.glob("*.zst"))
    if packed:
        return b"".join(subprocess.check_output(["zstd", "-dcq", path]) for path in packed)
    return b"".join(path.read_bytes() for path in sorted(fill.iterdir()) if path.is_file())
