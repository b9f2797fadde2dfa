"""Which modules are blocks, and which of them is next."""

import pytest
import torch
from torch.nn import Linear, ModuleDict, ModuleList, Sequential

from kvps.errors import ConfigError
from kvps.torch.sharded.param_groups import ExecutionOrder, cut


def model() -> torch.nn.Module:
    whole = torch.nn.Module()
    whole.embed = Linear(2, 3)
    whole.stages = ModuleList([Sequential(Linear(3, 3), torch.nn.Tanh()), Linear(3, 3)])
    whole.heads = ModuleDict({"a": Linear(3, 1), "b": Linear(3, 1, bias=False)})
    whole.end = Linear(3, 2, bias=False)
    whole.end.weight = whole.embed.weight
    return whole


def found(module: torch.nn.Module, chosen: list[torch.nn.Module] | None = None) -> dict[str, list[str]]:
    return {item.path: item.names for item in cut(module, dict(module.named_parameters()), chosen)}


def test_elements_of_lists_are_blocks_and_what_is_left_is_the_rest() -> None:
    assert found(model()) == {
        "": ["embed.weight", "embed.bias"],
        "stages.0.0": ["stages.0.0.weight", "stages.0.0.bias"],
        "stages.1": ["stages.1.weight", "stages.1.bias"],
        "heads.a": ["heads.a.weight", "heads.a.bias"],
        "heads.b": ["heads.b.weight"],
    }


def test_the_user_chooses_and_a_shared_parameter_is_in_each_block() -> None:
    whole = model()
    blocks = found(whole, [whole.end, whole.stages[0], whole.stages[0][0]])
    assert blocks["end"] == ["embed.weight"]
    assert blocks[""][:2] == ["embed.weight", "embed.bias"]
    assert "stages.0" not in blocks, "all that is inside is in a block of its own"
    assert blocks["stages.0.0"] == ["stages.0.0.weight", "stages.0.0.bias"]


def test_a_module_that_is_used_twice_is_one_block() -> None:
    layer = Linear(2, 2)
    twice = Sequential(layer, torch.nn.Tanh(), layer)
    assert found(twice) == {"": [], "0": ["0.weight", "0.bias"]}


def test_a_block_must_be_a_module_inside_that_is_called() -> None:
    whole = model()
    with pytest.raises(ConfigError, match="element 1 is a Linear, not a module inside the model"):
        found(whole, [whole.end, Linear(1, 1)])
    with pytest.raises(ConfigError, match="element 0 is a ModuleList, which is never called"):
        found(whole, [whole.stages])


def test_the_order_is_that_of_the_pass_before() -> None:
    order = ExecutionOrder(4)
    order.begin()
    assert [order.enter(item) for item in (0, 2, 1)] == [1, 3, 2]
    assert order.is_last(3)
    assert (order.before(0), order.before(1), order.before(2), order.before(3)) == (1, 2, None, None)
    order.begin()
    assert order.is_last(1)
    assert order.first() == 2
    assert [order.enter(item) for item in (0, 1, 2, 3)] == [2, None, 1, None]
