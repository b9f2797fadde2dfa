"""Memory of columns that grow."""

import mmap

import numpy as np
import pytest

from kvps.core.embedding import pages
from kvps.core.embedding.pages import MAPPED_BYTES, grown, zeros

COUNT = MAPPED_BYTES // 8


@pytest.mark.parametrize("count", [0, COUNT - 1, COUNT])
@pytest.mark.parametrize("advice", [None, getattr(mmap, "MADV_HUGEPAGE", None)])
def test_columns_of_any_length_grow(count: int, advice: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_HUGE", advice)
    column = zeros(count, np.dtype(np.int64))
    assert (len(column), column.dtype, column.any()) == (count, np.int64, False)
    column[:] = np.arange(1, count + 1)
    assert grown(column, count, count) is column
    larger = grown(column, count, count + 1)
    assert len(larger) >= max(1024, count + 1, count * 3 // 2)
    assert np.array_equal(larger[:count], column)
    assert not larger[count:].any()
