"""kvps follow: each version of a publication becomes a file, whole or not at all."""

import errno
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

import kvps
from kvps.checkpoint import atomic_file
from kvps.cli import follow
from kvps.runtime import process


@pytest.fixture
def store() -> object:
    with kvps.create("dist_sync") as kv:
        yield kv
    kvps.shutdown()


def address() -> list[str]:
    cluster = process.embedded()
    assert cluster is not None
    return ["--scheduler", cluster.scheduler, *(["--keys", cluster.keys] if cluster.keys else [])]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_files_stay_and_hold_what_was_published(
    store: kvps.KVStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made" / "weights"
    for number in (1, 2, 3):
        state = {"w": torch.full((2, 3), float(number)), "n": torch.tensor(7), "none": torch.empty(0, 2)}
        state["mask"] = torch.tensor([True, False, True])
        store.publish("policy", state, dtype="bfloat16")
        assert follow.main(["policy", "--to", str(folder), "--once", *address()]) == 0
        (folder / f"version-{number:08d}.safetensors.a1b2.tmp").write_text("of a follower that was killed")
        (folder / "mine.txt").write_text("of somebody else")
    assert names(folder)[:1] == ["mine.txt"]
    assert [name for name in names(folder) if name.endswith(".safetensors")] == [
        "version-00000002.safetensors",
        "version-00000003.safetensors",
    ]
    assert "version-00000002.safetensors.a1b2.tmp" not in names(folder)
    path = folder / "version-00000003.safetensors"
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {path}"
    read = safetensors.torch.load_file(path)
    assert read["w"].dtype is torch.bfloat16
    assert read["w"].unique().tolist() == [3.0]
    assert (read["n"].item(), read["none"].shape) == (7, (0, 2))
    assert read["mask"].tolist() == [True, False, True]
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"publication": "policy", "version": "3", "format": "pt"}


def test_full_disk_is_told_and_harms_nothing_else(
    store: kvps.KVStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["policy", "--to", str(tmp_path), "--once", *address()]
    store.publish("policy", {"w": torch.randn(1000)})
    assert follow.main(words) == 0
    store.publish("policy", {"w": torch.randn(1000)})

    def full(file: int, octets: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(atomic_file.os, "write", full)
        assert follow.main(words) == 1
    told = capsys.readouterr().err
    assert "version 2 of 'policy' cannot be written to" in told
    assert "No space left on device" in told
    assert names(tmp_path) == ["version-00000001.safetensors"]
    assert store.publish("policy", {"w": torch.randn(1000)}) == 3
    assert follow.main(words) == 0
    assert names(tmp_path)[-1] == "version-00000003.safetensors"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["policy"], "give --to DIR"),
        (["policy", "--to", "x", "--keep", "0"], "at least one file must stay"),
        (["policy", "--to", "x", "--keys", "/no/such"], "cannot read the key"),
        ([], "NAME"),
    ],
)
def test_mistakes_are_told(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert follow.main(words) == 78
    assert text in capsys.readouterr().err


def test_name_that_a_file_cannot_have_is_told(
    store: kvps.KVStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.publish("policy", {"__metadata__": torch.randn(3)})
    assert follow.main(["policy", "--to", str(tmp_path), "--once", *address()]) == 1
    assert "'__metadata__'" in capsys.readouterr().err
    assert names(tmp_path) == []
