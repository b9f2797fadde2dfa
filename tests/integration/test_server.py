"""kvps-server as a process: where it listens, what it refuses, and what its end means."""

import signal
import socket
import sys

import pytest

from kvps.core.liveness import SILENCE_MAX_S
from tests.integration.processes import SUM, Cluster, Process, Processes, free_port

WAIT = SUM + "kv.pull('w', min_version=99)"


def finish(cluster: Cluster, *servers: Process) -> Process:
    """Run one worker to its end, and with it the job."""
    worker = cluster.worker(sys.executable, cluster.processes.script(SUM))
    assert worker.wait() == 0, worker
    assert [item.wait() for item in (*servers, cluster.process)] == [0] * (len(servers) + 1)
    return worker


def test_nobody_there_ends_with_75(processes: Processes) -> None:
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    server = processes.kvps("server", "--scheduler", nowhere, KVPS_JOIN_TIMEOUT="0.5")
    assert server.wait() == 75
    for part in (nowhere, "0.5 s", "--bind", "Nothing was lost"):
        assert part in server.err


def test_a_name_that_nobody_knows_ends_with_75(processes: Processes) -> None:
    flags = ("--scheduler", "tcp://no-such-host.invalid:9091", "--bind", "tcp://0.0.0.0:0", "--insecure")
    server = processes.kvps("server", *flags, KVPS_JOIN_TIMEOUT="0.1")
    assert server.wait(120.0) == 75, "a resolver may wait for name servers that do not answer"
    assert "no-such-host.invalid" in server.err


def test_a_busy_port_is_named(processes: Processes) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        endpoint = f"tcp://127.0.0.1:{busy.getsockname()[1]}"
        server = processes.kvps("server", "--bind", endpoint)
        assert server.wait() == 78
        assert endpoint in server.err


def test_an_address_that_others_reach_is_refused(processes: Processes) -> None:
    for flags in (("--bind", "tcp://0.0.0.0:0"), ("--scheduler", "tcp://192.0.2.1:9091")):
        server = processes.kvps("server", *flags)
        assert server.wait() == 78
        assert "--insecure" in server.err


def test_server_announces_an_address_that_workers_reach(processes: Processes) -> None:
    cluster = processes.scheduler(1, 2)
    servers = [
        cluster.server("--bind", "tcp://0.0.0.0:0", "--insecure"),
        cluster.server("--bind", "tcp://0.0.0.0:0", "--insecure", KVPS_ADVERTISE="127.0.0.1"),
    ]
    finish(cluster, *servers)


