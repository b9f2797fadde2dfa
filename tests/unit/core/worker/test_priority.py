"""The order in which what is pushed and pulled leaves a worker."""

import pytest
import torch

import kvps
from kvps.core.worker import connection
from kvps.errors import ConfigError
from kvps.protocol.values import Push
from tests.support.worker_harness import Bench, push

BIG = 400
"""Elements of a key that is cut: a part of 800 octets on each server."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A worker of two servers, with one chunk of the big keys under way at once."""
    monkeypatch.setattr(connection, "UPLINK_BYTES", 1)
    monkeypatch.setattr(connection, "UPLINK_LEAST", 1)
    worker = Bench()
    worker.open()
    worker.init({name: torch.zeros(BIG) for name in ("first", "second", "third")})
    return worker


def order(bench: Bench) -> list[int]:
    """The chunks in the order in which their pushes were sent."""
    return [message.chunk for message in bench.sent(Push)]


def let_go(bench: Bench) -> None:
    """Acknowledge one push after another until none is left."""
    done = 0
    while done < len(bench.sends(Push)):
        send = bench.sends(Push)[done]
        done += 1
        bench.ack(int(str(send.to).removeprefix("server ")), send.packet.envelope.seq)


def chunks(bench: Bench, name: str) -> set[int]:
    (store,) = bench.core.stores.values()
    return {piece.chunk for piece in store.keys[name].pieces}


def test_two_pushes_of_one_key_keep_their_order(bench: Bench) -> None:
    bench.call(push({"first": torch.ones(BIG)}))
    bench.call(push({"first": torch.ones(BIG)}, priority=5))
    let_go(bench)
    for chunk in chunks(bench, "first"):
        numbers = [item.runs[0].number for item in bench.sent(Push) if item.chunk == chunk]
        assert numbers == [0, 1]


@pytest.mark.parametrize("bad", ["1", 1.0, True, [1], [1, 2.0], None])
def test_invalid_priority_is_refused(bad: object) -> None:
    kv = kvps.create("local")
    kv.init(["a", "b"], [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(ConfigError, match="priorit"):
        kv.pushpull(["a", "b"], [torch.ones(2), torch.ones(2)], priority=bad)
    assert kv.pull("a").tolist() == [0, 0]
    kv.pushpull(["a", "b"], [torch.ones(2), torch.ones(2)], priority=[2, 1])
    kv.close()


def test_the_first_parameters_of_a_trainer_have_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}

    def pushpull(self: object, key: list[str], *given: object, priority: list[int], **more: object):  # type: ignore[no-untyped-def]  # a stand-in
        seen.update(zip(key, priority, strict=True))

    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(8)])
    trainer = kvps.Trainer(model, "sgd", {"lr": 0.1}, kvstore="device", update_on_kvstore=True)
    monkeypatch.setattr(kvps.KVStore, "pushpull", pushpull)
    model(torch.ones(1, 2)).sum().backward()
    trainer.step(1)
    assert list(seen) == [name for name, _ in model.named_parameters()]
    assert list(seen.values()) == sorted(seen.values(), reverse=True)
    assert len(set(seen.values())) == 8
