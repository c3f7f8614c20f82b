#!/usr/bin/env python3
"""Measures libvirt's migrations with and without the agents of the hosts, and a drain.

    sudo bench/agent.py --ram 2G --repeats 3 --fill ../shared/silesia --out bench/results/DATE-agent
    bench/agent.py --table bench/results/DATE-agent/runs.jsonl

Two hosts as in the tests (`scripts/libvirt-host`) with a veth pair that `tc tbf` limits. The guest is `hotlift-vmm/guest/hotlift.s`
on one vCPU under KVM and QEMU 7.2; all of its RAM has content, a tenth of it zero pages. Time is that of the command; downtime is
what libvirt counts at the destination; QEMU may choose it up to --downtime-limit.

| kind | what |
|---|---|
| plain | `virsh migrate --live --parallel`, no agent |
| agent | the same command, the agents redirect it |
| relays | two bare relays with method auto, and the command of `plain` through them; the agents are not there |
| domain | `hotlift migrate --domain --parallel`, no rule |
| drain | `hotlift drain` of several domains, with the agents |
| all | the same domains by `virsh migrate` all at once, with the agents |
| all-plain | the same domains all at once, no agent |
| each | the same domains one after the other, no agent |
| idle | an agent that carries nothing: resident memory, and how often its threads wake up in ten seconds |
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from common import HOTLIFT, ROOT, add_guest_options, read_runs, size
from restore_vm import VMM, write_ram

LINKS = ("200mbit", "1gbit", "none")
KINDS = ("plain", "agent", "relays", "domain", "drain", "all", "all-plain", "each", "idle")
OF_DRAIN = ("drain", "all", "all-plain", "each")
CHANNELS = 2
# Ports of the destination's QEMU and the source's relay, and of the destination's relay.
QEMU_PORT, RELAY_PORT = 49300, 49301
# The guest program waits in a loop, because it has no interrupts. With several guests, each gets a part of a core, as idle
# guests need, or they would fill a small machine. Uses libvirt's <cputune> (us), which needs control groups of version 1.
SHARE_PERIOD_US, SHARE_QUOTA_US = 20000, 1000
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
HAS_SHARES = (CPU_GROUPS / "tasks").exists()
IDLE_S = 10
PATIENCE_S = 60


class Host:
    """A host in namespaces that end with this process."""

    def __init__(self, name, folder):
        self.name = name
        line = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", ROOT / "scripts/libvirt-host"]
        self.group = CPU_GROUPS / f"hotlift-{folder.name}-{name}"
        if HAS_SHARES:
            self.group.mkdir()
        words = [name, folder, *([self.group] if HAS_SHARES else [])]
        self.holder = subprocess.Popen([*line, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.holder.stdout.readline().strip() != "stands":
            raise RuntimeError("scripts/libvirt-host says why")
        self.init = children(self.holder.pid)[0]

    def words(self, *words):
        return ["nsenter", f"--target={self.init}", "--all", "setpriv", "--pdeathsig", "KILL", *map(str, words)]

    def run(self, *words):
        done = subprocess.run(self.words(*words), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout.strip()

    def virsh(self, *words):
        return self.run("virsh", "--quiet", *words)

    def path(self, path):
        return Path(f"/proc/{self.init}/root{path}")

    def start_libvirtd(self):
        self.run("libvirtd", "--daemon", "--listen", "--pid-file", "/run/libvirtd.pid")
        wait_for(lambda: subprocess.run(self.words("virsh", "uri"), capture_output=True).returncode == 0)

    def end(self):
        self.holder.stdin.close()
        self.holder.wait()
        for group, _, _ in os.walk(self.group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(group)


def children(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    wait_for(lambda: path.read_text())
    return [int(child) for child in path.read_text().split()]


def wait_for(look):
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        if time.monotonic() > deadline:
            raise RuntimeError("what was waited for has not come")
        time.sleep(0.05)


class Rig:
    """Two hosts, their link, and the content of RAM."""

    def __init__(self, arguments, folder):
        self.arguments, self.folder = arguments, folder
        folder.chmod(0o777)
        self.a, self.b = Host("a", folder), Host("b", folder)
        subprocess.check_call(["ip", "link", "add", "veth", "netns", str(self.a.init), "type", "veth", "peer", "name", "veth",
                               "netns", str(self.b.init)])
        for host, number in ((self.a, 1), (self.b, 2)):
            host.run("ip", "address", "add", f"192.0.2.{number}/24", "dev", "veth")
            host.run("ip", "link", "set", "dev", "veth", "up")
            host.start_libvirtd()
        elf, assembled = folder / "guest.elf", folder / "guest.o"
        subprocess.check_call(["as", "--64", "-o", assembled, VMM / "guest/hotlift.s"])
        subprocess.check_call(["ld", "-T", VMM / "guest/hotlift.ld", "--no-warn-rwx-segments", "--build-id=none", "-o", elf, assembled])
        self.certificates()

    def certificates(self):
        hotlift, pki = self.arguments.hotlift, self.folder / "pki"
        subprocess.check_call([hotlift, "certs", "init", "--dir", pki], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for host, address in ((self.a, "192.0.2.1"), (self.b, "192.0.2.2")):
            subprocess.check_call([hotlift, "certs", "host", host.name, address, "--dir", pki, "--out", self.folder / f"{host.name}.hotlift"],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def limit(self, link):
        for host in (self.a, self.b):
            with contextlib.suppress(RuntimeError):
                host.run("tc", "qdisc", "delete", "dev", "veth", "root")
            if link != "none":
                host.run("tc", "qdisc", "add", "dev", "veth", "root", "tbf", "rate", link, "burst", "256k", "limit", "2m")

    def domain(self, name, ram, is_one_of_many=False):
        console = self.folder / f"{name}.console"
        console.write_text("")
        console.chmod(0o666)
        rate, working_set = self.arguments.rate, self.arguments.working_set
        settings = f"workload=random rate={rate} ws={working_set} seed=5"
        share = f"<cputune><period>{SHARE_PERIOD_US}</period><quota>{SHARE_QUOTA_US}</quota></cputune>"
        xml = self.folder / f"{name}.xml"
        xml.write_text(
            f"<domain type='kvm'><name>{name}</name><memory unit='KiB'>{ram >> 10}</memory>"
            "<memoryBacking><source type='file'/><access mode='shared'/></memoryBacking><vcpu>1</vcpu>"
            f"{share if is_one_of_many and HAS_SHARES else ''}"
            "<os><type arch='x86_64' machine='pc-i440fx-7.2'>hvm</type><loader type='rom'>/usr/share/qemu/qboot.rom</loader>"
            f"<kernel>{self.folder / 'guest.elf'}</kernel><cmdline>{settings}</cmdline></os><features><acpi/></features><devices>"
            f"<controller type='usb' model='none'/><serial type='file'><source path='{console}' append='on'/></serial>"
            "<memballoon model='none'/></devices></domain>")
        self.a.virsh("create", "--paused", xml)
        number = self.a.virsh("domid", name)
        write_ram(self.a.path(f"/run/ram/libvirt/qemu/{number}-{name}/pc.ram"), ram, working_set >> 12, self.arguments.fill)
        self.a.virsh("migrate-setmaxdowntime", name, str(self.arguments.downtime_limit))
        self.a.virsh("resume", name)
        wait_for(lambda: "writes=" in console.read_text())

    def destroy(self, name):
        for host in (self.a, self.b):
            with contextlib.suppress(RuntimeError):
                host.virsh("destroy", name)

    @contextlib.contextmanager
    def agents(self, *config):
        """Starts an agent on each host; yields their process ids."""
        processes = []
        try:
            for host in (self.a, self.b):
                file = self.folder / f"{host.name}.toml"
                file.write_text("\n".join([f'tls = "{self.folder}/{host.name}.hotlift"', 'control = "/run/agent.sock"', 'metrics = ""',
                                           *config]) + "\n")
                log = open(self.folder / f"{host.name}.log", "w+")
                words = host.words(self.arguments.hotlift, "agent", "run", f"--config={file}")
                processes.append(subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT))
                wait_for(lambda: "listening on" in Path(log.name).read_text())
            yield [children(process.pid)[0] for process in processes]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, IndexError):
                    os.kill(children(process.pid)[0], 15)
                process.wait()
            # The agents' tables stay: without an agent no migration would leave.
            for host in (self.a, self.b):
                host.run(self.arguments.hotlift, "agent", "rules", "--remove")

    @contextlib.contextmanager
    def relays(self):
        """Starts a relay on each host for one migration."""
        lines = ((self.b, "destination", f"tcp:0.0.0.0:{RELAY_PORT}", f"tcp:127.0.0.1:{QEMU_PORT}"),
                 (self.a, "source", f"tcp:127.0.0.1:{QEMU_PORT}", f"tcp:192.0.2.2:{RELAY_PORT}"))
        processes = []
        try:
            for host, side, listen, connect in lines:
                words = (self.arguments.hotlift, "relay", side, f"--listen={listen}", f"--connect={connect}", "--quiet",
                         f"--tls={self.folder}/{host.name}.hotlift", f"--channels={CHANNELS}")
                process = subprocess.Popen(host.words(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                processes.append(process)
                if "listening on" not in (said := process.stdout.readline()):
                    raise RuntimeError(said)
            yield
            # They end with the migration.
            for process in processes:
                process.wait(PATIENCE_S)
        finally:
            for process in processes:
                process.kill()

    def failures(self):
        """Returns the agents' log lines about failed migrations, by host."""
        logs = {host.name: self.folder / f"{host.name}.log" for host in (self.a, self.b)}
        return {name: [line for line in log.read_text().splitlines() if "state=failed" in line] for name, log in logs.items() if log.exists()}

    def end(self):
        self.a.end()
        self.b.end()


