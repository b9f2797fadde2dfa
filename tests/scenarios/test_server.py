"""The server's transcripts: ``server-*.txt`` are plays, and this file performs them.

A transcript is a list of commands, each with what comes of it: every key with its version, the
ranks that its open rounds miss, and its values; then what the server says::

    # what a reader should know
    command argument …
    ----
    a 1: 3 3
    -> w0: ACK seq=5 version=1

``pytest --rewrite`` writes what the server does now; commit the diff only if you can say why each
line of it is right. ``KEYS`` is one key or several joined by commas; a worker is ``w0``. Commands::

    start WORKERS                               open MODE [option=…]
    init KEY VALUE …                            broadcast CALL KEY VALUE …
    optimizer NAME [parameter=…]                view w1=STATE …
    push WORKER KEYS NUMBER VALUE … [pull]      pull WORKER KEYS [after=N] [least=N]
    replace WORKER                              probe WORKER SEQ …
    old WORKER KEYS NUMBER VALUE …              (a push by the life that was replaced)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvps.protocol.membership import Error, Probe, Probed
from kvps.protocol.values import Ack, Pulled, Push, Run
from tests.scenarios.plays import check, performed, plays, words_of
from tests.support.server_harness import Said, ServerStage, as_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PLAYS = plays("server")


@pytest.mark.parametrize("path", PLAYS, ids=[path.stem for path in PLAYS])
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, perform, request)


def test_transcripts_exist() -> None:
    assert len(PLAYS) >= 4


def perform(text: str) -> str:
    """Return the transcript with the outputs of today."""
    stage: list[ServerStage] = []

    def show(commands: Sequence[str]) -> list[str]:
        said = [line for command in commands for line in run(command, stage)]
        return [*state_of(stage[0]), *said]

    return performed(text, show)


def run(command: str, stage: list[ServerStage]) -> list[str]:
    words, options = words_of(command)
    if words[0] == "start":
        stage[:] = [ServerStage(int(words[1]))]
        return []
    return [line_of(each) for each in perform_one(stage[0], words, options)]


def perform_one(stage: ServerStage, words: list[str], options: dict[str, object]) -> list[Said]:
    match words:
        case ["open", mode]:
            stage.open(mode, **options)
        case ["init", key, *values]:
            stage.init(key, [float(value) for value in values])
        case ["broadcast", call, key, *values]:
            row = as_row([float(value) for value in values])
            return stage.declare(key, row, call=int(call)) + stage.load(key, row, call=int(call))
        case ["optimizer", name]:
            stage.optimizer(name, **options)
        case ["view"]:
            return stage.show(**options)  # type: ignore[arg-type]
        case ["push", who, keys, number, *values]:
            numbers = [float(value) for value in values if value != "pull"]
            return stage.push(rank_of(who), keys.split(","), numbers, int(number), pull="pull" in values)
        case ["old", who, keys, number, *values]:
            rank = rank_of(who)
            (place,) = stage.places(keys)
            runs = (Run(place.start, place.size, int(number)),)
            message = Push(place.chunk, 1, (rank,), 1.0, False, runs)
            row = as_row([float(value) for value in values])
            life = stage.seats[rank].incarnation - 100
            return stage.say(rank, message, row, incarnation=life, route=b"w%d (old)" % rank)
        case ["pull", who, keys]:
            return stage.pull(rank_of(who), keys.split(","), **options)  # type: ignore[arg-type]
        case ["replace", who]:
            return stage.replace(rank_of(who))
        case ["probe", who, *seqs]:
            return stage.say(rank_of(who), Probe(tuple(map(int, seqs))), seq=0)
        case _:
            raise AssertionError(f"no command {' '.join(words)!r}")
    return []


def rank_of(who: str) -> int:
    return int(who.removeprefix("w"))


def state_of(server: ServerStage) -> Iterator[str]:
    required = frozenset(range(server.workers))
    for key in server.pieces:
        span = server.span(key)
        values = " ".join(f"{value:g}" for value in server.values(key))
        # Of each open round, who has been counted in it.
        rounds = "".join(
            f" [{each.number}: {', '.join(f'w{rank}' for rank in sorted(each.ranks & required))}]"
            for each in span.rounds
        )
        yield f"{key} at {span.version}: {values}{rounds}"


def line_of(said: Said) -> str:
    assert isinstance(said.to, bytes)
    return f"-> {said.to.decode()}: {' '.join(spoken(said))}"


def spoken(said: Said) -> Iterator[str]:
    message = said.message
    yield type(message).__name__.upper()
    match message:
        case Ack():
            yield from (f"seq={receipt.seq} version={receipt.version}" for receipt in message.receipts)
        case Pulled():
            yield f"seq={message.seq}"
            yield from (f"{run.size}@v{run.version} owed={run.owed}" for run in message.runs)
            yield f"values {' '.join(f'{value:g}' for value in said.values())}"
        case Probed():
            yield f"missing={list(message.missing)}"
            yield from (f"{seq} waits: {reason}" for seq, reason in message.pending)
        case Error():
            yield f"{message.code}: {message.text}"
        case _:
            for name in type(message).__dataclass_fields__:  # type: ignore[attr-defined]
                yield f"{name}={getattr(message, name)!r}"
