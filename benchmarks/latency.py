"""The latency of one call: push(), pull() and pushpull() of one array, beside bare ZeroMQ and torch's gloo.

    python -m benchmarks.latency [--quick] [--json FILE] [--plot FILE] [--links shm ...] [--turns 3]

A *job* is a way in which the bytes travel, and a number of workers and servers:

    local      kvps in one process
    shm        kvps with keys; values lie in shared memory
    tcp        kvps through sockets, in clear text
    tcp keys   kvps through encrypted sockets
    zmq LINK   bare pyzmq: a DEALER sends the array to a ROUTER in another process, which sends it back
    gloo       torch's all_reduce

Each job measures arrays of several sizes. All workers make the same calls, and push one of a few random
arrays in turns. Every number of every result is compared, outside of the timing.

``push`` is the time until the script may reuse its array, ``pull`` that of values which are there already,
and ``pushpull`` the time until the sum over all workers is there; compare it with the round trip of zmq and
the sum of gloo. Percentiles are over the calls of all ranks and turns; p99.9 needs a thousand calls.

The processor time of a worker and of the servers is that of all their threads, for each call of a worker,
without the script's own work between two calls. That of a push is the time of a loop of push() and pull(),
less that of a loop of pull().

Jobs take turns, and each has a limit of time, which is said at the beginning. A job that fails is told, and
the figures of the others are printed; the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import zmq

import kvps
from kvps.tools.bench.figures import described, headline
from kvps.tools.bench.local import THREADS, free_port, module
from kvps.tools.bench.run import time_left, write

SIZES = (64, 1024, 65536, 1 << 20)
"""Bytes of the array."""
LARGE = 1 << 20
"""Arrays of so many bytes and more are measured in a quarter of the rounds."""
LINKS = {
    "local": ((1, 0),),
    "shm": ((1, 1), (2, 2)),
    "tcp": ((1, 1), (2, 2)),
    "tcp keys": ((1, 1), (2, 2)),
    "zmq shm": ((1, 1),),
    "zmq tcp": ((1, 1),),
    "zmq tcp keys": ((1, 1),),
    "gloo": ((2, 0),),
}
"""Link -> the numbers of workers and servers."""
POOL = 16
"""Arrays of a rank that are pushed in turns."""
WARM_UP = 50
START_MAX_S, ROUND_MAX_S = 60.0, 0.05
"""Seconds that a job may take to begin and end, and for the three calls of a round on average."""
MARK = "KVPS_LATENCY_JOB"
PERCENTILES = {"p50_us": 0.5, "p99_us": 0.99, "p999_us": 0.999}


class Job(NamedTuple):
    """A way in which bytes travel, and the processes."""

    link: str
    workers: int
    servers: int

    @property
    def name(self) -> str:
        """How it is shown."""
        return f"{self.link} {self.workers}+{self.servers}"


class Loop(NamedTuple):
    """One worker's calls of one kind."""

    times_us: list[float]
    worker_us: float
    """Processor time of a call, of all threads of this worker."""
    servers_us: float
    """The same of all servers."""


Found = dict[str, dict[str, Any]]
"""Size -> call -> a :class:`Loop` as JSON has it."""


# --- one process of a job ----------------------------------------------------------------------------


