"""A server that is lent gradients, in any pieces, beside one that gets them in frames.

Both hear the same pushes in the same order: whole rounds or parts of them, of several ranks, some
ahead of others. Weights and state must be equal bit by bit, and what was lent must be as it was.
"""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.core.server.chunks.rounds import LENT_MAX
from kvps.core.server.rules import book
from kvps.dtypes import BY_NAME
from kvps.protocol.values import Push, Run
from kvps.tensors import TORCH
from tests.support.server_harness import ServerStage
from tests.support.tiers import examples

SIZES = {"a": 5, "b": 1, "c": 12, "d": 3, "e": 8}
ROUNDS = 3
BLOCK = 8
"""Elements that are updated at once, so few that their edges and those of pieces mix."""

OPTIMIZERS: dict[str, dict[str, float]] = {
    "": {},
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"lr": 0.1},
    "lars": {"lr": 0.1},
}


def stage(mode: str, ranks: int, dtype: str, rule: str, deterministic: bool) -> ServerStage:
    server = ServerStage(ranks)
    server.open(mode, deterministic=deterministic)
    for index, (key, size) in enumerate(SIZES.items()):
        server.init(key, torch.linspace(-index, size, size).to(TORCH[dtype]))
    if rule:
        server.optimizer(rule, **OPTIMIZERS[rule])
    return server


def bits(server: ServerStage) -> list[bytes]:
    """All that an update changes."""
    chunk = server.chunk()
    rows = [chunk.buffer.tensor, *(chunk.state or {}).values()]
    return [row[: chunk.used].contiguous().view(torch.uint8).numpy().tobytes() for row in rows]


@st.composite
def groups(draw: st.DrawFn) -> list[list[str]]:
    """All keys, in the messages in which one rank pushes them."""
    names = draw(st.permutations(sorted(SIZES)))
    cuts = sorted(draw(st.sets(st.integers(1, len(names) - 1), max_size=2)))
    return [sorted(names[start:stop]) for start, stop in zip([0, *cuts], [*cuts, 5], strict=True)]


def joined(runs: list[Run]) -> tuple[Run, ...]:
    """Join neighbours, as a plan does: then they share a span, until a rank pushes one alone."""
    out = runs[:1]
    for run in runs[1:]:
        last = out[-1]
        if last.start + last.size == run.start:
            out[-1] = last._replace(size=last.size + run.size)
        else:
            out.append(run)
    return tuple(out)


@pytest.mark.spec("R50", "R80")
@given(data=st.data())
@examples(60)
def test_lent_gradients_do_what_frames_do_and_are_only_read(data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    kinds = {"float", "half"} | ({"int"} if not rule else set())
    dtype = data.draw(st.sampled_from([n for n, item in BY_NAME.items() if item.kind in kinds]))
    mode = data.draw(st.sampled_from(["sync", "async"] if rule else ["sync"]))
    deterministic = data.draw(st.booleans())
    ranks = data.draw(st.sampled_from([1, 2, 3, LENT_MAX + 3]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    lent: list[tuple[torch.Tensor, torch.Tensor]] = []
    with mock.patch.object(book, "BLOCK_COUNT", BLOCK):
        frames = stage(mode, ranks, dtype, rule, deterministic)
        loans = stage(mode, ranks, dtype, rule, deterministic)
        todo = {
            rank: [(n, keys) for n in range(ROUNDS) for keys in data.draw(groups())] for rank in range(ranks)
        }
        while any(todo.values()):
            ready = [rank for rank, left in todo.items() if left]
            if not deterministic:  # then sums are taken as pushes come: let them come in order
                ready = [
                    rank
                    for rank in ready
                    if not any(todo[low] and todo[low][0][0] <= todo[rank][0][0] for low in range(rank))
                ]
            rank = data.draw(st.sampled_from(ready))
            number, keys = todo[rank].pop(0)
            runs = joined([Run(*frames.pieces[key][0][1:], number) for key in keys])
            row = (torch.randn(sum(run.size for run in runs), generator=generator) * 50).to(TORCH[dtype])
            message = Push(1, BY_NAME[dtype].id, (rank,), 1.0, False, runs)
            frames.say(rank, message, row)
            if data.draw(st.booleans()):
                cuts = data.draw(st.sets(st.integers(0, len(row)), max_size=4))
                pieces = [item.clone() for item in torch.tensor_split(row, sorted(cuts)) if len(item)]
                loans.say(rank, message, *pieces, lent=True)
                lent += [(piece, piece.clone()) for piece in pieces]
            else:
                loans.say(rank, message, row)
            assert bits(loans) == bits(frames)
    for key in SIZES:
        assert loans.span(key).version == (ROUNDS if mode == "sync" else ROUNDS * ranks)
    assert all(torch.equal(now.view(torch.uint8), before.view(torch.uint8)) for now, before in lent)
