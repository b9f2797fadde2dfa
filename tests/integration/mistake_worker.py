"""One rank of a job in which ranks do different things by mistake; says by which error of kvps the rank ended, and when.

kvps-launch -n 2 -s 2 --max-restarts 0 -- python -m tests.integration.mistake_worker FRONT_END MISTAKE

Prints ``told after N.N s: TEXT`` for an error of kvps, else ``ended without a word``. A rank that has been told waits until
the other one has: kvps-launch would end it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import kvps
from tests.integration.front_end_worker import loss_at, net, plain_sgd
from tests.integration.front_ends import FRONT_ENDS, Training

STEPS = 4
MISTAKES: dict[str, Callable[[Callable[..., Training], int, kvps.KVStore], None]] = {}

Make = Callable[..., Training]


def mistake(loop: Callable[[Make, int, kvps.KVStore], None]) -> Callable[[Make, int, kvps.KVStore], None]:
    MISTAKES[loop.__name__] = loop
    return loop


def train(training: Training, steps: int = STEPS) -> None:
    for step in range(steps):
        training.zero_grad()
        training.backward(loss_at(step))
        training.step()


@mistake
def wrapped_on_rank_0_alone(make: Make, rank: int, kv: kvps.KVStore) -> None:
    if rank == 0:
        train(make(net(), plain_sgd))
    else:
        train(Training(net(), plain_sgd, 1, 2))
    kv.barrier()


@mistake
def fewer_steps_on_rank_1(make: Make, rank: int, kv: kvps.KVStore) -> None:
    train(make(net(), plain_sgd), STEPS - 2 * rank)
    kv.barrier()


def main(front_end: str, name: str, folder: str) -> int:
    torch.set_num_threads(1)
    kv = kvps.create("dist_sync", name="seat")
    rank = kv.rank
    kind = FRONT_ENDS[front_end]
    kv.barrier()
    began = time.monotonic()

    def make(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> Training:
        return kind(model, optimizer, rank, kv.num_workers, 1)

    try:
        MISTAKES[name](make, rank, kv)
        said = "ended without a word"
    except kvps.KvpsError as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        said = f"told after {time.monotonic() - began:.1f} s: {text}"
    sys.stdout.write(f"{said}\n")
    sys.stdout.flush()
    (Path(folder) / f"told-{rank}").touch()
    until = time.monotonic() + 30
    while not (Path(folder) / f"told-{1 - rank}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
