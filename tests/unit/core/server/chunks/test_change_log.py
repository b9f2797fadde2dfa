"""Which rows of a piece changed, and when that is no longer known."""

import torch

from kvps.core.server.chunks.history import LEAST_COUNT, VERSION_COUNT, ChangeLog


def noted(*versions: tuple[int, list[int]], rows: int = 20) -> ChangeLog:
    changes = ChangeLog(rows)
    for version, ids in versions:
        changes.add(version, torch.tensor(ids, dtype=torch.int64))
        changes.check()
    return changes


def since(changes: ChangeLog, version: int, now: int) -> list[int] | None:
    found = changes.since(version, now)
    return None if found is None else found.tolist()


def test_rows_of_several_versions_are_named_once_and_in_order() -> None:
    changes = noted((3, [5, 9]), (4, []), (5, [2, 9]))
    assert since(changes, 5, 5) == []
    assert since(changes, 4, 5) == [2, 9]
    assert since(changes, 3, 5) == [2, 9]
    assert since(changes, 2, 5) == [2, 5, 9]
    assert since(changes, 1, 5) is None


def test_more_than_half_of_the_rows_may_as_well_be_read_whole() -> None:
    changes = noted((1, [0, 1]), (2, [2, 3]), (3, [4]), rows=8)
    assert since(changes, 1, 3) == [2, 3, 4]
    assert since(changes, 0, 3) is None
    changes = noted((1, [0, 1]), (2, [0, 1]), (3, [0, 1]), rows=8)
    assert since(changes, 0, 3) == [0, 1], "rows count once"


def test_of_a_large_piece_half_as_many_numbers_as_rows() -> None:
    rows = 4 * LEAST_COUNT
    each = LEAST_COUNT - VERSION_COUNT
    changes = noted(*[(number, list(range(each))) for number in (1, 2, 3)], rows=rows)
    assert since(changes, 1, 3) == list(range(each))
    assert since(changes, 0, 3) is None, "the first does not fit beside the others"
