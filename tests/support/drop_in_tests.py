"""Another library's own tests over its drop-in interface, for a person who has fetched them.

    kvps-launch -n 2 -s 2 -- python -m tests.support.drop_in_tests PATH/TO/test_torch.py [PYTEST ARGUMENTS]

``horovod.torch`` and ``byteps.torch`` are then ``kvps.compat.horovod`` and ``kvps.compat.byteps``. The tests of Horovod import three helpers from
a module ``common`` of theirs, and names that Python and torch had when these tests were written; both are provided here.
They step every optimizer in ``torch.optim`` with biases. Muon is newer than they are and takes matrices only, so it is hidden.
Each rank runs all tests in the order of the file. Rank 0 prints, and its exit code is that of pytest; the others end well,
so that the launcher does not end the job before rank 0 has printed all.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

import kvps.compat.byteps
import kvps.compat.horovod

HOROVOD = ("compression", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm")
BYTEPS = ("compression", "cross_barrier", "ops", "parallel")


class FatalError(Exception):
    """Stands for ``torch.FatalError``, which torch no longer has."""


def main(path: str, *arguments: str) -> int:
    """Run the tests; return the exit code."""
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        ours = name.replace("SIZE", "WORLD_SIZE")
        os.environ[f"HOROVOD_{name}"] = os.environ.get(ours, "1" if "SIZE" in name else "0")
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    provide()
    is_first = os.environ["HOROVOD_RANK"] == "0"
    if not is_first:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    folder = os.path.dirname(os.path.abspath(path))
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as settings:
        settings.write("[pytest]\n")  # those of kvps make warnings errors
        settings.flush()
        plain = ("-c", settings.name, "--rootdir", folder, "-p", "no:cacheprovider")
        code = int(pytest.main([*plain, path, *arguments]))
        return code if is_first else 0


def provide() -> None:
    """Make the modules and names known that the tests import."""
    for library, ours, parts in (
        ("horovod", kvps.compat.horovod, HOROVOD),
        ("byteps", kvps.compat.byteps, BYTEPS),
    ):
        whole = ModuleType(library)
        whole.torch = ours  # type: ignore[attr-defined]
        sys.modules |= {library: whole, f"{library}.torch": ours}
        for part in parts:
            sys.modules[f"{library}.torch.{part}"] = importlib.import_module(f"{ours.__name__}.{part}")
    for part in ("common", "common.exceptions"):
        sys.modules[f"horovod.{part}"] = importlib.import_module(f"kvps.compat.horovod.{part}")
    common = ModuleType("common")
    common.mpi_env_rank_and_size = _rank_and_size  # type: ignore[attr-defined]
    common.skip_or_fail_gpu_test = lambda test, reason: test.skipTest(reason)  # type: ignore[attr-defined]
    common.temppath = _temporary_path  # type: ignore[attr-defined]
    sys.modules["common"] = common
    if not hasattr(torch, "FatalError"):
        torch.FatalError = FatalError  # type: ignore[attr-defined]
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "newer"  # the tests look for "torch.optim"
    if not hasattr(inspect, "getargspec"):
        inspect.getargspec = inspect.getfullargspec  # type: ignore[attr-defined]


def _rank_and_size() -> tuple[int, int]:
    return int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])


@contextmanager
def _temporary_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "file")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
