"""Jobs that are broken on purpose: how they are started, and what they wrote down.

Every job of these tests trains with ``onehot.py``, whose weights count each push.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.integration.processes import Process, Processes

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "onehot.py"
WORKERS, SERVERS = 2, 2
RESTARTS = 100


@dataclass(frozen=True)
class Reached:
    """A failpoint that was reached: its place in the list, when, and by which process."""

    place: int
    at: float
    pid: int


class Job:
    """One job in one folder, and its failpoints."""

    def __init__(self, processes: Processes, points: Sequence[str] = ()) -> None:
        self.processes = processes
        self.points = points
        self.folder = processes.folder
        self._log = self.folder / "failpoints"
        path = f"{HERE / 'site'}{os.pathsep}{processes.env['PYTHONPATH']}"
        self.env = {"PYTHONPATH": path}
        if points:
            self.env["KVPS_FAILPOINTS"] = ", ".join(points)
            self.env["KVPS_FAILPOINTS_LOG"] = str(self._log)

    def command(self, mode: str, steps: int, *flags: object) -> list[object]:
        """Return the command of a worker."""
        return [sys.executable, SCRIPT, mode, steps, self.folder, *flags]

    def launch(self, mode: str, steps: int, *flags: object, **env: str) -> Process:
        """Start all of it; a worker that fails is started again."""
        sizes = ("-n", WORKERS, "-s", SERVERS, "--max-restarts", RESTARTS)
        command = self.command(mode, steps, *flags)
        return self.processes.kvps("launch", *sizes, "--", *command, **self.env, **env)

    def reached(self) -> list[Reached]:
        """Return the failpoints that were reached, in their order."""
        if not self._log.exists():
            return []
        rows = [line.split() for line in self._log.read_text().splitlines()]
        return [Reached(int(place), float(at), int(pid)) for place, at, pid in rows]

    def rounds(self, rank: int) -> list[float]:
        """Return when ``rank`` has done its steps."""
        path = self.folder / f"rounds-{rank}"
        text = path.read_text() if path.exists() else ""
        return [float(line.split()[1]) for line in text.splitlines() if " " in line]

    def healed(self) -> dict[str, float]:
        """Return for each point how long it took until its rank had done another step.

        Of points that were followed by another one before that, nothing is said.
        """
        took = {}
        reached = self.reached()
        for item, after in zip(reached, [*reached[1:], None], strict=True):
            point = self.points[item.place]
            rank = re.match(r"worker-(\d+)", point)
            later = [at for at in self.rounds(int(rank[1])) if at > item.at] if rank else []
            if later and (after is None or later[0] < after.at):
                took[point] = later[0] - item.at
        return took
