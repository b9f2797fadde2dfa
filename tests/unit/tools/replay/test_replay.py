"""A replay knows all that a process asks of its core."""

import ast
from pathlib import Path

import kvps
from kvps.tools.replay.replay import CALLS

ROOT = Path(kvps.__file__).parent
UNRECORDED = {"on_signal", "restore"}
"""Methods of the supervisor's core, of which no record is kept; and the way to begin a scheduler again."""


def asked() -> dict[str, str]:
    """Return each method of a core that the package puts into an inbox -> the file."""
    found = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(
                    value=ast.Name(id="Worker" | "Server" | "Scheduler" | "Supervisor"), attr=name
                ):
                    found[name] = str(path.relative_to(ROOT))
    return found


def test_every_request_to_a_core_can_be_replayed() -> None:
    found = asked()
    assert {"on_call", "on_stop", "leave"} <= set(found)
    assert {name: file for name, file in found.items() if name not in CALLS | UNRECORDED} == {}
