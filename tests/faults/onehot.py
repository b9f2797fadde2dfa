"""A training script that counts each push: every element of the weights belongs to one of them.

The gradient of a rank's step is -1 at the elements of that rank and step, and 0 elsewhere. With
SGD and a rate of 1 each element is then a counter: 0 says that its push was lost, 2 that it was
applied twice, and 1 that all is well. Elements of all steps lie in every part of every server.

    python onehot.py sync|async STEPS FOLDER [--no-barrier]

Every third step has a barrier, unless told otherwise. In FOLDER, ``rounds-R`` gets a line for each step that rank R has done: the step, and the monotonic
time. A replacement appends to it.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

import torch
from sitecustomize import reach

import kvps

SIZES = {"wide": 150_001, "a": 501, "b": 997, "c": 7_919}
LIMIT_S = 60.0


def main(mode: str, steps: int, folder: Path, has_barriers: bool) -> None:
    """Train."""
    reach("begin")
    kv = kvps.create(f"dist_{mode}", timeout=LIMIT_S, bigarray_bound=50_000)
    reach("created")
    kv.set_optimizer("sgd", lr=1.0)
    reach("optimizer")
    names = list(SIZES)
    kv.init(names, [torch.zeros(size) for size in SIZES.values()])
    reach("initialized")
    start = kv.resume(names)
    reach("resumed")
    owners = [torch.arange(size) % (steps * kv.num_workers) for size in SIZES.values()]

    def gradients(step: int) -> list[torch.Tensor]:
        mine = step * kv.num_workers + kv.rank
        return [-(owner == mine).float() for owner in owners]

    def check(done: int, pulled: list[torch.Tensor]) -> None:
        """Everything up to step ``done`` must be there once; of others nothing beyond one step."""
        for name, owner, value in zip(names, owners, pulled, strict=True):
            step = owner.div(kv.num_workers, rounding_mode="floor")
            own = owner % kv.num_workers == kv.rank
            if mode == "sync":
                assert value.eq((step <= done).float()).all(), report(name, done, value, step)
            else:
                known = (step <= done) & own
                assert value[known].eq(1).all(), report(name, done, value[known], step[known])
                assert value.le(1).all(), report(name, done, value, step)
                assert value.ge(0).all(), report(name, done, value, step)

    if start % 3 == 2 and has_barriers:
        # Its predecessor may have ended between its push and the barrier behind it, at which the
        # others wait for this rank. If they do not, it is passed at once.
        kv.barrier(f"step {start - 1}")
    with open(folder / f"rounds-{kv.rank}", "a") as rounds:
        for step in range(start, steps):
            if step % 3 == 0:
                pulled = kv.pushpull(names, gradients(step))
                reach("pushpulled")
            else:
                kv.push(names, gradients(step))
                reach("pushed")
                if step % 3 == 1 and has_barriers:
                    kv.barrier(f"step {step}")
                    reach("passed")
                pulled = kv.pull(names)
                reach("pulled")
            check(step, pulled)
            rounds.write(f"{step} {time.monotonic():.6f}\n")
            rounds.flush()
        reach("trained")
        kv.barrier("end")
        reach("ended")
    # A barrier of an async store is passed without those who are lost: wait for their pushes.
    pushes = steps if mode == "sync" else steps * kv.num_workers
    for name, value in zip(names, kv.pull(names, min_version=pushes), strict=True):
        assert value.eq(1).all(), report(name, steps, value, owners[names.index(name)])
    assert kv.version(names) == [pushes] * len(names)
    print("each push counted once", flush=True)  # noqa: T201  # for the test to see


def report(name: str, done: int, value: torch.Tensor, step: torch.Tensor) -> str:
    """Say what the counters are."""
    lost = sorted(set(step[(value < 1) & (step <= done)].tolist()))
    twice = sorted(set(step[value > 1].tolist()))
    early = sorted(set(step[(value > 0) & (step > done)].tolist()))
    return f"{name} after step {done}: lost {lost}, applied again {twice}, too early {early}"


NOT_AGAIN = 78
"""The exit code of what kvps-launch does not start again: the count is wrong, and stays so."""

if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), "--no-barrier" not in sys.argv)
    except AssertionError as error:
        traceback.print_exception(error)
        sys.exit(NOT_AGAIN)
