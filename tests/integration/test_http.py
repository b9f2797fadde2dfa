"""Endpoints and metrics of real processes: what strangers and members are refused is counted once."""

import json
import socket
import sys
from pathlib import Path

import pytest

from kvps import protocol as m
from kvps.errors import Unauthorized
from kvps.inquiry import inquire
from kvps.net.zap import Keys, new_pair
from kvps.runtime import key_files as files
from tests.integration.processes import Processes, until
from tests.support.scraping import HTTP, Samples, get, metrics, one_moves, url_of

SCRIPT = """
import pathlib, time, torch, kvps
kv = kvps.create("dist_sync", timeout=60)
kv.init("w", torch.zeros(1000))
for _ in range(3):
    kv.push("w", torch.ones(1000))
kv.pull("w")
try:
    kv.init("large", torch.zeros(1 << 22))
except kvps.Overload:
    print("too large", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
"""


def test_a_job_with_endpoints(processes: Processes) -> None:
    folder = processes.folder / "keys"
    files.write(folder, files.generate())
    keys = ("--keys", folder)
    cluster = processes.scheduler(1, 1, *keys, "--http", "127.0.0.1:0")
    at_scheduler = url_of(cluster.process)
    server = cluster.server(*keys, *HTTP, "--memory-limit", "4M")
    at_server = url_of(server)
    assert get(f"{at_server}/livez") == (200, "ok\n")
    worker = cluster.plain(processes.script(SCRIPT), KVPS_KEYS=str(folder))
    worker.expect("too large", 120.0)

    def all_seen() -> Samples | None:
        found = metrics(at_server)
        return found if found["kvps_overloads_total", "memory"] else None

    found = until(all_seen, "sample with the overload")
    assert found["kvps_overloads_total", "memory"] == 1
    assert found["kvps_pushes_total", "counted"] == 3
    assert found["kvps_round_duration_seconds_count", ""] == 3
    assert found["kvps_memory_limit_bytes", ""] == 4 << 20
    assert found["kvps_memory_bytes", "weights"] == 4000
    assert found["kvps_ready", ""] == 1
    assert sum([item for (name, _), item in found.items() if name == "kvps_refusals_total"]) == 0
    assert get(f"{at_server}/readyz")[0] == 200
    assert json.loads(get(f"{at_server}/statusz")[1])["rank"] == 0

    def members() -> bool:
        found = metrics(at_scheduler)
        return all(found.get(("kvps_members", f"{role},held")) == 1 for role in ("worker", "server"))

    until(members, "sample with both members")
    status = json.loads(get(f"{at_scheduler}/statusz")[1])
    assert (status["role"], status["phase"]) == ("scheduler", "running")
    with one_moves(at_scheduler, "kvps_refused_connections_total", "unknown_key"):
        unknown(cluster.endpoint, folder)
    with one_moves(at_scheduler, "kvps_refusals_total", "key_may_not"):
        look_key_leaves_its_place(cluster.endpoint, folder)
    (processes.folder / "go").touch()
    for item in (worker, server, cluster.process):
        assert item.wait() == 0, item


def keys_of(folder: Path, role: str) -> Keys:
    loaded = files.load_if_any(str(folder), role)
    assert loaded is not None
    return loaded


def unknown(endpoint: str, folder: Path) -> None:
    """Connect by a key that nobody knows."""
    stranger = Keys(keys_of(folder, "look").scheduler, role=new_pair())
    with pytest.raises(Unauthorized):
        inquire(endpoint, m.Look(), m.Seen, stranger, 10.0)


def look_key_leaves_its_place(endpoint: str, folder: Path) -> None:
    """Send by the key ``look`` a message that it may not send."""
    with pytest.raises(Unauthorized, match="may not send Evict"):
        inquire(endpoint, m.Evict(2, 0), m.Done, keys_of(folder, "look"), 10.0)


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_a_launch_prints_where_its_dashboard_is(processes: Processes, how: str) -> None:
    """Its port is the scheduler's: a server that took it too would end, and the job with it."""
    script = processes.script(
        "import kvps, pathlib, time, torch\n"
        'kv = kvps.create("dist_sync", timeout=60)\n'
        'kv.init("w", torch.zeros(4))\n'
        'print("ready", flush=True)\n'
        'while not pathlib.Path("go").exists():\n'
        "    time.sleep(0.02)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    flags, env = (["--http", place], {}) if how == "flag" else ([], {"KVPS_HTTP": place})
    launched = processes.kvps("launch", "-n", 1, "-s", 2, *flags, "--", sys.executable, script, **env)
    assert launched.expect(r"^dashboard: (\S+)$").group(1) == f"http://{place}/"
    launched.expect("ready")
    until(lambda: json.loads(get(f"http://{place}/statusz")[1])["phase"] == "running", "sample of the job")
    assert get(f"http://{place}/")[0] == 200
    (processes.folder / "go").touch()
    assert launched.wait() == 0, launched
