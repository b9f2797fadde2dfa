"""The table of tools/launch.py's flags in docs/migrating/mxnet.md: each line is what kvps-launch does with the flag."""

import re
import shlex
from pathlib import Path

import pytest

from kvps.cli import launch

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "migrating" / "mxnet.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## tools/launch.py\n")[2].partition("\n## ")[0]
ROWS = [
    (given, line.split(" | ")[1])
    for line in SECTION.splitlines()
    if line.startswith("| `")
    for given in re.findall(r"`([^`]+)`", line.split(" | ")[0])
]
OF_MXNET = (
    *("-n", "--num-workers", "-s", "--num-servers", "-H", "--hostfile", "-SH", "--server-hostfile"),
    *("--sync-dst-dir", "--byteps-launch", "--scheduler-ip", "--scheduler-port", "--p3"),
    *("--env-server", "--env-worker", "--env"),
    *(f"--launcher {name}" for name in ("local", "ssh", "mpi", "sge", "yarn")),
)
"""The flags of tools/launch.py in MXNet 2.0."""
COMMAND = ["python", "train.py", "--kv-store", "dist_sync", "-n", "7"]


def words(given: str) -> list[str]:
    found = shlex.split(given)
    return found if found[0] in ("-n", "--num-workers") else ["-n", "4", *found]


@pytest.mark.parametrize("flag", OF_MXNET)
def test_the_table_has_every_flag(flag: str) -> None:
    assert [given for given, _ in ROWS if f" {flag} " in f" {given} "], flag


@pytest.mark.parametrize("given", [given for given, here in ROWS if "refused" not in here])
def test_a_flag_that_is_the_same_is_accepted(given: str) -> None:
    parsed, command = launch.parse([*words(given), *COMMAND])
    assert command == COMMAND
    assert parsed.workers == "4"
    value = shlex.split(given)[-1]
    assert value == "--p3" or value in str(vars(parsed).values())


@pytest.mark.parametrize(("given", "here"), [row for row in ROWS if "refused" in row[1]])
def test_a_flag_that_is_refused_names_the_way_out(
    capsys: pytest.CaptureFixture[str], given: str, here: str
) -> None:
    assert launch.main([*words(given), *COMMAND]) == 78
    told = capsys.readouterr().err
    assert re.match(rf"kvps-launch: {re.escape(shlex.split(given)[0])}\b", told), told
    key_words = {"mpirun", "PE_HOSTFILE", "ssh", "rsync", "go round", "byteps", "runs where", "free"}
    assert [key_word for key_word in key_words if key_word in told.lower() or key_word in told], told
    assert here.startswith("refused: ")
