"""One worker of ``local_steps.py kills``: trains the small GPT for some time, and notes its merges.

Arguments: the folder for notes, seconds from the first merge to the end, the seconds that a step
    takes at least, the
steps from one merge to the next, and the quorum (0: none). Waiting stands for a device of its own:
how far a worker gets then depends on when it was killed, and not on how many processes share a processor.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, batches, docstrings, encode, loss_of

import kvps.torch


def main(folder: Path, seconds: float, step_s: float, sync_every: int, quorum: int) -> None:
    """Train, and write a line for the start, for each merge, and for the end."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    notes = (folder / f"{rank}.jsonl").open("a", buffering=1)

    def note(event: str, **facts: float) -> None:
        notes.write(json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **facts}))
        notes.write("\n")

    text = text_in(folder)
    train, test = text[: -len(text) // 10], text[-len(text) // 10 :]
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    compression = {"type": "e3m0", "min_bytes": 0, "pull": True}
    with kvps.torch.DiLoCo(
        model, optimizer, momentum=0.5, sync_every=sync_every, quorum=quorum or None, compression=compression
    ) as outer:
        source = batches(train, 2, torch.Generator().manual_seed(os.getpid()))
        note("begin")
        merges, end = 0, math.inf
        while time.time() < end:
            began = time.perf_counter()
            optimizer.zero_grad()
            loss_of(model, *next(source)).backward()
            time.sleep(max(0.0, began + step_s - time.perf_counter()))
            optimizer.step()
            if outer.syncs > merges:
                merges = outer.syncs
                note("merge", steps=sync_every, waited=outer.wait_s)
                end = end_of(folder, seconds)
        outer.join()
        with torch.no_grad():
            pieces = zip(batches(test, 32, torch.Generator().manual_seed(0)), range(4), strict=False)
            losses = [loss_of(model, *piece).item() for piece, _ in pieces]
        note("end", loss=sum(losses) / len(losses))


def text_in(folder: Path) -> torch.Tensor:
    """Return the encoded text, which the first life of a worker prepares, as a real job's data are
    prepared before."""
    path = folder / "text.safetensors"
    if not path.exists():
        own = folder / f"text.{os.getpid()}"
        save_file({"text": encode(docstrings()).to(torch.uint8)}, own)
        own.replace(path)
    return load_file(path)["text"].long()


def end_of(folder: Path, seconds: float) -> float:
    """Return the time of the end, which the worker sets that is the first to merge."""
    path = folder / "end"
    with suppress(FileExistsError):
        own = folder / f"end.{os.getpid()}"
        own.write_text(str(time.time() + seconds))
        os.link(own, path)
    return float(path.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
