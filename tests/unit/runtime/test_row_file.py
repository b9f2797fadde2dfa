"""Records on a disk."""

import errno
import resource
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kvps.errors import ConfigError
from kvps.runtime import row_file
from kvps.runtime.row_file import DiskRows, tier_in


def records(cells: np.ndarray, size: int, salt: int) -> np.ndarray:
    return ((cells[:, None] * 7 + np.arange(size) + salt) % 251).astype(np.uint8)


def test_records_come_back_from_their_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_file, "SPAN_BYTES", 300)
    monkeypatch.setattr(row_file, "SLAB_BYTES_MIN", 1000)
    random = np.random.default_rng(2)
    file, salts = DiskRows(str(tmp_path), 30), {}
    assert not list(tmp_path.iterdir())
    for salt in range(40):
        cells = np.sort(random.choice(200, random.integers(0, 60), replace=False))
        file.write(cells, records(cells, 30, salt))
        salts |= dict.fromkeys(cells.tolist(), salt)
        known = random.permutation(list(salts))[: random.integers(0, 80)]
        found = np.empty((len(known), 30), np.uint8)
        file.read(known, found)
        for item, record in zip(known, found, strict=True):
            assert np.array_equal(record, records(np.array([item]), 30, salts[item])[0])


def test_a_record_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    file = DiskRows(str(tmp_path), 30)
    for cells in (np.array([1 << 20]), (1 << 20) + np.arange(3)):
        with pytest.raises(OSError, match="fewer records"):
            file.read(cells, np.empty((len(cells), 30), np.uint8))


def test_a_file_that_may_not_grow_says_so_before_it_writes(tmp_path: Path) -> None:
    file = DiskRows(str(tmp_path), 1024)
    cells = np.arange(4)
    file.write(cells, records(cells, 1024, 0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        more = np.arange(2, 4000)
        with pytest.raises(OSError, match="large"):
            file.write(more, records(more, 1024, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = np.empty((4, 1024), np.uint8)
    file.read(cells, found)
    assert np.array_equal(found, records(cells, 1024, 0))


def test_records_are_there_after_a_mapping_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cells, found = DiskRows(str(tmp_path), 30), np.arange(0, 8, 2), np.empty((4, 30), np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(row_file.mmap, "mmap", Mock(side_effect=OSError(errno.ENOMEM, "no memory")))
        with pytest.raises(OSError, match="no memory"):
            file.write(cells, records(cells, 30, 1))
    file.write(cells, records(cells, 30, 2))
    file.read(cells, found)
    assert np.array_equal(found, records(cells, 30, 2))


def test_a_directory_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--table-dir .*/nowhere .*No such file"):
        tier_in(str(tmp_path / "nowhere"))
    assert tier_in(str(tmp_path)).open_file(8)
