"""A thousand small keys travel in a handful of messages, there and back."""

import torch

from kvps.core.placement import parts
from kvps.core.worker.plan import Key, PieceLocation, make
from kvps.dtypes import Spec
from kvps.protocol.stores import Declare, Declared, Entry
from kvps.protocol.values import Load, Pulled, Push
from kvps.tensors import PRIVATE
from tests.support.server_harness import ServerStage, heard

KEYS = 1000
SERVERS = 2


def test_a_thousand_keys_on_two_servers() -> None:
    stages = [ServerStage(2, SERVERS, rank) for rank in range(SERVERS)]
    entries: list[list[Entry]] = [[] for _ in stages]
    for index in range(KEYS):
        (part,) = parts(f"layer{index}.weight", 256, SERVERS)
        entries[part.server].append(Entry(f"layer{index}.weight", 1, (256,), 0, 256))
    keys = []
    for server, stage in enumerate(stages):
        stage.open()
        (answer,) = heard(stage.say(0, Declare("kv", True, 0, tuple(entries[server]))), Declared)
        for entry, place in zip(entries[server], answer.places, strict=True):
            held = tuple(PieceLocation(server, *piece, 0) for piece in place.pieces)
            keys.append(Key(entry.key, Spec("float32", (256,)), held))
    plan = make(keys)
    rows = [torch.full((256,), float(index)) for index in range(KEYS)]
    messages = answers = 0
    for share in plan.shares:
        load = Load(share.chunk, 1, share.runs((0,)))
        stages[share.server].say(0, load, share.gather(rows, PRIVATE, "server 0")[0])
    for rank in range(2):
        for share in plan.shares:
            push = Push(share.chunk, 1, (rank,), 1.0, True, share.runs((0,)))
            assert len(push.runs) == 1
            said = stages[share.server].say(rank, push, share.gather(rows, PRIVATE, "server 0")[0])
            messages += 1
            answers += len(heard(said, Pulled))
    assert messages == answers == 2 * SERVERS
    # And no more than one round, one sum and one update for each of them.
    for stage in stages:
        assert [(span.version, len(span.pushed)) for span in stage.chunk().spans] == [(1, 2)]
