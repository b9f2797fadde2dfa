"""A click model with 26 embedding tables: kvps beside DistributedDataParallel on gloo, and TorchRec.

    .venv/bin/python benchmarks/click_model.py [--rows 1000000] [--torchrec-python trec/bin/python]
    .venv/bin/python benchmarks/click_model.py --quick

The model is a small DLRM (click_model_worker.py): 26 tables, one id of each in an example, and a dense part.
Ids are Zipf-distributed, and clicks are drawn from a planted function of them. The ways:

    kvps sync     tables and dense part in dist_sync
    kvps async    both in dist_async
    kvps ahead    as kvps async, and the rows of a batch are asked for behind the push of the one before
    kvps hybrid   tables in dist_async, the dense part in dist_sync
    kvps apart    as kvps sync, with an Embedding for each table instead of one EmbeddingCollection (if named)
    ddp gloo      nn.EmbeddingBag(sparse=True) in DistributedDataParallel; each rank holds all rows
    torchrec      an EmbeddingBagCollection, sharded by its planner, on fbgemm's CPU kernels
    alone         constant rows and no exchange: what computing costs

Each turn starts every way anew, in another order: two workers, for kvps two servers, and one thread of torch
in each process. All ways begin with the same rows and weights, and see the same examples. The losses of
``kvps sync``, ``ddp gloo`` and ``torchrec`` agree in each step within ``EXACT``. In the other ways of kvps
their mean over the last half agrees within ``STALE`` of it. Otherwise the exit code is 1. With Adagrad means
are compared in all ways: the sign of a gradient that is nearly 0 decides about its first step.

Printed are medians of the slower rank in ms, for a step and its phases: the lookup of rows; forward and
backward of the dense part, in which DDP exchanges gradients; backward of the tables, which pushes; and the
step of the optimizers. In all ways of kvps the dense part has ``overlap_forward=True``: its forward waits for
the exchange of the step before, after the lookup. "MB sent" is by a worker and step, as stores of
kvps count it, or as gloo writes it to sockets. "cpu" is the processor time of all processes, servers among
them, for a step of one worker, in ms: other work on the machine changes it less. A table of kvps holds the
rows that were pushed, the others hold all rows.

TorchRec has an environment of its own. It asks for fbgemm-gpu, whose files replace those of the CPU kernels:

    python3.11 -m venv trec
    trec/bin/pip install torch==2.13.0 torchrec==1.9.2
    trec/bin/pip uninstall -y fbgemm-gpu
    trec/bin/pip install --no-deps fbgemm-gpu-cpu==1.8.0
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

if __package__:
    from benchmarks.click_model_worker import PHASES, RATES, STORES, Task, first_values
else:
    from click_model_worker import PHASES, RATES, STORES, Task, first_values

WORKERS, SERVERS = 2, 2
EXACT, STALE = 1e-5, 0.001
WAYS = ("kvps sync", "kvps async", "kvps ahead", "kvps hybrid", "ddp gloo", "torchrec", "alone")
EXACT_WAYS = ("kvps sync", "kvps apart", "ddp gloo", "torchrec")
STALE_WAYS = ("kvps async", "kvps ahead", "kvps hybrid")
WORKER = Path(__file__).with_name("click_model_worker.py")


def demand(losses: dict[str, list[list[float]]], optimizer: str = "sgd") -> list[str]:
    """Check that all ways learned the same; return the differences, in words.

    Args:
        losses: way -> rank -> loss of each step.
        optimizer: of the tables.

    Raises:
        ValueError: if two ways differ by more than they may.
    """
    exact = [way for way in EXACT_WAYS if way in losses]
    stale = [way for way in STALE_WAYS if way in losses]
    if optimizer == "adagrad":
        exact, stale = exact[:1], [*exact[1:], *stale]
    told = []
    for way in exact[1:]:
        most = np.abs(np.subtract(losses[way], losses[exact[0]])).max()  # which is NaN where any is
        told.append(f"{way} and {exact[0]} differ by {most:.1e}")
        if not most <= EXACT:
            raise ValueError(f"{told[-1]} in the loss of a step; {EXACT} is allowed")
    for way in stale:
        if exact:
            share = abs(late(losses[way]) / late(losses[exact[0]]) - 1)
            told.append(f"{way} and {exact[0]} by {share:.2%} at the end")
            if not share <= STALE:
                raise ValueError(f"{told[-1]}; {STALE:.1%} is allowed")
    return told


def late(losses: list[list[float]]) -> float:
    """Return the mean loss of the last half of all steps, over all ranks."""
    return statistics.fmean(loss for rank in losses for loss in rank[len(rank) // 2 :])


def run(way: str, task: Task, folder: Path, python: str) -> list[dict[str, Any]]:
    """Run a way once; return the reports of its ranks."""
    script = [python, str(WORKER), way, str(folder), str(os.getpid())]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    if way in STORES:
        launch = [sys.executable, "-m", "kvps.cli.launch", "-n", str(WORKERS), "-s", str(SERVERS), "--"]
        subprocess.run([*launch, *script], check=True, env=variables)
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        seats = {
            "WORLD_SIZE": WORKERS,
            "LOCAL_WORLD_SIZE": WORKERS,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        ranks = []
        for rank in range(WORKERS):
            own = {name: str(value) for name, value in {**seats, "RANK": rank, "LOCAL_RANK": rank}.items()}
            ranks.append(
                subprocess.Popen(script, env={**variables, **own}, stderr=subprocess.PIPE, text=True)
            )
        errors = [rank.communicate()[1] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"{way} failed:\n{errors[0][-3000:]}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]


def needed_gb(way: str, task: Task) -> float:
    """Return the memory of the tables of a way whose ranks hold all rows."""
    copies = {"ddp gloo": WORKERS, "torchrec": 1}.get(way, 0)
    return copies * task.tables * task.rows * task.dim * 4 / 1e9


def free_gb() -> float:
    """Return the memory that processes can still have."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1e6


