"""What all commands have in common: help, version, speed, mistakes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvps
from tests.integration.processes import BIN, ENDPOINT, Processes, is_quick

COMMANDS = [
    *(f"kvps-{name}" for name in ("scheduler", "server", "worker", "launch")),
    *("kvps", "kvps bench", "kvps checkpoint", "kvps checkpoint export", "kvps follow", "kvps status"),
]
EXIT_CONFIG = 78


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(processes: Processes, command: str) -> None:
    name, *words = command.split()
    helped = processes.start(name, BIN / name, *words, "--help")
    assert helped.wait() == 0
    for part in (f"usage: {command} ", "example", "exit codes", "KVPS_LOG_LEVEL", "--version"):
        assert part in helped.out
    assert max(map(len, helped.out.splitlines())) <= 110
    assert helped.err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_version(processes: Processes, command: str) -> None:
    name, *words = command.split()
    asked = processes.start(name, BIN / name, *words, "--version")
    assert asked.wait() == 0
    assert asked.out == f"{command} {kvps.__version__}\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_command_whose_reader_has_ended_ends_in_silence(unbuffered: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    keygen = [BIN / "kvps", "keygen", tmp_path / "keys"]
    ran = subprocess.run(keygen, stdout=writer, stderr=subprocess.PIPE, env=env, timeout=60)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which Python keeps bytecode, as of a package that pip has installed."""
    folder = str(tmp_path_factory.mktemp("bytecode"))
    return {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}


@pytest.mark.usefixtures("fresh_interpreters")
@pytest.mark.parametrize("command", COMMANDS)
def test_help_comes_at_once_and_without_torch(
    processes: Processes, command: str, compiled: dict[str, str]
) -> None:
    name, *words = command.split()
    code = (
        f"import sys; from kvps.cli.{name.partition('-')[2] or 'main'} import main\n"
        f"try: main([*{words}, '--help'])\n"
        "finally: sys.exit(bool({'torch', 'numpy', 'rich'} & sys.modules.keys()))"
    )
    assert is_quick(processes, 3, sys.executable, "-c", code, **compiled)


@pytest.mark.usefixtures("fresh_interpreters")
def test_the_scheduler_runs_without_torch(processes: Processes) -> None:
    code = (
        "import sys; from kvps.cli.scheduler import main\n"
        "main(['--workers', '1', '--servers', '1', '--bind', 'tcp://127.0.0.1:0', '--log-level', 'info'])\n"
        "sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    )
    scheduler = processes.python("-c", code)
    scheduler.expect(ENDPOINT.pattern)
    scheduler.signal(signal.SIGTERM)
    assert scheduler.wait() == 0


@pytest.mark.parametrize(
    ("command", "flags", "told"),
    [
        ("scheduler", ["--wrkers", "2"], "--wrkers"),
        ("scheduler", ["--workers", "2"], "--servers S"),
        ("scheduler", ["--workers", "two", "--servers", "1"], "--workers='two'"),
        ("scheduler", ["--workers", "0", "--servers", "1"], "0 workers"),
        ("scheduler", ["--workers", "1000", "--servers", "1000"], "1500"),
        ("scheduler", ["--workers", "1", "--servers", "1", "--bind", "here"], "tcp://HOST:PORT"),
        ("scheduler", ["--workers", "1", "--servers", "1", "--log-level", "loud"], "debug, info"),
        ("scheduler", ["--workers", "1", "--servers", "1", "--state", "/dev/null"], "not a directory"),
        ("server", ["--scheduler", "tcp://127.0.0.1"], "tcp://HOST:PORT"),
        ("server", ["--scheduler", "tcp://127.0.0.1:0"], "no port"),
        ("server", ["--memory-limit", "lots"], "512M"),
        ("server", ["--threads", "0"], "--threads"),
        ("server", ["--rank", "-1"], "--rank"),
        ("server", ["--plugin", "no_such_module"], "no_such_module"),
        ("server", ["--checkpoint-every", "5"], "--checkpoint-dir DIR"),
        ("worker", [], "-- python train.py"),
        ("worker", ["--rank", "x", "--", sys.executable], "--rank='x'"),
        ("worker", ["--", "no-such-program"], "no-such-program"),
        ("launch", ["-n", "2"], "-- python train.py"),
        ("launch", ["--", sys.executable], "-n"),
        ("launch", ["-n", "0", "--", sys.executable], "-n 0"),
        ("launch", ["-n", "0", "-s", "1", "--", sys.executable], "-n 0"),
        ("launch", ["-n", "1", "--env", "A", "--", sys.executable], "NAME=VALUE"),
        ("launch", ["-n", "1", "--launcher", "slurm", "--", sys.executable], "salloc"),
        ("launch", ["-n", "1", "--launcher", "pigeon", "--", sys.executable], "local"),
        ("launch", ["-n", "1", "--", "no-such-program"], "no-such-program"),
    ],
)
def test_a_wrong_flag_is_named(processes: Processes, command: str, flags: list[str], told: str) -> None:
    process = processes.kvps(command, *flags)
    assert process.wait() == EXIT_CONFIG
    assert told in process.err
    assert "Traceback" not in process.err


@pytest.mark.parametrize(
    ("command", "flags", "variable", "value"),
    [
        ("scheduler", ["--servers", "1"], "KVPS_WORKERS", "many"),
        ("scheduler", ["--workers", "1", "--servers", "1"], "KVPS_BIND", "9091"),
        ("scheduler", ["--workers", "1", "--servers", "1"], "KVPS_KEEP_ALIVE", "perhaps"),
        ("server", [], "KVPS_SCHEDULER", "localhost"),
        ("server", [], "KVPS_MEMORY_LIMIT", "0"),
        ("server", [], "KVPS_JOIN_TIMEOUT", "0"),
        ("scheduler", ["--workers", "1", "--servers", "1"], "KVPS_DROP_GRACE", "0"),
        ("server", [], "KVPS_SILENCE_MAX", "1"),
        ("server", [], "KVPS_LOG_LEVEL", "5"),
        ("worker", ["--", sys.executable], "KVPS_RANK", "1.5"),
    ],
)
def test_a_wrong_variable_is_named(
    processes: Processes, command: str, flags: list[str], variable: str, value: str
) -> None:
    process = processes.kvps(command, *flags, **{variable: value})
    assert process.wait() == EXIT_CONFIG
    assert variable in process.err
    assert "Traceback" not in process.err
