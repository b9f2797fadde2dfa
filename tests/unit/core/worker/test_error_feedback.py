"""What a worker compresses: once for each push, and each key by its own rule."""

import pytest
import torch

from kvps.compression.codecs import decode, encode
from kvps.compression.policy import rules_of
from kvps.compression.spec import BIT2, FP16, RANDOMK, CodecSpec
from kvps.core.worker import calls
from kvps.dtypes import Spec
from kvps.errors import ConfigError, ProtocolError
from kvps.protocol.envelope import Message
from kvps.protocol.membership import Error, Probe, Probed, Welcome
from kvps.protocol.stores import Declare, Declared, Piece, Place
from kvps.protocol.values import Ack, Pull, Pulled, Push, Receipt, Stand, Steps
from kvps.tensors import from_frame
from tests.support.worker_harness import Bench

TWO = CodecSpec(BIT2, 0.5)
ALL = {"type": "2bit", "min_bytes": 0}
BOTH_WAYS = {"type": "2bit", "min_bytes": 0, "pull": True}


def random(seed: int, count: int = 20) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def bench(
    params: dict[str, object] | None = None, *, mode: str = "sync", ready: bool = True, **options: object
) -> Bench:
    """A worker with two keys; one that is not ``ready`` has lost its server since."""
    worker = Bench(servers=1, **options)  # type: ignore[arg-type]
    worker.open(mode=mode)
    worker.init({"a": torch.zeros(20), "b": torch.zeros(30)})
    worker.core.table.links[0].ready = ready
    if params is not None:
        ticket = worker.call(calls.Compress("kv", rules_of(params)))
        assert worker.is_done(ticket)
    return worker


def push(worker: Bench, *names: str, seed: int = 0, pull: bool = False, eager: bool = True) -> int:
    counts = {"a": 20, "b": 30}
    rows = tuple(random(seed, counts[name]) for name in names)
    sinks = tuple(torch.zeros(counts[name]) for name in names) if pull else None
    return worker.call(calls.PushValues("kv", names, rows, sinks, 0, eager))


def last(worker: Bench, cls: type[Message]) -> tuple[Message, list[torch.Tensor], int]:
    """The message of the last packet of a class, its payload as octets, and its number."""
    packet = worker.sends(cls)[-1].packet
    payload = [from_frame(frame, "uint8").clone() for frame in packet.payload]
    return packet.message, payload, packet.envelope.seq


def residuals(worker: Bench) -> dict[str, torch.Tensor]:
    ticket = worker.call(calls.SaveResiduals("kv"))
    finish = worker.finish(ticket)
    assert finish is not None
    found = finish.value
    assert isinstance(found, dict)
    return found


# --- the way there ------------------------------------------------------------------------------------


@pytest.mark.spec("R151")
def test_a_push_is_written_once_however_often_it_is_sent() -> None:
    worker = bench(ALL)
    push(worker, "a")
    message, (octets,), seq = last(worker, Push)
    assert isinstance(message, Push)
    assert message.code == TWO
    assert (message.back, message.held) == (None, ())
    residual = torch.zeros(20)
    assert torch.equal(octets, encode(TWO, residual, random(0)))
    worker.wait(30.0)  # it is asked after, and the server does not have it
    probe = worker.sends(Probe)[-1].packet
    worker.server(0, Probed((seq,), ()), seq=probe.envelope.seq)
    assert len(worker.sends(Push)) == 2
    again, (same,), _ = last(worker, Push)
    assert (again, same.tolist()) == (message, octets.tolist())
    worker.server(0, Ack((Receipt(seq, 1),)))
    assert torch.equal(residuals(worker)["a"], residual)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_residual_decays_before_the_next_push(decay: float) -> None:
    worker = bench(ALL | {"decay": decay})
    residual = torch.zeros(20)
    for seed in range(3):
        push(worker, "a", seed=seed)
        _, (octets,), seq = last(worker, Push)
        residual *= decay
        assert torch.equal(octets, encode(TWO, residual, random(seed)))
        worker.server(0, Ack((Receipt(seq, 1),)))
    assert torch.equal(residuals(worker)["a"], residual)


def test_each_key_travels_by_its_rule() -> None:
    worker = bench({"min_bytes": 0, "rules": [{"pattern": "a", "type": "fp16"}]})
    push(worker, "a", "b", seed=4)
    sent = {message.code: message for message in worker.sent(Push)}
    assert set(sent) == {CodecSpec(FP16), None}
    assert [run.size for run in sent[CodecSpec(FP16)].runs] == [20]
    assert [run.size for run in sent[None].runs] == [30]
    ack_all(worker)
    assert set(residuals(worker)) == {"a"}


