"""Records of jobs with a fault: what each process was given leads its core to the same state, bit for bit."""

import signal
from pathlib import Path

import pytest

from kvps.tools.replay.format import Record, What, read
from kvps.tools.replay.replay import ReplayOutcome, replay
from tests.faults.jobs import Job
from tests.integration.processes import BIN, Processes

STEPS = 6


def records(folder: Path, role: str) -> list[Record]:
    """Return the records of all processes of one role."""
    found = []
    for path in sorted((folder / "records").glob(f"{role}-*.record")):
        assert path.stat().st_mode & 0o777 == 0o600
        with path.open("rb") as file:
            found.append(read(file))
    return found


def same(record: Record) -> ReplayOutcome:
    """Replay a record that has its end; return the outcome."""
    outcome = replay(record)
    assert not outcome.difference, outcome.difference
    assert not outcome.stopped, outcome.stopped
    assert outcome.inputs == sum(
        event.what in (What.PACKET, What.FAILURE, What.DROP, What.TIMER, What.ITEM) for event in record.events
    )
    assert outcome.sent == sum(event.what is What.SENT for event in record.events)
    return outcome


def test_a_worker_that_is_killed_in_the_middle_of_a_round(processes: Processes) -> None:
    """Server 0 has its push, and server 1 has not; another process takes its place."""
    job = Job(processes, ["worker-1/said-Push@server-0:3:kill"])
    launched = job.launch("sync", STEPS, KVPS_RECORD="full")
    assert launched.wait(150.0) == 0, launched
    assert [item.place for item in job.reached()] == [0]
    for role, count in (("scheduler", 1), ("server", 2)):
        found = records(job.folder, role)
        assert len(found) == count
        for record in found:
            outcome = same(record)
            assert outcome.states, "its end has a digest"
            assert all(is_same for _, is_same in outcome.states)
    workers = records(job.folder, "worker")
    assert len(workers) == 3
    outcomes = [same(record) for record in workers]
    # The one that was killed has no digest: all that it said is the same nevertheless.
    assert sorted(len(outcome.states) for outcome in outcomes) == [0, 1, 1]
    assert all(outcome.is_same for outcome in outcomes)
    # The state is that of these inputs: without the last push it is another one.
    (server, _) = records(job.folder, "server")
    last = max(
        index
        for index, event in enumerate(server.events)
        if event.what is What.PACKET and len(event.parts) > 2
    )
    del server.events[last]
    assert not replay(server).is_same


@pytest.mark.thorough
def test_a_server_that_is_killed_and_returns_to_a_checkpoint(processes: Processes) -> None:
    """The snapshot that its replacement reads is part of that one's record."""
    job = Job(processes, ["server-1/heard-Push@worker-0:9:kill"])
    shelf = job.folder / "shelf"
    launched = job.launch(
        "sync", STEPS * 3, KVPS_RECORD="full", KVPS_CHECKPOINT_DIR=str(shelf), KVPS_CHECKPOINT_EVERY="0.2"
    )
    launched.wait(150.0)
    servers = records(job.folder, "server")
    assert len(servers) >= 2
    for record in (*servers, *records(job.folder, "scheduler")):
        assert same(record).is_same


def test_the_flight_recorder_of_a_scheduler_and_a_server_replays(processes: Processes) -> None:
    """It is there without a setting; SIGUSR1 writes it, and a program shows and replays it."""
    cluster = processes.scheduler(1, 1, KVPS_INSECURE="1")
    server = cluster.server()
    script = processes.script(
        "import kvps, torch, os\n"
        "kv = kvps.create('dist_sync')\n"
        "kv.init('w', torch.zeros(4)); kv.pushpull('w', torch.ones(4))\n"
        "print('ready', flush=True)\n"
        "while not os.path.exists('go'): kv.pushpull('w', torch.ones(4))\n"
    )
    worker = cluster.plain(script)
    worker.expect("ready")
    for process in (cluster.process, server, worker):
        process.signal(signal.SIGUSR1)
        process.expect("wrote the flight recorder")
    (processes.folder / "go").touch()
    assert worker.wait() == 0, worker
    (scheduler,) = (processes.folder / "records").glob("scheduler-*.record")
    for role in ("scheduler", "server"):
        (record,) = records(processes.folder, role)
        outcome = replay(record)
        assert outcome.is_same, (role, outcome)
        assert outcome.states, role
    shown = processes.start("replay", BIN / "kvps", "replay", "--show", scheduler)
    assert shown.wait() == 0, shown
    assert "Hello(" in shown.out
    assert "View(" in shown.out
    done = processes.start("replay", BIN / "kvps", "replay", scheduler)
    assert done.wait(60.0) == 0, done
    assert ": the same" in done.out
    (of_worker,) = (processes.folder / "records").glob("worker-*.record")
    refused = processes.start("replay", BIN / "kvps", "replay", of_worker)
    assert refused.wait(60.0) == 78
    assert "KVPS_RECORD=full" in refused.err
