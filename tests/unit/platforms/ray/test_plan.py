"""The plan of a job on Ray: checked values, resources, folders, keys and texts. Ray is not needed."""

from typing import Any

import pytest

from kvps.errors import ConfigError
from kvps.platforms.ray.plan import (
    RayPlan,
    ServerPlace,
    actor_options,
    checkpoint_folder,
    demand_same_version,
    demand_train_v2,
    demand_version,
    demand_workers,
    keys_text,
    no_room,
    shortage,
    too_slow,
    torch_variables,
)
from kvps.runtime.key_files import generate, of, parse


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"servers": 0}, "servers=0: use a whole number, 1 or more"),
        ({"servers": 2.0}, "servers=2.0: use a whole number, 1 or more"),
        ({"servers": True}, "servers=True: use a whole number, 1 or more"),
        ({"max_restarts": -1}, "max_restarts=-1: use a whole number, 0 or more"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1: use a number, 0 or more"),
        ({"checkpoint_every": "60"}, "checkpoint_every='60': use a number, 0 or more"),
        ({"start_timeout": float("inf")}, "start_timeout=inf: use a number, 0 or more"),
        ({"start_timeout": 0}, "start_timeout=0: use a number of seconds above 0"),
        ({"resources_per_server": 2}, "resources_per_server=2: use a dict"),
        ({"resources_per_server": {"CPU": -1}}, r"resources_per_server\['CPU'\]=-1"),
        ({"env": {"KVPS_TRANSPORT": 1}}, r"env\['KVPS_TRANSPORT'\]=1: use texts"),
        ({"env": {"KVPS_RANK": "1"}}, r"env\['KVPS_RANK'\] contradicts the cluster"),
        ({"log_level": "loud"}, "log_level='loud': use debug, info, warning or error"),
    ],
)
def test_a_value_that_cannot_be_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RayPlan(**{"servers": 1, **options})


def test_a_cluster_has_workers() -> None:
    demand_workers(1)
    with pytest.raises(ConfigError, match="workers=0: use a whole number, 1 or more"):
        demand_workers(0)


@pytest.mark.parametrize("found", ["2.60.0", "2.61.0rc1", "3.0.0"])
def test_a_newer_ray_is_taken(found: str) -> None:
    demand_version(found)


@pytest.mark.parametrize("found", ["2.59.1", "1.13.0", "", "unknown"])
def test_an_older_ray_is_refused(found: str) -> None:
    with pytest.raises(ConfigError, match=f"Ray {found} is installed, and kvps.platforms.ray needs 2.60"):
        demand_version(found)


def test_ray_train_v1_is_refused() -> None:
    demand_train_v2({})
    demand_train_v2({"RAY_TRAIN_V2_ENABLED": "1"})
    with pytest.raises(ConfigError, match="RAY_TRAIN_V2_ENABLED=0 selects Ray Train V1"):
        demand_train_v2({"RAY_TRAIN_V2_ENABLED": "0"})


def test_a_node_with_another_kvps_is_named() -> None:
    demand_same_version("0.2.0", "0.2.0", "10.0.0.7")
    with pytest.raises(ConfigError, match=r"kvps 0\.1\.0 is installed on the Ray node 10\.0\.0\.7"):
        demand_same_version("0.2.0", "0.1.0", "10.0.0.7")


def test_resources_become_options_of_an_actor() -> None:
    assert actor_options({}) == {"num_cpus": 0}
    given = {"CPU": 2, "GPU": 0.5, "memory": 4e9, "disk": 1, "node:10.0.0.7": 0.01}
    assert actor_options(given) == {
        "num_cpus": 2,
        "num_gpus": 0.5,
        "memory": 4e9,
        "resources": {"disk": 1, "node:10.0.0.7": 0.01},
    }


def test_memory_that_is_requested_is_the_limit() -> None:
    assert RayPlan(1).memory_limit() is None
    assert RayPlan(1, {"CPU": 1, "memory": 4e9}).memory_limit() == 4_000_000_000


def test_a_server_without_checkpoints_is_not_started_again() -> None:
    assert RayPlan(1, max_restarts=5).restarts("/ckpt") == 5
    assert RayPlan(1, max_restarts=5).restarts(None) == 0


