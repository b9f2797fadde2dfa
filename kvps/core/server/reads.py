"""Reads of values: when a pull can be answered, and its payload.

A pull waits at the first element that lacks something. An element that once had what the pull
needs is not looked at again: so however many keys one pull names, and however often it is woken,
each is looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from kvps.core.liveness import ranks_in_words
from kvps.core.quorum import Quorum
from kvps.core.server.chunks.rounds import Span
from kvps.core.server.chunks.slab import Buffer, Chunk
from kvps.core.server.sessions import PendingRead
from kvps.core.server.store import ServerStore
from kvps.dtypes import BY_NAME
from kvps.errors import ProtocolError
from kvps.protocol.values import Ask, Dropped, Run, Stand, Steps


def holds(space: ServerStore, chunk: Chunk, reading: PendingRead, quorum: Quorum) -> bool:
    """Whether ``reading`` can be answered; if not, ``reading.at`` says where it must wait.

    Raises:
        ProtocolError: if a key was replaced while it waited.
    """
    if reading.call is not None:
        return _is_loaded(space, chunk, reading, reading.call)
    for index in range(reading.index, len(reading.asks)):
        ask = reading.asks[index]
        reading.index, reading.at = index, max(reading.at, ask.start)
        for span in chunk.spans_in(reading.at, ask.start + ask.size):
            reading.at = max(reading.at, span.start)
            if lack(space, span, ask, reading, quorum):
                return False
    chunk.validate(reading.asks)
    return True


def _is_loaded(space: ServerStore, chunk: Chunk, reading: PendingRead, call: int) -> bool:
    """Whether the value of ``call`` has reached all that ``reading`` asks for.

    All is looked at each time: the value may have been begun anew, by another life of its creator.
    """
    chunk.validate(reading.asks, are_whole=False)
    for index, ask in enumerate(reading.asks):
        at = space.lacks(chunk, ask.start, ask.start + ask.size, call)
        if at is not None:
            reading.index, reading.at = index, at
            return False
    return True


def why(
    space: ServerStore,
    chunk: Chunk,
    reading: PendingRead,
    quorum: Quorum,
    describe: Callable[[int], str] = lambda rank: "",
) -> str:
    """Say what ``reading`` waits for, for the one who waits; ``describe`` says how a rank stands."""
    span = next(chunk.spans_in(reading.at, reading.at + 1))
    key, _, _ = next(chunk.pieces(reading.at, reading.at + 1))
    if reading.call is not None:
        creator = space.shards[key].loading[1][0]
        return f"key {key[:64]!r}: {ranks_in_words([creator], describe)} has not given all of its value"
    ask = reading.asks[reading.index]
    missing = lack(space, span, ask, reading, quorum, describe)
    return f"key {key[:64]!r}: {missing}"


def lack(
    space: ServerStore,
    span: Span,
    ask: Ask,
    reading: PendingRead,
    quorum: Quorum,
    describe: Callable[[int], str] = lambda rank: "",
) -> str:
    """Say what ``span`` lacks for an answer; nothing if it lacks nothing."""
    rank = reading.session.rank
    if space.ordered:
        if span.version >= max(ask.after, ask.least):
            return ""
        if span.due:
            what = "the norms" if space.drops is None else "word, if it is finite,"
            return f"round {span.version} waits for {what} of other servers"
        missing = span.missing(quorum.required(space.opened.on_worker_lost))
        ranks = ranks_in_words(missing, describe) if missing else "rank none that is left"
        return f"round {span.version} waits for a push of {ranks}"
    if span.version < ask.least:
        return f"it is at version {span.version}, asked for is {ask.least}"
    if span.applied(rank) < ask.after:
        return f"{span.applied(rank)} of {ask.after} pushes of rank {rank} are applied"
    # Only values are stale. Who asks which pushes it owes may be the one for whose push others wait.
    is_bounded = space.opened.mode == "ssp" and reading.values
    ahead = span.ahead(rank, quorum.live) if is_bounded else 0
    if ahead > space.opened.staleness:
        slowest = ranks_in_words([span.slowest(quorum.live)], describe)
        return (
            f"rank {rank} is {ahead} pushes ahead of {slowest}, "
            f"staleness allows {space.opened.staleness}"
        )
    return ""


def dropped(space: ServerStore, chunk: Chunk, reading: PendingRead) -> tuple[Dropped, ...]:
    """Return which updates of the asked elements were not made, for one who makes errors of them."""
    if space.drops is None or not reading.values:
        return ()
    rank = None if space.ordered else reading.session.rank
    return space.drops.among(chunk.number, rank, reading.asks)


def read(
    space: ServerStore, chunk: Chunk, reading: PendingRead
) -> tuple[tuple[Stand, ...], torch.Tensor | None, Buffer | None]:
    """Return where the asked elements stand, their values, and the buffer to be held.

    The buffer is None where the values are a copy.
    """
    rank = reading.session.rank
    stands: list[Stand] = []
    for ask in reading.asks:
        stop = ask.start + ask.size
        for span in chunk.spans_in(ask.start, stop):
            begin, end = max(span.start, ask.start), min(span.stop, stop)
            owed = span.owed(rank, space.ordered)
            stands.append(Stand(begin, end - begin, span.version, owed))
    if not reading.values:
        return tuple(stands), None, None
    weight, updater = chunk.buffer.tensor, space.updater
    if updater is not None and updater.tracks_pulls and BY_NAME[chunk.dtype].kind != "int":
        state = space.state_of(chunk)
        for ask in reading.asks:
            updater.pulled(weight, state, ask.start, ask.start + ask.size, rank)
    if all(one.start + one.size == other.start for one, other in pairwise(reading.asks)):
        first, last = reading.asks[0], reading.asks[-1]
        return tuple(stands), weight[first.start : last.start + last.size], chunk.buffer.hold()
    parts = [weight[ask.start : ask.start + ask.size] for ask in reading.asks]
    return tuple(stands), torch.cat(parts), None


def check_held(held: Sequence[int], runs: Sequence[Ask] | Sequence[Run]) -> None:
    """Check that a request says of all of its runs, or of none, which version its sender has.

    Raises:
        ProtocolError: if it does not.
    """
    if held and len(held) != len(runs):
        raise ProtocolError(f"{len(runs)} runs, and versions held of {len(held)} of them")


def lead(
    chunk: Chunk, reading: PendingRead, stands: tuple[Stand, ...]
) -> tuple[tuple[Steps, ...], torch.Tensor]:
    """Return how the asked values are written for one who has some versions of them, and the bytes.

    As they are, where there are no steps from those, or a span ends within what was asked for.
    Nothing is returned if that is so of all.
    """
    steps: list[Steps] = []
    octets: list[torch.Tensor] = []
    held = dict(zip([(one.start, one.size) for one in reading.asks], reading.held, strict=True))
    for stand in stands:
        found = None
        if chunk.back is not None and (stand.start, stand.size) in held:
            version = held[stand.start, stand.size]
            found = chunk.back.lead(stand.start, stand.size, stand.version, version)
        if found is None:
            weight = chunk.buffer.tensor[stand.start : stand.start + stand.size]
            steps.append(Steps(True, ()))
            octets.append(weight.view(torch.uint8))
        else:
            steps.append(Steps(False, tuple([code for code, _ in found])))
            octets += [one for _, one in found]
    if all(one.whole for one in steps):
        return (), torch.empty(0)
    return tuple(steps), torch.cat([*octets, torch.empty(0, dtype=torch.uint8)])
