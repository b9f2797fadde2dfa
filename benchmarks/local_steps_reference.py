"""Local steps in one process, by torch alone: what the algorithm loses, apart from servers and links.

The replicas of all workers are trained in turn, on the pieces of text that the workers of examples/gpt_local_steps.py would
have, and by the flags of that example. tests/integration/test_local_steps.py shows that kvps computes the same.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, batches, docstrings, encode, loss_of
from gpt_local_steps import flags_of

from kvps.torch.local_steps.fragments import fragments_of
from kvps.torch.local_steps.schedule import Schedule


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
        self._momenta = {name: torch.zeros_like(one) for name, one in self._weights.items()}
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
    text = encode(docstrings())
    train, test = text[: -len(text) // 10], text[-len(text) // 10 :]
    torch.manual_seed(flags.seed)
    first = GPT(flags.width, flags.layers)
    models = [first if flags.every_step else copy.deepcopy(first) for _ in range(workers)]
    trained_models = models[:1] if flags.every_step else models
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=flags.lr, weight_decay=0.01)
        for model in trained_models
    ]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(
            one, flags.lr, total_steps=flags.steps + 1, pct_start=flags.warm_up
        )
        for one in optimizers
    ]
    size = max(1, flags.batch_size // workers)
    sources = [
        batches(train, size, torch.Generator().manual_seed(1000 * flags.seed + rank), flags.context)
        for rank in range(workers)
    ]
    names = fragments_of(dict(first.named_parameters()), flags.fragments)
    schedule = Schedule.of(flags.sync_every, len(names), flags.delay)
    outer = Outer(models, flags.outer_lr, flags.momentum)
    merged: dict[str, torch.Tensor] = {}
    for _ in range(flags.steps):
        for one in optimizers:
            one.zero_grad()
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
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in first.named_parameters():
            param.copy_(outer.mean(name))
        losses = [
            loss_of(first, *piece, is_exact=flags.float32).item()
            for piece, _ in zip(
                batches(test, 32, generator, flags.context), range(48), strict=False
            )
        ]
    return {"loss": sum(losses) / len(losses)}