def test_a_shortage_names_the_resource() -> None:
    plan = RayPlan(3, {"CPU": 2, "disk": 1}, start_timeout=20)
    total = {"CPU": 8.0, "memory": 1e9}
    text = shortage(plan, 2, total, {"CPU": 1.0})
    assert text.startswith(
        "2 of 3 kvps servers found no place in 20 s. Each needs 2 CPU, 1 disk: 1 of 8 CPU are free; "
        "the Ray cluster has 0 disk in all. "
    )


@pytest.mark.parametrize(
    ("each", "workers", "nodes", "text"),
    [
        ({"CPU": 1}, 4, [{"CPU": 2.0}, {"CPU": 2.0}], ""),
        ({}, 4, [], ""),
        ({"CPU": 0}, 4, [], ""),
        ({"CPU": 1}, 5, [{"CPU": 2.0}, {"CPU": 2.0}], "Each needs 1 CPU: the Ray cluster has 4 CPU"),
        ({"CPU": 1, "disk": 2}, 1, [{"CPU": 2.0}], "2 disk: the Ray cluster has 0 disk in all"),
        ({"CPU": 3}, 2, [{"CPU": 4.0}, {"CPU": 2.0}], "the nodes have room for 1 of them"),
        ({"CPU": 1, "GPU": 1}, 1, [{"CPU": 4.0}, {"GPU": 2.0}], "the nodes have room for 0 of them"),
        ({"GPU": 0.5}, 4, [{"GPU": 2.0}], ""),
    ],
)
def test_workers_for_which_there_can_be_no_room(
    each: dict[str, float], workers: int, nodes: list[dict[str, float]], text: str
) -> None:
    found = no_room(each, workers, nodes)
    assert text in found
    assert bool(text) == found.startswith(f"{workers} workers find no place. Each needs ")


def test_servers_that_only_start_slowly_are_no_shortage() -> None:
    plan = RayPlan(2, {"CPU": 1})
    assert shortage(plan, 2, {"CPU": 8.0}, {"CPU": 2.0}) == ""
    assert shortage(RayPlan(2, {}), 2, {}, {}) == ""
    text = too_slow(RayPlan(2, {}), 1, 85.0)
    assert text.startswith("1 of 2 kvps servers did not start in 85 s")
    assert "(no resources each)" in text


def test_checkpoints_go_to_the_storage_path() -> None:
    assert checkpoint_folder(RayPlan(1), "local", "/nfs/runs/one/") == "/nfs/runs/one/kvps"
    assert checkpoint_folder(RayPlan(1, checkpoint_dir="/ckpt"), "s3", "bucket/one") == "/ckpt"
    assert checkpoint_folder(RayPlan(1), "s3", "bucket/one") is None
    with pytest.raises(ConfigError, match=r"checkpoint_every=60, but .* 'bucket/one' is on s3"):
        checkpoint_folder(RayPlan(1, checkpoint_every=60), "s3", "bucket/one")


def test_a_role_gets_only_the_secret_that_it_needs() -> None:
    sections = generate()
    for role in ("scheduler", "server", "worker"):
        text = keys_text(sections, role)
        assert text.count("secret = ") == 1
        keys = of(parse(text, "text"), role)
        assert keys.scheduler == tuple(section.public for section in sections if section.role == "scheduler")
    opens = of(parse(keys_text(sections, "scheduler"), "text"), "scheduler").opens
    assert {member.role for member in opens.values()} >= {"server", "worker"}


def test_a_worker_has_its_place_in_place_of_another() -> None:
    place = ServerPlace("tcp://10.0.0.7:9091", 3, "keys", {"KVPS_TRANSPORT": "tcp", "RANK": "3"})
    before = {"PATH": "/bin", "DMLC_ROLE": "server", "KVPS_RANK": "0", "KVPS_INCARNATION": "2"}
    assert place.environment(before, "/proc/7/fd/9") == {
        **{"PATH": "/bin", "KVPS_TRANSPORT": "tcp", "RANK": "3"},
        **{"KVPS_SCHEDULER": "tcp://10.0.0.7:9091", "KVPS_RANK": "3"},
        "KVPS_KEYS": "/proc/7/fd/9",
    }
    assert "KVPS_KEYS" not in place.environment({}, None)
    assert "keys" not in repr(place)


def test_variables_are_those_of_torchrun() -> None:
    assert torch_variables({"RANK": 1, "WORLD_SIZE": 2}, "10.0.0.7:4711") == {
        **{"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4711"}
    }
