"""Each fault of a job, and what was done about it."""

from __future__ import annotations

from kvps.core.scheduler.figures.fault_log import EVENTS_MAX, FAULTS_MAX, STEPS_MAX, FaultLog
from kvps.protocol.checkpoint import Recall, Restore, Restored
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Count, Measured
from tests.support.scheduler_harness import Stage, sent

WORKER, SERVER = Node(Role.WORKER, 1), Node(Role.SERVER, 0)


def formed() -> Stage:
    stage = Stage(2, 1)
    stage.form()
    return stage


def log_of(stage: Stage) -> FaultLog:
    return stage.scheduler.job.fault_log


def steps(log: FaultLog) -> list[list[str]]:
    return [[text for _, text in one.steps] for one in log.faults]


def test_a_lost_worker_is_replaced() -> None:
    stage = formed()
    stage.drop("w1")
    stage.wait(2.0, ["s0", "w0"])
    (fault,) = log_of(stage).faults
    assert (fault.node, fault.over_at, fault.steps) == (WORKER, None, [])
    assert "connection" in fault.reason
    stage.hello("w2", rank=1)
    assert steps(log_of(stage)) == [["replaced by host-w2:7"]]
    assert fault.over_at == stage.now


def test_a_lost_worker_is_heard_again() -> None:
    stage = formed()
    stage.wait(20.0, ["s0", "w0"])
    assert [one.over_at for one in log_of(stage).faults] == [None]
    stage.beat("w1")
    assert steps(log_of(stage)) == [["the same process is heard again, and goes on"]]
    assert log_of(stage).faults[0].over_at == stage.now


def test_a_worker_that_leaves_well_is_no_fault_and_one_that_fails_is() -> None:
    stage = formed()
    stage.leave("w0")
    assert not log_of(stage).faults
    stage.leave("w1", done=False, code=3)
    assert [one.reason for one in log_of(stage).faults] == ["exit code 3"]


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


def test_a_replaced_server_rolls_the_job_back() -> None:
    stage = formed()
    job = stage.scheduler.job
    stage.shelf("s0")
    job.checkpoints.kept = 4
    stage.drop("s0")
    stage.wait(2.0, ["w0", "w1"])
    stage.hello("s1", rank=0, endpoint="tcp://s1:1")
    (fault,) = log_of(stage).faults
    assert [text for _, text in fault.steps] == [
        "replaced by host-s1:7",
        "all servers roll back to checkpoint 4 or an older one; epoch 1 begins",
    ]
    assert fault.over_at is None
    assert sent(stage.wait(1.5, ["s1", "w0", "w1"]), Recall)
    effects = stage.shelf("s1", 3, 4, epoch=1)
    assert sent(effects, Restore)
    stage.now += 1
    stage.say("s1", Restored(1, 4, ""))
    assert fault.steps[-1][1].startswith("all servers hold checkpoint 4")
    assert fault.over_at == stage.now


def test_a_replaced_server_without_a_checkpoint() -> None:
    stage = formed()
    stage.drop("s0")
    stage.wait(2.0, ["w0", "w1"])
    stage.hello("s1", rank=0, endpoint="tcp://s1:1")
    assert steps(log_of(stage))[0][1].startswith("there was no checkpoint")


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
    assert [one.reason for one in log.faults] == ["silent"]
    log.returned(WORKER, 3.0)
    log.lost(WORKER, "again", 4.0)
    log.returned(Node(Role.WORKER, 7), 5.0)
    assert [one.reason for one in log.faults] == ["silent", "again"]


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


def test_the_lines_of_the_log_are_kept_with_their_time() -> None:
    stage = formed()
    last = log_of(stage).events[-1]
    assert (last.at, last.level) == (stage.now, "info")
    assert last.text.startswith("running")
