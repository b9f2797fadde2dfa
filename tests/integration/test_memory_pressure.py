"""A server in a control group that is nearly full: new work is refused, the kernel kills nobody, and training goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Processes
from tests.support.cgroup import limited
from tests.support.scraping import HTTP, url_of

LIMIT_MIB = 700
SCRIPT = """
import sys, time, urllib.request
import torch, kvps

def used():
    lines = urllib.request.urlopen(sys.argv[1]).read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("kvps_memory_used_ratio")]
    return float(line.split()[-1])

def grow(key, mib):
    before = used()
    kv.init(key, torch.zeros(mib << 18))
    end = time.monotonic() + 30.0
    while used() <= before and time.monotonic() < end:  # the server has read what it uses now
        time.sleep(0.05)

kv = kvps.create("dist_sync")
grow("first", 1)
grow("large", int((0.85 - used()) * int(sys.argv[2])))
try:
    for number in range(100):  # more than there is
        grow(f"more-{number}", 8)
except kvps.Overload as error:
    print("refused", number, error, flush=True)
kv.push("first", torch.ones(1 << 18))
print("goes on", kv.pull("first").sum().item(), flush=True)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    with limited(LIMIT_MIB) as folder:
        yield folder


@pytest.mark.thorough
def test_a_server_that_is_short_of_memory_refuses_keys_and_lives(group: Path, processes: Processes) -> None:
    # A forked process copies pages of its parent as it ends, and the group would be charged for them.
    processes.may_fork = False
    cluster = processes.scheduler(1, 1)
    # The limit of values is far above what there is: only the reading can stop it.
    server = cluster.server("--memory-limit", "8G", *HTTP)
    (group / "cgroup.procs").write_text(str(server.pid))
    url = url_of(server)
    worker = processes.python(
        processes.script(SCRIPT), f"{url}/metrics", LIMIT_MIB, KVPS_SCHEDULER=cluster.endpoint
    )
    worker.expect("goes on 262144", 120.0)
    assert "(9" in worker.expect(r"refused \d+ key .*").group()
    assert "--limit used_memory=NUMBER" in worker.out
    assert "is short of memory" in server.err
    assert worker.wait() == 0
    assert server.wait() == 0
