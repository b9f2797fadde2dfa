"""Train the small GPT of gpt.py over slow links: workers train alone, and merge every 50 steps.

    python examples/gpt_local_steps.py                                    # one process
    kvps-launch -n 2 -s 2 -- python examples/gpt_local_steps.py           # 2 workers, 2 servers

The loop is that of one process: a plain AdamW and torch's OneCycleLR. DiLoCo around it counts its steps. Three
fragments of the model take turns, each sends four bits for each weight, and training goes on while a fragment is on its
way. With ``--every-step`` a DistributedOptimizer averages each gradient instead, for comparison. With ``--mode async``
nobody waits for a slower worker, and ``--dynamic`` gives that worker fewer steps between two merges.

Add ``--max-restarts 2`` to kvps-launch: a worker that is killed is started again, makes its steps up to the last merge of
its predecessor again, and goes on with the weights of the others. Not so with ``--every-step``, where AdamW runs here.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from contextlib import nullcontext
from typing import Any

import torch
from gpt import CONTEXT, GPT, LAYERS, WIDTH, batches, docstrings, encode, loss_of

import kvps.torch


def flags_of(arguments: list[str] | None) -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT by local steps.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--first-step", type=int, default=0, help="of a worker that joins late: the steps before it"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="of all workers, in a step")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--warm-up", type=float, default=0.3, help="share of steps with a rising lr")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--context", type=int, default=CONTEXT, help="characters of a piece")
    parser.add_argument(
        "--float32", action="store_true", help="no bfloat16: sooner done where a model is small"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-step", action="store_true", help="average each gradient instead")
    parser.add_argument("--sync-every", type=int, default=60)
    parser.add_argument("--fragments", type=int, default=3)
    parser.add_argument("--delay", type=int, default=2)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--outer-lr", type=float, default=0.8)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--codec", default="e3m0", help="e3m0, int8, topk2bit, or none")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--outer", default="nesterov", help="nesterov, delayed_nesterov, or sgd")
    parser.add_argument(
        "--dynamic", action="store_true", help="a slower worker makes fewer steps between merges"
    )
    parser.add_argument("--quorum", type=int, help="merge without waiting for all workers")
    parser.add_argument(
        "--late", default="drop", help="next or drop: what becomes of pushes after a quorum's round"
    )
    parser.add_argument("--slow", type=float, default=1.0, help="the last worker takes so many times as long")
    parser.add_argument("--gate", type=float, help="times the median norm from which a worker does not count")
    parser.add_argument(
        "--penalty", action="store_true", help="count a worker less whose norm is over the median"
    )
    parser.add_argument("--broken", type=float, default=1.0, help="times the others' lr of the last worker")
    parser.add_argument(
        "--by-speed",
        action="store_true",
        help="give the slow worker fewer steps, and the others more; --steps is the mean",
    )
    parser.add_argument("--max-loss", type=float, default=2.6, help="exit 1 above this")
    return parser.parse_args(arguments)


def compression_of(codec: str) -> dict[str, Any] | None:
    """Return how pseudo-gradients and merged weights travel."""
    if codec == "none":
        return None
    if codec == "topk2bit":  # the weights come back by e3m0, which needs no residual of many rounds
        return {"type": codec, "ratio": 1 / 64, "decay": 0.95, "min_bytes": 0, "pull": {"type": "e3m0"}}
    return {"type": codec, "min_bytes": 0, "pull": True}


def steps_of(flags: argparse.Namespace, rank: int, workers: int) -> int:
    """Return how many steps a worker makes in all."""
    if not flags.by_speed:
        return int(flags.steps)
    speeds = [1.0] * (workers - 1) + [1 / flags.slow]
    return round(flags.steps * workers * speeds[rank] / sum(speeds))


def main(arguments: list[str] | None = None) -> int:
    """Train and test; return the exit code."""
    flags = flags_of(arguments)
    text = encode(docstrings())
    train, test = text[: -len(text) // 10], text[-len(text) // 10 :]
    torch.manual_seed(flags.seed)
    model = GPT(flags.width, flags.layers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=flags.lr, weight_decay=0.01)
    outer: Any
    if flags.every_step:
        optimizer = outer = kvps.torch.DistributedOptimizer(optimizer, model)
        stores = [outer.kvstore]
    else:
        outer = kvps.torch.DiLoCo(
            model,
            optimizer,
            flags.outer,
            lr=flags.outer_lr,
            momentum=flags.momentum,
            sync_every=flags.sync_every,
            dynamic_sync_every=flags.dynamic,
            fragments=flags.fragments,
            delay=flags.delay,
            alpha=flags.alpha,
            compression=compression_of(flags.codec),
            mode=flags.mode,
            quorum=flags.quorum,
            late=flags.late,
            gate=flags.gate,
            penalty=flags.penalty,
        )
        stores = list(outer.stores)
    rank, workers = stores[0].rank, stores[0].num_workers
    steps = steps_of(flags, rank, workers)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        flags.lr * (flags.broken if rank == workers - 1 else 1.0),
        total_steps=steps + 1,
        pct_start=flags.warm_up,
    )
    scheduler.last_epoch = flags.first_step
    own = max(1, flags.batch_size // workers)
    seed = torch.Generator().manual_seed(1000 * flags.seed + rank)
    source = batches(train, own, seed, flags.context)

    ages: list[int] = []
    begin = time.perf_counter()
    with nullcontext() if flags.every_step else outer:
        for step in range(flags.first_step + 1, steps + 1):
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = loss_of(model, *next(source), is_exact=flags.float32)
            loss.backward()
            if rank == workers - 1 and flags.slow > 1:
                time.sleep((flags.slow - 1) * (time.perf_counter() - began))
            optimizer.step()
            scheduler.step()
            if flags.mode == "async" and outer.syncs > len(ages):
                ages.append(outer.age)
            if rank == 0 and step % 50 == 0:
                print(f"step {step:4}  loss {loss.item():.3f}", flush=True)
        waited = 0.0 if flags.every_step else outer.wait_s
        if not flags.every_step:
            # The last steps, too; but with a quorum, nobody waits for a worker that has more time to go.
            outer.average() if flags.quorum is None or flags.by_speed else outer.pull()
        sent = sum(kv.metrics()["sent_bytes"] for kv in stores)
    if flags.every_step:
        outer.close()
    seconds = time.perf_counter() - begin
    if ages:
        print(
            f"rank {rank}: {len(ages)} merges, the last after {outer.sync_every} steps; pushes were "
            f"{sum(ages) / len(ages):.1f} pushes of others old"
        )
    if rank != 0:
        return 0

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        losses = [
            loss_of(model, inputs, targets, is_exact=flags.float32).item()
            for (inputs, targets), _ in zip(
                batches(test, 32, generator, flags.context), range(48), strict=False
            )
        ]
    result = sum(losses) / len(losses)
    found = {"loss": result, "seconds": seconds, "waited": waited, "sent_bytes": sent}
    print(json.dumps({name: round(value, 4) for name, value in found.items()}), flush=True)
    print(
        f"{steps} steps in {seconds:.0f} s, of which {waited:.1f} s waiting; {sent / 1e6:.2f} MB sent; "
        f"test loss {result:.3f} ({result / math.log(2):.2f} bits a character)"
    )
    if result > flags.max_loss:
        print(f"the test loss is above --max-loss {flags.max_loss}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
