"""What kvps demo prints, and when it says that nothing was lost."""

import io
import os
import signal
from typing import Any

import pytest
import torch
from rich.console import Console

from kvps.tools.demo import command, training
from kvps.tools.demo.command import Show

JOB = {
    "copies": [{"state": "level"}, {"state": "level"}],
    "members": [
        {"role": "worker", "rank": 1, "pid": 11},
        {"role": "server", "rank": 0, "pid": 20},
    ],
}
END = "[worker 0] end 0.99 1\n"


class Demo:
    """A Show over the lines of a job whose status is given; no process is killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int = 60, **options: Any) -> None:
        self.killed: list[tuple[int, int]] = []
        self.job: dict[str, object] = dict(JOB)
        self.now = 0.0
        monkeypatch.setattr(os, "kill", lambda pid, number: self.killed.append((pid, number)))
        monkeypatch.setattr(command.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(Show, "_status", lambda _: self.job)
        self._out = io.StringIO()
        self.show = Show(Console(file=self._out, width=200, highlight=False, **options), steps)
        self.steps = steps

    def play(self, times: dict[int, float], *more: str) -> str:
        """Let the rounds close, each a second after the last, or at the given time; return what is printed."""

        def lines() -> Any:
            yield "dashboard: http://127.0.0.1:1/\n"
            at = 0.0
            for step in range(1, self.steps + 1):
                at = self.now = times.get(step, at + 1)
                yield f"[worker 0] step {step} {at}\n"
            yield from more

        self.show.follow(lines())
        return self._out.getvalue()

    def verdict(self, code: int = 0) -> tuple[int, str]:
        """Return the exit code, and what is printed with it."""
        before = len(self._out.getvalue())
        return self.show.verdict(code, 9.0), self._out.getvalue()[before:]


def test_each_kill_is_told_with_the_time_until_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = Demo(monkeypatch)
    # Step 21 needed no killed process; step 22 waited for the replacement.
    said = demo.play({20: 20.0, 21: 20.5, 22: 23.0, 40: 41.0, 41: 41.25}, END)
    assert demo.killed == [(11, signal.SIGKILL), (20, signal.SIGKILL)]
    assert "dashboard: http://127.0.0.1:1/" in said
    assert (
        "killed worker 1 (process 11): its replacement went on at the step of worker 0, and the next round"
        in said
    )
    assert "closed after 2.50 s" in said
    assert (
        "killed server 0 (process 20): its copy took its place, and the next round closed after 1.00 s"
        in said
    )
    code, told = demo.verdict()
    assert code == 0
    assert "no update was lost, and none counted twice" in told
    assert "99% of new points right, after 9.0 s" in told
    assert "\x1b" not in said + told, "colours are for terminals"


def test_the_time_counts_from_the_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = Demo(monkeypatch)

    def status(_: object) -> dict[str, object]:
        demo.now += 0.75  # the look at the job took so long
        return demo.job

    monkeypatch.setattr(Show, "_status", status)
    said = demo.play({}, END)
    assert "closed after 1.00 s" in said, "the rounds after it are a second apart"
    assert "closed after 0.25 s" not in said


def test_a_server_without_a_whole_copy_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    for copies in ([], [{"state": "level"}, {"state": "held"}]):
        demo = Demo(monkeypatch)
        demo.job["copies"] = copies
        demo.play({}, END)
        assert demo.killed == []
        code, told = demo.verdict()
        assert code == 1
        assert "server 0 was not killed" in told
        assert "no update was lost" not in told


def test_another_count_and_a_failed_job_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = Demo(monkeypatch)
    demo.play({}, "[worker 0] end 0.99 0\n")
    code, told = demo.verdict()
    assert (code, "have not counted each step of each worker once" in told) == (1, True)
    assert "no update was lost" not in told
    for end in ([], [END]):
        demo = Demo(monkeypatch)
        demo.play({}, *end)
        code, told = demo.verdict(3)
        assert (code, "ended with exit code 3" in told) == (1, True)
        assert "no update was lost" not in told
    demo = Demo(monkeypatch)
    demo.play({})
    assert demo.verdict()[0] == 1, "without results nothing is shown"


def test_a_terminal_has_a_bar_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Demo(monkeypatch, force_terminal=True, color_system="standard").play({}, END)
    assert "60/60" in said
    assert "\x1b[1m" in said


def test_other_lines_of_the_job_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "[worker 1] ValueError: [bold]" in Demo(monkeypatch).play({}, "[worker 1] ValueError: [bold]\n")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--steps", "9"], "--steps 9: use 60 or more"),
        (["--steps", "many"], "--steps"),
        (["--http", "nowhere"], "--http='nowhere' is not an address"),
        (["--http", "0.0.0.0:0"], "other machines can reach"),
    ],
)
def test_a_wrong_flag_starts_nothing(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(argv) == 78
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


def test_a_step_that_is_missing_or_counted_twice_is_found() -> None:
    pushes = [training.count_of(step, rank) for step in range(9) for rank in range(training.WORKERS)]
    exact = torch.zeros_like(pushes[0])
    for push in pushes:
        exact -= training.LR * push / training.WORKERS
    assert training.is_exact(exact, 9)
    twice, for_another = pushes[7], pushes[7] - pushes[9]
    assert not training.is_exact(exact - twice, 9)
    assert not training.is_exact(exact - for_another, 9)
    exact[0, 0, -1] += 1
    assert not training.is_exact(exact, 9), "on one server"