def servers() -> list[Path]:
    """Return the folders in /proc of the servers of this job."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = mark in (folder / "environ").read_bytes().split(b"\0")
            if is_ours and b"kvps.cli.server" in (folder / "cmdline").read_bytes():
                found.append(folder)
        except OSError:  # it has ended, or is another user's
            continue
    return found


def cpu_us(folders: Sequence[Path]) -> float:
    """Return the processor time of processes so far."""
    tasks = [task for folder in folders for task in (folder / "task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e3


def loop(
    rounds: int,
    before: Callable[[int], object],
    call: Callable[[int], object],
    check: Callable[[int], object],
    stand: Callable[[], object],
    folders: Sequence[Path] = (),
    then: Callable[[int], object] = lambda number: None,
) -> Loop:
    """Make a call again and again.

    Args:
        rounds: how often it is measured.
        before: what a round begins with.
        call: what is timed.
        check: what a round ends with.
        stand: waits for the other workers.
        folders: of the servers, in /proc.
        then: a call that follows, whose processor time counts, too.
    """
    times_us: list[float] = []
    script_ns = 0
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            stand()
            served_us, all_ns, own_ns = cpu_us(folders), time.process_time_ns(), time.thread_time_ns()
        before(number)
        entered_ns = time.thread_time_ns()
        begin_ns = time.perf_counter_ns()
        call(number)
        end_ns = time.perf_counter_ns()
        then(number)
        if number >= WARM_UP:
            script_ns += time.thread_time_ns() - entered_ns
            times_us.append((end_ns - begin_ns) / 1e3)
        check(number)
    checks_ns = time.thread_time_ns() - own_ns - script_ns
    worker_us = (time.process_time_ns() - all_ns - checks_ns) / 1e3 / rounds
    stand()
    return Loop(times_us, worker_us, (cpu_us(folders) - served_us) / rounds)


def arrays(size: int, workers: int) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return the arrays of each rank, and their sums."""
    dice = torch.Generator().manual_seed(size)
    pools = [[torch.randn(size // 4, generator=dice) for _ in range(POOL)] for _ in range(workers)]
    return pools, [torch.stack(row).sum(0) for row in zip(*pools, strict=True)]


def demand(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare every number.

    Raises:
        ValueError: if one differs.
    """
    if not torch.equal(found, expected):
        raise ValueError(f"a result is wrong: {found[found != expected][:4].tolist()}")


def by_kvps(job: Job, sizes: Sequence[int], rounds: int) -> Found:
    """Measure the calls of a store."""
    is_local = job.link == "local"
    with kvps.create("local" if is_local else "dist_sync") as kv:
        folders = [] if is_local else servers()
        assert len(folders) == job.servers, folders
        return {str(size): _calls_of(kv, job, size, rounds_of(size, rounds), folders) for size in sizes}


def _calls_of(kv: Any, job: Job, size: int, rounds: int, folders: Sequence[Path]) -> dict[str, Loop]:
    """Measure the calls on an array of a store."""
    pools, sums = arrays(size, job.workers)
    key, own, out = str(size), pools[kv.rank], torch.empty(size // 4)
    last = sums[(WARM_UP + rounds - 1) % POOL]
    kv.init(key, own[0])

    def dirty(number: int) -> None:
        out.fill_(torch.nan)

    def pull(number: int) -> None:
        kv.pull(key, out=out)

    def compare(number: int) -> None:
        demand(out, sums[number % POOL])

    def measured(call: Callable[[int], object], check: Callable[[int], object], **more: Any) -> Loop:
        found = loop(rounds, dirty, call, check, kv.barrier, folders, **more)
        return found._replace(servers_us=found.servers_us / job.workers)

    both = measured(lambda number: kv.pushpull(key, own[number % POOL], out=out), compare)
    pushed = measured(lambda number: kv.push(key, own[number % POOL]), compare, then=pull)
    pulled = measured(pull, lambda number: demand(out, last))
    worker_us, servers_us = (max(0.0, pair[0] - pair[1]) for pair in zip(pushed[1:], pulled[1:], strict=True))
    return {"pushpull": both, "push": Loop(pushed.times_us, worker_us, servers_us), "pull": pulled}


def by_gloo(job: Job, sizes: Sequence[int], rounds: int) -> Found:
    """Measure all_reduce."""
    dist.init_process_group("gloo")

    def pushpull(size: int) -> Loop:
        pools, sums = arrays(size, job.workers)
        own, out = pools[dist.get_rank()], torch.empty(size // 4)
        return loop(
            rounds_of(size, rounds),
            lambda number: out.copy_(own[number % POOL]),
            lambda number: dist.all_reduce(out),
            lambda number: demand(out, sums[number % POOL]),
            dist.barrier,
        )

    found: Found = {str(size): {"pushpull": pushpull(size)} for size in sizes}
    dist.destroy_process_group()
    return found


def by_zmq(job: Job, sizes: Sequence[int], rounds: int) -> Found:
    """Measure the round trip of an array to another process, which this one forks."""
    endpoint = f"ipc://{os.environ[MARK]}.ipc" if job.link == "zmq shm" else f"tcp://127.0.0.1:{free_port()}"
    keys = zmq.curve_keypair() if job.link == "zmq tcp keys" else None
    echo = multiprocessing.get_context("fork").Process(target=_echo, args=(endpoint, keys), daemon=True)
    echo.start()
    answer: Any = None
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        if keys is not None:
            socket.curve_serverkey = keys[0]
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(endpoint)

        def pushpull(size: int) -> Loop:
            own = arrays(size, 1)[0][0]

            def call(number: int) -> None:
                nonlocal answer
                socket.send(own[number % POOL].numpy(), copy=False)
                answer = socket.recv(copy=False)

            def check(number: int) -> None:
                demand(torch.frombuffer(answer.buffer, dtype=torch.float32), own[number % POOL])

            folders = [Path(f"/proc/{echo.pid}")]
            return loop(rounds_of(size, rounds), lambda number: None, call, check, lambda: None, folders)

        found: Found = {str(size): {"pushpull": pushpull(size)} for size in sizes}
        socket.send(b"")
    echo.join()
    return found


def _echo(endpoint: str, keys: tuple[bytes, bytes] | None) -> None:
    """Send back what comes, until it is empty."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        if keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys
        socket.bind(endpoint)
        while len((frames := socket.recv_multipart(copy=False))[1]):
            socket.send_multipart(frames, copy=False)


def rounds_of(size: int, rounds: int) -> int:
    """Return how many rounds are measured of this size."""
    return rounds if size < LARGE else max(1, rounds // 4)


def work(job: Job, given: argparse.Namespace) -> None:
    """Be one worker of a job, and write what it found."""
    torch.set_num_threads(1)
    by = by_gloo if job.link == "gloo" else by_zmq if job.link.startswith("zmq") else by_kvps
    found = by(job, given.sizes, given.rounds)
    rank = os.environ.get("KVPS_RANK") or os.environ.get("RANK") or "0"
    Path(given.folder, f"{rank}.json").write_text(json.dumps(found))


# --- all jobs ----------------------------------------------------------------------------------------


def jobs(links: Sequence[str]) -> list[Job]:
    """Return the jobs of these links."""
    return [Job(link, *shape) for link in links for shape in LINKS[link]]


def limit_s(given: argparse.Namespace) -> float:
    """Return the seconds after which a job is ended."""
    return START_MAX_S + ROUND_MAX_S * len(given.sizes) * (WARM_UP + given.rounds)


def run(job: Job, given: argparse.Namespace) -> list[Found]:
    """Run a job once; return what each worker found.

    Raises:
        subprocess.SubprocessError: if it fails, or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["--work", job.link, str(job.workers), str(job.servers), "--folder", folder]
        words += ["--rounds", str(given.rounds), "--sizes", *map(str, given.sizes)]
        worker = [*module("benchmarks.latency"), *words]
        marked = {MARK: f"{folder}/{uuid.uuid4().hex}"}
        env = os.environ | THREADS | marked | {"PYTHONPATH": str(Path(__file__).parents[1])}
        if job.link.startswith("tcp"):
            env |= {"KVPS_TRANSPORT": "tcp"} | ({} if "keys" in job.link else {"KVPS_INSECURE": "1"})
        if job.servers and not job.link.startswith("zmq"):
            sizes = ["-n", str(job.workers), "-s", str(job.servers), "--"]
            argvs = [[*module("kvps.cli.launch"), *sizes, *worker]]
        else:
            argvs = [worker] * job.workers
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(job.workers)}
        started = [
            subprocess.Popen(argv, env=env | place | {"RANK": str(rank)}, stdout=subprocess.DEVNULL)
            for rank, argv in enumerate(argvs)
        ]
        clock = threading.Timer(limit_s(given), lambda: [process.terminate() for process in started])
        clock.start()
        try:
            codes = [process.wait() for process in started]
        finally:
            clock.cancel()
            for process in started:
                process.kill()
        if any(codes):
            why = f"{job.name} failed, or took over {limit_s(given):.0f} s: exit codes {codes}"
            raise subprocess.SubprocessError(why)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(job.workers)]


def rows_of(job: Job, trials: Sequence[Found]) -> list[dict[str, Any]]:
    """Return a row of figures for each size and call.

    Args:
        job: what was measured.
        trials: what each worker found in each turn.
    """
    rows = []
    for size, calls in trials[0].items():
        for call in calls:
            loops = [Loop(*trial[size][call]) for trial in trials]
            times = sorted(time_us for each in loops for time_us in each.times_us)
            row: dict[str, Any] = {"link": job.link, "workers": job.workers, "servers": job.servers}
            row |= {"call": call, "bytes": int(size), "calls": len(times)}
            for name, part in PERCENTILES.items():
                has_enough = len(times) * (1 - part) >= 0.999
                row[name] = round(times[int(part * len(times))], 1) if has_enough else None
            row["worker_cpu_us"] = round(statistics.median(each.worker_us for each in loops), 1)
            row["servers_cpu_us"] = round(statistics.median(each.servers_us for each in loops), 1)
            rows.append(row)
    return rows


def told(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table as text."""
    lines = ["job               call          bytes    p50 us       p99     p99.9  worker cpu  servers"]
    for row in rows:
        cells = [f"{row[name]:,.0f}" if row[name] is not None else "" for name in PERCENTILES]
        name = Job(row["link"], row["workers"], row["servers"]).name
        lines.append(
            f"{name:18}{row['call']:10}{row['bytes']:9,}{cells[0]:>10}{cells[1]:>10}{cells[2]:>10}"
            f"{row['worker_cpu_us']:12,.0f}{row['servers_cpu_us']:9,.0f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all jobs in turns, and print, write and draw; or be a worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="one turn of 200 rounds")
    add("--rounds", type=int, help="measured calls of a kind in each turn (1000)")
    add("--turns", type=int, help="how often each job is started (3)")
    add("--links", nargs="+", choices=LINKS, default=list(LINKS), help="the jobs (all)")
    add("--sizes", nargs="+", type=int, default=list(SIZES), help="bytes of the array")
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    add("--plot", type=Path, metavar="FILE", help="draw the figures as PNG; needs matplotlib")
    add("--work", nargs=3, help=argparse.SUPPRESS)
    add("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    given.rounds = given.rounds or (200 if given.quick else 1000)
    given.turns = given.turns or (1 if given.quick else 3)
    if given.work:
        link, *counts = given.work
        work(Job(link, *map(int, counts)), given)
        return
    todo = jobs(given.links)
    machine = described()
    say(headline(machine))
    say(f"{len(todo)} jobs in {given.turns} turns; each is ended after {limit_s(given):.0f} s at the latest")
    found: dict[Job, list[Found]] = {job: [] for job in todo}
    failures: list[str] = []
    began, total = time.monotonic(), len(todo) * given.turns
    for done in range(total):
        job = todo[done % len(todo)]
        try:
            found[job] += run(job, given)
        except subprocess.SubprocessError as error:
            failures.append(str(error))
            say(failures[-1])
        each_s = (time.monotonic() - began) / (done + 1)
        say(f"{done + 1} of {total}: {job.name}{time_left(each_s * (total - done - 1))}")
    rows = [row for job in todo if found[job] for row in rows_of(job, found[job])]
    say(told(rows))
    if given.json:
        settings = {"rounds": given.rounds, "turns": given.turns}
        write(given.json, {"machine": machine, "settings": settings, "rows": rows})
    if given.plot:
        from benchmarks.compare.plots import draw_latency  # it imports matplotlib

        draw_latency(rows, given.plot, "Latency of a call")
    if failures:
        raise SystemExit("\n".join(failures))


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
