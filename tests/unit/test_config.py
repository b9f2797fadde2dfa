"""What the environment says, and what it must not say by halves."""

import pytest

from kvps import config
from kvps.config import Cluster
from kvps.errors import ConfigError

DMLC = {
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "9000",
    "DMLC_NUM_WORKER": "3",
    "DMLC_NUM_SERVER": "2",
    "DMLC_ROLE": "server",
}


def test_no_sign_of_a_cluster():
    assert config.cluster({}) is None
    assert config.cluster({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "1"}) is None
    assert config.cluster({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None, "a batch script is one process"
    assert config.cluster({"KVPS_SCHEDULER": ""}) is None


def test_process_of_torchrun_is_not_alone():
    torchruns = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}
    with pytest.raises(ConfigError, match=r"torchrun started 2 processes .* KVPS_SCHEDULER is not set"):
        config.check_alone({**torchruns, "WORLD_SIZE": "2"})
    assert config.cluster({**torchruns, "WORLD_SIZE": "2"}) is None, "gloo needs no scheduler"
    config.check_alone({**torchruns, "WORLD_SIZE": "1"})
    config.check_alone({"WORLD_SIZE": "2", "RANK": "0"})
    config.check_alone({"WORLD_SIZE": "auto"})


def test_our_own_variables():
    env = {"KVPS_SCHEDULER": "tcp://h:1", "KVPS_RANK": "3", "KVPS_JOB": "ab" * 16}
    assert config.cluster(env) == Cluster("tcp://h:1", rank=3, job=b"\xab" * 16)
    assert config.cluster({"KVPS_SCHEDULER": "tcp://h:1"}) == Cluster("tcp://h:1")


def test_mxnets_variables():
    assert config.cluster(DMLC) == Cluster("tcp://10.0.0.1:9000", "server", workers=3, servers=2)
    role = config.cluster({**DMLC, "DMLC_ROLE": ""})
    assert role is not None
    assert role.role == "worker"


@pytest.mark.parametrize("missing", [name for name in DMLC if name != "DMLC_ROLE"])
def test_half_a_dmlc_cluster_names_what_is_missing(missing):
    with pytest.raises(ConfigError, match=f"but {missing} is not"):
        config.cluster({**DMLC, missing: ""})


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"KVPS_RANK": "1"}, "KVPS_SCHEDULER is not"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "Slurm started 4 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "Open MPI started 2"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set; ranks begin at 0"),
        ({"PMI_SIZE": "2", "PMI_RANK": "2"}, "MPI says PMI_SIZE=2, but PMI_RANK is 2"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS='many' is not a number"),
        ({"KVPS_SCHEDULER": "h:1"}, "tcp://HOST:PORT"),
        ({"KVPS_SCHEDULER": "tcp://h:99999"}, "a port up to 65535"),
        ({"KVPS_SCHEDULER": "tcp://h:0"}, "has no port"),
        ({"KVPS_SCHEDULER": "tcp://h:1", "KVPS_RANK": "-1"}, "KVPS_RANK=-1"),
        ({"KVPS_SCHEDULER": "tcp://h:1", "KVPS_RANK": "1.5"}, "whole number"),
        ({"KVPS_SCHEDULER": "tcp://h:1", "KVPS_RANK": "nan"}, "finite"),
        ({"KVPS_SCHEDULER": "tcp://h:1", "KVPS_JOB": "xyz"}, "KVPS_JOB"),
        ({**DMLC, "DMLC_ROLE": "boss"}, "worker, server or scheduler"),
        ({**DMLC, "DMLC_PS_ROOT_PORT": "99999"}, "DMLC_PS_ROOT"),
    ],
)
def test_a_description_that_cannot_be(env, says):
    with pytest.raises(ConfigError, match=says):
        config.cluster(env)


@pytest.mark.parametrize(
    ("given", "bytes_"),
    [("1048576", 1 << 20), ("512M", 512 << 20), ("2G", 2 << 30), ("1.5GiB", 3 << 29), ("4k", 4096)],
)
def test_sizes(given, bytes_):
    assert config.as_bytes("--memory-limit", given) == bytes_


@pytest.mark.parametrize("given", ["", "M", "-1", "nan", "0", "1e40", "3X"])
def test_sizes_that_are_none(given):
    with pytest.raises(ConfigError, match="512M or 2G"):
        config.as_bytes("--memory-limit", given)