def ack_all(worker: Bench) -> None:
    for seq in worker.seqs(Push):
        worker.server(0, Ack((Receipt(seq, 1),)))


def test_of_many_keys_each_has_its_own_rows_and_numbers() -> None:
    """Also when the call ends before its values were read."""
    worker = bench({"min_bytes": 0, "rules": [{"pattern": "b", "type": "2bit"}]})
    push(worker, "a")
    push(worker, "b", "a", seed=3, eager=False)
    coded = [send for send in worker.sends(Push) if send.packet.message.code == TWO]  # type: ignore[attr-defined]
    (b,) = coded
    assert [run.number for run in b.packet.message.runs] == [0]  # type: ignore[attr-defined]
    assert torch.equal(from_frame(b.packet.payload[0], "uint8"), encode(TWO, torch.zeros(30), random(3, 30)))
    plain = worker.sends(Push)[-1] if worker.sends(Push)[-1] is not b else worker.sends(Push)[-2]
    assert [run.number for run in plain.packet.message.runs] == [1]  # type: ignore[attr-defined]


def test_the_seed_of_randomk_follows_the_number_of_the_push() -> None:
    worker = bench({"type": "randomk", "ratio": 0.5, "seed": 9, "min_bytes": 0})
    for number in range(3):
        push(worker, "a", seed=number)
        message, _, seq = last(worker, Push)
        assert isinstance(message, Push)
        assert message.code == CodecSpec(RANDOMK, 0.5, 1.0, 9 + number)
        worker.server(0, Ack((Receipt(seq, 1),)))


@pytest.mark.spec("R154")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_gradient_goes_uncompressed_and_leaves_the_residual(bad: float) -> None:
    worker = bench(ALL)
    push(worker, "a", seed=1)
    _, (octets,), seq = last(worker, Push)
    residual = torch.zeros(20)
    encode(TWO, residual, random(1))
    worker.server(0, Ack((Receipt(seq, 1),)))
    row = random(2)
    row[7] = bad
    worker.call(calls.PushValues("kv", ("a",), (row,), None, 0, True))
    message, (octets,), seq = last(worker, Push)
    assert isinstance(message, Push)
    assert message.code is None
    assert torch.equal(octets, row.view(torch.uint8))
    worker.server(0, Ack((Receipt(seq, 1),)))
    assert torch.equal(residuals(worker)["a"], residual)


@pytest.mark.spec("R155")
def test_compressed_push_is_not_merged() -> None:
    worker = Bench(servers=1, machines=[2, 2])  # the server is on machine 1
    worker.open(bundles=True)
    worker.init({"a": torch.zeros(20), "b": torch.zeros(30)})
    push(worker, "a")
    assert not worker.sends(Push, 0)  # it waits for the neighbour's, or is with the leader
    worker.call(calls.Compress("kv", rules_of(BOTH_WAYS)))
    push(worker, "b", pull=True)
    (sent,) = worker.sends(Push, 0)
    assert sent.packet.message.code == TWO  # type: ignore[attr-defined]


def test_rests_go_with_the_pushes_in_the_order_of_these() -> None:
    """A pushpull that stands in line is written before the push that was made after it."""
    worker = bench(ALL, ready=False)
    sink = torch.zeros(20)
    worker.call(calls.PushValues("kv", ("a",), (torch.full((20,), 0.6),), (sink,), 0, False))
    worker.call(calls.PushValues("kv", ("a",), (torch.full((20,), -0.4),), None, 0, True))
    assert not worker.sends(Push)
    worker.server(0, Welcome(0, 1, 2, 1))
    first, second = [
        decode(TWO, from_frame(send.packet.payload[0], "uint8").clone(), torch.empty(20))
        for send in worker.sends(Push)
    ]
    assert first.tolist() == [0.5] * 20
    assert second.tolist() == [0.0] * 20
    assert rests_now(worker)["a"].tolist() == pytest.approx([-0.3] * 20)


def rests_now(worker: Bench) -> dict[str, torch.Tensor]:
    return worker.core.stores["kv"].feedback.residuals


