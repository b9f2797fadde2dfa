"""No packet raises in a core what is no error of kvps, whoever it says it is from."""

import dataclasses
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvps import protocol as m
from kvps.core.effects import Send
from kvps.core.scheduler.scheduler import Scheduler
from kvps.core.scheduler.seat import Settings
from kvps.errors import ProtocolError
from kvps.protocol import wire
from kvps.protocol.envelope import MESSAGES, Envelope, Message, Packet, Role
from tests.properties.test_wire import messages_of
from tests.support import tiers
from tests.support.effects import taken
from tests.support.server_harness import JOB, ServerStage

PIECES = st.sampled_from([(0, 4), (4, 4), (0, 8), (8, 4)])
"""Where keys lie on the server, and how long they are."""
INTEGERS = st.sampled_from([0, 1, 2, 3, 4, 8, 10, 11, 12, 2**31, 2**53, 2**62, 2**63 - 1])
FLOATS = st.sampled_from([0.0, -1.0, 1.0, 0.5, 3.0, 65536.0, 1e39, 1e300, -1e300, 1.7e308, 1e-300])
TEXTS = st.sampled_from(["", "x", "a\0b", "\x1b[2J", "sync", "tcp://h:1", "tcp://h", "y" * 300])
OPTIMIZERS = ["sgd", "adam", "nadam", "radam", "lars", "lamb", "ftrl", "signum", "dcasgd", "test"]
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "store": st.sampled_from(["kv", "other"]),
    "key": st.sampled_from(["a", "b", "half", "rows", "new"]),
    "keys": st.sampled_from([("a",), ("b", "rows"), ("none",)]),
    "chunk": st.integers(0, 8),
    "rank": st.sampled_from([0, 1, 2, None]),
    "ranks": st.sampled_from([(0,), (1,), (0, 1), (), (7,), (0, 0)]),
    "sums": st.lists(FLOATS, max_size=3).map(tuple),
    "culprits": st.sampled_from([(), (0,), (9,)]),
    "numbers": st.dictionaries(
        st.sampled_from(["lr", "weight_decay", "clip_gradient", "rescale_grad", "momentum", "eps"]),
        FLOATS,
        max_size=3,
    ),
}
LEFT_ALONE = {"dtype", "role", "width", "dim", "mode", "entries", "code", "back", "held"}


@cache
def kind_of(cls: type[Message]) -> st.SearchStrategy[Message]:
    """What a message of a class may be; made once, since that takes longer than to draw from it."""
    return plausible(cls, messages_of(cls))


@st.composite
def plausible(draw: st.DrawFn, cls: type[Message], any_: st.SearchStrategy[Message]) -> Message:
    """A message of which most fields name what there is."""
    message = draw(any_)
    if not draw(st.integers(0, 4)):
        return message
    changes: dict[str, Any] = {}
    for item in dataclasses.fields(message):  # type: ignore[arg-type]
        value = getattr(message, item.name)
        if item.name in LEFT_ALONE:
            continue
        if item.name == "name" and cls is m.Optimize:
            changes[item.name] = draw(st.sampled_from(OPTIMIZERS))
        elif item.name == "numbers" and cls is not m.Optimize:
            continue
        elif item.name == "step" and cls is m.Push:
            changes[item.name] = draw(st.none() | STEPS)
        elif item.name == "rank" and cls is not m.Norms:
            changes[item.name] = draw(st.integers(0, 2))
        elif item.name in BY_NAME:
            changes[item.name] = draw(BY_NAME[item.name])
        elif item.name == "runs":
            kind = {m.Push: m.Run, m.Load: m.Run, m.Pull: m.Ask}.get(cls)
            if kind is not None:
                rest = [draw(st.integers(0, 2)) for _ in kind._fields[2:]]
                changes[item.name] = (kind(*draw(PIECES), *rest),)
        elif item.name == "fields":
            names = st.sampled_from(["exp_avg", "momentum_buffer", "master", "kvps.rest", "x"])
            changes[item.name] = tuple(
                [field._replace(name=draw(names), size=draw(st.integers(0, 8))) for field in value]
            )
        elif type(value) is int:
            changes[item.name] = draw(st.integers(0, 12) if item.name in SIZES else INTEGERS)
        elif type(value) is float:
            changes[item.name] = draw(FLOATS.filter(lambda item: abs(item) < 1e308))
        elif type(value) is str:
            changes[item.name] = draw(TEXTS)
    return replace(message, **changes)  # type: ignore[type-var]


STEPS = st.builds(
    m.StepPart,
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(0, 9),
    st.lists(st.integers(0, 2), max_size=3).map(tuple),
)
SIZES = ("count", "size", "rows", "vacant", "ids", "counts")
"""Numbers by which a packet has payload."""
ANYWHERE = st.sampled_from(list(MESSAGES.values())).flatmap(kind_of)
AT_A_SERVER = st.sampled_from(
    [*MESSAGES.values(), m.Norms, m.StepNorm, m.Push, m.Optimize, m.SetState, m.Rate, m.Declare]
).flatmap(kind_of)


