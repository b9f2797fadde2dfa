"""The scheduler's transcripts: ``scheduler-*.txt`` are plays, and this file performs them.

A transcript is a list of commands, each with what comes of it::

    # what a reader should know
    command argument …
    ----
    phase: reason
    -> route: MESSAGE field=value …

``pytest --rewrite`` writes what the scheduler does now; commit the diff only if you can say why
each line of it is right. Commands::

    start WORKERS SERVERS [setting=value …]     hello ROUTE [role=…] [rank=…] [guardian] [host=…]
    attach ROUTE to ROUTE [pid=…]               beat ROUTE
    leave ROUTE [code=N] [final]                barrier ROUTE NUMBER
    drop ROUTE                                  wait SECONDS [beating ROUTE …]
    restart                                     stop
    stand SECONDS                               alive ROUTE [guardian]
    say ROUTE MESSAGE [field=value …]

Where a server has no place for checkpoints it says so once (``say s0 Shelf …``); until it does, it is
asked again every second.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvps.core.effects import Effect, Exit, Note, Save, Send
from kvps.protocol.envelope import MESSAGES, Message, Node, Role
from kvps.protocol.membership import Beat, Error, Member, View, ViewChanges, Welcome
from tests.scenarios.plays import check, performed, plays, words_of
from tests.support.scheduler_harness import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PLAYS = plays("scheduler")
BY_NAME = {cls.__name__: cls for cls in MESSAGES.values()}


@pytest.mark.parametrize("path", PLAYS, ids=[path.stem for path in PLAYS])
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, perform, request)


def test_transcripts_exist() -> None:
    assert len(PLAYS) >= 5


def perform(text: str) -> str:
    """Return the transcript with the outputs of today."""
    stage: list[Stage] = []

    def show_all(commands: Sequence[str]) -> list[str]:
        effects = [effect for command in commands for effect in run(command, stage)]
        return [f"{stage[0].phase}: {stage[0].reason}", *map(show, effects)]

    return performed(text, show_all)


def run(command: str, stage: list[Stage]) -> list[Effect]:
    words, options = words_of(command)
    match words:
        case ["start", workers, servers]:
            stage[:] = [Stage(int(workers), int(servers), **options)]
            return []
        case ["hello", route, *flags]:
            return stage[0].hello(route, guardian="guardian" in flags, **options)  # type: ignore[arg-type]
        case ["attach", route, "to", other]:
            return stage[0].attach(route, other, **options)
        case ["beat", route]:
            return stage[0].beat(route)
        case ["alive", route, *flags]:
            return stage[0].alive(route, "guardian" in flags)
        case ["leave", route, *flags]:
            code = options.get("code", 0)
            assert isinstance(code, int)
            return stage[0].leave(route, not code, code, "final" not in flags)
        case ["barrier", route, number]:
            return stage[0].barrier(route, int(number), seq=int(number) + 1)
        case ["drop", route]:
            return stage[0].drop(route)
        case ["wait", seconds, "beating", *routes]:
            return stage[0].wait(float(seconds), routes)
        case ["wait", seconds]:
            return stage[0].wait(float(seconds))
        case ["stand", seconds]:
            return stage[0].stand(float(seconds))
        case ["restart"]:
            return stage[0].restart()
        case ["stop"]:
            return stage[0].stop()
        case ["say", route, name]:
            seq = options.pop("seq", 0)
            assert isinstance(seq, int)
            return stage[0].say(route, BY_NAME[name](**options), seq)
        case _:
            raise AssertionError(f"no command {command!r}")


def show(effect: Effect) -> str:
    match effect:
        case Send(to, packet):
            return f"-> {to}: {' '.join(spoken(packet.message))}"
        case Note(level, text):
            return f"{level}: {text}"
        case Save(state):
            return "saved" if state else "saved: nothing to go on from"
        case Exit(code, reason):
            return f"exit {code}: {reason}"
        case _:
            raise AssertionError(f"a scheduler does not ask for {effect}")


def spoken(message: Message) -> Iterator[str]:
    yield type(message).__name__.upper()
    match message:
        case View():
            yield f"{message.number} {message.phase}:"
            yield ", ".join(member_of(member) for member in message.members)
            if message.epoch or message.cut:
                yield f"epoch={message.epoch} since={message.since} cut={message.cut}"
        case ViewChanges():
            yield f"{message.number} after {message.base} {message.phase}:"
            yield ", ".join(member_of(member) for member in message.members)
        case Welcome():
            yield f"rank={message.rank} incarnation={message.incarnation}"
            yield f"local={message.local_rank}/{message.local_size} master={message.master!r}"
        case Beat():
            yield f"progress={message.progress} reason={message.reason!r}"
        case Error():
            yield f"{message.code}: {message.text}"
        case _:
            for name in type(message).__dataclass_fields__:  # type: ignore[attr-defined]
                yield f"{name}={getattr(message, name)!r}"


def member_of(member: Member) -> str:
    shown = f"{Node(Role(member.role), member.rank)} {member.state}"
    shown += f" #{member.incarnation}" if member.incarnation else ""
    return shown + (f" ({member.reason}; {member.lost_for_s:g} s ago)" if member.state == "lost" else "")
