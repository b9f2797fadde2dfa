"""A store within one process: what it writes is a checkpoint like any other, and it reads any."""

import errno
import os
from pathlib import Path

import pytest
import torch

import kvps
from kvps.checkpoint import atomic_file
from kvps.checkpoint.directory import CheckpointDirectory
from kvps.errors import ConfigError, Mismatch, StorageError
from kvps.store.kvstore import KVStore
from tests.support import snapshots

W = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
ONES = torch.ones(2, 2)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPS_CHECKPOINT_DIR", str(tmp_path / "ckpt"))
    return tmp_path / "ckpt"


def store(optimizer: bool = True, **more: object) -> KVStore:
    kv = kvps.create("local", **more)  # type: ignore[arg-type]
    if optimizer:
        kv.set_optimizer("sgd", lr=0.5, momentum=0.9)
    kv.init("w", W)
    kv.init("b", torch.zeros(3, dtype=torch.float64))
    return kv


def pulled(kv: KVStore, key: str = "w") -> torch.Tensor:
    row = torch.zeros(2, 2) if key == "w" else torch.zeros(3, dtype=torch.float64)
    kv.pull(key, out=row)
    return row


def train(kv: KVStore, steps: int) -> None:
    for _ in range(steps):
        kv.push("w", ONES)


class TestLocal:
    def test_another_process_goes_on_as_if_it_had_been_the_same(self, folder: Path) -> None:
        kv = store()
        train(kv, 3)
        assert kv.checkpoint() == 1
        train(kv, 2)
        other = kvps.create("local")
        assert other.restore() == 1
        assert other.version("w") == 3
        train(other, 2)
        assert torch.equal(pulled(other), pulled(kv))
        assert torch.equal(pulled(other, "b"), torch.zeros(3, dtype=torch.float64))

    def test_restore_returns_to_the_checkpoint(self) -> None:
        kv = store()
        train(kv, 3)
        before = pulled(kv)
        kv.checkpoint("best")
        train(kv, 5)
        kv.checkpoint()
        later = pulled(kv)
        assert kv.restore("best") == 1
        assert torch.equal(pulled(kv), before)
        assert kv.restore() == 2
        assert torch.equal(pulled(kv), later)

    def test_a_tensor_that_was_never_updated_then_has_no_momentum_now(self) -> None:
        kv, reference = store(), store()
        kv.checkpoint()
        train(kv, 4)
        kv.restore()
        train(kv, 1)
        train(reference, 1)
        assert torch.equal(pulled(kv), pulled(reference))

    def test_restore_leaves_later_keys_as_they_are(self) -> None:
        kv = store()
        kv.checkpoint()
        kv.init("later", torch.ones(2, 2))
        kv.restore()
        row = torch.zeros(2, 2)
        kv.pull("later", out=row)
        assert torch.equal(row, ONES)

    def test_the_files_are_those_of_one_server(self, folder: Path) -> None:
        store().checkpoint("best")
        (manifest,) = CheckpointDirectory(folder).complete()
        assert (manifest.tag, manifest.servers, manifest.workers) == ("best", 1, 1)
        assert manifest.stores["local"].keys == 2

    def test_without_an_optimizer(self) -> None:
        kv = store(optimizer=False)
        kv.push("w", ONES)
        value = pulled(kv)
        kv.checkpoint()
        other = store(optimizer=False)
        other.restore()
        assert torch.equal(pulled(other), value)

    def test_the_optimizer_comes_along(self) -> None:
        kv = store()
        kv.set_learning_rate(0.125)
        kv.checkpoint()
        other = store(optimizer=False)
        other.restore()
        train(kv, 2)
        train(other, 2)
        assert torch.equal(pulled(other), pulled(kv))


class TestRefused:
    @pytest.mark.parametrize("tag", ["", 5, "two\nlines", "two words", "../x", ".x", "é", "x" * 65])
    def test_with_a_tag_that_is_no_name(self, tag: str) -> None:
        kv = store()
        for call in (kv.checkpoint, kv.restore):
            with pytest.raises(ConfigError, match="use 1 to 64 of the characters"):
                call(tag)

    def test_without_a_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KVPS_CHECKPOINT_DIR")
        kv = store()
        for call in (kv.checkpoint, kv.restore):
            with pytest.raises(ConfigError, match="set KVPS_CHECKPOINT_DIR"):
                call()

    def test_with_nothing_there(self, folder: Path) -> None:
        kv = store()
        with pytest.raises(StorageError, match="no checkpoint is complete"):
            kv.restore()
        kv.checkpoint()
        with pytest.raises(StorageError, match="with tag 'best'"):
            kv.restore("best")

    def test_of_a_store_with_another_name(self) -> None:
        store().checkpoint()
        with pytest.raises(StorageError, match="has no store 'other'; it has 'local'"):
            store(name="other").restore()

    def test_into_another_model_and_nothing_is_changed(self) -> None:
        kv = store()
        train(kv, 1)
        kv.checkpoint()
        other = kvps.create("local")
        other.init("b", torch.ones(3, dtype=torch.float64))
        other.init("w", torch.ones(4))
        with pytest.raises(Mismatch, match=r"'w' of store 'local' is float32\[4\], and float32\[2,2\]"):
            other.restore()
        assert torch.equal(pulled(other, "b"), torch.ones(3, dtype=torch.float64))

    def test_with_another_optimizer(self) -> None:
        store().checkpoint()
        other = store(optimizer=False)
        other.set_optimizer("adam")
        with pytest.raises(Mismatch, match="has optimizer 'adam', and the checkpoint 'sgd'"):
            other.restore()

    def test_on_a_full_disk_training_goes_on(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kv = store()
        kv.checkpoint()
        with monkeypatch.context() as patched:
            patched.setattr(atomic_file.os, "write", _no_space)
            with pytest.raises(StorageError, match="checkpoint 2 not written: No space left"):
                kv.checkpoint()
        train(kv, 1)
        assert [manifest.cut for manifest in CheckpointDirectory(folder).complete()] == [1]
        assert kv.checkpoint() > 1

    def test_without_room_for_the_manifest(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kv = store()

        def refuse(self: CheckpointDirectory, *commit: object) -> None:
            raise StorageError("no room for the manifest")

        with monkeypatch.context() as patched:
            patched.setattr(CheckpointDirectory, "commit", refuse)
            with pytest.raises(StorageError, match="no room for the manifest"):
                kv.checkpoint()
        assert not CheckpointDirectory(folder).complete()
        assert [kv.checkpoint() for _ in range(2)] == [2, 3]
        assert len(list(folder.rglob("*.safetensors"))) == 2, "what was left is removed"


def _no_space(file: int, octets: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TestOfServers:
    """A local store reads what servers wrote: the laptop of one who trained on a cluster."""

    def test_however_many_they_were(self, folder: Path) -> None:
        keys = {name: snapshots.KEYS[name] for name in ("layer1.weight", "nothing")}
        snapshots.put(folder, 7, servers=3, keys=keys)
        kv = kvps.create("local", name="default")
        assert kv.restore() == 7
        weight = torch.zeros(12, 10)
        kv.pull("layer1.weight", out=weight)
        assert torch.equal(weight.flatten(), snapshots.values(keys["layer1.weight"]))
        kv.pull("nothing", out=torch.ones(0, 3))
