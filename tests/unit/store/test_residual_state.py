"""What compression leaves out, as front ends ask for it, save it and put it back."""

from pathlib import Path
from typing import Any

import pytest
import torch

import kvps
from kvps.store import residual_state

TWO_BITS = {"type": "2bit", "threshold": 0.5, "min_bytes": 0}


class Plugin(kvps.KVStoreBase):
    """A store of another package."""

    @property
    def type(self) -> str:
        return "plugin"


class Compressing(Plugin):
    """One that has compression of its own."""

    asked: object = None

    def set_gradient_compression(self, params: object) -> None:
        self.asked = params


def owing() -> kvps.KVStore:
    """Return a store that was pushed 0.7 and could say 0.5 of it."""
    kv: kvps.KVStore = kvps.create("local")
    residual_state.compress(kv, TWO_BITS, "compression")
    kv.init("w", torch.zeros(1))
    assert kv.pushpull("w", torch.tensor([0.7])).tolist() == [0.5]
    return kv


@pytest.mark.parametrize("kv", [None, Plugin(), "local"])
def test_without_compression_nothing_is_asked_of_a_store(kv: Any) -> None:
    residual_state.compress(kvps.create(kv) if kv == "local" else kv, None, "compression")


@pytest.mark.parametrize(
    ("kv", "params", "text"),
    [
        (None, "2bit", r"compression needs a store; give one, such as kvstore='dist_sync'"),
        (Plugin(), "2bit", r"'plugin' is a plug-in without set_gradient_compression\(\); omit"),
        (kvps.create("local"), True, "compression=True: give the name of a codec"),
        (kvps.create("local"), {"type": "3bit"}, "type='3bit': use one of fp16"),
    ],
)
def test_invalid_parameters_are_refused(kv: Any, params: Any, text: str) -> None:
    with pytest.raises(kvps.ConfigError, match=text):
        residual_state.compress(kv, params, "compression")


def test_a_plugin_is_handed_what_it_may_know_better() -> None:
    kv = Compressing()
    residual_state.compress(kv, {"type": "its own"}, "compression")
    assert kv.asked == {"type": "its own"}
    assert residual_state.state_of(kv) == {}
    residual_state.put(kv, {"rank": 0, "rests": {"w": torch.ones(1)}})  # it keeps its own


def test_a_state_goes_on_where_it_was_taken() -> None:
    state = residual_state.state_of(owing())
    assert state["rank"] == 0
    torch.testing.assert_close(state["rests"], {"w": torch.tensor([0.2])})
    other = owing()
    other.pushpull("w", torch.tensor([0.1]))
    residual_state.put(other, state)
    assert other.pushpull("w", torch.tensor([0.31])).tolist() == [0.5]


@pytest.mark.parametrize("state", [{}, {"rank": 1, "rests": {"w": torch.tensor([0.2])}}])
def test_nothing_is_owed_by_the_state_of_another_rank(state: dict[str, Any]) -> None:
    kv = owing()
    residual_state.put(kv, state)
    assert residual_state.state_of(kv) == {}
    assert kv.pushpull("w", torch.tensor([0.31])).tolist() == [0.0]


def test_rests_of_another_model_are_refused() -> None:
    with pytest.raises(kvps.Mismatch, match="'w' is"):
        residual_state.put(owing(), {"rank": 0, "rests": {"w": torch.zeros(3)}})


def test_rests_lie_beside_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "states")
    kv = owing()
    residual_state.save(kv, path)
    assert [field.name for field in tmp_path.iterdir()] == ["states.rests-0"]
    other = owing()
    other.pushpull("w", torch.tensor([0.1]))
    residual_state.load(other, path)
    assert other.compression_state()["w"].tolist() == kv.compression_state()["w"].tolist()

    residual_state.save(kvps.create("local"), path)  # a later one that owes nothing
    assert not list(tmp_path.iterdir())
    residual_state.load(other, path)
    assert other.compression_state() == {}


def test_a_front_end_without_a_store_has_no_rests(tmp_path: Path) -> None:
    for kv in (None, Plugin()):
        residual_state.save(kv, str(tmp_path / "states"))
        residual_state.load(kv, str(tmp_path / "states"))
    assert not list(tmp_path.iterdir())


def test_state_saved_after_the_end_of_a_store_is_empty(tmp_path: Path) -> None:
    kv = owing()
    state = residual_state.state_of(kv)
    kv.close()
    assert residual_state.state_of(kv) == {}
    residual_state.put(kv, state)
    residual_state.save(kv, str(tmp_path / "states"))
    residual_state.load(kv, str(tmp_path / "states"))
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "states.rests-0").write_bytes(b"nonsense")
    with pytest.raises(kvps.StorageError, match=r"states\.rests-0.*file, residuals start at zero"):
        residual_state.load(owing(), str(tmp_path / "states"))
    with pytest.raises(kvps.StorageError, match=r"missing"):
        residual_state.save(owing(), str(tmp_path / "missing" / "states"))
