"""What a table is made by, checked."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvps.core.embedding.spec import EmbeddingSpec, recipe_of
from kvps.errors import ConfigError


def made(**given: Any) -> EmbeddingSpec:
    plain: dict[str, Any] = {
        "name": "words",
        "dim": 4,
        "init": "zeros",
        "optimizer": "sgd",
        "admit": 1,
        "evict": None,
        "dtype": "float32",
        "seed": None,
    }
    return recipe_of(**(plain | given))


def test_a_torch_dtype_and_a_torch_optimizer_will_do() -> None:
    optimizer = torch.optim.Adagrad([torch.zeros(1)], lr=0.5)
    recipe = made(dtype=torch.bfloat16, optimizer=optimizer)
    assert (recipe.dtype, recipe.hyper.name, recipe.hyper.number("lr")) == ("bfloat16", "adagrad", 0.5)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"dim": 0}, "dim=0"),
        ({"dim": 2.5}, "dim=2.5"),
        ({"dim": True}, "dim=True"),
        ({"dim": 1 << 17}, "1 to 65536"),
        ({"dtype": "int64"}, "int64"),
        ({"dtype": "complex64"}, "complex64"),
        ({"init": "ones"}, "init"),
        ({"admit": 0}, "admit=0"),
        ({"admit": 256}, "admit=256"),
        ({"evict": 5}, "evict=5"),
        ({"evict": {"size": 5}}, "'age'"),
        ({"evict": {"age": 0}}, "evict age=0"),
        ({"evict": {"rows": -1}}, "evict rows=-1"),
        ({"evict": {"age": 2**63}}, "2\\*\\*63"),
        ({"evict": {"seconds": 0}}, "evict seconds=0"),
        ({"evict": {"seconds": True}}, "evict seconds=True"),
        ({"evict": {"seconds": math.inf}}, "evict seconds=inf"),
        ({"evict": {"half_life": 5}}, "evict half_life: .*give 'rows', too"),
        ({"evict": {"rows": 5, "half_life": 0}}, "evict half_life=0"),
        ({"admit": 0.0}, "admit=0.0: give a probability"),
        ({"admit": 1.5}, "admit=1.5: give a probability"),
        ({"admit": math.nan}, "admit=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"optimizer": "lamb"}, "lamb"),
        ({"lr_mult": {"words": 2.0}}, "lr_mult"),
        ({"clip_global_norm": 2.0}, "rows of a table are pushed by themselves"),
        ({"optimizer": "dcasgd"}, "dcasgd"),
        ({"optimizer": "sdg"}, "sdg"),
        ({"optimizer": None}, "unknown optimizer"),
        ({"lr": float("nan")}, "lr"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1), "lr": 1.0}, "omit lr="),
    ],
)
def test_impossible_table_is_refused_by_the_name_of_the_argument(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        made(**given)


def test_recipes_differ_in_something_that_has_a_name() -> None:
    recipe = made()
    assert recipe.difference(made()) == ""
    assert recipe.difference(made(seed=1)) == "seed"
    assert recipe.difference(made(lr=3.0)) == "lr"
    assert recipe.difference(made(admit=0.5)) == "admit"
    assert recipe.difference(made(evict={"seconds": 5})) == "evict seconds"
    assert recipe.difference(made(optimizer="adam")) == "optimizer"
    assert recipe.difference(replace(recipe, dim=5)) == "dim"
