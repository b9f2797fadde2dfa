"""The newest checkpoint is harmed and a server killed: all return to an older one, and the end is the same bits.

Each file of a checkpoint, an image or the manifest, is cut short, changed in one bit, taken away, emptied,
or is that of another checkpoint. Two of these every day; all, KVPS_FALLBACKS times each (3) and while
KVPS_BUSY other processes (4) keep the machine busy, with ``-m slow``.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.test_soak import Run
from tests.integration.processes import Processes, until

log = logging.getLogger(__name__)
TIMES = int(os.environ.get("KVPS_FALLBACKS", "3"))
BUSY = int(os.environ.get("KVPS_BUSY", "4"))
LIMIT_S = 60.0
UNIT = 20
"""Runs end at a multiple of so many steps, so that they can be compared with few unharmed ones."""
PAUSE_S = 0.03
HARMS = ("truncated", "flipped", "deleted", "emptied", "swapped")
FILES = ("image", "manifest")


def harm(how: str, path: Path, other: Path) -> None:
    """Do to a file what disks and people do; ``other`` is that of an older checkpoint."""
    octets = path.read_bytes()
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(octets[: len(octets) // 2])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "swapped":
        path.write_bytes(other.read_bytes())
    else:
        at = len(octets) // 2
        path.write_bytes(octets[:at] + bytes([octets[at] ^ 1]) + octets[at + 1 :])


def cuts(run: Run) -> list[Path]:
    """Return the folders of the checkpoints that are complete, oldest first."""
    return sorted(one.parent for one in (run.folder / "checkpoints").glob("cut-*/manifest.json"))


def fall_back(run: Run, file: str, how: str) -> int:
    """Harm the newest checkpoint while a server is dead; return at which step the run is to end."""
    until(lambda: len(cuts(run)) >= 2, "two checkpoints", LIMIT_S)
    run.kill("server 1")  # from here on no checkpoint becomes complete, and no step is done
    # Each server writes the manifest, and on a busy machine server 0 may be about to: it would mend what we harm.
    run.members["scheduler"].expect(r"server 1 \(.*\) lost", LIMIT_S)
    older, newest = cuts(run)[-2:]
    (name,) = [one.name for one in newest.iterdir() if _is(one, file)]
    harm(how, newest / name, older / name)
    # A step may be done that is not written down yet.
    limit = ((max(run.step(rank) for rank in range(2)) + 5) // UNIT + 1) * UNIT
    (run.folder / "limit").write_text(str(limit))
    run.start("server 1")
    found = run.members["scheduler"].expect(r"all servers hold cut (\d+)", LIMIT_S)
    assert int(found.group(1)) == int(older.name.removeprefix("cut-"))
    return limit


def _is(path: Path, file: str) -> bool:
    return bool(re.match(r"manifest" if file == "manifest" else r"server-1\b.*safetensors$", path.name))


class Compared:
    """Harmed runs, and unharmed ones that ended at the same step."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._ends: dict[int, str] = {}
        self._count = 0

    def run(self, file: str, how: str, *more: str) -> None:
        """Let one run fall back; it has to end as one to which nothing happened."""
        self._count += 1
        run = Run(self._processes, self._processes.folder / f"harmed-{self._count}", PAUSE_S, *more)
        limit = fall_back(run, file, how)
        end = run.end(limit)
        if limit not in self._ends:
            folder = self._processes.folder / f"unharmed-{limit}"
            self._ends[limit] = Run(self._processes, folder, 0.0).end(limit)
        assert end == self._ends[limit], f"{file} {how}, run {self._count}"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep the machine busy meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("file", "how"), [("manifest", "emptied"), pytest.param("image", "flipped", marks=pytest.mark.thorough)]
)
def test_a_harmed_checkpoint_is_passed_over(processes: Processes, file: str, how: str) -> None:
    Compared(processes).run(file, how)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_from_before_the_optimizer(processes: Processes) -> None:
    """On a busy machine the first checkpoint may come between init() and set_optimizer()."""
    Compared(processes).run("manifest", "emptied", "late")


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * TIMES * len(HARMS))
@pytest.mark.parametrize("file", FILES)
def test_any_harm_under_load(processes: Processes, file: str) -> None:
    compared = Compared(processes)
    with busy(BUSY):
        for turn in range(TIMES):
            for how in HARMS:
                compared.run(file, how)
                log.info("%s %s, %d: the same bits", file, how, turn)
