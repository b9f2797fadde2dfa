"""A worker that reads its batches with forked and spawned processes while its store is open."""

from __future__ import annotations

import os
import signal
import sys
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import kvps

warnings.filterwarnings("ignore")  # newer Pythons warn of a fork, and torch of what cannot be pickled


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
    create_after_a_fork()
    kv.close()


def create_after_a_fork() -> None:
    """A forked process is told that it cannot be the worker that its parent is, and does not wait for ever."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            with pytest.raises(kvps.ConfigError, match=r"was forked from process .*already"):
                kvps.create("dist_sync")
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    sys.stdout.write("fork and create() passed\n")


if __name__ == "__main__":
    main()
