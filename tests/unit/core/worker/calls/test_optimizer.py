"""Calls of the optimizer, and of its state."""

import torch

from kvps.core.worker import calls
from kvps.protocol.membership import Done
from kvps.protocol.stores import Field, GetState, SetState, StateIs
from tests.support.worker_with_key import FLOAT, HOT, chunk, ready


class TestState:
    def test_is_collected_from_where_keys_lie(self) -> None:
        worker = ready()
        ticket = worker.call(calls.SaveState("kv"))
        assert worker.sent(GetState) == [GetState(chunk(worker, 0), 0, 16), GetState(chunk(worker, 1), 0, 24)]
        for server, size in enumerate((16, 24)):
            fields = (Field("momentum", FLOAT, size), Field("extra", FLOAT, size))[: 2 - server]
            rows = [torch.full((size,), 1.0 + server)] * len(fields)
            worker.server(server, StateIs(worker.seqs(GetState, server)[0], 5, fields), *rows)
        states = worker.finish(ticket).value  # type: ignore[union-attr]
        assert isinstance(states, dict)
        step, rows = states["w"]
        assert step == 5
        assert rows.keys() == {"momentum"}, "a part without it was never updated"
        assert rows["momentum"].tolist() == [1.0] * 16 + [2.0] * 24

    def test_is_put_back_there(self) -> None:
        worker = ready()
        ticket = worker.call(calls.LoadState("kv", {"w": (5, {"m": HOT, "v": HOT + 100})}))
        for server, (begin, size) in enumerate(((0, 16), (16, 24))):
            (send,) = worker.sends(SetState, server)
            fields = (Field("m", FLOAT, size), Field("v", FLOAT, size))
            assert send.packet.message == SetState(chunk(worker, server), 0, size, 5, fields)
            assert len(send.packet.payload) == 2
            assert send.packet.payload[1].cast("f")[0] == 100 + begin
            worker.server(server, Done(worker.seqs(SetState, server)[0]))
        assert worker.is_done(ticket)
