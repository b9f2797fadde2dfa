"""Where the processor time of a round goes: each process, each of its threads, and the kinds of work in them.

    python benchmarks/where.py resnet50 [--how in-place] [--rule sgd] [--transport tcp] [--rounds 50]
    python benchmarks/where.py small --no-keys

A scheduler, servers and workers run on this machine as for a user, with keys unless ``--no-keys``.
Workers push and pull the arrays of a workload of ``kvps bench``, and check every number. In each
process the functions of :data:`WORK` are timed: a function's time is without that of timed
functions that it calls. Each process states its times before the first measured round and after
the last, while all workers stand still. Printed are milliseconds per round: processor time (CPU)
of each thread, from the kernel, and within it of each kind of work. ``waiting`` is time in the
poll of the loop, and takes no processor.

The checks of the workers (fresh values, comparison) run in their main thread, outside of a step, and are left
out: a worker's main thread counts only within ``step()``. Timers cost about a microsecond a call.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STATE_MAX_S = 10.0
"""The longest that a process may take to state its times."""
WORK = (
    ("waiting", "zmq:Poller.poll"),
    ("copies", "kvps.core.worker.plan:ChunkSlice.gather"),
    ("copies", "kvps.core.worker.plan:ChunkSlice.scatter"),
    ("copies", "kvps.store.arguments:reduce"),
    ("arithmetic", "kvps.core.gradients:GradientSum.into"),
    ("arithmetic", "kvps.core.optim.base:Updater.apply"),
    ("packets to frames", "kvps.protocol.wire:encode"),
    ("frames to packets", "kvps.net.doorman:Doorman.decode"),
    ("sending", "zmq:Socket.send_multipart"),
    ("receiving", "zmq:Socket.recv"),
    ("step", "kvps.tools.bench.worker:Copying.step"),
    ("step", "kvps.tools.bench.worker:InPlace.step"),
)
"""(kind of work, module:function) of the functions that are timed."""
Times = dict[str, dict[str, dict[str, float]]]
"""thread -> kind of work -> ``calls``, ``cpu_ms``, ``wall_ms``; the kind "" is the thread's whole time."""


