"""The configuration for Ray Train: refused values, and the backend that it selects. No Ray is started."""

from __future__ import annotations

from typing import Any

import pytest

from kvps.errors import ConfigError

pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvps[ray]'")

import kvps.ray
from kvps.ray.backend import GroupBackend, KvpsConfig, StoreBackend


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"servers": 0}, "servers=0: use a whole number, 1 or more"),
        ({"backend": "gloo"}, "backend='gloo': use 'kvps', or None for no process group"),
        ({"backend": 2}, "backend=2: use 'kvps', or None for no process group"),
        ({"init_method": "tcp"}, "init_method='tcp': workers meet at the scheduler; omit it"),
        ({"env": {"DMLC_ROLE": "worker"}}, "contradicts the cluster that kvps starts"),
    ],
)
def test_a_value_that_cannot_be_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        KvpsConfig(**options)


def test_a_worker_is_replaced_alone_without_a_process_group() -> None:
    config = KvpsConfig(servers=2)
    config.backend = "gloo"  # as TorchTrainer does where there is none
    assert config.backend_cls is StoreBackend
    assert StoreBackend.has_replica_groups
    assert config.to_dict()["backend"] is None


def test_a_process_group_needs_all_of_its_workers() -> None:
    config = KvpsConfig(backend="kvps", servers=2)
    assert config.backend_cls is GroupBackend
    assert not GroupBackend.has_replica_groups
    assert config.to_dict() == {
        **{"servers": 2, "resources_per_server": {"CPU": 1}, "max_restarts": 3},
        **{"checkpoint_every": 0.0, "backend": "kvps"},
    }


def test_settings_of_the_driver_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_TRANSPORT", "tcp")
    monkeypatch.setenv("KVPS_RANK", "3")
    monkeypatch.setenv("KVPS_CHUNK_BYTES", "1M")
    env = KvpsConfig(env={"KVPS_CHUNK_BYTES": "2M", "OTHER": "1"}).plan.env
    assert env["KVPS_TRANSPORT"] == "tcp"
    assert env["KVPS_CHUNK_BYTES"] == "2M"
    assert env["OTHER"] == "1"
    assert "KVPS_RANK" not in env


def test_a_cluster_is_checked_before_ray_starts() -> None:
    with (
        pytest.raises(ConfigError, match="workers=0: use a whole number, 1 or more"),
        kvps.ray.cluster(workers=0, servers=1),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="checkpoint_every=60 has no directory to write to"),
        kvps.ray.cluster(workers=1, servers=1, checkpoint_every=60),
    ):
        pass
