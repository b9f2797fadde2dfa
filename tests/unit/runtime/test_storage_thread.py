"""A server's disk: each order is carried out in turn, and each that has an answer is answered."""

import errno
import os
from pathlib import Path

import pytest

from kvps import __version__
from kvps.checkpoint import atomic_file
from kvps.checkpoint.directory import CheckpointDirectory
from kvps.checkpoint.manifest import NAME, image_name
from kvps.core.effects import Disk
from kvps.core.server.server import Server
from kvps.core.server.snapshot.storage import (
    Answer,
    Complete,
    Completed,
    FindCuts,
    FoundCuts,
    Loaded,
    Order,
    Read,
    Remove,
    SnapshotWritten,
    Write,
)
from kvps.errors import Overload, StorageError
from kvps.protocol.checkpoint import Commit, ImageSum, StoreSum
from kvps.runtime.storage_thread import StorageThread, carry_out, manifest_of
from tests.support import snapshots


def write(folder: Path, cut: int = 5, servers: int = 2) -> list[ImageSum]:
    """Let all servers write their images of a cut."""
    sums = []
    for server in range(servers):
        written = carry_out(str(folder), Write(cut, snapshots.image(server, servers)))
        assert isinstance(written, SnapshotWritten)
        assert written.error is None
        sums.append(ImageSum(written.size, written.sha256))
    return sums


def order_of(sums: list[ImageSum], cut: int = 5, tag: str = "best", server: int = 0) -> Complete:
    commit = Commit(cut, tag, 3, tuple(sums), (StoreSum("default", 12, 5, 6),))
    return Complete(snapshots.JOB, server, 4, commit)


def complete(folder: Path, cut: int = 5, tag: str = "best", servers: int = 2) -> None:
    sums = write(folder, cut, servers)
    for server in range(servers):
        assert carry_out(str(folder), order_of(sums, cut, tag, server)) == Completed(cut)


def no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, octets: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_file.os, "write", refuse)


def test_a_cut_is_complete_when_every_server_has_ordered_it(tmp_path: Path) -> None:
    sums = write(tmp_path)
    look = FindCuts(0, 2, snapshots.JOB, for_whom="me")
    assert carry_out(str(tmp_path), look) == FoundCuts((), 5, "me")
    assert carry_out(str(tmp_path), order_of(sums)) == Completed(5)
    assert carry_out(str(tmp_path), look) == FoundCuts((5,), 5, "me")


def test_manifest_describes_the_cut(tmp_path: Path) -> None:
    manifest = manifest_of(order_of(write(tmp_path)))
    assert (manifest.cut, manifest.tag, manifest.epoch, manifest.workers) == (5, "best", 3, 4)
    assert (manifest.job, manifest.version) == (snapshots.JOB, __version__)
    assert [image.name for image in manifest.images] == [image_name(0, 2), image_name(1, 2)]
    assert manifest.stores["default"].lowest == 5


def test_read_snapshot_is_the_written_snapshot(tmp_path: Path) -> None:
    complete(tmp_path)
    loaded = carry_out(str(tmp_path), Read(1, 2, 5, "me"))
    assert isinstance(loaded, Loaded)
    assert loaded.snapshot is not None
    assert loaded.for_whom == "me"
    assert snapshots.same(loaded.snapshot, snapshots.image(1, 2))


def test_another_number_of_servers_reads_its_share(tmp_path: Path) -> None:
    complete(tmp_path)
    loaded = carry_out(str(tmp_path), Read(0, 1, 5, None))
    assert isinstance(loaded, Loaded)
    assert loaded.snapshot is not None
    assert snapshots.elements([loaded.snapshot]) == snapshots.elements(
        [snapshots.image(0, 2), snapshots.image(1, 2)]
    )


def test_cuts_are_found_by_job_and_by_tag(tmp_path: Path) -> None:
    complete(tmp_path, 5)
    complete(tmp_path, 6, tag="")
    for look, found in (
        (FindCuts(0, 2, snapshots.JOB), (5, 6)),
        (FindCuts(0, 2, None, "best"), (5,)),
        (FindCuts(0, 2, bytes(16)), ()),
    ):
        assert carry_out(str(tmp_path), look) == FoundCuts(found, 6)


