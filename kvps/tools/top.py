"""``kvps top``: a live view of a job in a terminal.

Shows a job live: its members and their states, the age of open rounds and the ranks that they wait for,
rounds and bytes per second, and how late each worker is. It takes no seat in the job.

examples:
  kvps top --scheduler tcp://10.0.0.1:9091
  ssh -t head kvps top
  kvps top --once > snapshot.txt

q or Ctrl-C ends it. Where the output is no terminal, and with --once, it looks twice, prints one snapshot and ends.
'late' is by how many seconds the pushes of a worker come after the first push of their round: the slow worker has
the largest number. Members that fail and workers that are late come first if not all fit on the screen.

{exit_codes}
environment, where the flag is not given:
  KVPS_SCHEDULER, KVPS_KEYS, KVPS_TIMEOUT (seconds to wait for an answer), KVPS_LOG_LEVEL, KVPS_LOG_FORMAT,
  NO_COLOR
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from kvps import config
from kvps.cli import flags
from kvps.errors import ConfigError, KvpsError
from kvps.inquiry import Inquirer
from kvps.observe.document import document_of
from kvps.phrases import bytes_in_words
from kvps.protocol.membership import Look, Seen
from kvps.tools.dashboard.model import JobModel

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

Document = Mapping[str, Any]
NAME = "kvps top"
TIMEOUT_S, EVERY_S, EVERY_MIN_S = 5.0, 1.0, 0.2
WIDTH = 160
"""Columns of a snapshot that goes into a file."""
KEY_SHOWN = 40
LATE_S = 0.1
"""Lateness that is shown in yellow, in seconds; ten times as much in red."""
OWN_LINES = 9
"""Lines of the screen that show no member: the title, the heads, the number of omitted members."""
MEMBERS_MIN = 3
DRAW_EVERY_S = 1.0
"""The interval at which the screen is drawn at least, as its times go on."""
QUIT = ("q", "Q", "\x03", "\x04")


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = flags.Parser(NAME, __doc__)
    parser.add_flags(
        {
            **flags.asking(TIMEOUT_S),
            "--once": "print one snapshot, and end",
            "--every SECONDS": f"time between two looks, {EVERY_MIN_S} or more ({EVERY_S:g})",
        }
    )
    parsed = parser.parse_args(argv)
    flags.start_log(NAME, parsed)
    every_s = EVERY_S if parsed.every is None else config.as_seconds("--every", parsed.every)
    if every_s < EVERY_MIN_S:
        raise ConfigError(f"--every={parsed.every}: use {EVERY_MIN_S} seconds or more")
    limit_s = flags.timeout_of(parsed, TIMEOUT_S)
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    is_live = console.is_terminal and not parsed.once
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=WIDTH)
    with Inquirer(flags.scheduler_of(parsed), flags.keys_of(parsed, "look")) as inquirer:
        watcher = Watcher(inquirer, every_s, limit_s)
        if is_live:
            return _live(console, watcher)
        watcher.look()
        time.sleep(every_s)
        console.print(rendered(watcher.look(), "", console.width, None))
    return 0


class Watcher:
    """Looks at a job again and again.

    Args:
        inquirer: asks the scheduler.
        every_s: seconds between two looks.
        limit_s: seconds that an answer may take.
    """

    def __init__(self, inquirer: Inquirer, every_s: float, limit_s: float) -> None:
        self.job: Document | None = None
        """The newest document of the job."""
        self.error: KvpsError | None = None
        """Why the last look failed; None if it did not."""
        self.seen_at = time.monotonic()
        """When it came."""
        self._inquirer = inquirer
        self._every_s, self._limit_s = every_s, limit_s
        self._model = JobModel()
        self._ended = threading.Event()
        self.woken, self.waker = os.pipe()
        """The ends of a pipe: there is something to read when the screen is to be drawn anew."""
        os.set_blocking(self.waker, False)

    def look(self) -> Document:
        """Look once; return the document of the job.

        Raises:
            KvpsError: as :meth:`~kvps.inquiry.Inquirer.ask`.
        """
        answer = self._inquirer.ask(Look(), Seen, self._limit_s)
        assert isinstance(answer.message, Seen)
        self.seen_at = time.monotonic()
        look = document_of(answer.envelope.job, answer.message)
        self.job = self._model.take(look, self.seen_at)
        return self.job

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look in a thread, as long as the block runs."""
        thread = threading.Thread(target=self._run, name="kvps-top", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._inquirer.stop()
            thread.join(self._limit_s)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.look()
                self.error = None
            except KvpsError as error:
                self.error = error
            with suppress(OSError):
                os.write(self.waker, b"\0")
            self._ended.wait(self._every_s)

    @property
    def complaint(self) -> str:
        """The text about a look that failed; empty if none did."""
        if self.error is None:
            return ""
        if self.job is None:
            return str(self.error)
        return f"no news for {time.monotonic() - self.seen_at:.0f} s: {self.error}"


def _live(console: Console, watcher: Watcher) -> int:
    """Show the job until a key or a signal ends it."""
    from rich.live import Live
    from rich.text import Text

    watcher.look()  # an error of the first look is printed on a screen that stays
    with (
        suppress(KeyboardInterrupt),
        _keys() as keyboard,
        watcher.looking(),
        Live(Text(""), console=console, screen=True, auto_refresh=False) as live,
        _resizing(watcher.waker),
    ):
        while True:
            live.update(_shown(console, watcher), refresh=True)
            ready, _, _ = select.select([watcher.woken, *keyboard], [], [], DRAW_EVERY_S)
            if watcher.woken in ready:
                os.read(watcher.woken, 1 << 12)
            if any(stream in ready and _wants_out(os.read(stream, 64)) for stream in keyboard):
                break
    return 0


def _wants_out(typed: bytes) -> bool:
    """Return whether the typed keys end the command; the end of the input does, too."""
    return not typed or any(key in typed.decode(errors="replace") for key in QUIT)


@contextmanager
def _keys() -> Iterator[list[int]]:
    """Yield the descriptor from which keys are read one by one, without an echo; none if the input
    is no terminal."""
    if not sys.stdin.isatty():
        yield []
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield [fd]
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def _resizing(waker: int) -> Iterator[None]:
    """Let a new size of the terminal end the wait, so that the screen is drawn anew at once."""
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    old = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old)
        signal.signal(signal.SIGWINCH, before)