def migrate(rig, name, *options):
    return rig.a.words("virsh", "--quiet", "migrate", "--live", "--parallel", "--parallel-connections", CHANNELS, *options, name,
                       "qemu+tcp://b/system")


def ran(*lines):
    """Runs commands concurrently, and returns the seconds until all have ended."""
    start = time.monotonic()
    begun = [subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for line in lines]
    for process in begun:
        _, said = process.communicate()
        if process.returncode:
            raise RuntimeError(said.strip())
    return time.monotonic() - start


def downtime(rig, name):
    said = rig.b.virsh("domjobinfo", name, "--completed", "--rawstats")
    figures = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
    return int(figures.get("downtime", 0))


def idle(rig):
    switches = lambda pid: sum(int(line.split()[1]) for task in Path(f"/proc/{pid}/task").iterdir()
                               for line in (task / "status").read_text().splitlines() if line.startswith("voluntary_ctxt"))
    with rig.agents() as (pid, _):
        time.sleep(1)
        before = switches(pid)
        time.sleep(IDLE_S)
        resident = next(int(line.split()[1]) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
        return {"resident_kib": resident, "wake_ups": switches(pid) - before}


def one(rig, kind, ram, link):
    """Runs one migration or several."""
    if kind == "idle":
        return idle(rig)
    count = rig.arguments.domains if kind in OF_DRAIN else 1
    names = [f"vm{number}" for number in range(count)]
    size = ram // count
    hotlift = rig.arguments.hotlift
    rig.limit("none")
    try:
        for name in names:
            rig.domain(name, size, is_one_of_many=count > 1)
        rig.limit(link)
        with contextlib.ExitStack() as stack:
            if kind in ("agent", "drain", "all"):
                stack.enter_context(rig.agents())
            if kind == "domain":
                stack.enter_context(rig.agents("redirect = false"))
            if kind == "relays":
                stack.enter_context(rig.relays())
                to_relay = (f"--migrateuri=tcp://127.0.0.1:{QEMU_PORT}", "--listen-address=127.0.0.1")
                seconds = ran(migrate(rig, names[0], *to_relay))
            elif kind == "domain":
                seconds = ran(rig.a.words(hotlift, "migrate", f"--domain={names[0]}", "--to=qemu+tcp://b/system", f"--parallel={CHANNELS}",
                                          f"--tls={rig.folder}/a.hotlift", "--method=auto", "--quiet"))
            elif kind == "drain":
                seconds = ran(rig.a.words(hotlift, "drain", "--to=qemu+tcp://b/system", f"--parallel={CHANNELS}", "--quiet"))
            elif kind == "each":
                seconds = sum(ran(migrate(rig, name)) for name in names)
            else:
                seconds = ran(*(migrate(rig, name) for name in names))
        return {"seconds": round(seconds, 3), "downtime_ms": [downtime(rig, name) for name in names]}
    finally:
        for name in names:
            rig.destroy(name)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hotlift", type=Path, default=HOTLIFT)
    parser.add_argument("--ram", type=size, default=size("2G"), help="of the domain, or of all domains together")
    parser.add_argument("--domains", type=int, default=8, help="of a drain")
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--downtime-limit", type=int, default=30, help="ms")
    add_guest_options(parser, rate=200, working_set="16M")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of what was kept")
    return parser.parse_args()


def table(runs):
    """Returns Markdown: medians of each kind by link."""
    out = ["| link | kind | seconds | of plain, or of all | downtime, ms |", "|---|---|---|---|---|"]
    moved = [run for run in runs if "seconds" in run]
    for link in LINKS:
        of = {kind: [run for run in moved if (run["link"], run["kind"]) == (link, kind)] for kind in KINDS}
        base = {kind: median(run["seconds"] for run in of[kind]) if of[kind] else 0 for kind in ("plain", "all")}
        for kind, mine in of.items():
            if not mine:
                continue
            seconds = median(run["seconds"] for run in mine)
            beside = base["all" if kind in OF_DRAIN else "plain"]
            share = f"{seconds / beside:.2f}" if beside else "–"
            out.append(f"| {link} | {kind} | {seconds:.2f} | {share} | {median(max(run['downtime_ms']) for run in mine):.0f} |")
    for run in runs:
        if run["kind"] == "idle" and "resident_kib" in run:
            out.append(f"\nAn idle agent: {run['resident_kib'] / 1024:.1f} MiB resident, {run['wake_ups']} wake-ups in {IDLE_S} s.")
    return "\n".join(out)


def main():
    arguments = parse()
    if arguments.table:
        return print(table(read_runs(*arguments.table)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.hotlift = arguments.hotlift.resolve()
    failed = 0
    with open(arguments.out / "runs.jsonl", "a") as kept, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rig = Rig(arguments, Path(folder))
        try:
            for repeat in range(arguments.repeats):
                for link in arguments.links.split(","):
                    for kind in arguments.kinds.split(","):
                        if kind == "idle" and (repeat, link) != (0, arguments.links.split(",")[0]):
                            continue
                        run = {"kind": kind, "link": link, "ram_bytes": arguments.ram, "repeat": repeat}
                        try:
                            run |= one(rig, kind, arguments.ram, link)
                        except RuntimeError as error:
                            run |= {"failed": str(error), "agents": rig.failures()}
                            failed += 1
                        print(json.dumps(run), file=kept, flush=True)
                        print(json.dumps(run), flush=True)
        finally:
            rig.end()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
