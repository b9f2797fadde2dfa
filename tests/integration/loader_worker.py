"""A worker that reads its batches with forked and spawned processes while its store is open."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import kvps

warnings.filterwarnings(
    "ignore"
)  # newer Pythons warn of a fork, and torch of what cannot be pickled


class Numbers(Dataset[float]):
    """Four numbers; with a store, whatever it holds."""

    def __init__(self, kv: kvps.KVStore | None = None) -> None:
        self.kv = kv

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        """Return a number, since torch hands tensors over by a socket in a folder, whose path is too long in tests."""
        return float(index) if self.kv is None else float(self.kv.pull("w"))


def main() -> None:
    kv = kvps.create("dist_sync")
    kv.init("w", torch.zeros(1))
    for how in ("fork", "spawn"):
        context = {"num_workers": 2, "multiprocessing_context": how, "timeout": 60}
        for number in DataLoader(Numbers(), batch_size=None, **context):  # type: ignore[arg-type]
            kv.pushpull("w", torch.tensor([number]))
        assert kv.pull("w").item() == 3, "the last batch"
        sys.stdout.write(f"{how} passed\n")
        text = "after a fork" if how == "fork" else "cannot be pickled or copied"
        with pytest.raises(kvps.ConfigError, match=text):
            list(DataLoader(Numbers(kv), batch_size=None, **context))  # type: ignore[arg-type]
        sys.stdout.write(f"{how} of a store passed\n")
    kv.close()


if __name__ == "__main__":
    main()
