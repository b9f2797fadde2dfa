"""How values are moved by what was written of them, and which steps are remembered."""

import pytest
import torch

from kvps.compression.codecs import decode
from kvps.compression.spec import BIT1, BIT2, FP16, RANDOMK, CodecSpec
from kvps.core.server.chunks.history import (
    LEAST_COUNT,
    VERSION_COUNT,
    ChangeLog,
    CompressedHistory,
    Step,
    code_of,
)

TWO = CodecSpec(BIT2, 0.5)


class Piece:
    """One piece of 8 elements, from 4 on, and what is known of its way back."""

    def __init__(self) -> None:
        self.values = torch.zeros(16)
        self.back = CompressedHistory(16)
        self.version = 0

    def move(self, by: list[float], code: CodecSpec | None = TWO, *, adds: bool = True) -> list[float]:
        """Let the values lack ``by`` more, and publish them; return them."""
        self.version += 1
        self.back.own_residual()[4:12] += torch.tensor(by)
        self.back.publish(self.values, 4, 12, self.version, code, adds=adds)
        self.back.check()
        found: list[float] = self.values[4:12].tolist()
        return found

    def lead(self, held: int) -> list[Step] | None:
        return self.back.lead(4, 8, self.version, held)

    def rest(self) -> list[float]:
        found: list[float] = self.back.residual[4:12].tolist()
        return found


def eight(first: float, *others: float) -> list[float]:
    return [first, *others] + [0.0] * (7 - len(others))


def test_a_sum_becomes_the_values() -> None:
    piece = Piece()
    assert piece.move(eight(0.75), adds=False) == eight(0.5)
    assert piece.move(eight(0.0), adds=False) == eight(0.0)
    assert piece.move(eight(0.25), adds=False) == eight(0.5)


def test_steps_lead_from_a_version_to_the_newest() -> None:
    piece = Piece()
    copies = {0: torch.zeros(8)}
    for step in range(5):
        piece.move(eight(0.6 * step, -0.4))
        copies[step + 1] = piece.values[4:12].clone()
    for version, copy in copies.items():
        found = piece.lead(version)
        assert found is not None
        assert len(found) == 5 - version
        for code, octets in found:
            copy += decode(code, octets, torch.empty(8))
        assert torch.equal(copy, piece.values[4:12])
    assert piece.lead(6) is None
    assert piece.lead(-1) is None


def test_an_image_keeps_the_rests_it_saw() -> None:
    piece = Piece()
    piece.move(eight(0.75))
    release = piece.back.keep()
    seen = piece.back.residual
    piece.move(eight(0.1))
    assert seen[4] == 0.25
    assert piece.back.residual is not seen
    release()
    now = piece.back.residual
    piece.move(eight(0.1))
    assert piece.back.residual is now


@pytest.mark.spec("R156")
def test_how_a_step_is_written() -> None:
    drawn, half = CodecSpec(RANDOMK, 0.1, 1.0, 5), CodecSpec(FP16)
    assert code_of(None, 3, 0.1) is None
    assert code_of(TWO, 3, None) == TWO
    assert code_of(TWO, 3, 0.1) == TWO._replace(scale=0.1)
    assert code_of(CodecSpec(BIT1), 3, -0.1) == CodecSpec(BIT1, scale=0.1)
    assert code_of(TWO, 3, 0.0) is None
    assert code_of(half, 3, 0.0) == half
    assert code_of(drawn, 3, 0.1) == code_of(drawn, 3, None) == drawn._replace(seed=8)


# --- which rows of a piece changed, and when that is no longer known ------------------------------


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
