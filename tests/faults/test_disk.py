"""The disk of the scheduler's state, or of checkpoints, is full: the job goes on, and what is there stays readable."""

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvps.runtime.scheduler_process import STATE_FILE, StateFile
from tests.faults.jobs import Job
from tests.faults.test_scheduler import Watched
from tests.integration.processes import BIN, Process, Processes, until

STEPS = 60
MOUNT = 'mount -t tmpfs -o size=64k none "$1" && echo ready && exec cat'
"""``cat`` keeps the mount, which nobody else sees, until this process closes its pipe, or ends."""


class SmallDisk:
    """A folder on a file system of 64 KiB, for processes that are started by :meth:`inside`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._keeper = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", MOUNT, "sh", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        self.is_there = self._keeper.stdout.readline() == b"ready\n"

    @property
    def seen(self) -> Path:
        """The folder as those inside see it."""
        return Path(f"/proc/{self._keeper.pid}/root{self.folder}")

    def inside(self) -> list[str]:
        """Return what to put before a command."""
        return ["nsenter", "--mount", "--target", str(self._keeper.pid)]

    def fill(self) -> None:
        """Leave no room."""
        with suppress(OSError), open(self.seen / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))

    def make_room(self) -> None:
        """Take back what :meth:`fill` did."""
        (self.seen / "filler").unlink()

    def close(self) -> None:
        """Unmount it."""
        self._keeper.communicate()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if os.geteuid() != 0:
        pytest.skip("mounting is for root")
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        pytest.skip("util-linux is not installed")
    small_disk = SmallDisk(tmp_path / "state")
    try:
        if not small_disk.is_there:
            pytest.skip("no file system can be mounted here")
        yield small_disk
    finally:
        small_disk.close()


class OnSmallDisk(Watched):
    """A job whose scheduler keeps its state on a small disk."""

    def __init__(self, job: Job, disk: SmallDisk) -> None:
        super().__init__(job)
        self._disk = disk

    def start_scheduler(self) -> Process:
        """Start the scheduler, or its next life."""
        flags = (
            *("--workers", 2, "--servers", 2, "--bind", self.endpoint),
            *("--state", self._disk.folder, "--log-level", "info"),
        )
        process = self.job.processes.start(
            "scheduler", *self._disk.inside(), BIN / "kvps-scheduler", *flags, **self.job.env
        )
        process.expect("at tcp://")
        self.lives.append(process)
        return process


def test_a_full_disk_ends_no_job(processes: Processes, disk: SmallDisk) -> None:
    job = Job(processes)
    watched = OnSmallDisk(job, disk)
    watched.start_scheduler()
    watched.start_members("sync", STEPS)
    until(lambda: len(job.rounds(0)) >= 3, "rounds", 60.0)
    disk.fill()
    before = (disk.seen / STATE_FILE).read_bytes()
    first = watched.lives[0]
    first.expect(f"cannot save .*{STATE_FILE}.*: No space left on device. The job continues")
    assert (disk.seen / STATE_FILE).read_bytes() == before, "the old state is whole"
    assert {path.name for path in disk.seen.iterdir()} == {STATE_FILE, "filler"}
    done = len(job.rounds(0))
    until(lambda: len(job.rounds(0)) >= done + 6, "rounds, and barriers, without a disk", 60.0)
    assert first.err.count("cannot save") == 1, "one line for one change"
    disk.make_room()
    first.expect("state is saved again")
    first.signal(signal.SIGKILL)
    first.wait()
    watched.run(60.0)
    watched.check()
    assert len(watched.lives) == 2


KEEPING = """
import pathlib, torch, kvps

kv = kvps.create("dist_sync", name="model")
kv.init("w", torch.zeros(2_000))
kv.pushpull("w", torch.ones(2_000))
print("cut", kv.checkpoint("first"), flush=True)
said = pathlib.Path("filled")
while not said.exists():
    kv.pushpull("w", torch.ones(2_000))
try:
    kv.checkpoint()
except kvps.StorageError as error:
    print(error, flush=True)
said = pathlib.Path("room")
while not said.exists():
    kv.pushpull("w", torch.ones(2_000))
print("cut", kv.checkpoint() > 1, flush=True)
"""


def test_a_server_whose_disk_is_full_serves_on(processes: Processes, disk: SmallDisk) -> None:
    cluster = processes.scheduler(1, 1)
    flags = ("--scheduler", cluster.endpoint, "--checkpoint-dir", disk.folder)
    server = processes.start("server", *disk.inside(), BIN / "kvps-server", *flags)
    worker = cluster.plain(processes.script(KEEPING))
    worker.expect("cut 1")
    kept = [path.name for path in disk.seen.iterdir()]
    disk.fill()
    (processes.folder / "filled").touch()
    worker.expect(r"checkpoint 2 was abandoned: server 0: .*No space left on device \(need \d+")
    until(
        lambda: sorted(path.name for path in disk.seen.iterdir()) == sorted([*kept, "filler"]),
        "removal of what was written of checkpoint 2, which nobody is told of",
        30.0,
    )
    disk.make_room()
    (processes.folder / "room").touch()
    worker.expect("cut True")
    for process in (worker, server, cluster.process):
        assert process.wait() == 0, process


@pytest.mark.parametrize("step", ["os.open", "os.write", "os.fsync", "os.replace"])
def test_a_save_that_fails_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with closing(StateFile(str(tmp_path))) as kept:
        kept.save(b"one")
        with monkeypatch.context() as broken:
            broken.setattr(step, fail)
            kept.save(b"two")
            kept.save(b"three")
        assert kept.read() == b"one"
        assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
        kept.save(b"four")
        assert kept.read() == b"four"
    told = [(record.levelname, "Input/output error" in record.getMessage()) for record in caplog.records]
    assert told == [("ERROR", True), ("WARNING", False)]
