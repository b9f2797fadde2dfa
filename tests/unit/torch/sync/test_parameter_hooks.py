"""Hooks on gradients: which parameters have them, and when a step's last pass is counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvps.errors import ConfigError
from kvps.torch.sync.parameter_hooks import ParameterHooks, second_gradient


def model_of(*trained: str) -> SimpleNamespace:
    params = {name: torch.zeros(2, requires_grad=True) for name in ("a", "b")}
    return SimpleNamespace(params=params, trained=list(trained))


def backward(model: SimpleNamespace, name: str) -> None:
    model.params[name].sum().backward()


def test_a_gradient_of_a_trained_parameter_is_told() -> None:
    model, told = model_of("a"), []
    hooks = ParameterHooks(model, 1, told.append)
    backward(model, "a")
    backward(model, "b")
    assert told == ["a"]
    model.trained.append("b")
    hooks.watch()
    backward(model, "b")
    backward(model, "a")
    assert told == ["a", "b", "a"]
    hooks.close()
    backward(model, "a")
    assert told == ["a", "b", "a"]


def test_the_newest_hooks_of_a_parameter_are_the_only_ones() -> None:
    model, older, newer = model_of("a", "b"), [], []
    first = ParameterHooks(model, 1, older.append)
    second = ParameterHooks(model, 1, newer.append)
    backward(model, "a")
    assert (older, newer) == ([], ["a"])
    del first, second


def test_passes_are_counted_until_a_gradient_leaves() -> None:
    hooks = ParameterHooks(model_of("a"), 2, lambda name: None)
    assert not hooks.is_begun
    assert [hooks.count("a"), hooks.count("a")] == [False, True]
    hooks.leave("a")
    assert not hooks.is_begun
    assert not hooks.count("a")
    hooks.begin()
    assert not hooks.count("a")


@pytest.mark.parametrize("passes", [0, -1, 1.5, True, "2"])
def test_a_number_of_passes_that_is_none(passes: object) -> None:
    with pytest.raises(ConfigError, match="backward_passes_per_step="):
        ParameterHooks(model_of("a"), passes, lambda name: None)  # type: ignore[arg-type]


def test_parameters_without_a_gradient_are_named() -> None:
    model = model_of("a", "b")
    hooks = ParameterHooks(model, 1, lambda name: None)
    assert hooks.missing({"b"}) == ["a"]
    backward(model, "a")
    assert hooks.missing(()) == ["b"]
    assert str(hooks.no_gradient(["b"], "zero_grad()", "Use them")) == (
        "no gradient for 'b', of 2 parameters: no backward() has reached them since zero_grad(). Use them"
    )
    assert "'a' got another gradient after the first was pushed" in str(
        second_gradient("a", "call step()")
    )
