"""What all rules have in common: how gradients are prepared, and what becomes of state."""

import pytest
import torch
from torch import Tensor

from kvps.core.optim.base import State, Terms, Updater
from kvps.core.optim.extra_rules import RULES
from kvps.core.optim.hyperparams import SCHEMAS, resolve
from kvps.core.optim.torch_rules import create
from kvps.errors import ConfigError


def updater(name: str, **given: object) -> Updater:
    return RULES[name](resolve(name, given))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [-8.0, 0.5, 2.0]),
        ({"rescale_grad": 0.25}, [-2.0, 0.125, 0.5]),
        ({"clip_gradient": 1.0}, [-1.0, 0.5, 1.0]),
        ({"rescale_grad": 0.25, "clip_gradient": 1.0}, [-1.0, 0.125, 0.5]),
        ({"rescale_grad": -1.0, "clip_gradient": 1.0}, [1.0, -0.5, -1.0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_gradients_are_rescaled_then_clipped(
    given: dict[str, object], expected: list[float], dtype: torch.dtype
) -> None:
    rule = updater("test", **given)
    weight = torch.zeros(3, dtype=dtype)
    grad = torch.tensor([-8.0, 0.5, 2.0], dtype=torch.float32 if dtype.itemsize == 2 else dtype)
    rule.apply(weight, grad, rule.new_state(weight), Terms(step=1, lr=1.0, weight_decay=0.0))
    assert weight.tolist() == expected


@pytest.mark.parametrize("rescale", [1.0, 0.5, -2.0])
@pytest.mark.parametrize("size", [0.0, 1.0, 3.0, 1e15])
def test_steps_are_clipped_as_torch_clips_them(size: float, rescale: float) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = rescale * torch.tensor([size, 0.0])
    torch.nn.utils.clip_grad_norm_([param], 2.0)
    rule = updater("test", clip_global_norm=2.0, rescale_grad=rescale)
    scaled = rescale * size * rule.clip_factor(size**2)
    assert scaled == pytest.approx(float(param.grad[0]), rel=1e-5)


def test_integers_are_not_scaled() -> None:
    with pytest.raises(ConfigError, match="clip_global_norm=2 cannot scale a gradient of"):
        updater("test", clip_global_norm=2.0).demand(torch.int32)


def test_a_big_sum_is_rescaled_before_it_is_cast_to_half() -> None:
    rule = updater("test", rescale_grad=2.0**-10)
    weight = torch.zeros(1, dtype=torch.float16)
    rule.apply(
        weight, torch.tensor([2.0**20]), rule.new_state(weight), Terms(step=1, lr=1.0, weight_decay=0.0)
    )
    assert weight.item() == 1024.0  # 2^20 itself is infinity in float16


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_an_empty_slice_is_no_update(name: str) -> None:
    """Its state stays as it was: a product over steps, too, counts updates of elements alone."""
    rule = create(resolve(name, {}))
    empty = torch.zeros((0, 1) if rule.is_by_row else 0)
    state = rule.new_state(empty)
    before = {field: value.clone() for field, value in state.items()}
    norms = rule.partial_norms(empty, empty, state, Terms(step=1, lr=0.1, weight_decay=0.1))
    rule.apply(empty, empty, state, Terms(step=1, lr=0.1, weight_decay=0.1, norms=norms))
    assert not empty.numel()
    assert state.keys() == before.keys()
    assert all(torch.equal(state[field], value) for field, value in before.items())


def test_a_master_is_a_copy_and_only_of_half_weights() -> None:
    rule = updater("test", multi_precision=True)
    assert rule.new_state(torch.ones(3)) == {}
    weight = torch.ones(3, dtype=torch.bfloat16)
    state = rule.new_state(weight)
    weight.zero_()
    assert state["master"].tolist() == [1, 1, 1]
    assert state["master"].dtype == torch.float32


def test_adopt_keeps_what_the_new_settings_still_need() -> None:
    weight = torch.linspace(-1, 1, 61).half()
    old = updater("lars", momentum=0.9)
    state = old.new_state(weight)
    for step in (1, 2):
        old.apply(
            weight, torch.ones(61), state, Terms(step=step, lr=0.1, weight_decay=0.0, norms=torch.ones(2))
        )
    velocity = state["velocity"].clone()

    same = updater("lars", momentum=0.5).adopt(weight, state)
    assert same["velocity"] is state["velocity"]  # no copy where nothing changes

    wider = updater("lars", momentum=0.5, multi_precision=True).adopt(weight, state)
    assert torch.equal(wider["velocity"], velocity.float())
    assert torch.equal(wider["master"], weight.float())

    assert updater("lars").adopt(weight, state) == {}
    begun = updater("lars", momentum=0.5).adopt(weight, {})
    assert not bool(begun["velocity"].any())


def test_adopt_keeps_what_ranks_have_read() -> None:
    rule = updater("dcasgd")
    weight = torch.zeros(4)
    state = rule.new_state(weight)
    rule.pulled(weight, state, 0, 4, 2)
    adopted = updater("dcasgd", momentum=0.9).adopt(weight, state)
    assert adopted.keys() == {"velocity", "read.2"}


def test_terms_are_what_apply_was_given() -> None:
    seen: list[Terms] = []

    class Spy(Updater):
        def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
            seen.append(terms)

    weight = torch.zeros(1)
    Spy(resolve("test", {})).apply(
        weight, torch.ones(1), {}, Terms(step=3, lr=0.5, weight_decay=0.25, rank=7, age=4)
    )
    assert seen == [Terms(step=3, lr=0.5, weight_decay=0.25, norms=None, rank=7, age=4)]