@pytest.mark.spec("R244")
def test_checkpoints_with_a_tag_are_bounded(tmp_path: Path) -> None:
    """All others are removed by and by; and of those with a tag, one may be written again."""
    for cut in (1, 2):
        complete(tmp_path, cut)
    sums = write(tmp_path, 3)
    for server in range(2):
        refused = carry_out(str(tmp_path), order_of(sums, 3, "more", server), tagged_max=2)
        assert isinstance(refused, Completed)
        assert isinstance(refused.error, Overload)
        assert str(refused.error).startswith("checkpoint 3 (more) not completed: ")
        assert "already has 2 checkpoints with a tag" in str(refused.error)
    assert not (tmp_path / "cut-00000003" / "manifest.json").exists()
    for order in (order_of(write(tmp_path, 4), 4, ""), order_of(sums, 2)):
        assert carry_out(str(tmp_path), order, tagged_max=2) == Completed(order.commit.cut)


def test_abandoned_cut_is_removed(tmp_path: Path) -> None:
    write(tmp_path, servers=1)
    assert carry_out(str(tmp_path), Remove(5, 0)) is None
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.spec("R136")
def test_the_cut_that_all_servers_have_stays_while_others_fail(tmp_path: Path) -> None:
    for cut in (1, 2, 3, 4):
        sums = write(tmp_path, cut, servers=1)
        commit = Commit(cut, "", 0, tuple(sums), (), kept=1)
        assert carry_out(str(tmp_path), Complete(snapshots.JOB, 0, 4, commit)) == Completed(cut)
    assert carry_out(str(tmp_path), FindCuts(0, 1)) == FoundCuts((1, 3, 4), 4)


class TestFailure:
    def test_a_full_disk_is_the_answer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sums = write(tmp_path)
        no_space(monkeypatch)
        written = carry_out(str(tmp_path), Write(6, snapshots.image(0, 2)))
        assert isinstance(written, SnapshotWritten)
        assert (written.size, written.sha256) == (0, "")
        assert "checkpoint 6 not written: No space left on device" in str(written.error)
        completed = carry_out(str(tmp_path), order_of(sums))
        assert isinstance(completed, Completed)
        assert "not written: No space left" in str(completed.error)
        assert not list(tmp_path.rglob(NAME))

    def test_a_damaged_file_is_the_answer(self, tmp_path: Path) -> None:
        complete(tmp_path)
        path = CheckpointDirectory(tmp_path).cut_folder(5) / image_name(0, 2)
        octets = bytearray(path.read_bytes())
        octets[-1] ^= 1
        path.write_bytes(octets)
        loaded = carry_out(str(tmp_path), Read(0, 2, 5, "me"))
        assert isinstance(loaded, Loaded)
        assert (loaded.snapshot, loaded.for_whom) == (None, "me")
        assert isinstance(loaded.error, StorageError)

    def test_a_cut_that_is_not_there_is_the_answer(self, tmp_path: Path) -> None:
        loaded = carry_out(str(tmp_path), Read(0, 2, 9, None))
        assert isinstance(loaded, Loaded)
        assert "cannot read the manifest" in str(loaded.error)

    def test_a_folder_that_cannot_be_read_is_the_answer(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("no folder")
        found = carry_out(str(tmp_path / "file"), FindCuts(0, 1, for_whom="me"))
        assert isinstance(found, FoundCuts)
        assert (found.cuts, found.highest, found.for_whom) == ((), 0, "me")
        assert isinstance(found.error, StorageError)

    def test_failed_removal_is_logged(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, servers=1)

        def refuse(path: Path) -> None:
            raise OSError(errno.EACCES, "not yours")

        monkeypatch.setattr(atomic_file, "remove", refuse)
        assert carry_out(str(tmp_path), Remove(5, 0)) is None
        assert "cannot be removed" in caplog.text


class Letters:
    """What stands for the server's loop: it keeps what it was to do."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def put(self, door: object, answer: Answer) -> None:
        assert door == Server.on_disk
        self.answers.append(answer)


def test_orders_are_carried_out_in_turn_and_all_of_them_before_the_end(tmp_path: Path) -> None:
    loop = Letters()
    archive = StorageThread(str(tmp_path), loop)  # type: ignore[arg-type]
    orders: list[Order] = [
        Write(1, snapshots.image(0, 1)),
        Remove(1, 0),
        Write(2, snapshots.image(0, 1)),
        FindCuts(0, 1),
    ]
    for order in orders:
        archive.order(Disk(order))
    archive.close()
    assert [type(answer) for answer in loop.answers] == [SnapshotWritten, SnapshotWritten, FoundCuts]
    assert loop.answers[-1] == FoundCuts((), 2)
    assert not archive._thread.is_alive()


def test_the_versions_of_a_store_are_listed_with_the_cuts(tmp_path: Path) -> None:
    snapshots.put(tmp_path, 1, version=7)
    for store, versions in [("default", (10,)), ("other", (0,)), ("", ())]:
        found = carry_out(str(tmp_path), FindCuts(0, 2, store=store))
        assert isinstance(found, FoundCuts)
        assert found.versions == versions
