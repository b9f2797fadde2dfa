"""A training script whose every bit is known: what it ends with must not depend on what befell it.

Gradients depend on the step and the rank, the optimizer keeps state, and sums are taken in the order of
the ranks. So one lost, doubled or changed push, or one element of a momentum that is not what it was,
shows in all later weights.

    python exact.py FOLDER PAUSE_S [late]

It trains until the step that the file FOLDER/limit names, once there is one, and pauses after each. In
FOLDER, ``rounds-R`` gets a line for each step that rank R has done: the step, and the monotonic time;
``epochs`` gets one for each epoch that a rank was told of.
With ``late`` the optimizer is set when there is a first checkpoint. At the end rank 0 writes FOLDER/end: a digest of the weights and of the optimizer's state.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

import kvps

SIZES = {"wide": 150_001, "a": 501, "b": 7_919}
LIMIT_S = 120.0


def main(folder: Path, pause_s: float, is_late: bool = False) -> None:
    """Train."""
    kv = kvps.create(
        "dist_sync", deterministic=True, timeout=LIMIT_S, bigarray_bound=50_000, worker_grace=LIMIT_S
    )
    names, weights = list(SIZES), initial()
    kv.init(names, weights)
    end = time.monotonic() + LIMIT_S
    while is_late and not list((folder / "checkpoints").glob("cut-*/manifest.json")):
        assert time.monotonic() < end, f"no checkpoint is complete after {LIMIT_S:g} s"
        time.sleep(0.01)
    kv.set_optimizer("adam", lr=0.01)
    step = kv.resume(names)
    is_done = False
    with open(folder / f"rounds-{kv.rank}", "a") as rounds:
        while not is_done:
            try:
                kv.pull(names, out=weights)
                while (limit := limit_in(folder)) is None or step < limit:
                    kv.pushpull(names, gradients(step, kv.rank), out=weights)
                    step += 1
                    rounds.write(f"{step} {time.monotonic():.6f}\n")
                    rounds.flush()
                    time.sleep(pause_s)
                kv.barrier("trained")
                if kv.rank == 0:
                    (folder / "end").write_text(digest(kv, names, folder))
                kv.barrier("end")
                is_done = True
            except kvps.EpochChanged as error:
                with open(folder / "epochs", "a") as epochs:
                    epochs.write(f"rank {kv.rank}: {error}\n")
                if names[0] not in error.after:  # the checkpoint is from before they were initialised
                    kv.init(names, initial())
                if not error.has_optimizer:  # ... or before it was set
                    kv.set_optimizer("adam", lr=0.01)
                (step,) = {error.after.get(name, 0) for name in names}


def initial() -> list[torch.Tensor]:
    """Return the weights before the first step."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in SIZES.values()]


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    """Return what a rank pushes in a step."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return [torch.randn(size, generator=generator) for size in SIZES.values()]


def limit_in(folder: Path) -> int | None:
    """Return the step at which to end, if that is known."""
    path = folder / "limit"
    return int(path.read_text()) if path.exists() else None


def digest(kv: kvps.KVStore, names: list[str], folder: Path) -> str:
    """Return a digest of all that the servers hold of the model."""
    path = folder / "states.safetensors"
    kv.save_optimizer_states(str(path))
    states = sorted(load_file(path).items())
    sum_ = hashlib.sha256()
    for item in [*(row for _, row in states), *kv.pull(names)]:
        sum_.update(item.numpy().tobytes())
    titles = " ".join(title for title, _ in states)
    return f"{kv.version(names)} {titles} {sum_.hexdigest()}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), "late" in sys.argv)
