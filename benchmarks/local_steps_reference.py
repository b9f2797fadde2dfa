"""Local steps in one process, by torch alone: what the algorithm loses, apart from servers and links.

The replicas of all workers are trained in turn, on the pieces of text that the workers of
examples/gpt_local_steps.py would have, and by the flags of that example.
tests/integration/test_local_steps.py shows that kvps computes the same.

With ``--mode async`` the replicas are trained in virtual time, whose unit is a step of a fast
worker: speeds are exact on a machine that has other work, and pushes and pulls take no time.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, batches, docstrings, encode, loss_of
from gpt_local_steps import flags_of, steps_of

from kvps.torch.local_steps.fragments import Schedule, fragments_of
from kvps.torch.local_steps.pace import DynamicSteps, Report


class Outer:
    """The global weights, and SGD with Nesterov momentum.

    Args:
        models: the replicas.
        lr, momentum: of the outer optimizer.
    """

    def __init__(self, models: list[GPT], lr: float, momentum: float) -> None:
        self._replicas = [dict(model.named_parameters()) for model in models]
        first = self._replicas[0]
        self._weights = {name: param.detach().clone() for name, param in first.items()}
        self._momenta = {name: torch.zeros_like(item) for name, item in self._weights.items()}
        self._lr, self._momentum = lr, momentum

    def mean(self, name: str) -> torch.Tensor:
        """Return the mean of a parameter over the replicas."""
        return torch.stack([params[name].detach() for params in self._replicas]).mean(0)

    def merge(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Make an outer step with these parameters; return their new values."""
        for name in names:
            weight = self._weights[name]
            pseudo = weight - self.mean(name)
            self._momenta[name].mul_(self._momentum).add_(pseudo)
            weight.sub_(pseudo.add_(self._momenta[name], alpha=self._momentum), alpha=self._lr)
        return {name: self._weights[name].clone() for name in names}

    @torch.no_grad()
    def take(self, merged: dict[str, torch.Tensor], alpha: float) -> None:
        """Give the replicas merged values, but for ``alpha``."""
        for name, value in merged.items():
            for params in self._replicas:
                params[name].copy_(torch.lerp(value, params[name], alpha))


