"""Files of states: whole or not at all, also where several workers write one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvps.errors import StorageError
from kvps.store import optimizer_state


def test_two_workers_may_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of one process, and processes of two hosts with one number: each writes aside of the other."""
    path = tmp_path / "states"
    others = [lambda: optimizer_state.write(str(path), {"w": torch.ones(3)}, {})]

    def interrupted(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, file, metadata)
        if others:
            others.pop()()

    monkeypatch.setattr(optimizer_state, "save_file", interrupted)
    optimizer_state.write(str(path), {"w": torch.full((3,), 2.0)}, {})
    assert load_file(path)["w"].tolist() == [2.0, 2.0, 2.0]
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_leaves_the_older_file(tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    with pytest.raises(StorageError, match="An older file there is kept"):
        optimizer_state.write(str(tmp_path / "states"), {"w": torch.ones(3)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["states"]
