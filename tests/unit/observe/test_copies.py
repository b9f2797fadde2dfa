"""What a person is shown of the copies of servers: ``kvps status``, and what a loss would cost now."""

import pytest

from kvps.cli.status import screen
from kvps.observe.document import document_of
from kvps.observe.findings import STUCK_S, Level, problems_of
from kvps.protocol.membership import Copy, Move, Promotion, Seen
from kvps.tools.dashboard.model import JobModel
from kvps.tools.doctor.diagnosis import Measurements, diagnose
from kvps.tools.top import rendered
from tests.support.scheduler_harness import Stage

COPIES = (
    Copy(0, "level", "b:12", 100, 4096, ""),
    Copy(1, "held", "c:13", 43, 0, ""),
    Copy(2, "held", "a:11", 0, 0, "store 'kv' is async"),
    Copy(3, "empty", "", 0, 0, ""),
)


def seen(phase: str = "running", checkpoint: int = 0) -> Seen:
    promotions = (Promotion(0, 9, "b:12", 42.0),)
    return Seen(1, phase, "well", (), (), checkpoint=checkpoint, copies=COPIES, promotions=promotions)


@pytest.mark.spec("R529")
def test_status_shows_the_copy_of_each_server() -> None:
    lines = screen(document_of(b"job!", seen())).splitlines()
    assert "server 0: its standby b:12 took its place 42 s ago (incarnation 9)" in lines
    at = lines.index("copies of servers:")
    assert [line.split("  ") for line in lines[at + 1 : at + 6]] == [
        line.split("  ")
        for line in (
            "server  copies                              standby  behind",
            "0       2 of 2 copies                       b:12     4 KiB",
            "1       1 of 2 copies, 43 % copied          c:13",
            "2       1 of 2 copies, store 'kv' is async  a:11",
            "3       1 of 2 copies                       none",
        )
    ]


def test_the_cost_of_a_loss_is_a_finding() -> None:
    found = problems_of(seen(checkpoint=12))
    assert [finding.text for finding in found] == [
        "the loss of server 1 would now cost the steps since checkpoint 12: its copy at c:13 has 43 % of the values",
        "the loss of server 2 would now cost the steps since checkpoint 12: its copy at a:11 has 0 % of the values "
        "(store 'kv' is async)",
        "the loss of server 3 would now cost the steps since checkpoint 12: it has no copy",
    ]
    assert {finding.level for finding in found} == {Level.WARN}
    assert "start another kvps-server" in found[2].advice
    assert "its part of the values" in problems_of(seen())[0].text
    assert not problems_of(seen("forming"))


def test_doctor_and_top_show_a_job_with_standbys() -> None:
    stage = Stage(1, 2, replicas=1)
    stage.form()
    told = stage.scheduler.seen(1, stage.now)
    results = diagnose(Measurements(scheduler="tcp://sched:1", software="kvps 0.1", seen=told))
    texts = [result.text for result in results]
    assert "all 3 members are well" in texts
    assert any("would now cost its part of the values: it has no copy" in text for text in texts)
    assert rendered(JobModel().take(document_of(b"job!", told), 0.0), "", 120, 40)


def test_a_seat_that_does_not_move_is_named_by_the_doctor_too() -> None:
    moves = (
        Move(0, "b:12", STUCK_S, 0.0, False),
        Move(1, "", STUCK_S + 2, 0.0, False),
        Move(2, "", STUCK_S - 1, 0.0, False),
        Move(3, "b:12", STUCK_S, 1.0, True),
    )
    seen = Seen(1, "running", "well", (), (), moves=moves)
    texts = [
        "the seat of server 0 has been due to move for 10 s: b:12 has not taken it",
        "the seat of server 1 has been due to move for 12 s: no process is there that may take it",
    ]
    assert [finding.text for finding in problems_of(seen)] == texts
    asked = diagnose(Measurements("tcp://head:9091", seen=seen))
    assert [finding.text for finding in asked if finding.topic == "progress"] == texts
    assert "-> start kvps-server" in screen(document_of(bytes(16), seen))