def trained(workers: int, words: list[str]) -> dict[str, float]:
    """Train by the flags of the example; return the test loss."""
    torch.set_num_threads(1)
    flags = flags_of(words)
    if not flags.every_step and flags.codec != "none":
        raise SystemExit(f"--codec {flags.codec}: the reference has no codecs; use --codec none")
    if flags.quorum is not None or (flags.mode == "async" and flags.fragments > 1):
        raise SystemExit("the reference has no quorum, and one fragment where each push is applied by itself")
    text = encode(docstrings())
    train, test = text[: -len(text) // 10], text[-len(text) // 10 :]
    torch.manual_seed(flags.seed)
    first = GPT(flags.width, flags.layers)
    models = [first if flags.every_step else copy.deepcopy(first) for _ in range(workers)]
    trained_models = models[:1] if flags.every_step else models
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=flags.lr, weight_decay=0.01) for model in trained_models
    ]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(
            item, flags.lr, total_steps=steps_of(flags, rank, workers) + 1, pct_start=flags.warm_up
        )
        for rank, item in enumerate(optimizers)
    ]
    size = max(1, flags.batch_size // workers)
    sources = [
        batches(train, size, torch.Generator().manual_seed(1000 * flags.seed + rank), flags.context)
        for rank in range(workers)
    ]
    if flags.mode == "async":
        replicas = [
            Replica(*parts, flags.float32)
            for parts in zip(models, optimizers, schedulers, sources, strict=True)
        ]
        found = trained_async(flags, replicas)
        return {"loss": loss_of_mean(models, test, flags), **found}
    names = fragments_of(dict(first.named_parameters()), flags.fragments)
    schedule = Schedule.of(flags.sync_every, len(names), flags.delay)
    outer = Outer(models, flags.outer_lr, flags.momentum)
    merged: dict[str, torch.Tensor] = {}
    for _ in range(flags.steps):
        for item in optimizers:
            item.zero_grad()
        for model, source in zip(models, sources, strict=True):
            loss = loss_of(model, *next(source), is_exact=flags.float32)
            (loss / workers if flags.every_step else loss).backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        if flags.every_step:
            continue
        schedule.step()
        if schedule.arriving is not None:
            outer.take(merged, flags.alpha)
            schedule.taken()
        if schedule.due is not None:
            merged = outer.merge(names[schedule.due])
            schedule.left()
            if not flags.delay:
                outer.take(merged, flags.alpha)
                schedule.taken()
    if schedule.in_flight is not None:
        outer.take(merged, flags.alpha)
    return {"loss": loss_of_mean(models, test, flags)}


@torch.no_grad()
def loss_of_mean(models: list[GPT], test: torch.Tensor, flags: argparse.Namespace) -> float:
    """Return the test loss of the mean of the replicas, which the first one becomes."""
    generator = torch.Generator().manual_seed(0)
    for params in zip(*[model.parameters() for model in models], strict=True):
        params[0].copy_(torch.stack(params).mean(0))
    losses = [
        loss_of(models[0], *piece, is_exact=flags.float32).item()
        for piece, _ in zip(batches(test, 32, generator, flags.context), range(48), strict=False)
    ]
    return sum(losses) / len(losses)


# --- each push by itself --------------------------------------------------------------------------------


@dataclass
class Replica:
    """The model of a worker, and how it is trained."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    source: Iterator[tuple[torch.Tensor, torch.Tensor]]
    is_exact: bool

    def step(self) -> None:
        """Make an inner step."""
        self.optimizer.zero_grad()
        loss_of(self.model, *next(self.source), is_exact=self.is_exact).backward()
        self.optimizer.step()
        self.scheduler.step()


class AsyncOuter:
    """The global weights, and SGD that applies each push, with Nesterov momentum that moves every
    ``period`` pushes.

    Args:
        model: a replica.
        lr, momentum: of the outer optimizer.
        period: 1, or the number of workers for ``delayed_nesterov``.
        share: of a push.
    """

    def __init__(self, model: GPT, lr: float, momentum: float, period: int, share: float) -> None:
        self._weights = [param.detach().clone() for param in model.parameters()]
        self._momenta = [torch.zeros_like(weight) for weight in self._weights]
        self._pending = [torch.zeros_like(weight) for weight in self._weights]
        self._lr, self._momentum, self._period, self._share = lr, momentum, period, share
        self.version = 0

    def read(self) -> list[torch.Tensor]:
        """Return a copy of the weights."""
        return [weight.clone() for weight in self._weights]

    @torch.no_grad()
    def push(self, start: list[torch.Tensor], model: GPT) -> None:
        """Apply what a replica has learned since ``start``, and give it the weights."""
        self.version += 1
        moves = self.version % self._period == 0
        for weight, momentum, pending, begun, param in zip(
            self._weights, self._momenta, self._pending, start, model.parameters(), strict=True
        ):
            pseudo = (begun - param) * self._share
            weight.sub_(pseudo, alpha=self._lr)
            pending.add_(pseudo)
            if moves:
                momentum.mul_(self._momentum).add_(pending)
                weight.sub_(momentum, alpha=self._lr * self._momentum)
                pending.zero_()
            param.copy_(weight)


def trained_async(flags: argparse.Namespace, replicas: list[Replica]) -> dict[str, float]:
    """Train the replicas, the last of which takes ``--slow`` times as long for a step; return what
    it took."""
    workers = len(replicas)
    period = workers if flags.outer == "delayed_nesterov" else 1
    outer = AsyncOuter(replicas[0].model, flags.outer_lr, flags.momentum, period, 1 / workers)
    step_s = [1.0] * (workers - 1) + [flags.slow]
    left = [steps_of(flags, rank, workers) for rank in range(workers)]
    lengths, since = [flags.sync_every] * workers, [0] * workers
    starts, versions = [outer.read() for _ in replicas], [0] * workers
    pushed_at, reports = [0.0] * workers, [Report(0.0, 0.0, 0.0)] * workers
    paces = [DynamicSteps(flags.sync_every, 1, rank) for rank in range(workers)]
    ages: list[list[int]] = [[] for _ in replicas]
    ends = [(step_s[rank], rank) for rank in range(workers)]
    now = 0.0
    while ends:
        now, rank = heapq.heappop(ends)
        replicas[rank].step()
        left[rank] -= 1
        since[rank] += 1
        if left[rank]:
            heapq.heappush(ends, (now + step_s[rank], rank))
        if since[rank] < lengths[rank]:
            continue
        ages[rank].append(outer.version - versions[rank])
        outer.push(starts[rank], replicas[rank].model)
        starts[rank], versions[rank], since[rank] = outer.read(), outer.version, 0
        reports[rank] = Report(len(ages[rank]), step_s[rank], now - pushed_at[rank])
        pushed_at[rank] = now
        if flags.dynamic:
            lengths[rank] = paces[rank].of(reports, now)
    found = {"fast_steps": now}
    for rank in range(workers):
        found |= {
            f"merges_{rank}": len(ages[rank]),
            f"last_steps_{rank}": lengths[rank],
            f"age_{rank}": statistics.fmean(ages[rank]),
        }
    return found
