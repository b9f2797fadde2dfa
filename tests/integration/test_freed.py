"""When a call is over nothing of it is left: its values are freed without the garbage collector."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

import kvps
from tests.integration.processes import until


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("call", ["init", "push", "pull", "pushpull"])
def test_values_are_freed_when_their_call_is_over(call: str) -> None:
    def begin() -> list[weakref.ref[torch.Tensor]]:
        values = [torch.ones(300_000), torch.ones(3)]
        names = ["a", "b"]
        if call == "init":
            kv.init(["c", "d"], values)
        elif call == "push":
            kv.push(names, values)
        elif call == "pull":
            kv.pull(names, out=values)
        else:
            kv.pushpull(names, values, out=values)
        return [weakref.ref(value) for value in values]

    with kvps.LocalCluster(1, 2):
        kv = kvps.create("dist_sync")
        kv.init(["a", "b"], [torch.zeros(300_000), torch.zeros(3)])
        left = begin()
        kv.barrier()
        until(lambda: not [item for item in left if item() is not None], "end of the values")
        kv.close()
