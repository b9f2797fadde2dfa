"""Fragments of a model: balanced by bytes, or as given; each trained parameter in one of them."""

from typing import Any

import pytest
import torch

from kvps.errors import ConfigError
from kvps.torch.local_steps.fragments import fragments_of


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Linear(8, 4), torch.nn.Linear(4, 2), torch.nn.LayerNorm(2)
    )


def trained(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_number_of_fragments_is_balanced_by_bytes(count: int) -> None:
    params = trained(model())
    found = fragments_of(params, count)
    assert len(found) == count
    assert all(found)
    assert sorted(name for names in found for name in names) == sorted(params)
    sizes = [sum(params[name].numel() for name in names) for names in found]
    largest = max(param.numel() for param in params.values())
    assert max(sizes) - min(sizes) <= largest
    assert found == fragments_of(params, count), "all workers cut alike"


def test_equal_parameters_are_dealt_out() -> None:
    params = {f"p{index}": torch.zeros(5) for index in range(6)}
    assert [len(names) for names in fragments_of(params, 3)] == [2, 2, 2]


def test_parameters_without_elements_fill_fragments() -> None:
    params = {"w": torch.zeros(5), "a": torch.zeros(0), "b": torch.zeros(0)}
    assert all(fragments_of(params, 3))


def test_fragments_may_be_given_as_modules_and_parameters() -> None:
    one = model()
    found = fragments_of(trained(one), [one[0], [one[1], one[3]], [one[2].weight, one[2].bias]])
    assert found == (
        ("0.weight", "0.bias"),
        ("1.weight", "1.bias", "3.weight", "3.bias"),
        ("2.weight", "2.bias"),
    )


def test_frozen_parameters_belong_to_no_fragment() -> None:
    one = model()
    one[0].requires_grad_(False)
    assert len(fragments_of(trained(one), [one[1:]])) == 1


@pytest.mark.parametrize(
    ("cut", "match"),
    [
        (lambda one: 0, "fragments=0: use 1 to 8"),
        (lambda one: 9, "fragments=9: use 1 to 8, the number of trained parameters"),
        (lambda one: True, "fragments=True: give a number, or a list"),
        (lambda one: "2", "fragments='2'"),
        (lambda one: None, "fragments=None"),
        (lambda one: [one[0], one[1:3]], "no fragment has '3.weight', '3.bias'; add it to a fragment"),
        (lambda one: [one, one[1]], r"parameter '1.weight' is in fragments\[0\] and in fragments\[1\]"),
        (lambda one: [one, torch.nn.ReLU()], r"fragments\[1\] has no trained parameter"),
        (lambda one: [one, model()], r"fragments\[1\] has 8 trained parameter\(s\) that the model"),
        (lambda one: [one, 3], r"fragments\[1\] is a int; give a module, a parameter, or a list"),
        (lambda one: [one, ["0.weight"]], r"fragments\[1\] is a str"),
    ],
)
def test_senseless_fragments_are_refused(cut: Any, match: str) -> None:
    one = model()
    with pytest.raises(ConfigError, match=match):
        fragments_of(trained(one), cut(one))