def test_too_many_servers_are_refused(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    server = cluster.server("--log-level", "debug")
    server.expect("joined as server 0")
    second = cluster.server()
    assert second.wait() == 78
    assert "already has 1 servers" in second.err
    third = cluster.server("--rank", 0)
    assert third.wait() == 78
    assert "rank 0 is alive" in third.err
    fourth = cluster.server(KVPS_RANK="5")
    assert fourth.wait() == 78
    assert "there is no server 5" in fourth.err
    finish(cluster, server)


def test_the_memory_limit_is_kept(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    server = cluster.server("--memory-limit", "1M", "--threads", 1)
    script = processes.script(
        "import kvps, torch\n"
        "kv = kvps.create('dist_sync')\n"
        "kv.init('small', torch.zeros(1000))\n"
        "try: kv.init('big', torch.zeros(1000, 1000))\n"
        "except kvps.Overload as error: print('refused:', error)\n"
        "kv.init('half', torch.zeros(60_000))\n"
        "try: kv.set_optimizer('adam')\n"
        "except kvps.Overload as error: print('also:', error)\n"
        "print(kv.pushpull('small', torch.ones(1000)).sum().item())\n"
    )
    worker = cluster.worker(sys.executable, script)
    assert worker.wait() == 0, worker
    assert "refused:" in worker.out
    assert "big" in worker.out
    assert (
        "also: no room for optimizer 'adam' of store 'store-0': weights 238 KiB + second buffers 238 KiB + "
        "sums of open rounds 238 KiB + optimizer state 477 KiB = 1.16 MiB, and the limit of this server is 1 MiB"
    ) in worker.out
    assert "1000.0" in worker.out
    assert [item.wait() for item in (server, cluster.process)] == [0, 0]


def test_a_plugin_brings_an_optimizer(processes: Processes) -> None:
    processes.script(
        "from kvps.plugin import Parameter, Schema, Updater, register\n"
        "class Half(Updater):\n"
        "    def _update(self, weight, gradient, state, terms):\n"
        "        weight.sub_(gradient, alpha=terms.lr * self.hyper.number('share'))\n"
        "register('half', Half, Schema.of('half', Parameter('share', 0.5, low=0.0), lr=0.1))\n",
        "half.py",
    )
    cluster = processes.scheduler(1, 1)
    server = cluster.server("--plugin", "half")
    script = processes.script(
        "import kvps, torch, half\n"
        "kv = kvps.create('dist_sync')\n"
        "kv.set_optimizer('half', lr=0.5)\n"
        "kv.init('w', torch.ones(2))\n"
        "print(kv.pushpull('w', torch.ones(2)).tolist())\n"
    )
    worker = cluster.worker(sys.executable, script)
    assert worker.wait() == 0, worker
    assert "[0.75, 0.75]" in worker.out
    assert [item.wait() for item in (server, cluster.process)] == [0, 0]


def test_a_server_that_is_stopped_leaves(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    worker = cluster.worker(sys.executable, processes.script(WAIT), flags=["--no-replacement"])
    processes.may_fork = False
    server = cluster.server()
    worker.expect("sum")
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert worker.wait(SILENCE_MAX_S - 1.0) == 1
    assert "ServerLost: server 0" in worker.err
    assert cluster.process.wait() == 1


def test_a_server_that_is_stopped_before_the_job_begins_is_replaced(processes: Processes) -> None:
    cluster = processes.scheduler(1, 1)
    first = cluster.server("--log-level", "debug")
    first.expect("joined as server 0")
    first.signal(signal.SIGINT)
    assert first.wait() == 0
    finish(cluster, cluster.server())


@pytest.mark.parametrize("is_flag", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_the_operator_decides_when_the_silent_are_lost(processes: Processes, is_flag: bool) -> None:
    flags, env = ["--silence-max", "3"], {"KVPS_SILENCE_MAX": "3"}
    cluster = processes.scheduler(1, 1, *(flags if is_flag else []), **({} if is_flag else env))
    server = cluster.server()
    cluster.process.expect("server 0 joined")
    server.signal(signal.SIGSTOP)
    cluster.process.expect(r"server 0 .*silent for 3 s")
    server.signal(signal.SIGKILL)
    cluster.process.signal(signal.SIGTERM)
    cluster.process.wait()


def test_any_number_of_threads_gives_the_same_bits(processes: Processes) -> None:
    script = processes.script(
        "import hashlib, kvps, torch\n"
        "kv = kvps.create('dist_sync', deterministic=True, timeout=60)\n"
        "kv.set_optimizer('adam', lr=0.1)\n"
        "kv.init('w', torch.zeros(700_001))\n"
        "for step in range(3):\n"
        "    generator = torch.Generator().manual_seed(10 * step + kv.rank)\n"
        "    w = kv.pushpull('w', torch.randn(700_001, generator=generator))\n"
        "print('bits', hashlib.sha256(w.numpy().tobytes()).hexdigest())\n"
    )
    bits = set()
    for threads in (1, 2, 3):
        cluster = processes.scheduler(2, 1)
        server = cluster.server("--threads", threads)
        workers = [cluster.plain(script) for _ in range(2)]
        assert [item.wait() for item in (*workers, server, cluster.process)] == [0, 0, 0, 0]
        bits |= {worker.expect("bits [0-9a-f]{64}").group() for worker in workers}
    assert len(bits) == 1
