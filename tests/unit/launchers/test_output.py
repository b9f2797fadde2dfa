"""How the output of several processes becomes one, and how a reaper is used."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pytest

from kvps.launchers.output import (
    HEADER,
    KEPT_MAX,
    LINE_MAX,
    LINES_MAX,
    MESSAGE_MAX,
    PAUSE_S,
    LineBuffer,
    OutputMux,
    TracebackFolder,
    Who,
)
from kvps.launchers.reaper import kill


class Terminal(BytesIO):
    def isatty(self) -> bool:
        return True


class TestLines:
    def test_a_line_is_whole_or_not_there(self) -> None:
        lines = LineBuffer()
        assert lines.feed(b"one\ntw") == [b"one"]
        assert lines.unfinished == b"tw"
        assert lines.feed(b"o\n\nthree") == [b"two", b""]
        assert lines.end() == [b"three"]
        assert lines.end() == []

    def test_windows_ends(self) -> None:
        assert LineBuffer().feed(b"one\r\ntwo\r\n") == [b"one", b"two"]

    @pytest.mark.parametrize("parts", [[b"\r10 %", b"\r20", b" %", b"\n"], [b"10 %\r", b"20 %\r", b"\n"]])
    def test_overwritten_text_is_not_kept(self, parts: list[bytes]) -> None:
        lines = LineBuffer()
        seen = [(lines.feed(part), lines.unfinished) for part in parts]
        assert seen[0] == ([], b"10 %")
        assert seen[-1] == ([b"20 %"], b"")

    def test_a_bar_that_never_ends_takes_no_memory(self) -> None:
        lines = LineBuffer()
        for step in range(1000):
            assert lines.feed(b"\r%d" % step * 100) == []
            assert len(lines._rest) < 1000

    def test_a_line_that_never_ends_is_ended(self) -> None:
        lines = LineBuffer()
        assert lines.feed(b"x" * (LINE_MAX + 1)) == [b"x" * LINE_MAX]
        assert lines.end() == [b"x"]


class TestScreen:
    def test_lines_have_a_name(self) -> None:
        out, error = BytesIO(), BytesIO()
        output = OutputMux(out, error, colour=True)
        output.write(0, output.prefix("worker 0", 0, 0), [b"one", b"two"], b"thr")
        output.write(1, output.prefix("server 1", 3, 1), [b"bad"])
        output.close()
        assert out.getvalue() == b"[worker 0] one\n[worker 0] two\n"
        assert error.getvalue() == b"[server 1] bad\n"

    def test_colour_is_for_terminals(self) -> None:
        for colour, out, has_colour in (
            (True, Terminal(), True),
            (False, Terminal(), False),
            (True, BytesIO(), False),
        ):
            prefix = OutputMux(out, BytesIO(), colour).prefix("worker 0", 0, 0)
            assert (b"\x1b[" in prefix) == has_colour
            assert b"[worker 0]" in prefix

    def test_a_bar_stands_below_the_lines(self) -> None:
        out = Terminal()
        output = OutputMux(out, BytesIO(), colour=False)
        clear = b"\r\x1b[2K"
        for lines, unfinished, shown in (
            ([], b"10 %", b"[a] 10 %"),
            ([], b"20 %", clear + b"[a] 20 %"),
            ([], b"20 %", b""),
        ):
            before = len(out.getvalue())
            output.write(0, b"[a] ", lines, unfinished)
            assert out.getvalue()[before:] == shown
        before = len(out.getvalue())
        output.write(0, b"[b] ", [b"line"])
        assert out.getvalue()[before:] == clear + b"[b] line\n[a] 20 %"
        before = len(out.getvalue())
        output.write(0, b"[a] ", [b"30 %"])
        output.close()
        assert out.getvalue()[before:] == clear + b"[a] 30 %\n"

    def test_a_bar_is_no_wider_than_the_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "10")
        out = Terminal()
        output = OutputMux(out, BytesIO(), colour=False)
        output.write(0, b"[a] ", [], b"x" * 20)
        assert out.getvalue() == b"[a] xxxxx"

    def test_a_reader_that_goes_away_is_told_once(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        sink: BinaryIO
        with os.fdopen(writer, "wb") as sink:
            output = OutputMux(sink, BytesIO(), colour=False)
            with pytest.raises(BrokenPipeError):
                output.write(0, b"", [b"line"])
            output.write(0, b"", [b"line"])


@pytest.fixture
def sleeper() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a process in a group of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


OWNER = """
import os, subprocess, sys
from kvps.launchers.reaper import Reaper
reaper = Reaper()
for _ in range(2):
    child = reaper.start(["sh", "-c", "sleep 60 & echo >&2; wait"], stderr=subprocess.PIPE)
    child.stderr.readline()  # the kernel ends the shell, and the reaper what the shell has started