def test_a_push_that_may_be_refused_is_not_compressed() -> None:
    """In an asynchronous store nobody knows whether there is an optimizer before something was taken in."""
    worker = bench(ALL, mode="async")
    ticket = push(worker, "a", pull=True, eager=False)
    message, _, seq = last(worker, Push)
    assert isinstance(message, Push)
    assert message.code is None
    worker.server(0, Error(seq, ConfigError.code, "no optimizer"))
    assert isinstance(worker.error(ticket), ConfigError)
    assert rests_now(worker) == {}
    worker.core.stores["kv"].keys["a"].applied = 1
    worker.core.stores["kv"].keys["a"].is_refused = False
    push(worker, "a")
    message, _, _ = last(worker, Push)
    assert isinstance(message, Push)
    assert message.code == TWO


def test_rests_are_given_and_taken() -> None:
    worker = bench(ALL)
    ticket = worker.call(calls.LoadResiduals("kv", {"a": torch.full((20,), 0.4)}))
    assert worker.is_done(ticket)
    worker.call(calls.PushValues("kv", ("a",), (torch.full((20,), 0.2),), None, 0, True))
    _, (octets,), seq = last(worker, Push)
    assert decode(TWO, octets, torch.empty(20)).tolist() == [0.5] * 20
    worker.server(0, Ack((Receipt(seq, 1),)))
    assert residuals(worker)["a"].tolist() == pytest.approx([0.1] * 20)


# --- the way back -------------------------------------------------------------------------------------


def answer(
    worker: Bench,
    version: int,
    steps: list[tuple[Steps, torch.Tensor]],
    *,
    adds: bool = True,
    chunk: int | None = None,
    seq: int | None = None,
) -> None:
    """Let server 0 answer the last push or pull of key ``a``."""
    asked, _, number = last(worker, Push if worker.sends(Push) and not worker.sends(Pull) else Pull)
    assert isinstance(asked, Push | Pull)
    stands = tuple(Stand(run.start, run.size, version, version) for run in asked.runs)
    octets = torch.cat([part for _, part in steps])
    some = tuple(item for item, _ in steps)
    if all(item.whole for item in some):
        some = ()
    message = Pulled(seq or number, asked.chunk, 1, True, stands, (), some, adds)
    worker.server(0, message, octets, seq=0)


def pull(worker: Bench, *names: str) -> tuple[int, torch.Tensor]:
    sink = torch.zeros(20)
    return worker.call(calls.PullValues("kv", names or ("a",), (sink,), 0, 0)), sink


WHOLE = Steps(True, ())


def test_steps_are_added_to_the_copy_that_is_kept() -> None:
    worker = bench(BOTH_WAYS)
    copy, residual = random(5), torch.zeros(20)
    ticket, sink = pull(worker)
    assert worker.sent(Pull)[-1].held == (-1,)
    answer(worker, 4, [(WHOLE, copy.view(torch.uint8))])
    assert worker.is_done(ticket)
    assert torch.equal(sink, copy)
    sink.zero_()  # it is the user's
    for version, count in ((6, 2), (6, 0), (7, 1)):
        ticket, sink = pull(worker)
        assert worker.sent(Pull)[-1].held == (version - count,)
        parts = []
        for _ in range(count):
            code = TWO._replace(scale=0.1 * (len(parts) + 1))
            octets = encode(code, residual, random(version))
            copy = copy + decode(code, octets, torch.empty(20))
            parts.append((code, octets))
        octets = torch.cat([torch.empty(0, dtype=torch.uint8), *[part for _, part in parts]])
        answer(worker, version, [(Steps(False, tuple(code for code, _ in parts)), octets)])
        assert worker.is_done(ticket)
        assert torch.equal(sink, copy)


@pytest.mark.spec("R158")
def test_of_more_steps_than_are_missing_the_last_count() -> None:
    """Two pulls were under way at once: both asked for steps from version 0."""
    worker = bench(BOTH_WAYS)
    pull(worker)
    copy = random(5)
    answer(worker, 0, [(WHOLE, copy.view(torch.uint8))])
    first, one_sink = pull(worker)
    second, other_sink = pull(worker)
    seqs = worker.seqs(Pull)[-2:]
    steps = [encode(TWO, random(6)), encode(TWO, random(7))]
    after = [copy + decode(TWO, steps[0], torch.empty(20))]
    after.append(after[0] + decode(TWO, steps[1], torch.empty(20)))
    answer(worker, 1, [(Steps(False, (TWO,)), steps[0])], seq=seqs[0])
    answer(worker, 2, [(Steps(False, (TWO, TWO)), torch.cat(steps))], seq=seqs[1])
    assert worker.is_done(first)
    assert worker.is_done(second)
    assert torch.equal(one_sink, after[0])
    assert torch.equal(other_sink, after[1])


