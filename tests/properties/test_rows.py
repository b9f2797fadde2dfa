"""Any mix of rows and whole tables, in any order, is what a dense reference makes of it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.protocol.values import PulledRows, PullRows, Push, PushRows, Run
from kvps.tensors import from_frame
from tests.support.server_harness import ServerStage, acked, heard
from tests.support.tiers import examples

WIDTH = 2


def stage(workers: int, count: int, optimizer: bool, **options: object) -> ServerStage:
    """A server with a table of zeros; its optimizer makes ``-g`` of what a round touches."""
    server = ServerStage(workers=workers)
    server.open(chunk_bytes=64 << 10, **options)
    if optimizer:
        server.optimizer("sgd", lr=1.0, weight_decay=1.0)
    server.init("t", torch.zeros(count * WIDTH), shape=(count, WIDTH))
    return server


def push_rows(server: ServerStage, rank: int, number: int, ids: list[int], lent: bool) -> bool:
    message = PushRows("kv", "t", 1, (rank,), number, WIDTH, len(ids))
    numbers = torch.tensor(ids, dtype=torch.int64)
    rows = value(rank, number, numbers).view(-1)
    return bool(acked(server.say(rank, message, *((numbers, rows) if ids else ()), lent=lent)))


def push_whole(server: ServerStage, rank: int, number: int, count: int) -> bool:
    values = value(rank, number, torch.arange(count)).view(-1)
    taken, at = [], 0
    for piece in server.pieces["t"]:
        run = (Run(piece.start, piece.size, number),)
        part = values[at : at + piece.size]
        at += piece.size
        taken += acked(server.say(rank, Push(piece.chunk, 1, (rank,), 1.0, False, run), part))
    return len(taken) == len(server.pieces["t"])


def value(rank: int, number: int, ids: torch.Tensor) -> torch.Tensor:
    """What a rank pushes for these rows: whole numbers, so that no order of sums matters."""
    return ((ids % 11 + 3 * rank + number) % 7).float()[:, None].expand(-1, WIDTH).contiguous()


def after(
    before: torch.Tensor, pushes: dict[int, list[int] | None], number: int, optimizer: bool
) -> torch.Tensor:
    """What a round makes of a table; a push of None is one of all rows."""
    total, touched = torch.zeros_like(before), torch.zeros(len(before), dtype=torch.bool)
    for rank, ids in pushes.items():
        named = torch.arange(len(before)) if ids is None else torch.tensor(ids).long()
        total[named] += value(rank, number, named)
        touched[named] = True
    return torch.where(touched[:, None], -total, before) if optimizer else total


@given(st.data())
@examples(40)
def test_rounds_are_those_of_a_dense_reference(data: st.DataObject) -> None:
    workers, optimizer = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    count = data.draw(st.sampled_from([1, 7, 20_000]))  # the last lies in several chunks
    rounds = data.draw(st.integers(1, 4))
    server = stage(
        workers,
        count,
        optimizer,
        deterministic=data.draw(st.booleans()),
        on_nonfinite=data.draw(st.sampled_from(["apply", "skip"])),
    )
    some = st.lists(st.integers(0, count - 1), max_size=6, unique=True).map(sorted)
    pushes = [
        {rank: data.draw(st.one_of(st.none(), some, some)) for rank in range(workers)} for _ in range(rounds)
    ]
    tables = [torch.zeros(count, WIDTH)]
    for number, of_round in enumerate(pushes):
        tables.append(after(tables[-1], of_round, number, optimizer))
    owed = dict.fromkeys(range(workers), 0)
    while owed:
        rank = data.draw(st.sampled_from(sorted(owed)))
        number = owed[rank] + data.draw(st.sampled_from([0, 0, 0, 1, -1]))  # also early, and again
        if not 0 <= number < rounds:
            continue
        ids = pushes[number][rank]
        if ids is None:
            is_taken = push_whole(server, rank, number, count)
        else:
            is_taken = push_rows(server, rank, number, ids, data.draw(st.booleans()))
        assert is_taken is (number <= owed[rank])
        if number == owed[rank]:
            owed[rank] += 1
            if owed[rank] == rounds:
                del owed[rank]
        version = server.span("t").version
        assert version == min(owed.get(rank, rounds) for rank in range(workers))
        found = torch.tensor(server.values("t")).view(count, WIDTH)
        assert torch.equal(found, tables[version])
    wanted = torch.tensor(data.draw(some), dtype=torch.int64)
    said = server.say(0, PullRows("kv", "t", rounds, 0, len(wanted)), *([wanted] if len(wanted) else []))
    assert len(heard(said, PulledRows)) == 1
    if len(wanted):
        rows = from_frame(said[0].payload[0], "float32").view(-1, WIDTH)
        assert torch.equal(rows, tables[-1][wanted])
