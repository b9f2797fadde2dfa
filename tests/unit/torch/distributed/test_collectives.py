"""Which keys collectives use, and on which tracks they go, without any server."""

import re

import pytest
import torch

from kvps.errors import ConfigError, WorkerLost
from kvps.torch.distributed import collectives
from kvps.torch.distributed.collectives import Collectives
from kvps.torch.distributed.host_tensor import Staged


class Desk:
    """What collectives see of a board before any step is made."""

    def __init__(self, rank: int, workers: int = 3) -> None:
        self.rank, self.workers = rank, workers
        self.posts = 0
        self.gone: list[int] = []

    def left(self) -> list[int]:
        return self.gone


def group(rank: int, *ranks: int) -> Collectives:
    return Collectives(Desk(rank), "g", ranks or (0, 1, 2), 60.0)  # type: ignore[arg-type]


def staged(count: int = 4, dtype: torch.dtype = torch.float32) -> Staged:
    return Staged(torch.zeros(count, dtype=dtype))


def reduced(collectives: Collectives, given: Staged, op: str) -> str:
    return collectives.reduce("all_reduce", given, op, None)[0]


def test_a_sum_of_all_ranks_is_a_round_of_its_own_key() -> None:
    collectives = group(0)
    assert reduced(collectives, staged(), "SUM") == "g/all_reduce.SUM/float32/4"
    assert reduced(collectives, staged(), "AVG") == "g/all_reduce.AVG/float32/4"
    assert reduced(collectives, staged(5), "SUM") == "g/all_reduce.SUM/float32/5"
    half = staged(dtype=torch.float16)
    assert reduced(collectives, half, "SUM") == "g/all_reduce.SUM/float16/4"
    assert collectives._sum_key("all_reduce.AVG", "AVG", half)[1].dtype == "float32", "no overflow"


def test_calls_that_differ_use_different_keys() -> None:
    collectives = group(0)
    square = Staged(torch.zeros(2, 2))
    names = [
        reduced(collectives, square, "SUM"),
        reduced(collectives, staged(), "SUM"),
        collectives.barrier()[0],
    ]
    names += [collectives.reduce("reduce", staged(), "SUM", dst)[0] for dst in (0, 1)]
    names += [collectives._post(f"broadcast/{src}", given) for src in (0, 1) for given in (square, staged())]
    assert len(set(names)) == len(names)


def test_other_reductions_and_subgroups_are_swaps() -> None:
    assert reduced(group(0), staged(), "MAX") == "g/all"
    assert reduced(group(0, 0, 2), staged(), "SUM") == "g/all"
    assert reduced(group(0, 2, 0, 1), staged(), "SUM") == "g/all_reduce.SUM/float32/4"
    flags = staged(dtype=torch.bool)
    assert reduced(group(0), flags, "SUM") == "g/all"


@pytest.mark.parametrize("src", [0, 1, 2])
def test_both_ends_of_a_letter_use_one_track(src: int) -> None:
    for what in (
        lambda item: item.broadcast(staged(), src),
        lambda item: item.scatter(staged(), [staged()] * 3, src),
        lambda item: item.gather([staged()] * 3, staged(), src),
        lambda item: item.reduce("reduce", staged(), "MAX", src),
    ):
        assert len({what(group(rank))[0] for rank in range(3)}) == 1
    sender, receiver = group(src), group((src + 1) % 3)
    sent = sender.send(staged(), (src + 1) % 3, 7)[0]
    assert sent == receiver.recv(staged(), src, 7)[0] == f"g/letters/{src}>{(src + 1) % 3}/7"


def test_ranks_of_a_group_are_not_those_of_the_job() -> None:
    collectives = group(1, 2, 1)
    assert collectives.rank == 1
    assert collectives._others == [2]


def test_a_member_that_has_left_is_missed_by_what_needs_all() -> None:
    collectives = group(0)
    collectives._board.gone = [1]  # type: ignore[attr-defined]
    for call in (
        lambda: collectives.reduce("all_reduce", staged(), "SUM", None),
        lambda: collectives.all_gather([staged()] * 3, staged()),
        lambda: collectives.all_to_all([staged()] * 3, [staged()] * 3),
        lambda: collectives.reduce_scatter(staged(), [staged()] * 3, "SUM"),
        lambda: collectives.barrier(),
    ):
        says = "worker 1 has left the job, and the group 'g' needs it"
        with pytest.raises(WorkerLost, match=re.escape(says)):
            call()
    collectives.broadcast(staged(), 1)  # it may have been said before
    collectives.reduce("reduce", staged(), "MAX", 0)


def test_tags_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "LETTERS_MAX", 10)
    item = group(0)
    item.send(staged(), 1, 0)
    item._board.posts = 11  # type: ignore[misc]
    with pytest.raises(ConfigError, match="used 11 combinations of ranks, tags and sizes"):
        item.send(staged(), 1, 1)