def test_a_sum_may_come_as_it_is() -> None:
    worker = bench(BOTH_WAYS)
    ticket, sink = pull(worker)
    whole = random(6)
    answer(worker, 1, [(WHOLE, whole.view(torch.uint8))], adds=False)
    assert worker.is_done(ticket)
    assert torch.equal(sink, whole)


def test_pulls_ask_piece_by_piece() -> None:
    """Also where one run of a pull would be two keys."""
    worker = Bench(servers=1)
    worker.open()
    spec = Spec("float32", (20,))
    ticket = worker.call(calls.Init("kv", (("a", spec), ("b", spec)), (torch.zeros(20),) * 2))
    places = (Place(False, (Piece(3, 0, 20),)), Place(False, (Piece(3, 20, 20),)))
    worker.server(0, Declared(worker.seqs(Declare)[-1], places))
    assert worker.is_done(ticket)
    worker.call(calls.Compress("kv", rules_of(BOTH_WAYS)))
    sinks = torch.zeros(20), torch.zeros(20)
    ticket = worker.call(calls.PullValues("kv", ("a", "b"), sinks, 0, 0))
    asked = worker.sent(Pull)[-1]
    assert [(ask.start, ask.size) for ask in asked.runs] == [(0, 20), (20, 20)]
    octets = encode(TWO, random(1))
    whole = random(2)
    answer(worker, 3, [(Steps(False, (TWO,)), octets), (WHOLE, whole.view(torch.uint8))], adds=False)
    assert worker.is_done(ticket)
    assert torch.equal(sinks[0], decode(TWO, octets, torch.empty(20)))
    assert torch.equal(sinks[1], whole)
    push(worker, "a", eager=False)  # from now on the two have conditions of their own
    worker.call(calls.PullValues("kv", ("a", "b"), sinks, 0, 0))
    asked = worker.sent(Pull)[-1]
    assert [(ask.start, ask.size, ask.after) for ask in asked.runs] == [(0, 20, 1), (20, 20, 0)]


@pytest.mark.spec("R159")
def test_a_copy_is_dropped_when_the_key_has_another_place() -> None:
    worker = bench(BOTH_WAYS)
    pull(worker)
    answer(worker, 4, [(WHOLE, random(5).view(torch.uint8))])
    store = worker.core.stores["kv"]
    key = store.keys["a"]
    store.place([("a", key.spec, key.pieces)])
    pull(worker)
    assert worker.sent(Pull)[-1].held == (-1,)


def stands(worker: Bench, *places: tuple[int, int]) -> tuple[Stand, ...]:
    return tuple(Stand(start, count, 1, 1) for start, count in places)


@pytest.mark.parametrize(
    ("steps", "match"),
    [
        ((Steps(False, (TWO,)), Steps(True, ())), "1 runs, and steps of 2"),
        ((Steps(False, (TWO,)),), "1 steps to version 1, and the values here are of none"),
    ],
)
def test_answers_that_cannot_be(steps: tuple[Steps, ...], match: str) -> None:
    worker = bench(BOTH_WAYS)
    pull(worker)
    asked, _, seq = last(worker, Pull)
    assert isinstance(asked, Pull)
    message = Pulled(seq, asked.chunk, 1, True, stands(worker, (0, 20)), (), steps, True)
    with pytest.raises(ProtocolError, match=match):
        worker.server(0, message, encode(TWO, random(1)))


def test_steps_beyond_the_copy() -> None:
    worker = bench(BOTH_WAYS)
    pull(worker)
    answer(worker, 4, [(WHOLE, random(5).view(torch.uint8))])
    pull(worker)
    with pytest.raises(ProtocolError, match="1 steps to version 9, and the values here are of ver"):
        answer(worker, 9, [(Steps(False, (TWO,)), encode(TWO, random(1)))])


def test_two_steps_of_which_none_adds() -> None:
    worker = bench(BOTH_WAYS)
    pull(worker)
    octets = encode(TWO, random(1))
    with pytest.raises(ProtocolError, match="2 steps that do not add up"):
        answer(worker, 2, [(Steps(False, (TWO, TWO)), torch.cat([octets, octets]))], adds=False)


def test_steps_of_other_pieces() -> None:
    worker = bench(BOTH_WAYS)
    pull(worker)
    asked, _, seq = last(worker, Pull)
    assert isinstance(asked, Pull)
    message = Pulled(seq, asked.chunk, 1, True, stands(worker, (0, 10), (10, 10)), (), (WHOLE, WHOLE), True)
    with pytest.raises(ProtocolError, match="other pieces than requested"):
        worker.server(0, message, torch.zeros(20))
