"""The start of a job: 4 workers and 2 servers to their first barrier, beside as many processes
that import torch.

    .venv/bin/python -m benchmarks.startup                 # kvps-launch, and the engines that are installed
    .venv/bin/python -m benchmarks.startup --repeat 7 --only launch

Both are measured in turns, so that other work on the machine meets both. Of a job by kvps-launch
the time is that from the command to the moment when all workers have passed the barrier; the other
six are ``python -c "import torch"`` side by
side: started directly, by six times ``ssh``, or by one ``srun``. sshd and a Slurm cluster of two
    nodes are started for
this, on loopback; the latter needs root. With Ray, it is the time from
``kvps.platforms.ray.cluster`` to that moment, in a Ray that runs already and has no idle processes
that have imported torch; the other six are actors that import torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

WORKERS, SERVERS = 4, 2
IMPORT = (sys.executable, "-c", "import torch")
SCRIPT = """
import time
import kvps
kv = kvps.create("dist_sync")
kv.barrier()
print("barrier", time.monotonic(), flush=True)
kv.close()
"""


def by_launch(
    before: Sequence[str] = (), flags: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> float:
    """Return the seconds from kvps-launch to the barrier.

    Args:
        before: words before the command.
        flags: flags of kvps-launch.
        env: variables to be set.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT, encoding="utf-8")
        launch = str(Path(sys.executable).parent / "kvps-launch")
        sizes = ("-n", str(WORKERS), "-s", str(SERVERS))
        command = [*before, launch, *flags, *sizes, "--", sys.executable, str(script)]
        began = time.monotonic()
        done = subprocess.run(
            command, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, text=True, check=True
        )
    passed = [float(line.split("barrier")[1]) for line in done.stdout.splitlines() if "barrier" in line]
    assert len(passed) == WORKERS, done.stdout
    return max(passed) - began


def by_commands(commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None) -> float:
    """Return the seconds until commands have ended that run side by side."""
    began = time.monotonic()
    started = [subprocess.Popen(command, env={**os.environ, **(env or {})}) for command in commands]
    for process in started:
        assert process.wait() == 0, process.args
    return time.monotonic() - began


def by_python() -> float:
    """Return the seconds until six processes have imported torch."""
    return by_commands([IMPORT] * (WORKERS + SERVERS))


def measure_ssh(repeat: int) -> None:
    """Compare with ssh, to a server on two loopback addresses."""
    from tests.integration.engines import HOSTS, Ssh

    with tempfile.TemporaryDirectory(prefix="kvps-ssh-") as folder:
        ssh = Ssh(Path(folder))
        hosts = ",".join(f"{host}:{WORKERS // len(HOSTS)}" for host in HOSTS)
        flags = ("--launcher", "ssh", "-H", hosts, "--rsh", ssh.rsh)
        theirs = [
            [*shlex.split(ssh.rsh), HOSTS[at % len(HOSTS)], shlex.join(IMPORT)]
            for at in range(WORKERS + SERVERS)
        ]
        try:
            name = "kvps-launch by ssh, ssh"
            in_turns(name, lambda: by_launch((), flags), lambda: by_commands(theirs), repeat)
        finally:
            ssh.close()


def measure_slurm(repeat: int) -> None:
    """Compare with srun, in a Slurm cluster of two nodes on this machine."""
    from tests.integration.engines import Slurm

    with tempfile.TemporaryDirectory(prefix="kvps-slurm-") as folder:
        slurm = Slurm(Path(folder))
        allocation = ["salloc", "-N2", "--quiet"]
        ours = [*allocation, f"--ntasks-per-node={WORKERS // 2}"]
        theirs = [*allocation, f"--ntasks-per-node={(WORKERS + SERVERS) // 2}", "srun", *IMPORT]
        try:
            in_turns(
                "kvps-launch by srun, srun",
                lambda: by_launch(ours, ("--launcher", "slurm"), slurm.env),
                lambda: by_commands([theirs], slurm.env),
                repeat,
            )
        finally:
            slurm.close()


def by_ray() -> float:
    """Return the seconds from kvps.platforms.ray.cluster to the barrier."""
    import ray

    import kvps.platforms.ray

    @ray.remote(num_cpus=1, max_calls=1)  # a process of its own, as an actor has
    def train(seat: kvps.platforms.ray.Seat) -> float:
        with seat:
            import kvps

            kv = kvps.create("dist_sync")
            kv.barrier()
            return time.monotonic()

    began = time.monotonic()
    with kvps.platforms.ray.cluster(WORKERS, SERVERS) as cluster:
        return max(ray.get([train.remote(cluster.seat(rank)) for rank in range(WORKERS)])) - began


def by_actors() -> float:
    """Return the seconds until six actors have imported torch."""
    import ray

    @ray.remote(num_cpus=1)
    class Importer:
        def load(self) -> None:
            import torch  # noqa: F401

    began = time.monotonic()
    actors = [Importer.remote() for _ in range(WORKERS + SERVERS)]
    ray.get([actor.load.remote() for actor in actors])
    took_s = time.monotonic() - began
    for actor in actors:
        ray.kill(actor)
    return took_s


def settle() -> None:
    """Wait until Ray has its resources back, and its pool of fresh processes."""
    import ray

    while ray.available_resources().get("CPU", 0) < WORKERS + SERVERS:
        time.sleep(0.1)
    time.sleep(5.0)


def in_turns(
    name: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    repeat: int,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Print the medians of both, and their ratio."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeat + 1):
        for who, measure, found in zip(("kvps", "engine"), (ours, theirs), times, strict=True):
            between()
            took_s = measure()
            if turn:  # the first fills the caches
                found.append(took_s)
                print(f"  turn {turn}, {who}: {took_s:.2f} s", flush=True)
    mine, other = (statistics.median(found) for found in times)
    load = os.getloadavg()[0]
    print(f"{name}: {mine:.2f} s, {other:.2f} s, ratio {mine / other:.2f} (load {load:.1f})", flush=True)


def main() -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(description="The start of a job, beside that of torch.")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=("launch", "ssh", "slurm", "ray"))
    flags = parser.parse_args()
    wanted = (flags.only,) if flags.only else ("launch", "ssh", "slurm", "ray")
    print(f"{WORKERS} workers + {SERVERS} servers to the first barrier, {WORKERS + SERVERS} import torch")
    if "launch" in wanted:
        in_turns('kvps-launch, python -c "import torch"', by_launch, by_python, flags.repeat)
    for name, program, measure in (("ssh", "sshd", measure_ssh), ("slurm", "slurmctld", measure_slurm)):
        if name in wanted and shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin"):
            measure(flags.repeat)
        elif name in wanted:
            print(f"{name}: {program} is not installed")
    if "ray" in wanted and importlib.util.find_spec("ray") is None:
        print("Ray: not installed (pip install 'kvps[ray]')")
    elif "ray" in wanted:
        measure_ray(flags.repeat)
    return 0


def measure_ray(repeat: int) -> None:
    """Compare with Ray's own actors."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=WORKERS + SERVERS, include_dashboard=False, log_to_driver=False)
    in_turns("kvps.platforms.ray.cluster, actors of Ray", by_ray, by_actors, repeat, settle)
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
