"""A replay knows all that a process asks of its core."""

import ast

from kvps.tools.replay.replay import CALLS
from tests.support.sources import trees

CORES = ("Worker", "Server", "Scheduler", "Supervisor")
UNRECORDED = {"on_signal", "restore"}
"""Methods of the supervisor's core, of which no record is kept; and the way to begin a scheduler again."""


def asked() -> dict[str, str]:
    """Return each method of a core that the package puts into an inbox -> the file."""
    found = {}
    for file, tree in trees([f"{core}." for core in CORES]):
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=core), attr=name) if core in CORES:
                    found[name] = file
    return found


def test_every_request_to_a_core_can_be_replayed() -> None:
    found = asked()
    assert {"on_call", "on_stop", "leave"} <= set(found)
    assert {name: file for name, file in found.items() if name not in CALLS | UNRECORDED} == {}
