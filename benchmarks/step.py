"""The cost of synchronisation in a training step: the front ends of kvps beside
DistributedDataParallel on gloo.

    .venv/bin/python benchmarks/step.py [--steps 20] [--turns 3] [--workers 2] [--servers 2] [--ways WAY ...]

A model of 25 million parameters in 24 layers computes little: two rows pass through it. So a step is mostly
forward and backward passes over the weights, the update (SGD with momentum), and what a front end does
between workers. The ways:

    alone            no other worker: what a step costs by itself
    ddp gloo         DistributedDataParallel on torch's gloo
    ddp kvps         the same on init_process_group("kvps")
    optimizer        kvps.torch.DistributedOptimizer; the update is torch's
    on servers       the same with update_on_kvstore=True: gradients leave in step()
    servers early    the same with overlap_backward=True
    trainer          kvps.Trainer with overlap=True; the update is torch's
    trainer late     the same without overlap
    trainer servers  with overlap, and with update_on_kvstore=True

Each turn starts each way anew, in another order. After the steps, weights of all workers have to
be the same bits, and those of all ways have to agree within 1e-5 with those of gloo. Printed for
each way are the median step of the slowest worker, its cost (the step less the step of as many
workers alone), and the ratio of this cost to gloo's. Behind them stand the same for the processor
time that all processes take for a step, servers among them, divided by the number of workers:
other work on the machine changes it less.

A turn of all ways takes some three minutes on two cores, most of which are imports. Each result is printed
at once, on standard error; the table follows at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

WIDTH, LAYERS, ROWS = 1024, 24, 2
SEED = 7
WAYS = (
    *("alone", "ddp gloo", "ddp kvps", "optimizer", "on servers", "servers early"),
    *("trainer", "trainer late", "trainer servers"),
)


def build() -> nn.Module:
    """Return the model, the same in every process: its weights are random."""
    torch.manual_seed(SEED)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def stepper(way: str, model: nn.Module) -> Callable[[torch.Tensor], None]:
    """Return a function that makes one step with a batch."""
    import kvps
    import kvps.torch

    if way.startswith("trainer"):
        kv = kvps.create("dist_sync")
        trainer = kvps.Trainer(
            model,
            "sgd",
            {"lr": 0.01, "momentum": 0.9},
            kv,
            update_on_kvstore=way == "trainer servers",
            overlap=way != "trainer late",
        )

        def by_trainer(batch: torch.Tensor) -> None:
            model(batch).square().mean().backward()
            trainer.step(kv.num_workers)  # gradients are summed, and divided by this
            model.zero_grad()

        return by_trainer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if way.startswith("ddp"):
        torch.distributed.init_process_group(way.split()[1])
        model = nn.parallel.DistributedDataParallel(model)
    elif way != "alone":
        optimizer = kvps.torch.DistributedOptimizer(
            optimizer, model, update_on_kvstore=way != "optimizer", overlap_backward=way == "servers early"
        )

    def by_optimizer(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return by_optimizer


def cpu_ms(parent: int) -> float:
    """Return the processor time so far of all processes that ``parent`` and its children have
    started, in ms."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            threads = [
                int((path / "schedstat").read_text().split()[0]) for path in (folder / "task").iterdir()
            ]
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(fields[1])
        spent[int(folder.name)] = sum(threads) / 1e6
    known = {parent}
    while new := {item for item, above in parents.items() if above in known} - known:
        known |= new
    return sum([spent[item] for item in known - {parent}])


def work(way: str, steps: int, folder: Path, parent: int) -> None:
    """Train, and write this worker's times and a part of its weights."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    model = build()
    step = stepper(way, model)
    batches = torch.Generator().manual_seed(SEED + rank)
    times = []
    for number in range(steps + 3):
        if number == 3:
            before_ms = cpu_ms(parent)
        batch = torch.randn(ROWS, WIDTH, generator=batches)
        began = time.perf_counter()
        step(batch)
        times.append(1000 * (time.perf_counter() - began))
    spent_ms = cpu_ms(parent) - before_ms
    if way == "trainer servers":
        model(batch)
    weights = torch.cat([param.detach().flatten()[:: WIDTH + 1] for param in model.parameters()])
    found = {"times": times[3:], "cpu_ms": spent_ms / steps, "weights": weights.tolist()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if way.startswith("ddp"):
        torch.distributed.destroy_process_group()


def run(way: str, flags: argparse.Namespace, folder: Path) -> tuple[float, float, list[float]]:
    """Return the median step of the slowest worker and the processor time of a step in ms, and weights."""
    script = [sys.executable, __file__, "--work", way, "--steps", str(flags.steps)]
    script += ["--folder", str(folder), "--parent", str(os.getpid())]
    if way in ("alone", "ddp gloo"):
        variables = {"WORLD_SIZE": str(flags.workers), "MASTER_ADDR": "127.0.0.1"}
        variables["MASTER_PORT"] = str(29500 + os.getpid() % 2000)
        workers = [
            subprocess.Popen(script, env={**os.environ, **variables, "RANK": str(rank)})
            for rank in range(flags.workers)
        ]
        codes = [worker.wait() for worker in workers]
        assert not any(codes), codes
    else:
        launch = Path(sys.executable).parent / "kvps-launch"
        command = [launch, "-n", str(flags.workers), "-s", str(flags.servers), "--", *script]
        subprocess.run(command, check=True)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(flags.workers)]
    if way != "alone":
        assert all(item["weights"] == found[0]["weights"] for item in found), way
    step_ms = max(statistics.median(item["times"]) for item in found)
    return step_ms, found[0]["cpu_ms"] / flags.workers, found[0]["weights"]


def main() -> None:
    """Take the ways in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="timed steps in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--ways", nargs="*", default=WAYS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.work:
        work(flags.work, flags.steps, flags.folder, flags.parent)
        return
    import tempfile

    found: dict[str, list[float]] = {way: [] for way in flags.ways}
    spent: dict[str, list[float]] = {way: [] for way in flags.ways}
    ends: dict[str, torch.Tensor] = {}
    for turn in range(flags.turns):
        for way in flags.ways if turn % 2 == 0 else reversed(flags.ways):
            with tempfile.TemporaryDirectory() as folder:
                ms, cpu, weights = run(way, flags, Path(folder))
            print(f"turn {turn + 1}  {way:16} step {ms:7.1f} | cpu {cpu:7.1f}", file=sys.stderr, flush=True)
            found[way].append(ms)
            spent[way].append(cpu)
            ends[way] = torch.tensor(weights)
    reference = ends.get("ddp gloo")
    for way in flags.ways:
        if reference is not None and way != "alone":
            torch.testing.assert_close(ends[way], reference, rtol=1e-5, atol=1e-5, msg=way)
        print(f"{way:16} step {told(found, way)} | cpu {told(spent, way)}")


def told(found: dict[str, list[float]], way: str) -> str:
    """Return the median of a way, what it costs beyond working alone, the ratio of that to gloo's,
    and all turns."""
    alone = statistics.median(found["alone"]) if "alone" in found else 0.0
    gloo = statistics.median(found.get("ddp gloo", [alone])) - alone
    median = statistics.median(found[way])
    ratio = f"{(median - alone) / gloo:5.2f}x" if gloo > 0 else ""
    turns = " ".join(f"{ms:.1f}" for ms in found[way])
    return f"{median:7.1f}  cost {median - alone:7.1f} {ratio}  [{turns}]"


if __name__ == "__main__":
    main()
