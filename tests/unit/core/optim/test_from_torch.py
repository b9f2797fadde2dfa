"""What a torch.optim object stands for on the wire, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvps.core.optim.from_torch import NAMES, describe
from kvps.core.optim.hyperparams import resolve
from kvps.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]


def two_groups(**second: float) -> list[dict[str, Any]]:
    return [{"params": weights()}, {"params": weights(), **second}]


@pytest.mark.parametrize("cls", NAMES, ids=lambda cls: cls.__name__)
def test_torchs_defaults_are_ours(cls: Callable[..., torch.optim.Optimizer]) -> None:
    name = NAMES[cls]  # type: ignore[index]
    assert describe(cls(weights())) == resolve(name, {})


@pytest.mark.parametrize(
    ("cls", "options", "name", "given"),
    [
        (
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4, "maximize": True},
            "sgd",
            None,
        ),
        (torch.optim.Adam, {"lr": 1, "betas": (0.5, 0.75), "amsgrad": True}, "adam", None),
        (torch.optim.AdamW, {"weight_decay": 0.5}, "adamw", None),
        (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 2}, "adagrad", None),
        (torch.optim.Adadelta, {"rho": 0.5, "eps": 1e-3}, "adadelta", None),
        (torch.optim.RMSprop, {"alpha": 0.5, "centered": True, "momentum": 0.1}, "rmsprop", None),
        (torch.optim.NAdam, {"momentum_decay": 0.1, "decoupled_weight_decay": True}, "nadam", None),
        (torch.optim.RAdam, {"decoupled_weight_decay": True}, "radam", None),
        (torch.optim.Adamax, {"eps": 1e-3}, "adamax", None),
        (
            torch.optim.Adam,
            {"weight_decay": 0.5, "decoupled_weight_decay": True},
            "adamw",
            {"weight_decay": 0.5},
        ),
        (torch.optim.Adam, {"foreach": True, "capturable": True}, "adam", {}),
        (torch.optim.SGD, {"fused": True}, "sgd", {}),
        (torch.optim.SGD, {"lr": torch.tensor(0.5)}, "sgd", {"lr": 0.5}),
        (
            torch.optim.Adam,
            {"betas": (torch.tensor(0.5), torch.tensor(0.25))},
            "adam",
            {"betas": (0.5, 0.25)},
        ),
    ],
)
def test_options_are_carried_over(
    cls: Callable[..., torch.optim.Optimizer],
    options: dict[str, object],
    name: str,
    given: dict[str, object] | None,
) -> None:
    assert describe(cls(weights(), **options)) == resolve(name, options if given is None else given)


def test_the_rate_is_what_a_scheduler_has_made_of_it() -> None:
    optimizer = torch.optim.SGD(weights(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert describe(optimizer) == resolve("sgd", {"lr": 0.5})


def test_named_parameters_are_fine() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).named_parameters(), lr=0.5)
    assert describe(optimizer) == resolve("sgd", {"lr": 0.5})


def test_equal_groups_are_one() -> None:
    optimizer = torch.optim.Adam(two_groups(lr=0.1), lr=0.1)
    assert describe(optimizer) == resolve("adam", {"lr": 0.1})


def test_groups_with_keys_may_differ_in_rate_and_decay() -> None:
    groups = two_groups(lr=0.5, weight_decay=0.0)
    key_of = {
        param: f"{group}{index}" for group in (0, 1) for index, param in enumerate(groups[group]["params"])
    }
    optimizer = torch.optim.SGD(groups, lr=0.25, weight_decay=0.125)
    factors = {"lr_mult": {"10": 2.0, "11": 2.0}, "wd_mult": {"10": 0.0, "11": 0.0}}
    assert describe(optimizer, key_of) == resolve("sgd", {"lr": 0.25, "weight_decay": 0.125, **factors})


def test_groups_that_differ_are_refused_with_the_way_out() -> None:
    optimizer = torch.optim.SGD(two_groups(lr=0.5), lr=0.1)
    with pytest.raises(ConfigError) as caught:
        describe(optimizer)
    assert str(caught.value) == (
        "optimizer 'sgd': parameter group 1 has lr=0.5, group 0 has 0.1; servers have one set of "
        "hyper-parameters: give one group, and lr_mult={key: factor} / wd_mult={key: factor} for "
        "keys that differ"
    )


class MySGD(torch.optim.SGD):
    """A subclass may do anything; its name says nothing."""


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: MySGD(weights()),
            r"servers cannot run .*\.MySGD; use one of SGD, Adam, AdamW, Adagrad, "
            r"Adadelta, RMSprop, NAdam, RAdam, Adamax of torch.optim \(not a subclass\), a name for set_opt",
        ),
        (lambda: torch.optim.LBFGS(weights()), r"cannot run torch\.optim\.lbfgs\.LBFGS; use one"),
        (
            lambda: torch.optim.SGD(weights(), differentiable=True),
            r"optimizer 'sgd': servers do not support differentiable=True; omit it, or "
            r"use update_on_kvstore=False. Servers support: lr, weight_decay",
        ),
    ],
)
def test_options_that_servers_cannot_follow_exactly_are_refused(
    make: Callable[[], torch.optim.Optimizer], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        describe(make())


def test_a_value_out_of_range_is_refused_by_name() -> None:
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    group: dict[str, Any] = optimizer.param_groups[0]
    group["lr"] = float("nan")
    with pytest.raises(ConfigError, match="optimizer 'sgd': lr=nan is not allowed"):
        describe(optimizer)