class Timers:
    """Times of functions in this process, by thread and kind of work, each without the timed
    functions in it."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._totals: dict[tuple[str, str], list[int]] = {}

    def patch(self, kind: str, place: str) -> None:
        """Time the function at ``module:Class.name`` or ``module:name`` from now on."""
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, self._timed(kind, getattr(owner, name)))

    def _timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        local, totals = self._local, self._totals

        @functools.wraps(function)
        def timed(*args: Any, **named: Any) -> Any:
            outer = getattr(local, "within", None)
            local.within = within = [0, 0]
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            try:
                return function(*args, **named)
            finally:
                cpu = time.thread_time_ns() - cpu
                wall = time.perf_counter_ns() - wall
                local.within = outer
                if outer is not None:
                    outer[0] += cpu
                    outer[1] += wall
                total = totals.setdefault((threading.current_thread().name, kind), [0, 0, 0])
                total[0] += 1
                total[1] += cpu - within[0]
                total[2] += wall - within[1]

        return timed

    def state(self) -> Times:
        """Return all times since the process began, with the processor time of each thread from
        the kernel."""
        found: Times = {}
        for (thread, kind), (calls, cpu, wall) in list(self._totals.items()):
            times = {"calls": calls, "cpu_ms": cpu / 1e6, "wall_ms": wall / 1e6}
            found.setdefault(thread, {})[kind] = times
        named = {field.native_id: field.name for field in threading.enumerate()}
        for task in Path("/proc/self/task").iterdir():
            name = named.get(int(task.name)) or (task / "comm").read_text().strip()
            on_cpu_ms = int((task / "schedstat").read_text().split()[0]) / 1e6
            whole = found.setdefault(name, {}).setdefault("", {"cpu_ms": 0.0})
            whole["cpu_ms"] += on_cpu_ms
        return found


def main() -> None:
    """Start a cluster of this machine and print where its time goes; or be one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", help="a workload of kvps bench, such as resnet50, small, keys:1000")
    parser.add_argument("--how", default="copy", help="copy, in-place, in-place-pushpull, or a codec (copy)")
    parser.add_argument("--rule", default="sum", help="sum or sgd (sum)")
    parser.add_argument("--transport", default="auto", help="auto, shm or tcp (auto)")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--no-keys", action="store_true", help="clear text over TCP, as in 0.1")
    parser.add_argument("--json", metavar="FILE", help="write all times to FILE")
    parser.add_argument("--as-role", nargs=2, metavar=("ROLE", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_role:
        be(*given.as_role, given)
        return
    with tempfile.TemporaryDirectory() as folder:
        found, rounds_ms = measure(given, Path(folder))
    print(f"{given.workload}, {given.how}, {given.rule}, {given.transport}, "
          f"{'no keys' if given.no_keys else 'keys'}: {given.workers} workers, {given.servers} servers; "
          f"median round {statistics.median(rounds_ms):.2f} ms of {given.rounds}")  # fmt: skip
    report(found, given.rounds)
    if given.json:
        Path(given.json).write_text(json.dumps({"rounds_ms": rounds_ms, "processes": found}))


def be(role: str, file: str, given: argparse.Namespace) -> None:
    """Be one process: time its work, and append its times to ``file`` at each SIGUSR2."""
    timers = Timers()
    for kind, place in WORK:
        timers.patch(kind, place)

    def state(number: int, frame: object) -> None:
        with Path(file).open("a") as out:
            out.write(json.dumps(timers.state()) + "\n")

    signal.signal(signal.SIGUSR2, state)
    if role == "server":
        from kvps.cli import server

        sys.exit(server.main([]))
    from kvps.tools.bench import rounds, worker
    from kvps.tools.bench.workloads import shapes_of

    system = worker.make(shapes_of(given.workload), given.how, given.rule)
    gate = (0, 1) if system.rank == 0 else None
    times_ms = rounds.measure(system, given.rule, given.rounds, gate, given.how)
    system.close()
    if gate is not None:
        sys.stderr.write(json.dumps(times_ms) + "\n")


def measure(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Times], list[float]]:
    """Run all processes; return the times of each, and those of the rounds, in milliseconds."""
    from kvps.tools.bench.local import THREADS, free_port

    address = f"tcp://127.0.0.1:{free_port()}"
    env = dict(os.environ) | THREADS | {"KVPS_SCHEDULER": address}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env["KVPS_TRANSPORT"] = given.transport
    safe = ["--insecure"]
    if not given.no_keys:
        keys = folder / "keys"
        kvps("keygen", str(keys), env=env)
        safe = ["--keys", str(keys)]
        env["KVPS_KEYS"] = str(keys)
    sizes = ["--workers", str(given.workers), "--servers", str(given.servers), "--bind", address]
    argv = [sys.executable, "-m", "kvps.cli.scheduler", *sizes, *safe]
    started: list[subprocess.Popen[bytes]] = [subprocess.Popen(argv, env=env)]
    named: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in names(given):
            role = name.split()[0]
            again = [sys.executable, __file__, *sys.argv[1:], "--as-role", role, folder / name]
            named[name] = subprocess.Popen(
                [str(item) for item in again],
                env=env | ({"KVPS_RANK": name.split()[1]} if role == "worker" else {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if name == "worker 0" else None,
                stderr=subprocess.PIPE if name == "worker 0" else None,
            )
            started.append(named[name])
        first = named["worker 0"]
        assert first.stdin is not None
        assert first.stdout is not None
        states = []
        for _ in range(2):
            if not first.stdout.read(1):
                _, last_words = first.communicate()
                raise SystemExit(f"worker 0 has ended:\n{last_words.decode()}")
            states.append(stated(named, folder, len(states) + 1))
            first.stdin.write(b".")
            first.stdin.flush()
        _, text = first.communicate()
        for process in started:
            process.wait(30)
    finally:
        for process in started:
            process.kill()
            process.wait()
    before, after = states
    found = {name: between(before[name], after[name]) for name in named}
    return found, json.loads(text.splitlines()[-1])


def names(given: argparse.Namespace) -> list[str]:
    """Return the names of the processes that are timed."""
    servers = [f"server {index}" for index in range(given.servers)]
    return [*servers, *(f"worker {rank}" for rank in range(given.workers))]


def kvps(*argv: str, env: dict[str, str]) -> None:
    """Run a command of kvps, without what it says when all is well."""
    command = [sys.executable, "-m", "kvps.cli.main", *argv]
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)


def stated(named: dict[str, subprocess.Popen[bytes]], folder: Path, count: int) -> dict[str, Times]:
    """Ask all processes for their times so far; each has been asked ``count`` times then."""
    for process in named.values():
        process.send_signal(signal.SIGUSR2)
    found = {}
    deadline = time.monotonic() + STATE_MAX_S
    for name in named:
        while len(lines := lines_of(folder / name)) < count:
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} has not stated its times in {STATE_MAX_S:g} s")
            time.sleep(0.01)
        found[name] = json.loads(lines[count - 1])
    return found


def lines_of(file: Path) -> list[str]:
    """Return the whole lines of a file that may not be there yet."""
    return file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []


def between(before: Times, after: Times) -> Times:
    """Return what was added to ``before``."""
    return {
        thread: {
            kind: {
                what: value - before.get(thread, {}).get(kind, {}).get(what, 0.0)
                for what, value in times.items()
            }
            for kind, times in kinds.items()
        }
        for thread, kinds in after.items()
    }


def rows(name: str, times: Times, rounds: int) -> Iterator[tuple[str, str, float, float, float]]:
    """Yield (thread, kind, calls, CPU ms, wall ms) of one process, for one round."""
    for thread, kinds in sorted(times.items()):
        steps = kinds.get("step", {})
        is_script = name.startswith("worker") and thread == "MainThread"
        inner = [item for kind, item in kinds.items() if kind and kind != "step"]
        whole_ms = kinds.get("", {}).get("cpu_ms", 0.0)
        if is_script:
            whole_ms = steps.get("cpu_ms", 0.0) + sum(item["cpu_ms"] for item in inner)
        if whole_ms / rounds < 0.005:
            continue
        yield thread, "all", 0, whole_ms / rounds, 0.0
        for kind, item in sorted(kinds.items()):
            if kind and kind != "step":
                yield thread, kind, *(item[what] / rounds for what in ("calls", "cpu_ms", "wall_ms"))
        rest_ms = whole_ms - sum(item["cpu_ms"] for item in inner)
        if inner:
            yield thread, "everything else", 0, rest_ms / rounds, 0.0


def report(found: dict[str, Times], rounds: int) -> None:
    """Print a table: for each process, its threads, and the kinds of work in them."""
    from rich.console import Console
    from rich.table import Table

    table = Table("process", "thread", "work")
    for title in ("calls", "CPU ms", "wall ms"):
        table.add_column(title, justify="right")
    total_ms = 0.0
    for name, times in found.items():
        shown = name
        for thread, kind, calls, cpu_ms, wall_ms in rows(name, times, rounds):
            is_whole = kind == "all"
            total_ms += cpu_ms if is_whole else 0.0
            cells = [shown, thread if is_whole else "", "" if is_whole else kind]
            cells += [f"{calls:.1f}" if calls else "", f"{cpu_ms:.2f}"]
            table.add_row(*cells, f"{wall_ms:.2f}" if wall_ms else "")
            shown = ""
        table.add_section()
    table.add_row("all", "", "", "", f"{total_ms:.2f}", "")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
