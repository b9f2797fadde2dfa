"""The configuration for Ray Train: refused values, and the backend that it selects. No Ray is started."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvps.errors import ConfigError

pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvps[ray]'")

from ray.train.torch import TorchConfig

import kvps.platforms.ray
from kvps.platforms.ray import backend
from kvps.platforms.ray.backend import GroupBackend, KvpsConfig, StoreBackend


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
        kvps.platforms.ray.cluster(workers=0, servers=1),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="checkpoint_every=60 has no directory to write to"),
        kvps.platforms.ray.cluster(workers=1, servers=1, checkpoint_every=60),
    ):
        pass


def test_the_demand_of_a_run_is_checked_for_a_while_and_that_of_other_runs_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []

    def nodes() -> list[dict[str, Any]]:
        looks.append(1)
        disk = {"disk": 1.0} if len(looks) > 2 else {}
        return [{"Alive": True, "Resources": disk}, {"Alive": False, "Resources": {"disk": 9.0}}]

    monkeypatch.setattr(backend.ray, "nodes", nodes)
    monkeypatch.setattr(backend, "LOOK_EVERY_S", 0.0)
    scaling = SimpleNamespace(min_workers=1, _resources_per_worker_not_none={"disk": 1})
    patient, hasty = [KvpsConfig(start_timeout=limit_s) for limit_s in (60.0, 1e-9)]

    def check(config: object, scaling: object = scaling) -> None:
        context = SimpleNamespace(backend_config=config, scaling_config=scaling)
        backend.DemandResources().after_controller_start(context)

    check(TorchConfig())
    check(patient, SimpleNamespace(min_workers=0))
    assert not looks
    check(patient)
    assert len(looks) == 3
    looks.clear()
    with pytest.raises(ConfigError, match=r"1 disk: the Ray cluster has 0 disk in all\. Add nodes"):
        check(hasty)


def test_trainers_learn_of_the_check_once_and_keep_other_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "mine.Callback")
    KvpsConfig()
    KvpsConfig()
    assert os.environ["RAY_TRAIN_CALLBACKS"] == "mine.Callback,kvps.platforms.ray.backend.DemandResources"
