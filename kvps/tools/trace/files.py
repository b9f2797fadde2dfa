"""Files of timelines: written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from kvps.checkpoint import atomic_file
from kvps.errors import ConfigError
from kvps.tools.trace import chrome
from kvps.tools.trace.merged import MergedTrace


def write(path: Path, trace: MergedTrace) -> None:
    """Write the file of a trace, whole or not at all.

    Raises:
        ConfigError: if it cannot be written.
    """
    text = chrome.dump(trace).encode()
    try:
        atomic_file.put(path, lambda sink: sink.write(text))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
