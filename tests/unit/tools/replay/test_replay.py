"""A replay knows all that a process asks of its core."""

from __future__ import annotations

import ast
from pathlib import Path

import kvps
from kvps.tools.replay.replay import CALLS

ROOT = Path(kvps.__file__).parent
UNRECORDED = {"on_signal"}
"""Methods of the supervisor's core, of which no record is kept."""


def asked() -> dict[str, str]:
    """Return each method that the package asks a core for by name -> the file."""
    found = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="CoreRequest"), args=[ast.Constant(str(name)), *_]):
                    found[name] = str(path.relative_to(ROOT))
    return found


def test_every_request_to_a_core_can_be_replayed() -> None:
    found = asked()
    assert {"on_call", "on_stop", "leave"} <= set(found)
    assert {name: file for name, file in found.items() if name not in CALLS | UNRECORDED} == {}
