"""``kvps demo``: trains on this machine, kills a worker and a server, and shows that nothing is lost.

Trains a small network with 2 workers and 2 servers, each of which has a copy in the other's process. On the way it
kills a worker and a server with SIGKILL, and says how long no round closed. Both servers count what they
apply: at the end each step of each worker must be there, and once. It downloads nothing, and takes about
fifteen seconds.

examples:
  kvps demo
  kvps demo --steps 5000 --http 127.0.0.1:9464     time to look at the dashboard, which is at this port

exit codes:
  0   the worker and the server were killed, and nothing was lost
  1   that did not hold, or the job failed
  78  a bad flag

environment, where the flag is not given:
  KVPS_HTTP, KVPS_HTTP_TOKEN, KVPS_LOG_LEVEL, KVPS_LOG_FORMAT, NO_COLOR
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

from kvps import config
from kvps.cli import flags
from kvps.errors import ConfigError
from kvps.observe.place import TOKEN, VARIABLE

if TYPE_CHECKING:
    from rich.console import Console

NAME = "kvps demo"
STEPS, STEPS_MIN = 200, 60
LATER = 3
"""Rounds after a kill that are measured: the push of the killed process may have been in the first of them."""
STATUS_MAX_S = 5.0
HTTP = "127.0.0.1:0"
INSECURE = "let other machines read the dashboard; KVPS_INSECURE=1"
TRAINING = Path(__file__).with_name("training.py")
NEXT = f"""Next:
  kvps-launch -n 2 -s 2 -- python train.py    run a script of yours on a cluster
  kvps top, kvps doctor, kvps-launch --help   watch a job, find faults, start one
The script of this demo: {TRAINING}"""


@dataclass(slots=True)
class Kill:
    """A kill, and how long no round closed."""

    member: str
    step: int
    """The last step before it."""
    successor: str
    pid: int = 0
    at: float = 0.0
    """When it was, on the clock of ``time.monotonic``."""
    still_s: float = 0.0
    """The longest time between it, or a round that closed after it, and the next round that closed."""

    def __str__(self) -> str:
        after = f"the next round closed after {self.still_s:.2f} s"
        return f"killed {self.member} (process {self.pid}): {self.successor}, and {after}"


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = flags.Parser(NAME, __doc__, insecure=INSECURE)
    parser.add_flags(
        {
            "--steps N": f"steps of the training, {STEPS_MIN} or more ({STEPS})",
            "--http HOST:PORT": f"serve the dashboard there; port 0: any free port; {VARIABLE} ({HTTP})",
        }
    )
    parsed = parser.parse_args(argv)
    level = flags.start_log(NAME, parsed)
    steps = STEPS if parsed.steps is None else config.as_whole("--steps", parsed.steps)
    if steps < STEPS_MIN:
        raise ConfigError(f"--steps {steps}: use {STEPS_MIN} or more, so that there is time for two kills")
    http = parsed.http or config.text(VARIABLE) or HTTP
    flags.http_of(parsed)
    from rich.console import Console

    console = Console(highlight=False)
    console.print("2 workers and 2 servers train here; each server has a copy in the other's process")
    words = f"-n 2 -s 2 --replicas 1 --max-restarts 1 --http {http} --log-format text".split()
    words += ["--log-level", "error" if level == "warning" else level]  # the kills are no news
    insecure = ["--insecure"] if flags.is_insecure(parsed) else []
    script = [sys.executable, "-P", "-m", "kvps.tools.demo.training", str(steps)]
    argv = [sys.executable, "-P", "-m", "kvps.cli.launch", *words, *insecure, "--", *script]
    began = time.monotonic()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        try:
            assert job.stdout is not None
            show = Show(console, steps)
            show.follow(job.stdout)
        finally:
            job.terminate()  # of no effect if it has ended
            code = job.wait()
    return show.verdict(code, time.monotonic() - began)


class Show:
    """The screen of a demo, and its two kills."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._url = ""
        self._due = [
            Kill("worker 1", steps // 3, "its replacement went on at the step of worker 0"),
            Kill("server 0", steps * 2 // 3, "its copy took its place"),
        ]
        self._closed_at = 0.0
        """When the newest round closed."""
        self._results: list[str] = []

    def follow(self, lines: Iterable[str]) -> None:
        """Show the job, from the lines that it prints, to its end."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps")
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as bar:
            task = bar.add_task("", total=self._steps)
            for line in lines:
                match line.removeprefix("[worker 0] ").split():
                    case ["dashboard:", url]:
                        self._url = url
                        self._console.print(f"[bold]dashboard: {url}[/]  (while the demo runs)")
                    case ["step", step, at]:
                        bar.update(task, completed=int(step))
                        self._on_step(int(step), float(at))
                    case ["end", *results]:
                        self._results = results
                    case _:
                        self._console.print(line, end="", markup=False)

    def _on_step(self, step: int, at: float) -> None:
        """Kill the next process when it is due; measure how long no round closed."""
        before, self._closed_at = self._closed_at, at
        kill = self._due[0] if self._due else None
        if kill is None or step < kill.step:
            return
        if not kill.at:
            job = self._status()
            copies = [copy["state"] for copy in job.get("copies", ())]
            if copies and set(copies) == {"level"}:  # else it is killed a step later
                members = {f"{member['role']} {member['rank']}": member["pid"] for member in job["members"]}
                kill.pid, kill.step, kill.at = members[kill.member], step, time.monotonic()
                os.kill(kill.pid, signal.SIGKILL)
            return
        kill.still_s = max(kill.still_s, at - max(before, kill.at))
        if step >= kill.step + LATER:
            self._due.pop(0)
            self._console.print(f"[yellow]{kill}[/]")

    def _status(self) -> Any:
        token = config.text(TOKEN)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        with urlopen(Request(f"{self._url}statusz", headers=headers), timeout=STATUS_MAX_S) as answer:
            return json.load(answer)

    def verdict(self, code: int, took_s: float) -> int:
        """Print whether anything was lost, and what to do next; return the exit code.

        Args:
            code: the exit code of the job.
            took_s: seconds from its start to its end.
        """
        right, is_exact = self._results or ("0", "0")
        wrong = [f"{kill.member} was not killed: no moment with whole copies came" for kill in self._due]
        if code:
            wrong = [f"the job ended with exit code {code}; kvps demo --log-level info says more"]
        elif is_exact != "1":
            wrong.append("the servers have not counted each step of each worker once")
        for text in wrong:
            self._console.print(f"[bold red]this did not hold:[/] {text}")
        if wrong:
            return 1
        self._console.print(
            f"[bold green]no update was lost[/], and none counted twice: both servers have counted the steps 1 to "
            f"{self._steps} of each worker, each once"
        )
        self._console.print(
            f"{float(right):.0%} of new points right, after {took_s:.1f} s\n\n{NEXT}",
            markup=False,
            soft_wrap=True,
        )
        return 0
