#!/usr/bin/env python3
"""Moves domains of libvirt to and fro through the agents of two hosts, with faults, and watches what the agents hold.

    sudo bench/soak.py --hours 2 --domains 8 --out bench/results/DATE-soak
    bench/soak.py --table bench/results/DATE-soak/agents.jsonl

Two hosts as in agent.py. A domain is chosen at random, and `virsh migrate --live` moves it to the other host; two are under way
at a time. Every third meets a fault: the command is aborted, the session cancelled at an agent, the link down for some
seconds, or the configuration of both agents read again. A fault may meet the other migration, too, so neither has multifd then;
the others have. After each migration the domain runs on one host, and only there; its guest has gone on, and has found no page
that is not what it wrote. One that libvirt has left paused, on one host alone, is let go on there, as an operator would. Once
a minute each agent's resident memory, files, threads and the lines of its nftables rules are kept in `agents.jsonl`, and each
migration in `migrations.jsonl`.

At the end the medians of the first tenth, after the first five minutes, and of the last tenth are held against each other: more files,
threads or rules, or a tenth more memory, is a failure.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

from agent import Rig
from common import HOTLIFT, add_guest_options, read_runs

AT_ONCE = 2
SAMPLE_S = 60
WARM_UP_S = 300
LINK_DOWN_S = 3
SETTLE_S = 60
RAM = 64 << 20
# QEMU 7.2 may end by an assertion of its own when multifd channels break early (docs/libvirt.md).
PLAIN = ()
PARALLEL = ("--parallel", "--parallel-connections", "2")
FAULTS = ("abort", "cancel", "link", "reload")
# Resources of an agent, and the factor of growth that is not a leak.
HELD = {"resident_kib": 1.1, "files": 1.0, "threads": 1.0, "rules": 1.0}


class Soak:
    """The domains and their hosts."""

    def __init__(self, rig, arguments, pids, kept):
        self.rig, self.arguments, self.kept = rig, arguments, kept
        self.agents = dict(zip((rig.a, rig.b), pids))
        self.chance = random.Random(arguments.seed)
        self.lock = threading.Lock()
        self.free = [f"vm{number}" for number in range(arguments.domains)]
        self.at = dict.fromkeys(self.free, rig.a)
        self.under_way = []
        self.wrong = []
        self.over = time.monotonic() + arguments.hours * 3600

    def run(self):
        threads = [threading.Thread(target=self.move_on) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.sample()
            threads[0].join(SAMPLE_S)
        self.sample()

    def move_on(self):
        while time.monotonic() < self.over and not self.wrong:
            with self.lock:
                name = self.free.pop(self.chance.randrange(len(self.free)))
                fault = self.chance.choice(FAULTS) if self.chance.random() < 1 / 3 else None
                delay = self.chance.uniform(0, 1)
            ways = self.begin(fault)
            try:
                self.move(name, fault, delay, ways)
            except Exception as error:  # Whatever it is, the soak has failed.
                self.wrong.append(f"{name}: {error!r}")
                self.wrong += [f"{name} at {host.name}: {self.words_of_qemu(host, name)}" for host in self.agents]
            with self.lock:
                self.under_way.remove(ways)
                self.free.append(name)
            time.sleep(self.arguments.rest)

    def begin(self, fault):
        """Returns options of a migration that may run now, next to the other."""
        while True:
            with self.lock:
                if not fault or PARALLEL not in self.under_way:
                    ways = PLAIN if fault or PLAIN in self.under_way else PARALLEL
                    self.under_way.append(ways)
                    return ways
            time.sleep(0.1)

    def words_of_qemu(self, host, name):
        log = host.path(f"/var/log/libvirt/qemu/{name}.log")
        return log.read_text()[-1000:] if log.exists() else "no log"

    def move(self, name, fault, delay, ways):
        start, there = self.at[name], self.other(self.at[name])
        said = self.console(name)
        words = ("virsh", "--quiet", "migrate", "--live", *ways, name, f"qemu+tcp://{there.name}/system")
        process = subprocess.Popen(start.words(*words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if fault:
            time.sleep(delay)
            self.break_it(fault, start, there, name)
        _, why = process.communicate(timeout=agent.PATIENCE_S * 5)
        settled = self.settle(name)
        if settled and not (process.returncode and (fault == "link" or self.was_disturbed(why))):
            raise RuntimeError(f"it was left paused: {settled}; {why.strip()}")
        agent.wait_for(lambda: self.console(name) > said)
        run = {"name": name, "fault": fault, "moved": self.at[name] is there, "said": why.strip(), **settled, **stamp()}
        with self.lock:
            print(json.dumps(run), file=self.kept["migrations"], flush=True)
        if process.returncode and not fault and not self.was_disturbed(why):
            raise RuntimeError(why.strip())

    def settle(self, name):
        """Finds the host that it runs on; returns the states if it ran on none. libvirt may leave a guest paused if the link was down at its handover."""
        deadline = time.monotonic() + SETTLE_S
        while len(self.runs_at(name)) != 1 and time.monotonic() < deadline:
            time.sleep(0.2)
        settled = {}
        if not self.runs_at(name):
            states = {host: self.state(host, name) for host in self.agents}
            settled = {"settled": {host.name: state for host, state in states.items()}}
            paused = [host for host, state in states.items() if state.startswith("paused")]
            if len(paused) == 1 and "none" in states.values():
                paused[0].virsh("resume", name)
        if len(self.runs_at(name)) != 1:
            raise RuntimeError(f"it does not run on one host: { {host.name: self.state(host, name) for host in self.agents} }")
        self.at[name] = self.runs_at(name)[0]
        return settled

    def state(self, host, name):
        if name not in host.virsh("list", "--all", "--name").split():
            return "none"
        return host.virsh("domstate", "--reason", name)

    def was_disturbed(self, why):
        """True if another migration's fault was the link or a reload: it may affect this one, too."""
        return any(word in why for word in ("closed", "reset", "timed out", "Broken pipe", "Bad file descriptor", "unexpectedly failed", "unable to connect", "No route to host", "cannot connect"))

    def break_it(self, fault, here, there, name):
        if fault == "abort":
            subprocess.run(here.words("virsh", "--quiet", "domjobabort", name), capture_output=True)
        elif fault == "cancel":
            listed = here.run(self.arguments.hotlift, "agent", "list", "--control=/run/agent.sock", "--json")
            under_way = [str(row["id"]) for row in json.loads(listed) if row["status"] not in ("completed", "failed", "cancelled")]
            for migration in under_way[:1]:
                subprocess.run(here.words(self.arguments.hotlift, "agent", "cancel", "--control=/run/agent.sock", migration), capture_output=True)
        elif fault == "link":
            self.rig.a.run("ip", "link", "set", "dev", "veth", "down")
            time.sleep(LINK_DOWN_S)
            self.rig.a.run("ip", "link", "set", "dev", "veth", "up")
        else:
            for pid in self.agents.values():
                subprocess.run(["kill", "-HUP", str(pid)], check=True)

    def other(self, host):
        return self.rig.b if host is self.rig.a else self.rig.a

    def runs_at(self, name):
        return [host for host in self.agents if name in host.virsh("list", "--name", "--state-running").split()]

    def console(self, name):
        """Checks the guest's console for errors, and returns the number of its status lines."""
        # The last line may be incomplete.
        lines = (self.rig.folder / f"{name}.console").read_text().split("\n")[:-1]
        whole = [line for line in lines if "writes=" in line and "errors=" in line]
        figures = dict(word.split("=") for word in whole[-1].split()[1:])
        if int(figures["errors"]):
            raise RuntimeError(f"its guest says {whole[-1]}")
        return len(whole)

    def sample(self):
        for host, pid in self.agents.items():
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
            held = {
                "host": host.name,
                "resident_kib": int(status["VmRSS"].split()[0]),
                "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
                "threads": int(status["Threads"]),
                "rules": len(host.run("nft", "list", "ruleset").splitlines()),
                "since_s": round(self.arguments.hours * 3600 - (self.over - time.monotonic())),
                **stamp(),
            }
            print(json.dumps(held), file=self.kept["agents"], flush=True)


