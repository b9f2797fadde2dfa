"""The newest checkpoint is harmed and a server killed: all return to an older one, and the end is the same bits.

The manifest is emptied, or a bit of an image is changed; ``tests/unit/checkpoint`` has every other harm.
"""

import re
from pathlib import Path

import pytest

from tests.faults.test_soak import Run
from tests.integration.processes import Processes, until

LIMIT_S = 60.0
UNIT = 20
"""Runs end at a multiple of so many steps, so that they can be compared with few unharmed ones."""
PAUSE_S = 0.03


def harm(how: str, path: Path) -> None:
    """Do to a file what disks and people do."""
    octets = path.read_bytes()
    if how == "emptied":
        path.write_bytes(b"")
    else:
        at = len(octets) // 2
        path.write_bytes(octets[:at] + bytes([octets[at] ^ 1]) + octets[at + 1 :])


def cuts(run: Run) -> list[Path]:
    """Return the folders of the checkpoints that are complete, oldest first."""
    return sorted(path.parent for path in (run.folder / "checkpoints").glob("cut-*/manifest.json"))


def fall_back(run: Run, file: str, how: str) -> int:
    """Harm the newest checkpoint while a server is dead; return at which step the run is to end."""
    until(lambda: len(cuts(run)) >= 2, "two checkpoints", LIMIT_S)
    run.kill("server 1")  # from here on no checkpoint becomes complete, and no step is done
    # Each server writes the manifest, and on a busy machine server 0 may be about to: it would mend what we harm.
    run.members["scheduler"].expect(r"server 1 \(.*\) lost", LIMIT_S)
    older, newest = cuts(run)[-2:]
    (name,) = [path.name for path in newest.iterdir() if _is(path, file)]
    harm(how, newest / name)
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
