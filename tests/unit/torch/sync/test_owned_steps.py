"""Hooks of a torch optimizer whose class torch has wrapped twice, as threads that make its first optimizer do."""

import torch

from kvps.torch.sync.steps import hook_once, plain_step


def wrapped_twice() -> torch.optim.Optimizer:
    kind = type("Fresh", (torch.optim.SGD,), {"step": torch.optim.SGD.__dict__["step"].__wrapped__})
    optimizer: torch.optim.Optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    kind.step = torch.optim.Optimizer.profile_hook_step(kind.step)
    return optimizer


def count_hooks(optimizer: torch.optim.Optimizer) -> list[str]:
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    return calls


def test_the_plain_step_calls_no_hook() -> None:
    optimizer = wrapped_twice()
    calls = count_hooks(optimizer)
    plain_step(optimizer)(optimizer)
    assert calls == []
    optimizer.step()
    assert calls == ["before", "before", "after", "after"]  # what torch does


def test_a_step_of_the_class_calls_each_hook_once() -> None:
    optimizer = wrapped_twice()
    hook_once(optimizer)
    calls = count_hooks(optimizer)
    optimizer.step()
    type(optimizer)([torch.nn.Parameter(torch.zeros(1))], lr=1.0).step()  # torch does not wrap it again
    assert calls == ["before", "after"]
