"""Progress of long reads and writes of checkpoints: a bar in a terminal, nothing where the output is none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

RESTORE_AT_LEAST_BYTES = 8 << 20
"""A smaller restore ends before a bar could be read."""
Step = Callable[[int], None]
"""Takes the bytes of each step."""


@contextmanager
def shown(what: str, total: int, console: Console) -> Iterator[Step]:
    """Show how far something is, as long as the block runs.

    Args:
        what: the name of the bar.
        total: bytes in all.
        console: draws, if it is a terminal.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        *(BarColumn(), DownloadColumn(), TransferSpeedColumn()),
    )
    disable = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)


@contextmanager
def restoring(cut: int, total: int) -> Iterator[Step]:
    """Show on stderr how far the restore of a checkpoint is, if that is a terminal and the
    checkpoint is large."""
    if total < RESTORE_AT_LEAST_BYTES or not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console

    with shown(f"restoring checkpoint {cut}", total, Console(stderr=True)) as step:
        yield step
