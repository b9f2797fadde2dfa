"""Which rows of a piece changed, and when that is no longer known."""

from __future__ import annotations

import torch

from kvps.core.changes import VERSIONS_MAX, Changes


def noted(*versions: tuple[int, list[int]], rows: int = 20) -> Changes:
    changes = Changes(rows)
    for version, ids in versions:
        changes.note(version, torch.tensor(ids, dtype=torch.int64))
        changes.check()
    return changes


def since(changes: Changes, version: int, now: int) -> list[int] | None:
    found = changes.since(version, now)
    return None if found is None else found.tolist()


def test_rows_of_several_versions_are_named_once_and_in_order() -> None:
    changes = noted((3, [5, 9]), (4, []), (5, [2, 9]))
    assert since(changes, 5, 5) == []
    assert since(changes, 4, 5) == [2, 9]
    assert since(changes, 3, 5) == [2, 9]
    assert since(changes, 2, 5) == [2, 5, 9]
    assert since(changes, 1, 5) is None


def test_nothing_is_known_across_a_version_that_was_not_noted() -> None:
    changes = noted((3, [5]), (5, [2]))
    assert since(changes, 4, 5) == [2]
    assert since(changes, 3, 5) is None
    assert since(changes, 5, 6) is None, "version 6 changed what nobody noted"
    assert since(changes, 4, 6) is None
    assert since(changes, 6, 5) is None, "a version that nobody has seen"


def test_what_half_of_the_rows_would_not_hold_is_forgotten() -> None:
    changes = noted((1, [0, 1]), (2, [2, 3]), (3, [4]), rows=8)
    assert since(changes, 1, 3) == [2, 3, 4]
    assert since(changes, 0, 3) is None
    changes = noted((1, list(range(5))), rows=8)
    assert since(changes, 0, 1) is None
    assert since(changes, 1, 1) == []


def test_many_versions_without_a_row_are_forgotten_too() -> None:
    changes = noted(*[(version, []) for version in range(1, VERSIONS_MAX + 3)])
    newest = VERSIONS_MAX + 2
    assert since(changes, newest - VERSIONS_MAX, newest) == []
    assert since(changes, newest - VERSIONS_MAX - 1, newest) is None
