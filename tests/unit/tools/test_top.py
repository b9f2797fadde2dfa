"""A job as kvps top shows it: rates from two answers, replaced members, order and layout."""

import io
from typing import Any

import pytest
from rich.console import Console

from kvps.observe.document import document_of
from kvps.protocol.membership import Figures, OldRound, Seen, Sight
from kvps.tools import top
from kvps.tools.dashboard.model import BEATS_S, JobModel

JOB = b"job1"


def worker(rank: int, incarnation: int = 1, state: str = "held") -> Sight:
    return Sight(2, rank, incarnation, state, "gpu", 40 + rank, "", 0.5, f"alive {rank}")


SERVER = Sight(1, 0, 9, "held", "cpu", 7, "", 0.1, "alive")


def figures(rounds: int = 0, size: int = 0, late_s: float = 0.0) -> Figures:
    return Figures("0.1.0", rounds, size, 2 * size, 1 << 20, 1 << 21, late_s)


def seen(*pairs: tuple[Sight, Figures], rounds: tuple[OldRound, ...] = ()) -> Seen:
    members = tuple([item for item, _ in pairs])
    numbers = tuple([item for _, item in pairs])
    return Seen(1, "running", "all are here", members, rounds, "0.1.0", 2, 12, numbers)


def shown(*pairs: tuple[Sight, Figures], rounds: tuple[OldRound, ...] = ()) -> dict[str, Any]:
    """Return the document of the first look at a job."""
    return JobModel().take(document_of(JOB, seen(*pairs, rounds=rounds)), 0.0)


def rates(model: JobModel, now: float, *pairs: tuple[Sight, Figures], job: bytes = JOB) -> Any:
    totals = model.take(document_of(job, seen(*pairs)), now)["totals"]
    return totals["rounds_per_s"], totals["in_bytes_per_s"], totals["out_bytes_per_s"]


def test_rates_are_differences_over_the_last_seconds() -> None:
    model = JobModel()
    later = ((worker(0), figures(150)), (SERVER, figures(0, 3000)))
    assert rates(model, 10.0, (worker(0), figures(100)), (SERVER, figures(0, 1000))) == (0, 0, 0)
    assert rates(model, 12.0, *later) == (25.0, 1000.0, 2000.0)
    for at in range(13, 13 + int(BEATS_S)):
        assert rates(model, at, *later)[0] > 0
    assert rates(model, at + 1, *later) == (0, 0, 0)


def test_a_member_that_was_replaced_and_another_job_begin_anew() -> None:
    model = JobModel()
    rates(model, 0.0, (worker(0), figures(100)))
    assert rates(model, 1.0, (worker(0, incarnation=2), figures(3)))[0] == 0.0
    rates(model, 2.0, (worker(0), figures(100)))
    assert rates(model, 3.0, (worker(0), figures(200)), job=b"job2")[0] == 0.0


def test_an_old_scheduler_has_no_figures() -> None:
    old = document_of(JOB, Seen(1, "running", "", (worker(0), SERVER), ()))
    assert [item["software"] for item in old["members"]] == ["", ""]
    assert "gpu:40" in drawn(JobModel().take(old, 0.0))


def drawn(job: dict[str, Any], height: int | None = None, width: int = 160) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, highlight=False)
    console.print(top.rendered(job, "", width, height))
    return out.getvalue()


def test_the_screen_names_late_workers_and_what_rounds_wait_for() -> None:
    waits = OldRound(0, "ours", "[bold]w", 7, (1,), 12.0)
    others = OldRound(0, "theirs", "b", 3, (), 2.0)
    pairs = ((worker(0), figures(9)), (worker(1), figures(9, 0, 0.25)), (SERVER, figures(0, 10)))
    text = drawn(shown(*pairs, rounds=(waits, others)))
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "0.25 s" in lines["worker 1"]
    assert "1 MiB (50 %)" in lines["server 0"]
    assert "[bold]w" in lines["ours"]  # a key is no markup
    assert "rank 1 (alive 1)" in lines["ours"]
    assert "other servers" in lines["theirs"]
    assert "rolled back 2 times" in text
    assert "checkpoint 12" in text


def test_if_not_all_members_fit_those_that_need_attention_are_shown() -> None:
    pairs = [(worker(rank), figures(9)) for rank in range(50)]
    pairs[30] = (worker(30), figures(9, 0, 2.0))
    pairs[40] = (worker(40, state="lost"), figures())
    text = drawn(shown(*pairs, (SERVER, figures())), height=20)
    assert len(text.splitlines()) <= 20
    assert "worker 30" in text
    assert "worker 40" in text
    assert "worker 49" not in text
    assert "more members" in text


def test_a_narrow_screen_leaves_out_what_matters_least() -> None:
    assert top.columns_for(160) == list(top.IN_ORDER)
    assert top.columns_for(10) == ["member", "state", "late"]
    assert top.columns_for(80) == ["member", "state", "rounds/s", "late", "status"]
    text = drawn(shown((worker(0), figures(9))), width=60)
    assert "worker 0" in text
    assert max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_heads_and_numbers_are_whole_on_a_narrow_screen(width: int) -> None:
    busy = Sight(2, 0, 1, "held", "a.example.org", 4, "", 0.5, "alive, but no progress for 42 s")
    waits = OldRound(0, "spirals", "layers.0.attention.query.weight", 7, (0,), 12.0)
    pairs = ((busy, figures(123_456, 0, 12.34)), (SERVER, figures(0, 1 << 30)))
    text = drawn(shown(*pairs, rounds=(waits,)), width=width)
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert max(map(len, text.splitlines())) <= width
    assert lines["member"].split() == top.columns_for(width)
    assert "12.34 s" in lines["worker 0"]
    assert " held " in lines["worker 0"]
    assert "open for" in text
    assert " 12 s " in text
