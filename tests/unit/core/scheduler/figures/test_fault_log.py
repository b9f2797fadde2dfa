"""Each fault of a job, and what was done about it."""

from kvps.core.scheduler.figures.fault_log import EVENTS_MAX, FAULTS_MAX, STEPS_MAX, FaultLog
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Count, Measured
from tests.support.scheduler_harness import Stage

WORKER, SERVER = Node(Role.WORKER, 1), Node(Role.SERVER, 0)


def formed() -> Stage:
    stage = Stage(2, 1)
    stage.form()
    return stage


def log_of(stage: Stage) -> FaultLog:
    return stage.scheduler.job.fault_log


def steps(log: FaultLog) -> list[list[str]]:
    return [[text for _, text in fault.steps] for fault in log.faults]


def test_rounds_without_a_lost_worker_are_a_step_that_is_said_once() -> None:
    stage = formed()
    stage.drop("w1")
    stage.wait(2.0, ["s0", "w0"])
    for number, short in ((1, 5.0), (2, 9.0), (3, 9.0)):
        stage.take(stage.scheduler.on_measure(stage.now))
        counts = (Count("kvps_short_rounds_total", "", short),)
        stage.say("s0", Measured(number, counts, (), (), (), ()))
    ((step,),) = steps(log_of(stage))
    assert "rounds close without it" in step


def test_a_rollback_that_fails_stays_open() -> None:
    log = FaultLog()
    log.replaced(SERVER, "b:1", 3.0)
    log.rollback_began(SERVER, 1, 4, 3.0)
    log.lost(WORKER, "gone", 3.5)
    log.rolled_back(0, "no disk", 5.0)
    assert log.faults[0].over_at is None
    assert steps(log)[0][-1] == "the rollback failed: no disk"
    assert log.faults[0].reason == "its process did not hold the seat any more"


def test_a_member_is_lost_once_and_unknown_ones_change_nothing() -> None:
    log = FaultLog()
    log.lost(WORKER, "silent", 1.0)
    log.lost(WORKER, "again", 2.0)
    assert [fault.reason for fault in log.faults] == ["silent"]
    log.returned(WORKER, 3.0)
    log.lost(WORKER, "again", 4.0)
    log.returned(Node(Role.WORKER, 7), 5.0)
    assert [fault.reason for fault in log.faults] == ["silent", "again"]


def test_all_of_it_is_bounded() -> None:
    log = FaultLog()
    for at in range(EVENTS_MAX + 5):
        log.note("info", "joined", at)
    for rank in range(FAULTS_MAX + 5):
        log.lost(Node(Role.WORKER, rank), "silent", 1.0)
    for _ in range(STEPS_MAX + 5):
        log.unsaved(Node(Role.WORKER, 9), 1.0)
    assert (len(log.events), len(log.faults)) == (EVENTS_MAX, FAULTS_MAX)
    assert max(map(len, steps(log))) == STEPS_MAX
