"""The named limits: an operator sets each of them, by flag or variable."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

import kvps
from kvps import config
from kvps.cli import scheduler, server
from kvps.core.limits import ALONE, TABLE, Limits, limits_of_role, remedy
from kvps.errors import ConfigError
from kvps.observe.metrics import BY_NAME

DOCS = Path(kvps.__file__).parents[1] / "docs/security.md"


def test_a_flag_counts_before_the_variable_and_that_before_the_default() -> None:
    env = {"KVPS_LIMITS": "stores=9, keys=50,looks=3"}
    found = config.limits(["stores=8", "unread=1M"], "server", env)
    assert found == Limits(stores=8, keys=50, looks=3, unread=1 << 20)
    assert config.limits(env={}) == Limits()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("store=8", r"--limit='store=8' is not a limit; .*stores.*"),
        ("looks=8", "--limit='looks=8' is not a limit"),
        ("stores", "--limit stores='' is not a number"),
        ("stores=many", "--limit stores='many' is not a number"),
        ("stores=0", "--limit stores=0: use 1 or more"),
        ("stores=1.5", "--limit stores=1.5 is not a whole number"),
        ("unread=2X", "--limit unread='2X' is not a number of bytes"),
        ("", "--limit='' is not a limit"),
    ],
)
def test_invalid_limit_is_refused(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config.limits([given], "server", {})


def test_the_variable_has_limits_of_all_roles() -> None:
    assert config.limits((), "server", {"KVPS_LIMITS": "looks=3"}).looks == 3
    with pytest.raises(ConfigError, match="KVPS_LIMITS='look=3' is not a limit"):
        config.limits((), "server", {"KVPS_LIMITS": "look=3"})


@pytest.mark.parametrize(("role", "command"), [("scheduler", scheduler), ("server", server)])
def test_help_names_the_limits_of_a_command(
    role: str, command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])  # type: ignore[attr-defined]
    told = " ".join(capsys.readouterr().out.split())
    for name, item in TABLE.items():
        assert (f"{name} ({item.default})" in told) == (role in item.roles), name


@pytest.mark.parametrize("command", [scheduler, server])
def test_a_command_refuses_what_is_no_limit(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--workers", "1", "--servers", "1"] if command is scheduler else []
    assert command.main([*sizes, "--limit", "nonsense=1"]) == 78  # type: ignore[attr-defined]
    assert "--limit='nonsense=1' is not a limit" in capsys.readouterr().err


def test_the_page_has_each_limit_with_its_default() -> None:
    page = DOCS.read_text()
    for name, item in TABLE.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
        words = [word.strip() for word in row.strip("|").split("|")]
        shown = f"{item.default >> 20} MiB" if item.is_bytes else f"{item.default:,}"
        assert words[2] == shown, row
        assert words[3] == ", ".join(item.roles), row
        assert re.findall(r"`(kvps_\w+)`", words[4])[0] in BY_NAME, row


def test_all_are_in_the_table() -> None:
    assert [field.name for field in fields(Limits)] == list(TABLE)
    assert {name for role in ("scheduler", "server") for name in limits_of_role(role)} == set(TABLE)
    assert all(f"kvps-{item.roles[0]} --limit {name}=" in remedy(name) for name, item in TABLE.items())


def test_a_cluster_without_others_is_not_bounded() -> None:
    assert ALONE.checkpoints > 10**9 < ALONE.tagged_checkpoints
