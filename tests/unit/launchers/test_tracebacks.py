"""Equal tracebacks of several processes: one is shown, and whose they are."""

import math

from kvps.launchers.output import HEADER, KEPT_MAX, LINES_MAX, MESSAGE_MAX, PAUSE_S, TracebackFolder, Who

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
    for time in range(KEPT_MAX * 2):
        lines = [HEADER, b"  line %d" % time, b"ValueError: no"]
        assert folder.feed(worker(0), lines, float(time)) == lines
    assert len(folder._kept["worker"]) == KEPT_MAX
    long = [HEADER, *[b"  again"] * LINES_MAX]
    assert folder.feed(worker(0), long, 1e6) == long
    assert max(len(one.lines) for one in folder._kept["worker"]) == LINES_MAX
