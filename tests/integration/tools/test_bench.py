"""``kvps``, ``kvps bench`` and ``python -m benchmarks.compare`` as a user calls them."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.processes import BIN, Process, Processes, until

EXIT_CONFIG = 78
QUICK = ("--workloads", "small", "--rounds", "2", "--repeat", "1")


def called(processes: Processes, *words: object, **env: str) -> Process:
    return processes.start("kvps", BIN / "kvps", *words, **env)


def compared(processes: Processes, *words: object) -> Process:
    return processes.python("-m", "benchmarks.compare", *words)


def test_help_of_the_comparison_teaches(processes: Processes) -> None:
    helped = compared(processes, "--help")
    assert helped.wait() == 0
    for part in ("usage: python -m benchmarks.compare ", "examples:", "--sweep AXIS", "exit codes"):
        assert part in helped.out
    assert max(map(len, helped.out.splitlines())) <= 110


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "COMMAND; see kvps --help"),
        (["bnech"], "'bnech' (choose from"),
        (["--log-level", "info", "bench"], "write kvps bench --log-level"),
        (["bench", "--wrkers", "2"], "--wrkers"),
        (["bench", "--workers", "two"], "--workers='two'"),
        (["bench", "--network", "4x4"], "run: python -m benchmarks.compare --network 4x4"),
        (["bench", "--systems", "ray"], "run: python -m benchmarks.compare --systems ray"),
        (["bench", "--log-level", "loud"], "debug, info"),
    ],
)
def test_a_wrong_flag_is_named(processes: Processes, flags: list[str], told: str) -> None:
    process = called(processes, *flags)
    assert process.wait() == EXIT_CONFIG
    assert told in process.err
    assert "Traceback" not in process.err


@pytest.mark.in_turn
@pytest.mark.timeout(240)
def test_the_table(processes: Processes, tmp_path: Path) -> None:
    bench = called(processes, "bench", "--full", *QUICK, "--json", "figures.json")
    assert bench.wait(200) == 0, bench
    for part in ("2 workers, 2 servers", "│ small ", "│ kvps sgd ", "│ gloo in place ", "loopback"):
        assert part in bench.out
    lines = bench.err.splitlines()
    assert all(re.fullmatch(r"\d+ of 7 trials, about \d+ (s|min) left", line) for line in lines), bench
    found = json.loads((tmp_path / "figures.json").read_text())
    assert {row["system"] for row in found["rows"]} >= {"kvps", "kvps sgd", "kvps tcp", "gloo"}
    assert all(len(row["trials"][0]["rounds_ms"]) == 2 for row in found["rows"])
    assert found["limits_gb_per_s"]["copy, one core"] > 0


@pytest.mark.thorough
def test_a_sweep(processes: Processes, tmp_path: Path) -> None:
    sweep = ("--sweep", "keys", "--at", "1", "10", "--systems", "gloo", "--plot", "plots")
    bench = compared(processes, *sweep, "--rounds", "2", "--repeat", "1")
    assert bench.wait(120) == 0, bench
    assert "│ gloo " in bench.out
    assert (tmp_path / "plots" / "sweep-keys.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.in_turn
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_everything(processes: Processes, number: int) -> None:
    bench = called(processes, "bench", "--workloads", "small", "--rounds", "100000", "--no-limits")
    until(lambda: len(processes.pids("kvps.tools.bench.worker")) >= 2, "workers")
    bench.signal(number)
    assert bench.wait() == (-number if number == signal.SIGKILL else 128 + number)
    until(lambda: not processes.running(), "end of all processes")
    if number == signal.SIGKILL:  # nobody could remove what was in there
        shutil.rmtree(processes.temp)
        processes.temp.mkdir()


@pytest.mark.usefixtures("has_namespaces")
class TestNetwork:
    @pytest.fixture
    def network(self, processes: Processes) -> Process:
        """Measures on two workers of one host and a server of another."""
        flags = ("--network", "2@1x1", "--rate", "1gbit", "--json", "figures.json")
        return compared(processes, *QUICK, *flags, "--systems", "kvps", "kvps apart")

    @pytest.mark.thorough
    def test_links_carry_the_model(self, network: Process, tmp_path: Path) -> None:
        assert network.wait(180) == 0, network
        assert "workers 0 to 1" in network.out
        found = json.loads((tmp_path / "figures.json").read_text())
        rows = {row["system"]: row for row in found["rows"]}
        # Both workers push and pull all of it: as one, or each for itself.
        for system, times in (("kvps", 1), ("kvps apart", 2)):
            scheduler, workers, server = rows[system]["traffic"]
            model = rows[system]["payload_bytes"]
            assert scheduler["in_bytes"] < 0.1 * model
            for link in (workers, server):
                assert times * model <= link["in_bytes"] < (times + 0.2) * model
                assert times * model <= link["out_bytes"] < (times + 0.2) * model
        until(lambda: not namespaces_of(network.pid), "end of the namespaces")

    def test_ctrl_c_leaves_no_namespace(self, network: Process) -> None:
        until(lambda: len(namespaces_of(network.pid)) == 4, "namespaces")
        network.signal(signal.SIGINT)
        assert network.wait() == 130
        assert namespaces_of(network.pid) == []


def namespaces_of(pid: int) -> list[str]:
    """Return the names of the network namespaces that a process has made."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line]
    return [name for name in names if name.startswith(f"kvps-{pid}-")]