print(child.pid, flush=True)
reaper.forget(child.pid)
os.kill(os.getpid(), 9)
"""


KILLED_TOGETHER = """
import os, subprocess, sys
from kvps.launchers.reaper import Reaper
reaper = Reaper()
reaper.start(["sleep", "60"])
os.kill(int(open(f"/proc/self/task/{os.getpid()}/children").read().split()[0]), 9)
os.kill(os.getpid(), 9)
"""
FOLDER = """
import os, sys
from kvps.launchers.reaper import Reaper
reaper = Reaper()
reaper.hold_folder(sys.argv[1])
if len(sys.argv) > 2: reaper.close()
print(os.path.exists(sys.argv[1]), flush=True)
os.kill(os.getpid(), 9)
"""


class TestLeash:
    def test_the_kernel_ends_what_the_reaper_holds_if_the_reaper_is_killed_too(self) -> None:
        code = [sys.executable, "-c", KILLED_TOGETHER]
        with subprocess.Popen(code, stdout=subprocess.PIPE) as owner:
            assert owner.communicate(timeout=10)[0] == b"", "until nobody has the pipe"
            assert owner.wait() == -signal.SIGKILL

    @pytest.mark.parametrize("more", [[], ["close"]])
    def test_folders_are_removed_at_the_end(self, tmp_path: Path, more: list[str]) -> None:
        folder = tmp_path / "a folder"
        folder.mkdir()
        (folder / "file").touch()
        code = [sys.executable, "-c", FOLDER, str(folder), *more]
        with subprocess.Popen(code, stdout=subprocess.PIPE) as owner:
            assert owner.communicate(timeout=10)[0] == (b"False\n" if more else b"True\n")
        deadline = time.monotonic() + 10
        while folder.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_an_owner_that_is_killed_takes_what_it_holds_along(self, tmp_path: Path) -> None:
        script = tmp_path / "owner.py"
        script.write_text(OWNER)
        # communicate() returns when the last process that has the pipe is gone
        owner = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE)
        assert owner.stdout is not None
        forgotten = int(owner.stdout.readline())
        assert owner.wait() == -signal.SIGKILL
        os.killpg(forgotten, signal.SIGKILL)
        assert owner.communicate(timeout=10)[0] == b""

    def test_a_signal_to_nobody(self, sleeper: Callable[[], subprocess.Popen[bytes]]) -> None:
        iterator = sleeper()
        kill(iterator.pid, signal.SIGTERM)
        assert iterator.wait() == -signal.SIGTERM
        kill(iterator.pid)


# --- equal tracebacks of several processes --------------------------------------------------------


CALLS = [HEADER, b'  File "train.py", line 3, in <module>', b"    step()"]
ONE = [*CALLS, b"ValueError: no"]
LATER = 2 * PAUSE_S


def worker(rank: int, life: int = 0) -> Who:
    return Who("worker", rank, life)


def held(folder: TracebackFolder, now: float = math.inf) -> list[tuple[str, list[bytes]]]:
    return [(shown.name, shown.lines) for shown in folder.on_time(now)]


def same(whose: str, of: str) -> tuple[str, list[bytes]]:
    return whose, [f"the same traceback as that of {of} above".encode()]


def test_equal_ones_are_shown_once() -> None:
    folder = TracebackFolder()
    assert folder.due() is None
    for rank in (2, 0, 1, 4):
        shown = folder.feed(worker(rank), [b"before", *ONE], 1.0)
        assert shown == ([b"before", *ONE] if rank == 2 else [b"before"])
    assert folder.end(worker(0), 1.1) == folder.end(worker(1), 1.2) == []
    assert folder.due() == 1.0 + PAUSE_S, "that of worker 4 has no end yet"
    assert held(folder, 1.0) == []
    assert held(folder) == [same("workers 0-1, 4", "worker 2")]
    assert folder.due() is None
    assert held(folder) == []


def test_lines_come_in_any_pieces() -> None:
    folder = TracebackFolder()
    for line in ONE:
        assert folder.feed(worker(0), [line], 1.0) == [line]
        assert folder.feed(worker(1), [line], 1.0) == []
    assert held(folder, 1.0) == []
    assert held(folder, 1.0 + PAUSE_S) == [same("worker 1", "worker 0")]


def test_another_message_is_shown_without_the_calls() -> None:
    folder = TracebackFolder()
    folder.feed(worker(0), ONE, 1.0)
    other = [*CALLS, b"ValueError: not here"]
    assert folder.feed(worker(1), [*other, b"more"], 1.0) == [
        b"the same traceback as that of worker 0 above, with another end:",
        *(b"ValueError: not here", b"more"),
    ]
    assert folder.end(worker(1), 1.0) == []
    folder.feed(worker(2), [*other, b"more"], 1.0)
    folder.end(worker(2), 1.0)
    assert held(folder) == [same("worker 2", "worker 1")]


def test_other_calls_are_shown() -> None:
    folder = TracebackFolder()
    folder.feed(worker(0), ONE, 1.0)
    other = [HEADER, b'  File "train.py", line 4, in <module>', b"KeyError: 'a'"]
    assert folder.feed(worker(1), other, 1.0) == other
    assert folder.feed(Who("server", 1), ONE, 1.0) == ONE, "another role has other code"


def test_unfinished_traceback_is_shown() -> None:
    folder = TracebackFolder()
    folder.feed(worker(0), ONE, 1.0)
    folder.feed(worker(1), CALLS, 1.0)
    assert folder.end(worker(1), 1.0) == CALLS
    folder.feed(worker(2), CALLS, 1.0)
    assert held(folder) == [("worker 2", CALLS)]


def test_output_after_it_is_shown() -> None:
    folder = TracebackFolder()
    assert folder.feed(worker(0), ONE, 1.0) == ONE
    assert folder.feed(worker(0), [b"step 1"], LATER + 1) == [b"step 1"]
    assert folder.feed(worker(1), [*ONE, b"step 1"], LATER + 1) == [b"step 1"]
    assert held(folder) == [same("worker 1", "worker 0")]


def test_lines_after_a_long_message_are_other_output() -> None:
    folder, lines = TracebackFolder(), [*ONE, *[b"step"] * MESSAGE_MAX]
    assert folder.feed(worker(0), lines, 1.0) == lines
    assert folder.feed(worker(1), lines, 1.0) == [b"step"]


def test_a_process_that_was_started_again_prints_the_same() -> None:
    folder = TracebackFolder()
    folder.feed(worker(1), ONE, 1.0)
    folder.end(worker(1), 1.0)
    assert folder.feed(worker(1, 1), ONE, 9.0) == []
    folder.end(worker(1, 1), 9.0)
    assert held(folder) == [same("worker 1", "worker 1")]


def test_the_prefix_of_torch_distributed_is_no_difference() -> None:
    folder = TracebackFolder()
    for rank in range(2):
        lines = [b"[rank%d]: " % rank + line for line in ONE]
        assert folder.feed(worker(rank), lines, 1.0) == (lines if rank == 0 else [])
        folder.end(worker(rank), 1.0)
    assert held(folder) == [same("worker 1", "worker 0")]


def test_a_process_that_logs_tracebacks_for_ever_is_shown_and_not_kept() -> None:
    folder = TracebackFolder()
    for at in range(KEPT_MAX * 2):
        lines = [HEADER, b"  line %d" % at, b"ValueError: no"]
        assert folder.feed(worker(0), lines, float(at)) == lines
    assert len(folder._kept["worker"]) == KEPT_MAX
    long = [HEADER, *[b"  again"] * LINES_MAX]
    assert folder.feed(worker(0), long, 1e6) == long
    assert max(len(item.lines) for item in folder._kept["worker"]) == LINES_MAX
