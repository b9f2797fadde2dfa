"""One rank of DistributedDataParallel whose gradients are compressed by a hook: it compares, and says so.

kvps-launch -n 2 -s 2 -- python tests/integration/hook_worker.py BACKEND
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import kvps
import kvps.torch
from tests.integration.test_compression import (
    LR,
    STEPS,
    THRESHOLD,
    TWO_BITS,
    Reference,
    Tensors,
    assert_close,
    assert_same,
    gradients,
    parameters,
    two_bits,
)

BUCKET_MB = 0.1
"""Several buckets, which are made anew behind the first step."""


class Drawn(torch.nn.Module):
    """A model whose gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.held = torch.nn.ParameterDict(parameters())

    def forward(self, drawn: Tensors) -> torch.Tensor:
        # Not in the order of registration: so DistributedDataParallel makes other buckets.
        return torch.stack([(self.held[name] * drawn[name]).sum() for name in sorted(drawn)]).sum()


class Job:
    """A model, its hook, and torch's SGD."""

    def __init__(self, compression: Any, names: bool = False) -> None:
        self.model = Drawn()
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_MB)
        self.state = kvps.torch.CommState(compression, None, self.model.held if names else None)
        self.ddp.register_comm_hook(self.state, kvps.torch.comm_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), **LR)

    def steps(self, begin: int, end: int, scale: float = 1.0) -> None:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            (scale * self.ddp(gradients(RANK, step))).backward()
            self.optimizer.step()

    def weights(self) -> Tensors:
        return {name: one.detach().clone() for name, one in self.model.held.items()}


def follows_mxnets_rule() -> None:
    reference = Reference(two_bits)
    job = Job(TWO_BITS, names=True)
    job.steps(0, STEPS)
    for step in range(STEPS):
        reference.step(step)
    assert_close(job.weights(), reference.params)
    state = job.state.state_dict()
    assert state["rank"] == RANK
    assert state["rests"].keys() == reference.params.keys()
    for name, rest in state["rests"].items():
        torch.testing.assert_close(
            rest.view_as(reference.rests[RANK][name]), reference.rests[RANK][name]
        )
    job.state.close()


def goes_on_with_what_was_owed() -> None:
    job = Job(TWO_BITS)
    job.steps(0, 2)
    again = Job(TWO_BITS)
    again.model.load_state_dict(job.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
    again.state.load_state_dict(job.state.state_dict())
    job.steps(2, STEPS)
    again.steps(2, STEPS)
    assert_same(job.weights(), again.weights())


def without_compression_is_a_mean() -> None:
    reference = Reference(lambda rest: rest.clone())
    job = Job(None)
    job.steps(0, STEPS)
    for step in range(STEPS):
        reference.step(step)
    assert_close(job.weights(), reference.params)
    assert job.state.state_dict() == {}


def rules_match_names() -> None:
    rules = [{"pattern": "cut", "type": "2bit", "threshold": THRESHOLD}]
    job = Job({"type": "none", "min_bytes": 0, "rules": rules}, names=True)
    job.steps(0, 1)
    assert job.state.state_dict()["rests"].keys() == {"cut"}


def passes_inside_no_sync_are_added_up() -> None:
    job = Job(TWO_BITS)
    with job.ddp.no_sync():
        job.ddp(gradients(RANK, 10)).backward()
    job.ddp(gradients(RANK, 0)).backward()
    job.optimizer.step()
    reference = Reference(two_bits)
    both = [(gradients(rank, 10), gradients(rank, 0)) for rank in range(SIZE)]
    reference.step_by([{name: a[name] + b[name] for name in a} for a, b in both])
    assert_close(job.weights(), reference.params)


def an_infinite_gradient_is_seen_by_all() -> None:
    job = Job(TWO_BITS)
    job.ddp(gradients(RANK, 0)).mul(float("inf") if RANK else 1.0).backward()
    assert not any(one.grad.isfinite().all() for one in job.model.parameters())
    job.ddp.zero_grad()
    job.ddp(gradients(RANK, 1)).backward()
    assert all(one.grad.isfinite().all() for one in job.model.parameters())


def ranks_may_have_more_batches_than_others() -> None:
    """Who has none left pushes zeros, and what it owes; the mean is over both, as torch has it."""
    reference = Reference(two_bits)
    job = Job(TWO_BITS)
    with job.ddp.join():
        job.steps(0, 3 + RANK)
    for step in range(3):
        reference.step(step)
    nothing = {name: torch.zeros_like(one) for name, one in gradients(0, 3).items()}
    reference.step_by([nothing, gradients(1, 3)])
    assert_close(job.weights(), reference.params)


def an_error_reaches_who_called_backward() -> None:
    job = Job(TWO_BITS)
    job.steps(0, 2)
    job.state.close()
    with pytest.raises((kvps.ConfigError, RuntimeError), match="is closed"):
        job.steps(2, 3)


def what_cannot_be_is_refused() -> None:
    model = torch.nn.Embedding(4, 2, sparse=True)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(kvps.torch.CommState("fp16"), kvps.torch.comm_hook)
    with pytest.raises((kvps.ConfigError, RuntimeError), match="use sparse=False"):
        ddp(torch.tensor([1])).sum().backward()
    job = Job("fp16")
    other = DistributedDataParallel(torch.nn.Linear(2, 2))
    named = kvps.torch.CommState("fp16", None, job.model)
    other.register_comm_hook(named, kvps.torch.comm_hook)
    with pytest.raises((kvps.ConfigError, RuntimeError), match="not in named_parameters"):
        other(torch.ones(1, 2)).sum().backward()


CASES: list[Callable[[], None]] = [
    follows_mxnets_rule,
    goes_on_with_what_was_owed,
    without_compression_is_a_mean,
    rules_match_names,
    passes_inside_no_sync_are_added_up,
    an_infinite_gradient_is_seen_by_all,
    ranks_may_have_more_batches_than_others,
    an_error_reaches_who_called_backward,
    what_cannot_be_is_refused,
]

if __name__ == "__main__":
    dist.init_process_group(sys.argv[1])
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
    for case in CASES:
        case()
        dist.barrier()
        sys.stdout.write(f"{case.__name__} went well\n")
        sys.stdout.flush()
    dist.destroy_process_group()