@pytest.mark.parametrize(
    "given", ["", "9091", "tcp://:1", "tcp://h", "tcp://h:x", "udp://h:1", "tcp://h:1/x"]
)
def test_addresses_that_are_none(given):
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        config.as_bind("--bind", given)


def test_only_loopback_without_insisting():
    for bind in ("tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1"):
        config.demand_loopback(bind, is_allowed=False)
    for bind in ("tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "tcp://host:1"):
        config.demand_loopback(bind, is_allowed=True)
        with pytest.raises(ConfigError, match="--insecure"):
            config.demand_loopback(bind, is_allowed=False)


def test_where_a_server_listens():
    assert config.server_bind("tcp://127.0.0.1:9091", is_allowed=False) == "tcp://127.0.0.1:0"
    assert config.server_bind("tcp://10.0.0.1:9091", is_allowed=True) == "tcp://0.0.0.0:0"
    with pytest.raises(ConfigError, match="--insecure"):
        config.server_bind("tcp://10.0.0.1:9091", is_allowed=False)


def test_where_a_scheduler_listens():
    assert config.scheduler_bind("tcp://10.0.0.1:9000") == "tcp://10.0.0.1:9000"
    assert config.scheduler_bind("tcp://localhost:9000") == "tcp://127.0.0.1:9000"
    assert config.scheduler_bind("tcp://head:9000") == "tcp://0.0.0.0:9000"


def test_switches():
    assert [config.switch("X", {"X": item}) for item in ("1", "true", "YES", "0", "no", "")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    with pytest.raises(ConfigError, match="neither 1 nor 0"):
        config.switch("X", {"X": "perhaps"})


def test_a_switch_that_is_on_unless_it_is_turned_off():
    for says, expected in (("0", False), ("no", False), ("1", True)):
        assert config.switch("X", {"X": says}, default=True) is expected
    assert config.switch("X", {}, default=True)
    assert config.switch("X", {"X": ""}, default=True)
    with pytest.raises(ConfigError, match="neither 1 nor 0"):
        config.switch("X", {"X": "perhaps"}, default=True)


def test_host_aggregation():
    off = {"KVPS_HOST_AGGREGATION": "0"}
    assert config.host_aggregation(None, {})
    assert not config.host_aggregation(None, off)
    assert config.host_aggregation(True, off), "the script knows better"
    assert not config.host_aggregation(False, {})
    for bad in ("yes", 1, 0):
        with pytest.raises(ConfigError, match=f"host_aggregation={bad!r}: use True or False"):
            config.host_aggregation(bad, {})
    with pytest.raises(ConfigError, match="KVPS_HOST_AGGREGATION='both' is neither"):
        config.host_aggregation(None, {"KVPS_HOST_AGGREGATION": "both"})


def test_packets_have_checksums_unless_told_otherwise():
    assert config.checksums({})
    assert not config.checksums({"KVPS_CHECKSUM": "0"})
    with pytest.raises(ConfigError, match="KVPS_CHECKSUM='crc' is neither"):
        config.checksums({"KVPS_CHECKSUM": "crc"})


def test_the_switch_interval_is_short_unless_told_otherwise():
    assert config.switch_interval_s({}) == config.SWITCH_INTERVAL_S < 0.005
    assert config.switch_interval_s({"KVPS_SWITCH_INTERVAL": "0"}) == 0
    assert config.switch_interval_s({"KVPS_SWITCH_INTERVAL": "0.002"}) == 0.002
    for bad in ("-1", "2", "short"):
        with pytest.raises(ConfigError, match="KVPS_SWITCH_INTERVAL="):
            config.switch_interval_s({"KVPS_SWITCH_INTERVAL": bad})


def test_how_much_travels_at_once():
    assert config.chunk_bytes({}) is None, "kvps decides"
    assert config.chunk_bytes({"KVPS_CHUNK_BYTES": "1M"}) == 1 << 20
    with pytest.raises(ConfigError, match="KVPS_CHUNK_BYTES='much' is not a number of bytes"):
        config.chunk_bytes({"KVPS_CHUNK_BYTES": "much"})


def test_the_join_limit():
    assert config.join_max_s({"KVPS_JOIN_TIMEOUT": "2.5"}) == 2.5
    assert config.join_max_s({}) == 60
    with pytest.raises(ConfigError, match="above 0"):
        config.join_max_s({"KVPS_JOIN_TIMEOUT": "0"})


def test_when_others_count_as_lost():
    assert config.silence_max_s(env={}) == 12
    assert config.silence_max_s(env={"KVPS_SILENCE_MAX": "30"}) == 30
    assert config.silence_max_s("3", env={"KVPS_SILENCE_MAX": "30"}) == 3, "the flag counts"
    with pytest.raises(ConfigError, match="KVPS_SILENCE_MAX=2: members send a beat each second"):
        config.silence_max_s(env={"KVPS_SILENCE_MAX": "2"})
    with pytest.raises(ConfigError, match="--silence-max='soon' is not a number"):
        config.silence_max_s("soon", env={})
    assert config.drop_grace_s(env={}) == 1
    assert config.drop_grace_s("0.5", env={"KVPS_DROP_GRACE": "9"}) == 0.5
    with pytest.raises(ConfigError, match="KVPS_DROP_GRACE=0: use a number of seconds above 0"):
        config.drop_grace_s(env={"KVPS_DROP_GRACE": "0"})


def test_the_bound_of_big_arrays(monkeypatch):
    for name in config.BIGARRAY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert config.bigarray_bound(None, 100) == 100
    monkeypatch.setenv("MXNET_KVSTORE_BIGARRAY_BOUND", "7")
    assert config.bigarray_bound(None, 100) == 7
    monkeypatch.setenv("KVPS_BIGARRAY_BOUND", "8")
    assert config.bigarray_bound(None, 100) == 8
    assert config.bigarray_bound(9, 100) == 9
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="bigarray_bound"):
            config.bigarray_bound(bad, 100)


def test_where_checkpoints_lie():
    assert config.checkpoint_dir({}) is None
    assert config.checkpoint_dir({"KVPS_CHECKPOINT_DIR": ""}) is None
    assert config.checkpoint_dir({"KVPS_CHECKPOINT_DIR": "/ckpt"}) == "/ckpt"


RANKS = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_the_world_that_torchrun_describes():
    assert config.world(RANKS) == config.World(1, 3, "10.0.0.1", 29500)
    assert config.world({"KVPS_SCHEDULER": "tcp://h:1", **RANKS}) == config.world(RANKS)
    assert config.world({"RANK": "0", "WORLD_SIZE": "1"}) == config.World(0, 1, "", 0)
    assert config.world({}) is None


@pytest.mark.parametrize(
    ("env", "says"),
    [
        *(({**RANKS, name: ""}, f"but {name} is not") for name in RANKS),
        ({**RANKS, "RANK": "3"}, "RANK=3 is not below WORLD_SIZE=3"),
        ({**RANKS, "WORLD_SIZE": "many"}, "WORLD_SIZE='many'"),
        ({"KVPS_SCHEDULER": "tcp://h:1"}, "its ranks are not.*kvps-launch"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "Slurm started 4 processes"),
    ],
)
def test_half_a_world_is_none(env, says):
    with pytest.raises(ConfigError, match=says):
        config.world(env)


@pytest.mark.parametrize(
    ("rank", "size"),
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_ranks_of_other_launchers(rank: str, size: str) -> None:
    env = {rank: "2", size: "4"}
    cluster = config.cluster({**env, "KVPS_SCHEDULER": "tcp://host:9091"})
    assert cluster is not None
    assert cluster.rank == 2
    cluster = config.cluster({**env, "KVPS_SCHEDULER": "tcp://host:9091", "KVPS_RANK": "1"})
    assert cluster is not None
    assert cluster.rank == 1
    for role, expected in (("worker", 2), ("server", None)):
        cluster = config.cluster({**env, **DMLC, "DMLC_ROLE": role})
        assert cluster is not None
        assert cluster.rank == expected
    found = config.world({**env, "MASTER_ADDR": "host", "MASTER_PORT": "29500"})
    assert found == config.World(2, 4, "host", 29500)
    with pytest.raises(ConfigError, match="started 4 processes"):
        config.world(env)


def test_ranges_and_ranks_of_members() -> None:
    assert config.as_range("-n", "3") == (3, 0)
    assert config.as_range("-s", "2:6", "server processes") == (2, 6)
    with pytest.raises(ConfigError, match="-s=2:1: the second number is the most server processes"):
        config.as_range("-s", "2:1", "server processes")
    assert config.as_ranks("--rank", "0,2,4") == (0, 2, 4)
    with pytest.raises(ConfigError, match="--rank"):
        config.as_ranks("--rank", "0,x")
