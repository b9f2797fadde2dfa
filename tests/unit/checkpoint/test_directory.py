"""A shelf: nothing half-written is ever complete, and older cuts stay until a newer one is."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvps.checkpoint import atomic_file
from kvps.checkpoint.directory import MANIFEST_MAX, CheckpointDirectory
from kvps.checkpoint.manifest import NAME, Manifest, image_name
from kvps.checkpoint.reading import verified
from kvps.checkpoint.reshard import regroup
from kvps.core.placement import RULE
from kvps.errors import StorageError
from kvps.phrases import bytes_in_words
from tests.support import snapshots
from tests.support.placement_reference import first_rule

FIRST, SECOND = image_name(0, 2), image_name(1, 2)


def numbers(manifests: list[Manifest]) -> list[int]:
    return [manifest.cut for manifest in manifests]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# --- what is written, kept and found ----------------------------------------------------------


def test_a_cut_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "ckpt"
    manifest = snapshots.put(folder, 12)
    assert files(folder) == {f"cut-00000012/{name}" for name in (FIRST, SECOND, NAME)}
    for server in range(2):
        shelf = CheckpointDirectory(folder, server)
        assert shelf.complete() == [manifest]
        assert snapshots.same(shelf.load(manifest, server, 2), snapshots.image(server, 2))
    assert CheckpointDirectory(folder).highest() == 12
    assert CheckpointDirectory(folder).manifest(12) == manifest


def test_for_another_number_of_servers_all_files_are_read(tmp_path: Path) -> None:
    manifest = snapshots.put(tmp_path, 1)
    some = [snapshots.image(server, 2) for server in range(2)]
    for server in range(3):
        got = CheckpointDirectory(tmp_path).load(manifest, server, 3)
        assert snapshots.same(got, regroup(some, server, 3))
    (tmp_path / "cut-00000001" / SECOND).unlink()
    assert snapshots.same(CheckpointDirectory(tmp_path).load(manifest, 0, 2), some[0])
    with pytest.raises(StorageError, match=SECOND):
        CheckpointDirectory(tmp_path).load(manifest, 0, 3)
    with pytest.raises(ValueError, match="no server 2 of 2"):
        CheckpointDirectory(tmp_path).load(manifest, 2, 2)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    shelf = CheckpointDirectory(tmp_path / "none", 0)
    assert shelf.complete() == []
    assert shelf.highest() == 0
    shelf.drop(3)
    with pytest.raises(StorageError, match=r"no complete checkpoint in .*: none"):
        shelf.find()


def test_without_a_manifest_a_cut_is_not_complete(tmp_path: Path) -> None:
    shelf = CheckpointDirectory(tmp_path, 0)
    shelf.write(7, snapshots.image(0, 2))
    assert shelf.complete() == []
    assert shelf.highest() == 7


def test_folders_of_other_names_are_none_of_ours(tmp_path: Path) -> None:
    for name in ("cut-1", "cut-000000012", "cut-0000000x", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "cut-00000099.txt").touch()
    assert CheckpointDirectory(tmp_path).numbers() == []
    snapshots.put(tmp_path, 123_456_789)
    assert CheckpointDirectory(tmp_path).highest() == 123_456_789


def test_the_two_newest_and_those_with_a_tag_are_kept(tmp_path: Path) -> None:
    snapshots.put(tmp_path, 1, tag="best")
    for cut in range(2, 6):
        snapshots.put(tmp_path, cut)
    assert numbers(CheckpointDirectory(tmp_path).complete()) == [1, 4, 5]
    assert CheckpointDirectory(tmp_path).numbers() == [1, 4, 5]


def test_incomplete_cuts_go_when_a_newer_one_is_complete(tmp_path: Path) -> None:
    shelf = CheckpointDirectory(tmp_path, 0)
    shelf.write(1, snapshots.image(0, 2))
    shelf.write(3, snapshots.image(0, 2))
    snapshots.put(tmp_path, 2)
    assert shelf.numbers() == [2, 3]
    stranger = tmp_path / "cut-00000003" / "notes.txt"
    stranger.touch()
    snapshots.put(tmp_path, 4)
    assert files(tmp_path / "cut-00000003") == {"notes.txt"}


def test_find_takes_the_newest_complete_cut_or_the_tag(tmp_path: Path) -> None:
    snapshots.put(tmp_path, 1, tag="best")
    snapshots.put(tmp_path, 2, tag="best")
    newest = snapshots.put(tmp_path, 3)
    shelf = CheckpointDirectory(tmp_path)
    assert shelf.find() == newest
    assert shelf.find("best").cut == 2
    with pytest.raises(StorageError, match=r"the tag 'worst'.*: 1 \(best\), 2 \(best\), 3"):
        shelf.find("worst")
    assert numbers(shelf.complete(snapshots.JOB)) == [1, 2, 3]
    assert shelf.complete(bytes(16)) == []


def test_each_server_may_have_a_folder_of_its_own(tmp_path: Path) -> None:
    shelves = [CheckpointDirectory(tmp_path / str(server), server) for server in range(2)]
    for cut in (1, 2, 3):
        some = [snapshots.image(server, 2) for server in range(2)]
        manifest = snapshots.manifest_of(cut, shelves, some)
        for shelf in shelves:
            shelf.commit(manifest)
    for server, shelf in enumerate(shelves):
        assert numbers(shelf.complete(snapshots.JOB, server)) == [2, 3]
        assert numbers(shelf.complete(server=server, servers=2)) == [2, 3]
        assert shelf.complete(server=1 - server) == []
        assert shelf.complete(server=0, servers=1) == []  # both images would be needed
        assert shelf.complete(server=5) == []
        assert numbers(shelf.complete()) == [2, 3]
        assert shelf.here(manifest) == {server}
        assert snapshots.same(shelf.load(manifest, server, 2), some[server])
        with pytest.raises(StorageError, match=image_name(1 - server, 2)):
            shelf.load(manifest, 0, 1)


def test_a_cut_that_is_given_up(tmp_path: Path) -> None:
    shelves = [CheckpointDirectory(tmp_path, server) for server in range(2)]
    for server, shelf in enumerate(shelves):
        shelf.write(4, snapshots.image(server, 2))
    shelves[0].drop(4)
    assert files(tmp_path) == {f"cut-00000004/{SECOND}"}
    shelves[1].drop(4)
    assert list(tmp_path.iterdir()) == []
    manifest = snapshots.put(tmp_path, 5)
    shelves[0].drop(5)  # too late: it is complete
    assert shelves[0].complete() == [manifest]


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    snapshots.put(tmp_path, 1)
    left = [tmp_path / "cut-00000001" / f"server-{server}.0123abcd.tmp" for server in range(2)]
    for path in left:
        path.write_bytes(b"half")
    CheckpointDirectory(tmp_path, 0).write(2, snapshots.image(0, 2))
    assert [path.exists() for path in left] == [False, True]
    snapshots.put(tmp_path, 3)
    assert not left[1].exists()


def test_file_that_is_being_written_is_no_leftover(tmp_path: Path) -> None:
    """A shelf that commits one cut while it writes the next."""
    shelves = [CheckpointDirectory(tmp_path, server) for server in range(2)]
    manifest = snapshots.manifest_of(1, shelves, [snapshots.image(server, 2) for server in range(2)])
    target = tmp_path / "cut-00000001" / "other"
    shelves[0]._put(target, lambda sink: shelves[0].commit(manifest))
    assert target.exists()


def test_a_shelf_of_nobody_is_for_reading(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="for reading"):
        CheckpointDirectory(tmp_path).write(1, snapshots.image(0, 2))


def test_no_manifest_without_the_image(tmp_path: Path) -> None:
    shelves = [CheckpointDirectory(tmp_path, server) for server in range(2)]
    manifest = snapshots.manifest_of(1, shelves, [snapshots.image(server, 2) for server in range(2)])
    (tmp_path / "cut-00000001" / FIRST).write_bytes(b"short")
    with pytest.raises(StorageError, match="checkpoint 1 not completed: the snapshot of server 0"):
        shelves[0].commit(manifest)
    assert not (tmp_path / "cut-00000001" / NAME).exists()


# --- damage -----------------------------------------------------------------------------------


def damaged(tmp_path: Path, harm: Callable[[bytes], bytes]) -> Manifest:
    manifest = snapshots.put(tmp_path, 1)
    path = tmp_path / "cut-00000001" / SECOND
    path.write_bytes(harm(path.read_bytes()))
    return manifest


@pytest.mark.parametrize("count", [0, 1, 100, -1])
def test_a_file_that_was_cut_short_is_not_complete(tmp_path: Path, count: int) -> None:
    manifest = damaged(tmp_path, lambda octets: octets[:count])
    shelf = CheckpointDirectory(tmp_path)
    assert shelf.complete() == []
    assert shelf.complete(server=1) == []
    assert shelf.complete(server=0) == [manifest]
    with pytest.raises(StorageError, match=rf"{SECOND} has \d+ octets, and its manifest says \d+"):
        shelf.load(manifest, 1, 2)


@pytest.mark.parametrize("region", ["length", "header", "tensors", "end"])
def test_flipped_bit_is_found(tmp_path: Path, region: str) -> None:
    def flip(octets: bytes) -> bytes:
        head = 8 + int.from_bytes(octets[:8], "little")
        at = {"length": 0, "header": head // 2, "tensors": head + 9, "end": -1}[region]
        changed = bytearray(octets)
        changed[at] ^= 0x10
        return bytes(changed)

    manifest = damaged(tmp_path, flip)
    with pytest.raises(StorageError, match=f"{SECOND} is not what was written: its SHA-256 is"):
        CheckpointDirectory(tmp_path).load(manifest, 1, 2)
    with pytest.raises(StorageError, match=SECOND):
        CheckpointDirectory(tmp_path).load(manifest, 0, 1)


def test_images_of_two_cuts_do_not_mix(tmp_path: Path) -> None:
    snapshots.put(tmp_path, 1, version=5)
    manifest = snapshots.put(tmp_path, 2, version=6)
    old, new = (tmp_path / f"cut-0000000{cut}" / SECOND for cut in (1, 2))
    assert old.stat().st_size == new.stat().st_size
    shutil.copy(old, new)
    with pytest.raises(StorageError, match="is not what was written"):
        CheckpointDirectory(tmp_path).load(manifest, 1, 2)


def test_a_manifest_of_another_number_of_servers(tmp_path: Path) -> None:
    manifest = snapshots.put(tmp_path, 1)
    for images in (manifest.images[:1], (*manifest.images, manifest.images[1])):
        count = len(images)
        other = replace(
            manifest,
            images=tuple(item._replace(name=image_name(server, count)) for server, item in enumerate(images)),
        )
        (tmp_path / "cut-00000001" / NAME).write_text(other.to_json())
        assert CheckpointDirectory(tmp_path).complete() == []
        with pytest.raises(StorageError, match=image_name(0, count)):
            CheckpointDirectory(tmp_path).load(other, 0, count)
        # Even where somebody renamed the files.
        for field, renamed in zip(images, other.images, strict=True):
            shutil.copy(tmp_path / "cut-00000001" / field.name, tmp_path / renamed.name)
            shutil.move(tmp_path / renamed.name, tmp_path / "cut-00000001" / renamed.name)
        with pytest.raises(StorageError, match=f"snapshot of server 0 of 2, and .* of 0 of {count}"):
            CheckpointDirectory(tmp_path).load(other, 0, count)


@pytest.mark.spec("R482")
@pytest.mark.parametrize("after", [1, 3])
def test_checkpoint_of_kvps_0_1_is_restored(tmp_path: Path, after: int) -> None:
    """Its manifest has format 1, and each server of as many as wrote it needs the snapshots of all."""
    old = snapshots.put(tmp_path, 7, 3, place=first_rule)
    path = tmp_path / "cut-00000007" / "manifest.json"
    row = json.loads(path.read_text())
    del row["placement"]
    path.write_text(json.dumps(row | {"format": 1}))
    shelf = CheckpointDirectory(tmp_path, 0)
    manifest = shelf.manifest(7)
    assert (manifest.placement, old.placement) == (1, RULE)
    assert shelf.complete(snapshots.JOB, 0, after)
    images = [shelf.load(manifest, server, after) for server in range(after)]
    written = [snapshots.image(server, 3, place=first_rule) for server in range(3)]
    assert snapshots.elements(images) == snapshots.elements(written)
    (tmp_path / "cut-00000007" / "server-2-of-3.safetensors").unlink()
    assert not shelf.complete(snapshots.JOB, 0, after)
    assert shelf.complete(snapshots.JOB, 0), "but it is not removed as a cut that was never completed"


def test_an_image_must_hold_what_belongs_there(tmp_path: Path) -> None:
    shelves = [CheckpointDirectory(tmp_path, server) for server in range(2)]
    some = [snapshots.image(server, 2) for server in range(2)]
    some[0] = replace(some[1], server=0)
    manifest = snapshots.manifest_of(1, shelves, some)
    with pytest.raises(StorageError, match=rf"{FIRST}: key '.*' of store 'default'"):
        shelves[0].load(manifest, 0, 2)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[]", b" " * MANIFEST_MAX + b"{}"])
def test_a_manifest_that_cannot_be_read(tmp_path: Path, text: bytes) -> None:
    snapshots.put(tmp_path, 1)
    path = tmp_path / "cut-00000001" / NAME
    path.write_bytes(text)
    assert CheckpointDirectory(tmp_path).complete() == []
    with pytest.raises(StorageError, match=f"cannot read the manifest {path}"):
        CheckpointDirectory(tmp_path).manifest(1)


def test_a_manifest_in_the_folder_of_another_cut(tmp_path: Path) -> None:
    snapshots.put(tmp_path, 1)
    (tmp_path / "cut-00000001").rename(tmp_path / "cut-00000002")
    assert CheckpointDirectory(tmp_path).complete() == []
    with pytest.raises(StorageError, match="of cut 1, and lies in the folder of 2"):
        CheckpointDirectory(tmp_path).manifest(2)


def test_a_damaged_cut_with_a_tag_is_not_removed(tmp_path: Path) -> None:
    snapshots.put(tmp_path, 1, tag="best")
    (tmp_path / "cut-00000001" / FIRST).write_bytes(b"")
    for cut in (2, 3, 4):
        snapshots.put(tmp_path, cut)
    assert CheckpointDirectory(tmp_path).numbers() == [1, 3, 4]


# --- a fault at each step ---------------------------------------------------------------------


class Broken:
    """``os`` for :mod:`kvps.checkpoint.atomic_file`, with one call that fails."""

    def __init__(self, name: str, number: int, error: BaseException) -> None:
        self.name, self.left, self.error = name, number, error
        self.steps: list[str] = []
        self.__dict__.update({item: self._watched(item) for item in STEPS})

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def _watched(self, name: str) -> Callable[..., object]:
        def call(*given: object) -> object:
            self.steps.append(name)
            if name == self.name:
                self.left -= 1
                if self.left < 0:
                    if name == "write" and given[1]:
                        os.write(*given[:1], given[1][: len(given[1]) // 2])  # type: ignore[call-overload,index,arg-type]
                    raise self.error
            found: object = getattr(os, name)(*given)
            return found

        return call


STEPS = ("open", "write", "fsync", "close", "replace")


def steps_of(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    watching = Broken("none", 0, OSError())
    with monkeypatch.context() as patch:
        patch.setattr(atomic_file, "os", watching)
        action()
    return watching.steps


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), Killed()])
def test_a_fault_at_each_step_of_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    image = snapshots.image(0, 2)
    snapshots.put(tmp_path / "probe", 11)
    steps = steps_of(lambda: CheckpointDirectory(tmp_path / "probe", 0).write(12, image), monkeypatch)
    assert set(STEPS) <= set(steps)
    for index, name in enumerate(steps):
        folder = tmp_path / str(index)
        older = snapshots.put(folder, 11)
        broken = Broken(name, steps[:index].count(name), error)
        expected = StorageError if isinstance(error, OSError) else Killed
        with monkeypatch.context() as patch:
            patch.setattr(atomic_file, "os", broken)
            with pytest.raises(expected) as caught:
                # As a killed process leaves it: the cut's folder may be there or not.
                CheckpointDirectory(folder, 0).write(12, image)
        if expected is StorageError:
            assert "checkpoint 12 not written: Input/output error (need " in str(caught.value)
            assert "The last complete one is 11; training goes on" in str(caught.value)
        assert CheckpointDirectory(folder).complete() == [older]
        assert not [file for file in files(folder) if file.endswith(".tmp")]
        newer = snapshots.put(folder, 13)
        assert CheckpointDirectory(folder).complete() == [older, newer]
        assert CheckpointDirectory(folder).numbers() == [11, 13]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), Killed()])
def test_a_fault_at_each_step_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    some = [snapshots.image(server, 2) for server in range(2)]

    def prepared(folder: Path) -> tuple[CheckpointDirectory, Manifest]:
        shelves = [CheckpointDirectory(folder, server) for server in range(2)]
        for cut in (9, 10, 11):
            snapshots.put(folder, cut)
        return shelves[0], snapshots.manifest_of(12, shelves, some)

    probe, manifest = prepared(tmp_path / "probe")
    steps = steps_of(lambda: probe.commit(manifest), monkeypatch)
    for index, name in enumerate(steps):
        folder = tmp_path / str(index)
        shelf, manifest = prepared(folder)
        broken = Broken(name, steps[:index].count(name), error)
        with monkeypatch.context() as patch:
            patch.setattr(atomic_file, "os", broken)
            try:
                shelf.commit(manifest)
            except (StorageError, Killed):
                was_raised = True
            else:
                was_raised = False  # only the removal of older cuts failed
        complete = CheckpointDirectory(folder).complete()
        assert numbers(complete) in ([10, 11], [10, 11, 12], [11, 12]), (index, name)
        assert was_raised or manifest in complete
        for item in complete:
            for server in range(2):
                CheckpointDirectory(folder).load(item, server, 2)
        snapshots.put(folder, 13)
        assert numbers(CheckpointDirectory(folder).complete())[-1] == 13


def test_a_writer_that_is_killed_for_good(tmp_path: Path) -> None:
    """No clean-up of any kind runs; the temporary file stays until the next writer comes."""
    older = snapshots.put(tmp_path, 11)
    code = (
        "import os, sys; import kvps.checkpoint.atomic_file as disk; from kvps.checkpoint.directory import CheckpointDirectory;"
        "import tests.support.snapshots as cuts;"
        "disk.os = type('Os', (), {'__getattr__': lambda _, name: "
        "getattr(os, name) if name != 'replace' else lambda *a: os._exit(9)})();"
        "CheckpointDirectory(sys.argv[1], 0).write(12, cuts.image(0, 2))"
    )
    root = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": str(root)}
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, check=False)
    assert ended.returncode == 9
    assert [file for file in files(tmp_path) if file.endswith(".tmp")]
    assert CheckpointDirectory(tmp_path).complete() == [older]
    snapshots.put(tmp_path, 13)
    assert not [file for file in files(tmp_path) if file.endswith(".tmp")]
    assert CheckpointDirectory(tmp_path).numbers() == [11, 13]


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(file: int, octets: memoryview) -> int:
        return os.write(file, octets[:1000])

    patched = SimpleNamespace(**{name: getattr(os, name) for name in dir(os)})
    patched.write = few
    monkeypatch.setattr(atomic_file, "os", patched)
    manifest = snapshots.put(tmp_path, 1)
    assert snapshots.same(CheckpointDirectory(tmp_path).load(manifest, 0, 2), snapshots.image(0, 2))
    patched.write = lambda file, octets: 0
    with pytest.raises(StorageError, match="takes nothing more"):
        CheckpointDirectory(tmp_path, 0).write(2, snapshots.image(0, 2))


def test_old_cuts_that_cannot_be_removed_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for cut in (1, 2):
        snapshots.put(tmp_path, cut)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(atomic_file, "remove", refuse)
    snapshots.put(tmp_path, 3)
    assert "could not be removed: [Errno 13]" in caplog.text
    assert numbers(CheckpointDirectory(tmp_path).complete()) == [1, 2, 3]
    (tmp_path / "cut-00000004").mkdir()
    (tmp_path / "cut-00000004" / FIRST).touch()
    with pytest.raises(StorageError, match="checkpoint 4, which was given up"):
        CheckpointDirectory(tmp_path, 0).drop(4)


def test_a_place_where_nothing_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"checkpoint 1 not written: .*cannot be read"):
        CheckpointDirectory(tmp_path / "file", 0).write(1, snapshots.image(0, 2))


def test_a_file_that_shrinks_between(tmp_path: Path) -> None:
    manifest = snapshots.put(tmp_path, 1)
    with pytest.raises(StorageError, match="cannot read"):
        list(verified(tmp_path / "none", manifest.images[0]))


# --- many servers at once ---------------------------------------------------------------------


def test_servers_commit_and_tidy_one_folder_at_once(tmp_path: Path) -> None:
    servers, rounds = 4, 6
    shelves = [CheckpointDirectory(tmp_path, server) for server in range(servers)]
    manifests = []
    for cut in range(1, rounds + 1):
        some = [snapshots.image(server, servers, version=cut) for server in range(servers)]
        manifests.append(snapshots.manifest_of(cut, shelves, some))
        wrong: list[BaseException] = []
        start = threading.Barrier(servers)

        def commit(
            shelf: CheckpointDirectory,
            manifest: Manifest = manifests[-1],
            start: threading.Barrier = start,
            wrong: list[BaseException] = wrong,
        ) -> None:
            start.wait()
            try:
                shelf.commit(manifest)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=commit, args=(shelf,)) for shelf in shelves]
        random.Random(cut).shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert CheckpointDirectory(tmp_path).complete() == manifests[-2:]
    assert CheckpointDirectory(tmp_path).numbers() == [rounds - 1, rounds]


def test_folders_that_another_server_has_just_removed_are_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    atomic_file.force_if_there(tmp_path / "none")
    atomic_file.remove(tmp_path / "none")
    atomic_file.remove_empty(tmp_path / "none")
    assert atomic_file.files(tmp_path / "none") == []
    (tmp_path / "cut" / "new").mkdir(parents=True)
    monkeypatch.setattr(atomic_file, "files", lambda folder: [])  # as it was a moment ago
    atomic_file.remove_empty(tmp_path / "cut")
    assert (tmp_path / "cut" / "new").exists()


# --- a full disk ------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "kvps-test", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    older = snapshots.put(small_disk, 11)
    (small_disk / "ballast").write_bytes(bytes(200 << 10))
    free = shutil.disk_usage(small_disk).free
    big = snapshots.image(
        0, 2, keys={**snapshots.KEYS, "big": replace(snapshots.KEYS["i8"], shape=(1 << 20,))}
    )
    with pytest.raises(StorageError) as caught:
        CheckpointDirectory(small_disk, 0).write(12, big)
    text = str(caught.value)
    assert text.startswith("checkpoint 12 not written: No space left on device (need 5")
    assert f" KiB, free {bytes_in_words(free)} on {small_disk}). " in text
    assert text.endswith("The last complete one is 11; training goes on")
    assert CheckpointDirectory(small_disk).complete() == [older]
    assert CheckpointDirectory(small_disk).numbers() == [11], "no empty folder is left"
    assert shutil.disk_usage(small_disk).free == free
    (small_disk / "ballast").unlink()
    assert CheckpointDirectory(small_disk).complete() == [older]


# --- files that are none ----------------------------------------------------------------------------


def test_no_link_is_followed_and_no_pipe_waited_for(tmp_path: Path) -> None:
    """Whoever may write to the folder decides the weights, and yet stops no server."""
    written = snapshots.put(tmp_path, 1)
    image = tmp_path / "cut-00000001" / written.images[0].name
    directory = CheckpointDirectory(tmp_path)
    aside = tmp_path / "aside"
    image.rename(aside)
    for make in (lambda: image.symlink_to(aside), lambda: os.mkfifo(image), image.mkdir):
        make()
        assert directory.here(written) == frozenset(range(1, written.servers))
        with pytest.raises(StorageError, match="it is no regular file"):
            directory.load(written, 0, written.servers)
        image.rmdir() if image.is_dir() and not image.is_symlink() else image.unlink()
    aside.rename(image)
    manifest = image.with_name("manifest.json")
    manifest.rename(aside)
    for make in (lambda: manifest.symlink_to(aside), lambda: os.mkfifo(manifest)):
        make()
        with pytest.raises(StorageError, match="cannot read the manifest"):
            directory.manifest(1)
        manifest.unlink()


def test_a_link_in_place_of_a_cut_is_no_cut(tmp_path: Path) -> None:
    snapshots.put(tmp_path / "elsewhere", 3)
    shelf = tmp_path / "here"
    shelf.mkdir()
    (shelf / "cut-00000003").symlink_to(tmp_path / "elsewhere" / "cut-00000003")
    directory = CheckpointDirectory(shelf)
    assert directory.complete() == []
    snapshots.put(shelf, 9)
    snapshots.put(shelf, 10)
    snapshots.put(shelf, 11)
    assert [item.cut for item in directory.complete()] == [10, 11]
    assert len(list((tmp_path / "elsewhere" / "cut-00000003").iterdir())) == 3, "nothing was removed"


def test_a_disk_is_not_filled_to_the_brim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("kvps.checkpoint.directory.shutil.disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match=r"checkpoint 1 not written: No space left.*free 0.977 KiB"):
        CheckpointDirectory(tmp_path, 0).write(1, snapshots.image(0, 1))
    assert not list(tmp_path.iterdir())


# --- the cuts of earlier jobs -------------------------------------------------------------------


def commit(folder: Path, cut: int, job: int, version: int, common: int = 0, store: str = "default") -> None:
    """Write a cut of a job, whose only server has one store with keys."""
    shelf = CheckpointDirectory(folder, 0)
    image = snapshots.image(0, 1, version=version, store=store)
    manifest = replace(snapshots.manifest_of(cut, [shelf], [image]), job=bytes([job]) * 16)
    shelf.commit(manifest, common, is_resumed=False)


@pytest.mark.spec("R414")
def test_cuts_of_an_earlier_job_stay_until_this_job_has_passed_them(tmp_path: Path) -> None:
    for cut, version in [(1, 500), (2, 900), (3, 1000)]:
        commit(tmp_path, cut, 1, version, common=cut - 1)
    shelf = CheckpointDirectory(tmp_path)
    assert shelf.numbers() == [2, 3]
    for cut in range(4, 9):
        commit(tmp_path, cut, 2, 0, common=cut - 1 if cut > 4 else 0)
    assert shelf.numbers() == [2, 3, 7, 8]
    commit(tmp_path, 9, 2, 950, common=8)
    assert shelf.numbers() == [2, 3, 8, 9], "not all servers are known to have it"
    commit(tmp_path, 10, 2, 1000, common=9)
    assert shelf.numbers() == [3, 9, 10]
    commit(tmp_path, 11, 2, 1001, common=10)
    assert shelf.numbers() == [10, 11]


@pytest.mark.spec("R414")
def test_cuts_of_stores_that_this_job_lacks_stay(tmp_path: Path) -> None:
    commit(tmp_path, 1, 1, 5, store="other")
    for cut in range(2, 6):
        commit(tmp_path, cut, 2, 100 * cut, common=cut - 1 if cut > 2 else 0)
    assert CheckpointDirectory(tmp_path).numbers() == [1, 4, 5]


@pytest.mark.spec("R414")
def test_two_jobs_in_one_directory_do_not_replace_each_others_files(tmp_path: Path) -> None:
    shelves = [CheckpointDirectory(tmp_path, 0) for _ in range(2)]
    first, second = (snapshots.image(0, 1, version=version) for version in (5, 7))
    manifest = snapshots.manifest_of(1, [shelves[0]], [first])
    with pytest.raises(StorageError, match=r"server-0-of-1.* is there already: does another job"):
        shelves[1].write(1, second)
    shelves[0].commit(manifest)
    with pytest.raises(StorageError, match="is there already"):
        shelves[1].write(1, snapshots.image(0, 3))
    with pytest.raises(StorageError, match="is there already"):
        shelves[1].commit(replace(manifest, job=bytes(16)))
    assert snapshots.same(shelves[1].load(manifest, 0, 1), first)


def test_a_file_that_comes_while_a_snapshot_is_written_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cut-00000001" / image_name(0, 1)
    write = atomic_file.HashedFile.write

    def slow(self: atomic_file.HashedFile, octets: object) -> None:
        path.write_bytes(b"another's")
        write(self, octets)  # type: ignore[arg-type]

    monkeypatch.setattr(atomic_file.HashedFile, "write", slow)
    with pytest.raises(StorageError, match="is there already"):
        CheckpointDirectory(tmp_path, 0).write(1, snapshots.image(0, 1))
    assert path.read_bytes() == b"another's"
    assert files(tmp_path / "cut-00000001") == {path.name}


def test_a_job_that_begins_beside_an_older_one_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit(tmp_path, 1, 1, 1000)
    commit(tmp_path, 2, 1, 1000, store="other")
    for cut in (3, 4):
        commit(tmp_path, cut, 2, 12)
    (text,) = caplog.messages
    assert "checkpoint 3 is the first of this job, which has not called restore()" in text
    assert "store 'default' has version 14 here and 1002 there" in text


def test_the_last_cut_with_a_store_that_the_job_has_closed_stays(tmp_path: Path) -> None:
    for cut in range(1, 4):
        commit(tmp_path, cut, 1, 10 * cut, common=cut - 1, store="first")
    for cut in range(4, 9):
        commit(tmp_path, cut, 1, 10, common=cut - 1, store="second")
    assert CheckpointDirectory(tmp_path).numbers() == [3, 7, 8]
    for cut in range(9, 12):
        commit(tmp_path, cut, 2, 1000, common=cut - 1 if cut > 9 else 0, store="second")
    assert CheckpointDirectory(tmp_path).numbers() == [3, 10, 11]
    for cut in range(12, 15):
        commit(tmp_path, cut, 2, 1000, common=cut - 1, store="first")
    assert CheckpointDirectory(tmp_path).numbers() == [11, 13, 14]


def test_cuts_without_stores_do_not_take_the_place_of_those_with(tmp_path: Path) -> None:
    commit(tmp_path, 1, 1, 10)
    for cut in range(2, 6):
        shelf = CheckpointDirectory(tmp_path, 0)
        manifest = snapshots.manifest_of(cut, [shelf], [snapshots.Snapshot(0, 1, ())])
        shelf.commit(replace(manifest, job=bytes([1]) * 16), cut - 1)
    assert CheckpointDirectory(tmp_path).numbers() == [1, 4, 5]