def _shown(console: Console, watcher: Watcher) -> RenderableType:
    from rich.text import Text

    if watcher.job is None:
        return Text(watcher.complaint)
    return rendered(watcher.job, watcher.complaint, *console.size)


# --- drawing -----------------------------------------------------------------------------------------


def rendered(job: Document, complaint: str, width: int, height: int | None) -> RenderableType:
    """Return a job as rich draws it.

    Args:
        job: its document.
        complaint: the error of the last look; empty for none.
        width: columns of the screen.
        height: lines of the screen; None for as many as there are.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_title(job)]
    if complaint:
        parts.append(Text(complaint, style="bold red"))
    parts += [
        Text(f"{problem['text']}: {problem['advice']}", style="bold red") for problem in job["problems"]
    ]
    parts.append(Text(""))
    room = None if height is None else max(MEMBERS_MIN, height - OWN_LINES - len(parts))
    rounds = job["rounds"] if room is None else job["rounds"][: max(1, room // 4)]
    members = job["members"]
    if room is not None:
        room = max(MEMBERS_MIN, room - len(rounds))
        if len(members) > room:
            urgent = sorted(members, key=_urgency)[:room]
            members = [member for member in members if member in urgent]
    parts.append(_members(members, width))
    if left := len(job["members"]) - len(members):
        parts.append(Text(f"and {left} more members", style="dim"))
    parts.append(Text(""))
    if rounds:
        parts.append(_rounds(rounds))
    elif not job["problems"]:
        parts.append(Text("no round has been open for long"))
    return Group(*parts)


def _urgency(member: Document) -> tuple[bool, float, int]:
    """Return the sort key: seats that no process holds first, then the latest, then by rank."""
    return member["state"] in ("held", "left"), -member["late_s"], member["rank"]


def _title(job: Document) -> RenderableType:
    from rich.text import Text

    style = {"running": "bold green", "ending": "bold red"}.get(job["phase"], "bold yellow")
    totals = job["totals"]
    facts = [
        f"{totals['rounds_per_s']:.1f} rounds/s",
        f"servers in {_speed(totals['in_bytes_per_s'])}, out {_speed(totals['out_bytes_per_s'])}",
    ]
    if job["checkpoint"]:
        facts.append(f"checkpoint {job['checkpoint']}")
    if job["epoch"]:
        facts.append(f"rolled back {job['epoch']} times")
    if job["software"]:
        facts.append(f"kvps {job['software']}")
    return Text.assemble(
        (f"job {job['job']} ", "bold"), (job["phase"], style), f": {job['reason']}\n{'   '.join(facts)}"
    )


COLUMNS: dict[str, int] = {
    **{"member": 9, "state": 5, "late": 7, "rounds/s": 8, "status": 24, "in": 10, "out": 10},
    **{"rounds": 9, "memory": 16, "heard": 7, "where": 18},
}
"""The columns of members and their usual widths, the most important first: a narrow screen omits
the last columns."""
IN_ORDER = (
    *("member", "state", "where", "heard", "rounds", "rounds/s", "in", "out", "late", "memory"),
    "status",
)
YIELDING = frozenset({"status", "where", "store", "key", "waits for"})
"""Columns that a narrow screen cuts; the others keep their width."""
NUMBERS = frozenset({"heard", "rounds", "rounds/s", "in", "out", "late", "memory", "round"})


def columns_for(width: int) -> list[str]:
    """Return the columns of members that a screen of this ``width`` has room for, from left to right."""
    chosen, left = set(), width
    for name, usual in COLUMNS.items():
        left -= usual + 3
        if left >= 0 or name in ("member", "state", "late"):
            chosen.add(name)
    return [name for name in IN_ORDER if name in chosen]


def _table(heads: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
    for head in heads:
        table.add_column(
            head,
            justify="right" if head in NUMBERS else "left",
            no_wrap=head not in YIELDING,  # rich narrows those that may wrap first; see _cut()
            overflow="ellipsis",
            min_width=COLUMNS["member"] if head == "member" else None,
        )
    return table


def _cut(text: str) -> RenderableType:
    """Return the text of a cell in a yielding column: one line, which ends with an ellipsis if it
    is too long."""
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ellipsis")


def _members(members: Sequence[Document], width: int) -> RenderableType:
    heads = columns_for(width)
    table = _table(heads)
    for member in members:
        cells = _cells(member)
        style = {"held": "", "left": "dim", "empty": "dim"}.get(member["state"], "red")
        table.add_row(*[cells.get(head, "") for head in heads], style=style)
    return table


def _cells(member: Document) -> dict[str, RenderableType]:
    """Return the cells of a member, by column."""
    cells: dict[str, RenderableType] = {
        "member": f"{member['role']} {member['rank']}",
        "state": member["state"],
        "status": _cut(member["presence"]),
    }
    if member["state"] != "held":
        return cells
    cells["where"], cells["heard"] = (_cut(f"{member['host']}:{member['pid']}"), f"{member['heard_s']:.1f} s")
    cells["in"], cells["out"] = _speed(member["in_bytes_per_s"]), _speed(member["out_bytes_per_s"])
    if member["role"] == "worker":
        cells["rounds"], cells["rounds/s"] = (f"{member['rounds']:,}", f"{member['rounds_per_s']:.1f}")
        cells["late"] = _late(member["late_s"])
    else:
        cells["memory"] = _memory(member["memory_bytes"], member["limit_bytes"])
    return cells


def _late(seconds: float) -> RenderableType:
    from rich.text import Text

    style = "red" if seconds >= 10 * LATE_S else "yellow" if seconds >= LATE_S else ""
    return Text(f"{seconds:.2f} s", style=style)


def _memory(used: int, limit: int) -> str:
    share = f" ({100 * used / limit:.0f} %)" if limit else ""
    return f"{bytes_in_words(used)}{share}"


def _speed(bytes_s: float) -> str:
    return f"{bytes_in_words(int(bytes_s))}/s"


def _rounds(rounds: Sequence[Document]) -> RenderableType:
    table = _table(("store", "key", "round", "open for", "waits for"))
    for round_ in rounds:
        store, key, who = map(_cut, (round_["store"], round_["key"][:KEY_SHOWN], round_["waits_for"]))
        table.add_row(store, key, str(round_["number"]), f"{round_['age_s']:.0f} s", who)
    return table


if __name__ == "__main__":
    sys.exit(main())
