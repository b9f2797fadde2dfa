"""What follows from an id alone: its server, and its row's first value."""

import math

import numpy as np
import pytest

from kvps.core.embedding.id_hash import Initializer, first_of, servers_of
from kvps.errors import ConfigError

SOME = np.array([0, 1, -1, 2**62, -(2**63)], np.int64)


def test_the_server_of_an_id_is_for_ever() -> None:
    assert servers_of(SOME, 5).tolist() == [2, 1, 1, 1, 1]
    assert servers_of(SOME, 1).tolist() == [0] * 5


@pytest.mark.parametrize("servers", range(1, 17))
def test_a_new_server_takes_ids_and_moves_none_between_the_others(servers: int) -> None:
    before, after = (servers_of(np.arange(100_000), number) for number in (servers, servers + 1))
    moved = before != after
    assert set(after[moved]) == {servers}
    assert abs(moved.mean() * (servers + 1) - 1) < 0.05


def test_first_values_are_for_ever() -> None:
    assert Initializer("zeros", 0.0).values(SOME, 2, 9).tolist() == [[0.0, 0.0]] * 5
    normal = Initializer("normal", 1.0).values(SOME[:2], 2, 9)
    uniform = Initializer("uniform", 1.0).values(SOME[:2], 2, 9)
    assert normal.tolist() == [
        [0.5083160400390625, 0.1992340087890625],
        [-1.04583740234375, -1.684539794921875],
    ]
    assert uniform.tolist() == [
        [0.6598493456840515, -0.4089213013648987],
        [-0.657486617565155, -0.1399117112159729],
    ]


@pytest.mark.parametrize(("kind", "deviation"), [("normal", 0.1), ("uniform", 0.1 / math.sqrt(3))])
def test_first_values_are_spread_as_their_kind_says(kind: str, deviation: float) -> None:
    values = Initializer(kind, 0.1).values(np.arange(50_000), 4, 7)
    assert abs(values.mean()) < 0.001
    assert values.std() == pytest.approx(deviation, rel=0.01)
    near = (np.abs(values) < 0.05).mean()  # half a deviation of normal, half the bound
    assert near == pytest.approx({"normal": 0.3829, "uniform": 0.5}[kind], abs=0.01)
    assert np.abs(np.corrcoef(values.T) - np.eye(4)).max() < 0.02


@pytest.mark.parametrize(
    "init",
    [
        "xavier",
        ("normal",),
        ("normal", "1"),
        ("normal", True),
        ("normal", 0.0),
        ("uniform", -1.0),
        ("uniform", math.nan),
        ("normal", math.inf),
        ("zeros", 1.0),
        (1, 1.0),
        None,
        "x" * 500,
    ],
)
def test_any_other_init_is_refused(init: object) -> None:
    with pytest.raises(ConfigError, match="init") as caught:
        first_of(init)
    assert len(str(caught.value)) < 250