def packed(envelope: Envelope, message: Message, octet: int) -> Packet | None:
    """Return a packet as its receiver gets it; its payload is of one octet, again and again."""
    payload = tuple([memoryview(bytes([octet]) * size) for size in message.payload_sizes()])
    frames = wire.encode(Packet(envelope, message, payload))
    try:
        return wire.decode([memoryview(bytearray(frame)) for frame in frames])
    except ProtocolError:  # a field is out of its range, so that no core would see it
        return None


def busy(mode: str, optimizer: str, on_nonfinite: str) -> ServerStage:
    """Return a server that holds keys of several types, some of them cut, in the midst of a round."""
    stage = ServerStage(workers=2, servers=2, memory_limit=1 << 20, every_s=0.0)
    stage.open(mode, on_nonfinite=on_nonfinite)
    stage.init("a", torch.ones(4))
    stage.init("b", torch.ones(4))
    stage.init("half", torch.ones(4, dtype=torch.float16))
    stage.declare("rows", torch.ones(8), shape=(4, 4))  # its other half is on the other server
    stage.load("rows", torch.ones(8))
    if optimizer:
        stage.optimizer(optimizer, **({"momentum": 0.9} if optimizer in ("sgd", "lars") else {}))
    if optimizer or mode == "sync":
        stage.push(0, "a", torch.ones(4), 0)
        stage.push(0, "half", torch.ones(4, dtype=torch.float16), 0)
        for rank in (0, 1) if mode == "sync" else (0,):
            stage.push(rank, "rows", torch.ones(8), 0)
    return stage


def quick(count: int) -> settings:
    """So many examples, however busy the machine is."""
    return tiers.examples(count, suppress_health_check=list(HealthCheck))


@pytest.mark.spec("R200")
@quick(60)
@given(st.data())
def test_a_server_answers_or_drops_whatever_comes(data: st.DataObject) -> None:
    options = (
        data.draw(st.sampled_from(["sync", "sync", "async", "ssp"])),
        data.draw(st.sampled_from(["", "sgd", "adam", "nadam", "lars", "lamb", "dcasgd"])),
        data.draw(st.sampled_from(["apply", "skip", "error"])),
    )
    stage = busy(*options)
    if options == ("sync", "sgd", "apply") or data.draw(st.booleans()):
        stage = busy("sync", "sgd", "apply")
        stage.optimizer("sgd", 2, momentum=0.9, clip_global_norm=1.0)
    for step in range(data.draw(st.integers(1, 6))):
        message = data.draw(AT_A_SERVER)
        is_server = isinstance(message, m.Norms | m.StepNorm) and data.draw(st.booleans())
        role = Role.SERVER if is_server else Role.WORKER
        rank = 1 if is_server else data.draw(st.integers(0, 1))
        incarnation = 2 if is_server else 10 + rank
        envelope = Envelope(JOB, stage.view, role, rank, incarnation, 100 + step)
        octet = data.draw(st.sampled_from([0, 1, 60, 127, 255]))
        packet = packed(envelope, message, octet)
        if packet is not None:
            stage.hear(b"x", packet)
        assert not stage.server.rules.is_torn
    stage.take(stage.server.on_timer(stage.now + 6))


@pytest.mark.spec("R200")
@quick(60)
@given(st.data())
def test_a_scheduler_answers_or_drops_whatever_comes(data: st.DataObject) -> None:
    scheduler = Scheduler(Settings(workers=2, servers=1, persist=True), JOB, 0.0)
    now = 0.0

    def hear(route: bytes, envelope: Envelope, message: Message) -> None:
        packet = packed(envelope, message, 0)
        for effect in () if packet is None else taken(scheduler, scheduler.on_packet(route, packet, now)):
            if isinstance(effect, Send):
                wire.decode([bytes(item) for item in wire.encode(effect.packet)])

    seats = [(Role.SERVER, 0), (Role.WORKER, 0), (Role.WORKER, 1)]
    for index, (role, rank) in enumerate(seats[: data.draw(st.integers(1, 3))]):
        endpoint = "tcp://h:1" if role is Role.SERVER else ""
        hello = m.Hello(1, 0, "kvps", 0, int(role), rank, "h", 7, endpoint)
        hear(b"%d" % index, Envelope(bytes(16), 0, role, 0, 0, 0), hello)
    for step in range(data.draw(st.integers(1, 8))):
        message = data.draw(ANYWHERE)
        if isinstance(message, m.Hello) and data.draw(st.booleans()):
            message = replace(message, major=1, role=data.draw(st.sampled_from([1, 2])))
        index = data.draw(st.integers(0, 2))
        role, rank = seats[index]
        envelope = Envelope(JOB, scheduler.job.number, role, rank, index + 1, 100 + step)
        hear(data.draw(st.sampled_from([b"0", b"1", b"2", b"x"])), envelope, message)
        now += 0.5
        scheduler.on_timer(now)
