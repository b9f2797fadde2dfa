"""MXNet's variables: one job script for all roles, and our commands under them."""

import signal
import sys
from pathlib import Path

from tests.integration.processes import SUM, Processes, free_port


def variables(role: str, workers: int = 2, servers: int = 2) -> dict[str, str]:
    return {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
    }


def test_a_single_script_runs_in_all_roles(processes: Processes) -> None:
    script = processes.script(SUM)
    port = str(free_port())
    roles = ("worker", "server", "scheduler", "server", "worker")
    started = [processes.python(script, **variables(role), DMLC_PS_ROOT_PORT=port) for role in roles]
    assert [process.wait() for process in started] == [0] * 5, started
    for role, item in zip(roles, started, strict=True):
        assert item.out == ("sum [3.0, 3.0, 3.0, 3.0]\n" if role == "worker" else "")
        assert item.err == ""


def test_our_commands_need_no_flags(processes: Processes) -> None:
    env = {**variables("any", 1, 1), "DMLC_PS_ROOT_PORT": str(free_port())}
    script = processes.script(SUM)
    started = [
        processes.kvps("scheduler", **env),
        processes.kvps("server", **env),
        processes.kvps("worker", "--", sys.executable, script, **env),
    ]
    assert [process.wait() for process in started] == [78] * 3
    assert all("DMLC_ROLE='any'" in process.err for process in started)
    for role in ("scheduler", "server", "worker"):
        env["DMLC_ROLE"] = role  # what they are, they know by themselves
    started = [
        processes.kvps("scheduler", **env),
        processes.kvps("server", **env),
        processes.kvps("worker", "--", sys.executable, script, **env),
    ]
    assert [process.wait() for process in started] == [0] * 3
    assert "sum [1.0, 1.0, 1.0, 1.0]" in started[2].out


def test_half_a_description_names_the_other_half(processes: Processes) -> None:
    env = variables("server")
    for item, code in (
        (processes.python(processes.script(SUM), **env), 1),
        (processes.kvps("server", **env), 78),
        (processes.kvps("scheduler", **env), 78),
    ):
        assert item.wait() == code
        assert "DMLC_PS_ROOT_PORT is not" in item.err


def test_a_busy_port_ends_the_scheduler_with_78(processes: Processes) -> None:
    cluster = processes.scheduler(1, 0)
    port = cluster.endpoint.rpartition(":")[2]
    script = processes.script(SUM)
    busy = processes.python(script, **variables("scheduler"), DMLC_PS_ROOT_PORT=port)
    assert busy.wait() == 78
    assert f"cannot listen on tcp://127.0.0.1:{port}" in busy.err
    cluster.process.signal(signal.SIGTERM)
    assert cluster.process.wait() == 0


def test_other_machines_need_a_word(processes: Processes) -> None:
    script = processes.script(SUM)
    for role in ("scheduler", "server"):
        env = {**variables(role), "DMLC_PS_ROOT_URI": "192.0.2.1", "DMLC_PS_ROOT_PORT": "9091"}
        refused = processes.python(script, **env)
        assert refused.wait() == 78
        assert "KVPS_INSECURE=1" in refused.err
    # A name is no address to listen on; it becomes all of them.
    endpoint = {"DMLC_PS_ROOT_URI": "localhost", "DMLC_PS_ROOT_PORT": str(free_port())}
    roles = ("scheduler", "server", "worker")
    started = [
        processes.python(script, **{**variables(role, 1, 1), **endpoint}, KVPS_INSECURE="1") for role in roles
    ]
    assert [process.wait() for process in started] == [0, 0, 0], started


def test_a_server_is_stopped_by_a_signal(processes: Processes) -> None:
    port = str(free_port())
    script = processes.script(SUM)
    scheduler = processes.python(script, **variables("scheduler"), DMLC_PS_ROOT_PORT=port)
    server = processes.kvps("server", "--log-level", "debug", **variables("server"), DMLC_PS_ROOT_PORT=port)
    server.expect("joined")
    scheduler.signal(signal.SIGTERM)
    assert [scheduler.wait(), server.wait()] == [0, 75]


def test_a_command_line_of_mxnets_launcher(processes: Processes) -> None:
    script = processes.script(
        SUM + "import os, pathlib, sys, time\n"
        "print(*(os.environ.get(one) for one in ('A', 'B', 'C')), *sys.argv[1:], flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
    )
    words = ["--num-workers", 2, "--num-servers", 1, "--launcher", "local", "--p3", "--env", "C"]
    words += ["--env-worker", "A:worker", "--env-server", "B:server"]
    words += [sys.executable, script, "--kv-store", "dist_sync", "-n", 7]
    launched = processes.kvps("launch", *words, C="all")
    launched.expect("worker None all")
    (server,) = processes.pids(r"kvps\.cli\.server")
    env = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    assert b"B=server" in env
    assert b"C=all" in env
    assert b"A=worker" not in env
    (processes.folder / "go").touch()
    assert launched.wait() == 0, launched
    assert launched.out.count("sum [3.0, 3.0, 3.0, 3.0]") == 2
    assert launched.out.count("worker None all --kv-store dist_sync -n 7") == 2
