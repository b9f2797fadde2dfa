"""The arguments of DiLoCo: the outer optimizer, modes, shares and weights."""

import math
from typing import Any

import pytest
import torch

from kvps.errors import ConfigError
from kvps.torch.local_steps.arguments import Weight, has_means, is_dynamic, outer_of, share_of, store_type


def test_the_outer_optimizer_by_name() -> None:
    nesterov, plain = outer_of("nesterov", 0.7, 0.9), outer_of("sgd", 1, 0.0)
    assert (nesterov.name, plain.name) == ("sgd", "sgd")
    assert nesterov.number("lr") == 0.7
    assert nesterov.to_wire()["nesterov"] is True
    assert plain.to_wire()["nesterov"] is False


def test_the_outer_optimizer_as_torch_has_it() -> None:
    params = [torch.nn.Parameter(torch.zeros(2))]
    outer = torch.optim.SGD(params, lr=0.4, momentum=0.8, nesterov=True)
    assert outer_of(outer, 9.0, 9.0) == outer_of("nesterov", 0.4, 0.8)
    assert outer_of(torch.optim.Adam(params), 0.7, 0.9).name == "adam"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("adam", 0.7, 0.9), "outer='adam': use 'nesterov', 'delayed_nesterov', 'sgd', or a torch optimizer"),
        ((None, 0.7, 0.9), "outer=None"),
        (("nesterov", 0.7, 0.0), "outer='nesterov' needs a momentum above 0, not 0.0; use outer='sgd'"),
        (("nesterov", 0.7, math.nan), "needs a momentum above 0"),
        (("sgd", "fast", 0.9), "lr='fast': use a number"),
        (("sgd", 0.7, None), "momentum=None: use a number"),
        (("sgd", -1.0, 0.0), "lr"),
    ],
)
def test_outer_optimizers_that_cannot_be(arguments: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        outer_of(*arguments)


def test_modes_and_shares() -> None:
    assert (store_type("sync"), store_type("async")) == ("dist_sync", "dist_async")
    with pytest.raises(ConfigError, match="mode='fast': use one of sync, async"):
        store_type("fast")
    with pytest.raises(ConfigError, match="mode=None"):
        store_type(None)
    assert [share_of(0), share_of(0.5), share_of(1)] == [0.0, 0.5, 1.0]
    for bad in (-0.1, 1.1, math.nan, True, "half"):
        with pytest.raises(ConfigError, match=r"alpha=.*: use a number from 0 \(global\) to 1 \(local\)"):
            share_of(bad)


def test_rounds_have_means_where_pushes_count_in_their_own_round_alone() -> None:
    assert has_means("sync", "drop")
    assert not has_means("sync", "next")
    assert not has_means("async", "drop")
    with pytest.raises(ConfigError, match="late='later': use one of drop, next"):
        has_means("sync", "later")


def test_a_weight_may_be_a_number() -> None:
    assert Weight(None, 2, is_mean=False).of(1) == 1.0
    weight = Weight(3, 2, is_mean=True)
    assert [weight.of(0), weight.of(1)] == [3.0, 3.0]
    weight.left(0)
    assert weight.of(0) == 3.0


def test_tokens_are_counted_for_each_fragment_since_it_left() -> None:
    weight = Weight("tokens", 2, is_mean=True)
    weight.add(100)
    weight.add(20.0)
    assert weight.of(0) == 120
    weight.left(0)
    weight.add(5)
    assert [weight.of(0), weight.of(1)] == [5, 125]
    weight.left(1)
    with pytest.raises(ConfigError, match=r"weight='tokens', but add_tokens\(\) was not called since"):
        weight.of(1)


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan, True, "words", [1]])
def test_weights_that_cannot_be(bad: Any) -> None:
    with pytest.raises(ConfigError, match="use a number above 0, 'tokens', or None"):
        Weight(bad, 1, is_mean=True)


def test_weights_where_there_are_no_means() -> None:
    with pytest.raises(ConfigError, match="weight=2 needs mode='sync' and late='drop'"):
        Weight(2, 1, is_mean=False)
    with pytest.raises(ConfigError, match=r"add_tokens\(\) needs weight='tokens'"):
        Weight(2, 1, is_mean=True).add(3)
    for bad in (-1, math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"add_tokens\(.*\): use a number of tokens, 0 or more"):
            Weight("tokens", 1, is_mean=True).add(bad)


def test_the_weight_of_all_fragments_together() -> None:
    assert Weight(None, 2, is_mean=True).overall() == 1.0
    assert Weight(3, 2, is_mean=True).overall() == 3.0
    tokens = Weight("tokens", 2, is_mean=True)
    assert tokens.overall() == 1.0, "nothing was counted since all fragments were merged"
    tokens.add(10)
    tokens.left(0)
    assert tokens.overall() == 10.0


def test_where_steps_may_follow_the_speed() -> None:
    assert is_dynamic(True, "async", 1)
    assert not is_dynamic(False, "sync", 3)
    with pytest.raises(ConfigError, match="dynamic_sync_every=True needs mode='async': with mode='sync' all"):
        is_dynamic(True, "sync", 1)
    with pytest.raises(ConfigError, match="dynamic_sync_every=True needs one fragment, not 2"):
        is_dynamic(True, "async", 2)
    with pytest.raises(ConfigError, match="dynamic_sync_every='auto': use True or False"):
        is_dynamic("auto", "async", 1)