def stamp():
    return {"time": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def table(samples):
    """Returns Markdown, and the resources of which an agent holds more at the end."""
    out = ["| agent | what | at first | at the end | most |", "|---|---|---|---|---|"]
    leaks = []
    for host in sorted({sample["host"] for sample in samples}):
        mine = [sample for sample in samples if sample["host"] == host]
        mine = [sample for sample in mine if sample["since_s"] >= WARM_UP_S] or mine
        tenth = max(1, len(mine) // 10)
        for what, more in HELD.items():
            values = [sample[what] for sample in mine]
            first, last = median(values[:tenth]), median(values[-tenth:])
            out.append(f"| {host} | {what} | {first:g} | {last:g} | {max(values)} |")
            # Resources of a migration in progress.
            slack = 0 if what in ("resident_kib", "rules") else 40
            if last > first * more + slack:
                leaks.append(f"{host}: {what} {first:g} -> {last:g}")
    return "\n".join(out), leaks


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hotlift", type=Path, default=HOTLIFT)
    parser.add_argument("--hours", type=float, default=2)
    parser.add_argument("--domains", type=int, default=8)
    parser.add_argument("--rest", type=float, default=0, help="seconds between two migrations of a thread")
    parser.add_argument("--seed", type=int, default=1)
    add_guest_options(parser, rate=200, working_set="16M")
    parser.add_argument("--out", type=Path, default=Path("hotlift-soak"))
    parser.add_argument("--table", type=Path, help="print the table of what was kept")
    parser.set_defaults(downtime_limit=300)
    return parser.parse_args()


def main():
    arguments = parse()
    if arguments.table:
        print(table(read_runs(arguments.table))[0])
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.hotlift = arguments.hotlift.resolve()
    kept = {name: open(arguments.out / f"{name}.jsonl", "a") for name in ("agents", "migrations")}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rig = Rig(arguments, Path(folder))
        try:
            for number in range(arguments.domains):
                rig.domain(f"vm{number}", RAM, is_one_of_many=True)
            with rig.agents() as pids:
                soak = Soak(rig, arguments, pids, kept)
                soak.run()
        finally:
            rig.end()
    said, leaks = table(read_runs(arguments.out / "agents.jsonl"))
    moves = read_runs(arguments.out / "migrations.jsonl")
    moved = sum(move["moved"] for move in moves)
    print(f"{said}\n\n{len(moves)} migrations, {sum(bool(move['fault']) for move in moves)} with a fault; {moved} moved; "
          f"{sum('settled' in move for move in moves)} were left paused, and resumed.")
    for wrong in [*soak.wrong, *leaks]:
        print(f"WRONG: {wrong}")
    return 1 if soak.wrong or leaks else 0


if __name__ == "__main__":
    sys.exit(main())
