"""The table of the annexes: the modules of compat, platforms and tools that the rest of kvps uses.

The rest imports none of them, so that no change of an annex reaches the parameter server. It asks
:func:`load` for the module at set-up, and calls the functions that the table names.
"""

from __future__ import annotations

import importlib
from typing import Any

MODULES = {
    "bench": "kvps.tools.bench.command",  # main
    "demo": "kvps.tools.demo.command",  # main
    "doctor": "kvps.tools.doctor.command",  # main
    "top": "kvps.tools.top",  # main
    "trace": "kvps.tools.trace.command",  # main
    "replay": "kvps.tools.replay.command",  # main
    # member_lens, Timeline, recorder, recorded, dump_at_signal, dumping_at_signal
    "lenses": "kvps.tools.lenses",
    "recorded-values": "kvps.tools.replay.values",  # dumps
    "dashboard": "kvps.tools.dashboard.model",  # Dashboard
    "dry-run": "kvps.platforms.dry_run",  # add_flags, text_if_any
}
"""Name of a feature -> the module that provides it. The comment names the functions that the rest
of kvps calls."""


def load(feature: str) -> Any:
    """Return the module of a feature.

    Args:
        feature: a name in :data:`MODULES`.

    Example:
        >>> load("dry-run").__name__
        'kvps.platforms.dry_run'
    """
    return importlib.import_module(MODULES[feature])
