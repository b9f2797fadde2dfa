"""Which module waits for which parameter in an overlapped forward pass."""

from __future__ import annotations

import torch

from kvps.torch.forward_overlap import ForwardOverlap


class Net(torch.nn.Module):
    """``hidden`` is read and never called; ``spare`` is neither; ``body`` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "second": Inner()})
        self.spare = torch.nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body["second"](self.body["first"](x))
        return y


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.hidden.weight


X = torch.ones(1, 2)


def ahead(model: torch.nn.Module) -> tuple[ForwardOverlap, list[str]]:
    updated: list[str] = []
    one = ForwardOverlap(model, dict(model.named_parameters()), updated.extend)
    model(X)
    one.learn()
    return one, updated


def test_a_module_waits_for_its_own_and_for_what_is_read_inside() -> None:
    model = Net()
    one, updated = ahead(model)
    names = [name for name, _ in model.named_parameters()]
    one.put_off(names)
    assert updated == []
    model.body["first"](X)
    assert updated == ["body.first.weight", "body.first.bias"]
    model.body["second"](X)
    assert updated[2:] == ["body.second.hidden.weight"]
    model(X)
    assert updated[3:] == ["spare.weight"], "the whole model waits for what nobody calls"
    model(X)
    assert sorted(updated) == sorted(names), "each once"


def test_what_no_module_would_wait_for_is_updated_at_once() -> None:
    """The model itself is never called, only parts of it."""
    model = Net()
    updated: list[str] = []
    one = ForwardOverlap(model, dict(model.named_parameters()), updated.extend)
    model.body["first"](X)
    one.learn()
    one.put_off(["body.first.weight", "spare.weight"])
    assert updated == ["spare.weight"]
    model.body["first"](X)
    assert updated == ["spare.weight", "body.first.weight"]


def test_a_shared_parameter_is_awaited_by_whoever_comes_first() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2))
    model[2].weight = model[0].weight
    one, updated = ahead(model)
    one.put_off(["0.weight"])
    model[2](X)
    assert updated == ["0.weight"]
    one.put_off(["0.weight"])
    model(X)
    assert updated == ["0.weight"] * 2


def test_all_is_updated_before_the_state_is_read() -> None:
    model = Net()
    one, updated = ahead(model)
    one.put_off(["body.first.bias", "spare.weight"])
    model.state_dict()
    assert sorted(updated) == ["body.first.bias", "spare.weight"]


def test_forgotten_updates_are_not_made_and_closing_takes_hooks_away() -> None:
    model = Net()
    one, updated = ahead(model)
    one.put_off(["spare.weight"])
    one.forget()
    model(X)
    assert updated == []
    one.put_off(["spare.weight"])
    one.close()
    assert updated == ["spare.weight"]
    one.put_off(["spare.weight"])
    model(X)
    assert updated == ["spare.weight"]
