"""Hooks on gradients: which parameters have them, and when a step's last pass is counted."""

import ast
import gc
from types import SimpleNamespace

import pytest
import torch

from kvps.errors import ConfigError
from kvps.torch.sync.parameter_hooks import ParameterHooks, PassEnd, second_gradient, watch
from tests.support.sources import trees

HOOKS = {"register_post_accumulate_grad_hook", "queue_callback"}
"""torch's methods that call during backward for each gradient, and at its end."""


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
    assert "'a' got another gradient after the first was pushed" in str(second_gradient("a", "call step()"))


class Seen:
    """Keys whose gradients were seen, and the ends of passes."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.ends = 0

    def on_gradient(self, key: str) -> None:
        self.keys.append(key)

    def on_end(self) -> None:
        self.ends += 1

    def await_end_of(self, tensor: torch.Tensor, end: PassEnd) -> None:
        def on_gradient(_: torch.Tensor) -> None:
            end.wait(self.on_end)

        tensor.register_post_accumulate_grad_hook(on_gradient)


def test_a_hook_ends_with_the_object_that_it_calls() -> None:
    seen, weight = Seen(), torch.ones(2, requires_grad=True)
    handle = watch(seen.on_gradient, "w", weight)
    weight.sum().backward()
    assert seen.keys == ["w"]
    keys = seen.keys
    del seen
    weight.sum().backward()
    assert keys == ["w"]
    handle.remove()


class TestPassEnd:
    """The end of a backward pass is told once."""

    def test_several_gradients_await_one_end(self) -> None:
        seen, end = Seen(), PassEnd()
        news: list[bool] = []
        a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        for item in (a, b):
            item.register_post_accumulate_grad_hook(lambda _: news.append(end.wait(seen.on_end)))
        for number in (1, 2):
            (a * b).sum().backward()
            assert seen.ends == number
        assert news == [True, False, True, False]

    def test_a_pass_after_one_that_failed_is_awaited_anew(self) -> None:
        seen, end = Seen(), PassEnd()
        weight = torch.ones(2, requires_grad=True)

        def await_and_fail(_: torch.Tensor) -> None:
            assert end.wait(seen.on_end)
            raise RuntimeError("lost")

        handle = weight.register_post_accumulate_grad_hook(await_and_fail)
        with pytest.raises(RuntimeError, match="lost"):
            weight.sum().backward()
        gc.collect()  # the traceback is gone
        handle.remove()
        assert seen.ends == 0
        seen.await_end_of(weight, end)
        weight.sum().backward()
        assert seen.ends == 1

    def test_a_pass_inside_belongs_to_the_outer_one(self) -> None:
        seen, end = Seen(), PassEnd()
        inner, outer = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        ends: list[int] = []

        def on_outer(_: torch.Tensor) -> None:
            assert end.wait(seen.on_end)
            with torch.enable_grad():
                (inner * 2).sum().backward()
            ends.append(seen.ends)

        outer.register_post_accumulate_grad_hook(on_outer)
        seen.await_end_of(inner, end)
        outer.sum().backward()
        assert (ends, seen.ends) == ([0], 1)


def test_no_other_file_registers_hooks_of_gradients() -> None:
    found = {
        name
        for name, tree in trees(HOOKS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in HOOKS
    }
    timed = "tools/bench/steps.py"  # sees when gradients of a script come up, and exchanges none
    assert found == {"torch/sync/parameter_hooks.py", timed}