def medians(turns: list[list[dict[str, Any]]], column: Callable[[list[float]], float]) -> list[float]:
    """Return for each turn the median over all steps of the slower rank, of a sum of phases."""
    return [max(statistics.median(map(column, report["times"])) for report in turn) for turn in turns]


def main(arguments: list[str] | None = None) -> int:
    """Take the ways in turns, print the table, and compare the losses; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each table, such as 1000000")
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--dim", type=int, default=16, help="elements of a row")
    parser.add_argument("--batch", type=int, default=1024, help="examples of a worker in a step")
    parser.add_argument("--steps", type=int, default=40, help="timed steps in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--optimizer", choices=RATES, default="sgd", help="of the tables")
    parser.add_argument("--dtype", default="float32", help="of the rows on kvps's servers, such as bfloat16")
    parser.add_argument("--pull-dtype", choices=["int8"], help="in which they travel to workers")
    parser.add_argument("--torchrec-python", metavar="PATH", help="a Python that has torchrec")
    parser.add_argument("--ways", nargs="*", choices=[*WAYS, "kvps apart"], default=WAYS)
    parser.add_argument("--json", type=Path, help="write all reports to this file")
    parser.add_argument("--quick", action="store_true", help="few, small steps: do all ways work?")
    given = parser.parse_args(arguments)
    if given.quick:
        given.rows, given.tables, given.batch, given.steps, given.turns = 1000, 4, 64, 6, 1
    shape = given.tables, given.rows, given.dim
    task = Task(*shape, given.batch, given.steps, given.optimizer, given.dtype, given.pull_dtype)
    found: dict[str, list[list[dict[str, Any]]]] = {}
    ways = []
    for way in given.ways:
        if way == "torchrec" and not given.torchrec_python:
            print("torchrec: left out, as --torchrec-python names no Python")
        elif needed_gb(way, task) > 0.8 * free_gb():
            print(f"{way}: left out, as it needs {needed_gb(way, task):.0f} GB for its tables")
        else:
            ways.append(way)
    for turn in range(given.turns):
        for way in ways if turn % 2 == 0 else reversed(ways):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                (folder / "task.json").write_text(json.dumps(task._asdict()))
                if way not in STORES:
                    first_values(task, WORKERS, folder / "first.npz")
                python = given.torchrec_python if way == "torchrec" else sys.executable
                found.setdefault(way, []).append(run(way, task, folder, python))
    if given.json:
        given.json.write_text(json.dumps({"task": task._asdict(), "ways": found}))
    print(told(task, found))
    try:
        for turn in range(given.turns):
            losses = {way: [report["losses"] for report in found[way][turn]] for way in found}
            compared = "; ".join(demand(losses, given.optimizer)) or "nothing to compare"
            print(f"losses of turn {turn + 1}: {compared}")
    except ValueError as error:
        print(f"not the same model: {error}", file=sys.stderr)
        return 1
    return 0


def told(task: Task, found: dict[str, list[list[dict[str, Any]]]]) -> str:
    """Return the table."""
    columns = (*("step", "/torchrec", "/ddp"), *PHASES, *("MB sent", "cpu"))
    lines = [
        f"{task.tables} tables of {task.rows:,} x {task.dim}, batch {task.batch}, {task.optimizer}; p50, ms",
        " " * 12 + "".join(f"{name:>10}" for name in columns),
    ]
    steps = {way: medians(turns, sum) for way, turns in found.items()}
    for way, turns in found.items():
        step = statistics.median(steps[way])
        beside = [steps.get(peer) for peer in ("torchrec", "ddp gloo")]
        ratios = [f"{step / statistics.median(other):.2f}" if other else "" for other in beside]
        phases = [statistics.median(medians(turns, itemgetter(at))) for at in range(len(PHASES))]
        sent = statistics.fmean(report["sent"] for turn in turns for report in turn) / 1e6
        cpu = statistics.median(turn[0]["cpu"] for turn in turns) / WORKERS
        figures = [f"{step:.1f}", *ratios, *[f"{ms:.1f}" for ms in phases], f"{sent:.2f}", f"{cpu:.1f}"]
        each = " ".join(f"{ms:.0f}" for ms in steps[way])
        lines.append(f"{way:12}" + "".join(f"{figure:>10}" for figure in figures) + f"  [{each}]")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
