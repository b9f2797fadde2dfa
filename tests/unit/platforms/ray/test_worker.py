"""A worker's part in a cluster on Ray: its process has its place until it leaves. Ray is not needed."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvps.platforms.ray
from kvps.errors import ConfigError
from kvps.platforms.ray import worker
from kvps.platforms.ray.plan import ServerPlace, keys_text
from kvps.runtime.key_files import generate, load


def named(prefix: str) -> dict[str, str]:
    """Return variables of this process, without that of pytest itself."""
    own = "PYTEST_CURRENT_TEST"
    return {name: item for name, item in os.environ.items() if name.startswith(prefix) and name != own}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment of the tests, whatever fails."""
    before = named("")
    yield
    worker.leave(None)
    assert named("") == before


def test_leaving_restores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_RANK", "7")
    text = keys_text(generate(), "worker")
    worker.take(ServerPlace("tcp://127.0.0.1:1", 1, text, {"KVPS_TRANSPORT": "tcp"}))
    assert os.environ["KVPS_RANK"] == "1"
    assert os.environ["KVPS_TRANSPORT"] == "tcp"
    path = os.environ["KVPS_KEYS"]
    assert load(path, "worker").opens == {}
    assert Path(path).read_text().count("secret = ") == 1
    worker.leave(None)
    assert os.environ["KVPS_RANK"] == "7"
    assert "KVPS_KEYS" not in os.environ
    assert not Path(path).exists()


def test_a_process_is_one_worker() -> None:
    worker.take(ServerPlace("tcp://127.0.0.1:1", 1))
    with pytest.raises(ConfigError, match="is worker 1 already, and a process is one worker"):
        worker.take(ServerPlace("tcp://127.0.0.1:1", 0))
    worker.leave(ValueError())
    worker.leave(None)  # twice


def test_a_free_address_can_be_bound() -> None:
    host, _, port = worker.free_address("127.0.0.1").rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_names_without_ray_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(vars(kvps.platforms.ray), "KvpsConfig", raising=False)
    with pytest.raises(
        ImportError, match=r"kvps\.platforms\.ray\.KvpsConfig needs Ray: pip install 'kvps\[ray\]'"
    ):
        kvps.platforms.ray.KvpsConfig  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvps.platforms.ray.nothing  # noqa: B018
