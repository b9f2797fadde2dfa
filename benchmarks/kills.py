"""Steps that count while workers are killed: kvps beside torchrun with DDP and checkpoints.

    python -m benchmarks.kills [--every 10] [--seconds 600] [--workers 4] [--step 0.1]

Both train the same model, whose step waits ``--step`` seconds as an accelerator would. Every ``--every``
seconds a worker that lives gets SIGKILL. kvps-launch starts the lost worker again, while the others go on
(``on_worker_lost="shrink"``, the optimizer on the servers). torchrun starts all workers again, from the
newest of the checkpoints that rank 0 writes into memory every ten steps. Printed are the steps of all workers
that count at the end: of kvps each update of a worker, of DDP those not lost since a checkpoint. The share is
that of workers that nobody kills, whose exchange takes no time. "A kill costs" so long a time of all workers.
That bounds what any system can win: if torchrun loses R seconds at a kill each T seconds, a system that loses
nothing has T / (T - R) times its steps.

torchrun is as its documentation has it: ``--max-restarts``, its own ``--monitor-interval`` (0.1 s), and
checkpoints that rank 0 writes and all load. Checkpoints in memory, each second, favour it: a kill loses half
a second of steps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESTARTS = 10_000
A_STORE_FOR_EACH_START = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, torch 2.13's gloo meets addresses of the start before, and hangs (pytorch/pytorch#135712)."""
START_MAX_S, END_MAX_S = 120.0, 20.0
KVPS = """
import os, sys, time
import torch
import kvps
folder, step_s, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
kv = kvps.create("dist_sync", on_worker_lost="shrink", average=True)
weight, gradient = torch.zeros(size), torch.randn(size)
kv.init("w", weight)
kv.set_optimizer("sgd", lr=0.01, momentum=0.9)
kv.resume(["w"])
kv.pull("w", out=weight)
open(f"{folder}/pid.{kv.rank}", "w").write(str(os.getpid()))
while not os.path.exists(f"{folder}/until"):
    time.sleep(0.01)
until = float(open(f"{folder}/until").read())
with open(f"{folder}/steps.{kv.rank}", "a", buffering=1) as steps:
    while time.time() < until:
        time.sleep(step_s)
        kv.pushpull("w", gradient, out=weight)
        print(time.time(), file=steps)
"""
DDP = """
import os, sys, time
import torch
import torch.distributed as dist
folder, step_s, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(size, 1, bias=False)
ddp = torch.nn.parallel.DistributedDataParallel(model)
sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
step, saved = 0, f"{folder}/checkpoint"
if os.path.exists(saved):
    step, weights, state = torch.load(saved, weights_only=True)
    model.load_state_dict(weights)
    sgd.load_state_dict(state)
open(f"{folder}/pid.{rank}", "w").write(str(os.getpid()))
while not os.path.exists(f"{folder}/until"):
    time.sleep(0.01)
until = float(open(f"{folder}/until").read())
x = torch.randn(1, size)
while time.time() < until:
    time.sleep(step_s)
    sgd.zero_grad()
    ddp(x).sum().backward()
    sgd.step()
    step += 1
    if rank == 0 and step % 10 == 0:
        torch.save((step, model.state_dict(), sgd.state_dict()), saved + ".new")
        os.replace(saved + ".new", saved)
    if rank == 0:
        open(f"{folder}/last", "w").write(str(step))
"""


def kvps_steps(folder: Path, workers: int) -> int:
    """Return the updates of all workers."""
    return sum(len((folder / f"steps.{rank}").read_text().splitlines()) for rank in range(workers))


def ddp_steps(folder: Path, workers: int) -> int:
    """Return the steps of all workers that were not lost."""
    last = folder / "last"
    return workers * int(last.read_text()) if last.exists() else 0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step", type=float, default=0.1, help="seconds that a step computes")
    parser.add_argument("--size", type=int, default=250_000, help="weights of the model")
    parser.add_argument("--log", action="store_true", help="print what the processes printed")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    count = str(given.workers)
    kvps = ("-m", "kvps.cli.launch", "-n", count, "-s", "1", "--max-restarts", str(RESTARTS))
    kvps = (*kvps, "--", sys.executable)
    ddp = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count)
    ddp = (*ddp, "--max-restarts", str(RESTARTS))
    best = given.workers * given.seconds / given.step
    found = {}
    print("| way | kills | steps that count | of workers that nobody kills | a kill costs, s | load |")
    print("|---|---|---|---|---|---|")
    for way, words, script, counted in (
        ("kvps", kvps, KVPS, kvps_steps),
        ("torchrun, DDP, checkpoints", ddp, DDP, ddp_steps),
    ):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            folder = Path(name)
            kills = _run(given, folder, words, script)
            found[way] = counted(folder, given.workers)
        share = found[way] / best
        costs_s = (1 - share) * given.seconds / max(1, kills)
        told = f"{found[way]:,} | {100 * share:.1f} % | {costs_s:.1f} | {os.getloadavg()[0]:.1f}"
        print(f"| {way} | {kills} | {told} |", flush=True)
    kept, lost = found.values()
    print(
        f"\nkvps has {kept / max(1, lost):.1f} times the steps of torchrun, DDP and checkpoints; "
        f"workers that nobody kills would have {best / max(1, lost):.1f} times"
    )
    return 0


def _run(given: argparse.Namespace, folder: Path, words: tuple[str, ...], script: str) -> int:
    """Run a job, and kill its workers; return how often. The time counts once all workers have begun."""
    (folder / "train.py").write_text(script)
    argv = [sys.executable, *words, str(folder / "train.py"), str(folder), str(given.step), str(given.size)]
    ranks = random.Random(given.seed)
    kills = 0
    with (folder / "log").open("wb") as log:
        environment = os.environ | A_STORE_FOR_EACH_START
        job = subprocess.Popen(argv, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            begin = time.monotonic()
            while len(list(folder.glob("pid.*"))) < given.workers:
                if time.monotonic() - begin > START_MAX_S:
                    raise SystemExit((folder / "log").read_text())
                time.sleep(0.01)
            end = time.time() + given.seconds
            (folder / "until.new").write_text(str(end))
            (folder / "until.new").rename(folder / "until")
            while (rest := end - time.time()) > 0:
                time.sleep(min(given.every, rest))
                pids = [int(file.read_text()) for file in sorted(folder.glob("pid.*"))]
                live = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
                if live and end - time.time() > 0:
                    os.kill(ranks.choice(live), signal.SIGKILL)
                    kills += 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(END_MAX_S)
        finally:
            for how in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(job.pid, how)
                    job.wait(END_MAX_S)
        if given.log:
            print((folder / "log").read_text(), file=sys.stderr)
    return kills


if __name__ == "__main__":
    sys.exit(main())
