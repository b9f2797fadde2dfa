"""Posts are read before they are written anew, whatever comes first: checked against servers that dawdle."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from kvps.runtime.ticket import Ticket
from kvps.torch.distributed import mailbox
from kvps.torch.distributed.host_tensor import Staged, octets
from kvps.torch.distributed.mailbox import LEAST, KeySizes, class_of
from kvps.torch.distributed.ordered_executor import Steps

RANKS = 3


@dataclass
class Servers:
    """Keys with versions; whatever can happen next happens in any order."""

    chance: random.Random
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[Callable[[], bool], Callable[[], None], Ticket]] = field(default_factory=list)
    """What was asked: whether it can be done, what does it, who hears of it."""

    def ask(self, can: Callable[[], bool], do: Callable[[], None]) -> Ticket:
        ticket = Ticket()
        self.asked.append((can, do, ticket))
        return ticket

    def happen(self) -> bool:
        """Do one thing that can be done."""
        able = [item for item in self.asked if item[0]()]
        if not able:
            return False
        number = self.chance.choice(able)
        self.asked.remove(number)
        number[1]()
        number[2].end(None, None)
        return True


class Desk:
    """The board of one rank."""

    def __init__(self, servers: Servers, rank: int) -> None:
        self.servers, self.rank = servers, rank
        self.uses: dict[str, int] = {}

    def next_use(self, name: str) -> tuple[str, int]:
        count = self.uses.get(name, 0)
        self.uses[name] = count + 1
        return f"{name}/{count % 2}", count // 2

    def make_posts(self, keys: Sequence[str], rows: Sequence[torch.Tensor], limit_s: float) -> Ticket:
        def make() -> None:
            for key, row in zip(keys, rows, strict=True):
                assert key not in self.servers.values, "made twice"
                self.servers.values[key], self.servers.versions[key] = row.clone(), 0

        return self.servers.ask(lambda: True, make)

    def expect(self, keys: Sequence[str], sizes: Sequence[int], writer: int, limit_s: float) -> Ticket:
        def look() -> None:
            assert [len(self.servers.values[key]) for key in keys] == list(sizes)

        return self.servers.ask(lambda: all(key in self.servers.values for key in keys), look)

    def write(self, keys: Sequence[str], rows: Sequence[torch.Tensor], limit_s: float) -> Ticket:
        def write() -> None:
            for key, row in zip(keys, rows, strict=True):
                self.servers.values[key] = row.clone()
                self.servers.versions[key] += 1

        return self.servers.ask(lambda: True, write)

    def read(
        self, keys: Sequence[str], sinks: Sequence[torch.Tensor], version: int, limit_s: float
    ) -> Ticket:
        def answer() -> None:
            for key, sink in zip(keys, sinks, strict=True):
                sink.copy_(self.servers.values[key])

        def is_there() -> bool:
            return all(self.servers.versions.get(key, -1) >= version for key in keys)

        return self.servers.ask(is_there, answer)


def play(seed: int, collectives: Callable[[Desk, int], Sequence[Steps]]) -> None:
    """Carry the collectives of all ranks out, those of one rank one behind the other."""
    servers = Servers(random.Random(seed))
    lines = [list(collectives(Desk(servers, rank), rank)) for rank in range(RANKS)]
    waiting: list[Sequence[Ticket]] = [()] * RANKS
    while any(lines):
        moved = servers.happen()
        for rank in servers.chance.sample(range(RANKS), RANKS):
            while lines[rank] and all(item.is_over for item in waiting[rank]):
                moved = True
                try:
                    waiting[rank] = next(lines[rank][0])
                except StopIteration:
                    lines[rank].pop(0)
                    waiting[rank] = ()
        assert moved, "everybody waits"


def row(*numbers: int, count: int = 3) -> torch.Tensor:
    return torch.tensor([*numbers, *[0] * (count - len(numbers))], dtype=torch.int64)


@pytest.mark.parametrize("seed", range(60))
def test_a_swap_brings_what_belongs_to_it(seed: int) -> None:
    def collectives(desk: Desk, rank: int) -> list[Steps]:
        def one(turn: int) -> Steps:
            count = 3 + 10 * (turn % 3 == 2)  # another class now and then
            mine = [(f"p/{rank}/{count}", row(turn, rank, count=count))]
            room = {other: row(count=count) for other in range(RANKS) if other != rank}
            theirs = [(f"p/{other}/{count}", other, room[other]) for other in room]
            yield from mailbox.swap(desk, 1.0, mine, theirs)  # type: ignore[arg-type]
            for other, found in room.items():
                assert found.tolist()[:2] == [turn, other], (turn, rank)

        return [one(turn) for turn in range(12)]

    play(seed, collectives)


@pytest.mark.parametrize("seed", range(60))
def test_a_letter_is_read_by_all_before_the_next_but_one_is_written(seed: int) -> None:
    def collectives(desk: Desk, rank: int) -> list[Steps]:
        def tell(turn: int) -> Steps:
            yield from mailbox.tell(desk, 1.0, [("m", row(turn))], RANKS - 1)  # type: ignore[arg-type]

        def hear(turn: int) -> Steps:
            staged = Staged(row())
            yield from mailbox.hear(desk, 1.0, [("m", 0, staged)])  # type: ignore[arg-type]
            assert staged.row[0] == turn, (turn, rank)

        return [hear(turn) if rank else tell(turn) for turn in range(12)]

    play(seed, collectives)


def test_a_letter_that_fits_its_class_is_read_where_it_belongs() -> None:
    found: list[torch.Tensor] = []

    def collectives(desk: Desk, rank: int) -> list[Steps]:
        if rank == 0:
            told = torch.arange(16.0)
            return [mailbox.tell(desk, 1.0, [("m", told)], 1)]  # type: ignore[arg-type]
        if rank == 1:
            staged = Staged(torch.zeros(16))
            assert octets(staged.row).nbytes == 64
            found.append(staged.row)
            return [mailbox.hear(desk, 1.0, [("m", 0, staged)])]  # type: ignore[arg-type]
        return [mailbox.tell(desk, 1.0, [("alone", row(1))], 0)]  # type: ignore[arg-type]

    play(0, collectives)
    assert found[0].tolist() == list(range(16))


# --- of which size keys are -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 71, 72, 73, 128, 129, 1000, 10**6 + 1, 2**40])
def test_a_class_holds_what_it_is_for_with_little_padding(count: int) -> None:
    size = class_of(count)
    assert size >= count
    assert size == LEAST or size <= count * 9 / 8
    assert class_of(size) == size


def test_eight_classes_lie_between_powers_of_two() -> None:
    assert len({class_of(count) for count in range(1025, 2049)}) == 8
    sizes = [class_of(count) for count in range(5000)]
    assert sizes == sorted(sizes)


def test_the_first_shapes_fit_exactly_and_later_ones_share_keys() -> None:
    sizes = KeySizes(exact_max=2)
    assert [sizes.of("f", (count,), count) for count in (1001, 7, 1001, 1002, 1003)] == [
        ("f/1001", 1001),
        ("f/7", 7),
        ("f/1001", 1001),
        ("f/~1024", 1024),
        ("f/~1024", 1024),
    ]
    assert sizes.of("d", (7,), 7) == ("d/7", 7), "another kind has keys of its own"
    assert sizes.of("f", (7,), 7) == ("f/7", 7)
    assert sizes.of("f", (8,), 8) == (f"f/~{LEAST}", LEAST)


def test_shapes_of_one_size_have_keys_of_their_own() -> None:
    sizes = KeySizes()
    shapes = ((), (1,), (1, 1), (4, 5), (5, 4), (20,))
    assert len({sizes.of("f", shape, 20) for shape in shapes}) == len(shapes)


def test_ranks_that_make_the_same_calls_choose_the_same_keys() -> None:
    calls = [(kind, count * 37 % 500) for count in range(200) for kind in ("int8", "float32")]
    key_sizes, other = KeySizes(), KeySizes()
    chosen = [[sizes.of(kind, (n,), n) for kind, n in calls] for sizes in (key_sizes, other)]
    assert chosen[0] == chosen[1]
