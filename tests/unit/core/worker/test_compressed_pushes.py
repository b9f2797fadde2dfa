"""What a server does with what was compressed, and how it compresses what it answers."""

from dataclasses import replace

import pytest
import torch

from kvps.compression.codecs import decode, encode
from kvps.compression.spec import BIT1, BIT2, CODECS, FP16, RANDOMK, TOPK, CodecSpec, size
from kvps.core.server.snapshot.model import Snapshot
from kvps.protocol.values import Ask, Pull, Pulled, Push, PushRows, Run, Steps
from kvps.tensors import from_frame
from tests.support.server_harness import Said, ServerStage, acked, heard, refusal

TWO = CodecSpec(BIT2, 0.5)
COUNT = 40


def random(seed: int, count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def stage(mode: str = "sync", workers: int = 2, **options: object) -> ServerStage:
    worker = ServerStage(workers=workers)
    worker.open(mode, **options)
    worker.init("w", torch.zeros(COUNT))
    return worker


class Worker:
    """A worker that compresses: its rest, and its copy of the values."""

    def __init__(
        self, at: ServerStage, rank: int, code: CodecSpec | None = TWO, back: CodecSpec | None = None
    ) -> None:
        self.at, self.rank, self.code, self.back = at, rank, code, back
        self.rest = torch.zeros(COUNT)
        self.copy = torch.zeros(COUNT)
        self.version = -1
        self.number = 0

    def message(self, **changes: object) -> Push:
        (piece,) = self.at.places("w")
        run = Run(piece.start, piece.size, self.number)
        held = (self.version,) if self.back is not None else ()
        push = Push(piece.chunk, 1, (self.rank,), 1.0, True, (run,), self.code, self.back, held)
        return replace(push, **changes)  # type: ignore[arg-type]

    def push(self, gradient: torch.Tensor) -> tuple[torch.Tensor, list[Said]]:
        """Push, with the wish for values; return what the server reads of it, and what was said."""
        if self.code is None:
            payload = sent = gradient
        else:
            payload = encode(self.code, self.rest, gradient)
            sent = decode(self.code, payload, torch.empty(COUNT))
        said = self.at.say(self.rank, self.message(), payload)
        self.number += 1
        return sent, said

    def pull(self, after: int) -> list[Said]:
        (piece,) = self.at.places("w")
        ask = Ask(piece.start, piece.size, after, 0)
        held = (self.version,) if self.back is not None else ()
        return self.at.say(self.rank, Pull(piece.chunk, True, (ask,), 0, held))

    def take(self, said: list[Said]) -> Pulled:
        """Take this rank's answer in, as docs/protocol.md section 20 says."""
        (packet,) = [effect for effect in said if isinstance(effect.message, Pulled) and self.is_mine(effect)]
        answer = packet.message
        assert isinstance(answer, Pulled)
        (stand,) = answer.runs
        if not answer.steps or answer.steps[0].whole:
            self.copy = from_frame(packet.payload[0], "float32").clone()
        else:
            octets, begin = from_frame(packet.payload[0], "uint8"), 0
            for code in answer.steps[0].codes:
                end = begin + size(code, COUNT)
                step = decode(code, octets[begin:end], torch.empty(COUNT))
                self.copy = self.copy + step if answer.adds else step
                begin = end
            assert begin == len(octets)
        self.version = stand.version
        return answer

    def is_mine(self, said: Said) -> bool:
        return said.to == b"w%d" % self.rank


def both(workers: list[Worker], gradients: list[torch.Tensor]) -> tuple[torch.Tensor, list[Pulled]]:
    """Let all push in one round; return the sum of what was sent, and the answers."""
    sent, said = [], []
    for worker, gradient in zip(workers, gradients, strict=True):
        read, answers = worker.push(gradient)
        sent.append(read)
        said += answers
    return torch.stack(sent).sum(0), [worker.take(said) for worker in workers]


# --- the way there ------------------------------------------------------------------------------------


@pytest.mark.spec("R152")
@pytest.mark.parametrize("name", CODECS)
def test_compressed_push_counts_as_the_values_it_decodes_to(name: str) -> None:
    code = CodecSpec(CODECS[name], 0.1)
    member = stage()
    workers = [Worker(member, rank, code) for rank in range(2)]
    for step in range(3):
        total, answers = both(workers, [random(step), random(step + 10)])
        assert torch.equal(torch.tensor(member.values("w")), total)
        for worker, answer in zip(workers, answers, strict=True):
            assert answer.steps == ()
            assert torch.equal(worker.copy, total)


def test_a_lent_push_is_read_once_and_not_kept() -> None:
    worker = stage()
    workers = [Worker(worker, rank) for rank in range(2)]
    payload = encode(TWO, workers[0].rest, random(1))
    sent = decode(TWO, payload, torch.empty(COUNT))
    said = worker.say(0, workers[0].message(), payload, lent=True)
    assert acked(said) == [worker.seqs[0]]  # nothing of it is read later
    payload.zero_()
    other, _ = workers[1].push(random(2))
    assert torch.equal(torch.tensor(worker.values("w")), sent + other)


@pytest.mark.spec("R153")
def test_octets_that_cannot_be_change_nothing() -> None:
    member = stage(workers=1)
    worker = Worker(member, 0, CodecSpec(TOPK, 0.1))
    good = encode(CodecSpec(TOPK, 0.1), random(1))
    for index in (-1, COUNT):
        bad = good.clone()
        bad[12:16] = torch.tensor([index], dtype=torch.int32).view(torch.uint8)
        before = member.snapshot()
        assert refusal(member.say(0, worker.message(), bad)).startswith(
            "ProtocolError: topk names elements out of order, or beyond the 40"
        )
        assert member.snapshot() == before


@pytest.mark.spec("R14", "R153")
@pytest.mark.parametrize("size_", [0, COUNT + 1, 2**33])
def test_few_octets_do_not_allocate_much(size_: int) -> None:
    """What a run says is checked before anything of its size is made."""
    worker = stage(workers=1)
    code = CodecSpec(RANDOMK, 1e-12)
    (piece,) = worker.places("w")
    message = Worker(worker, 0, code).message(runs=(Run(piece.start, size_, 0),))
    before = worker.snapshot()
    payload = torch.zeros(size(code, size_), dtype=torch.uint8)
    assert refusal(worker.say(0, message, payload)).startswith("ProtocolError: chunk 1")
    assert worker.snapshot() == before


def test_a_rate_that_no_step_can_be_a_multiple_of() -> None:
    member = stage(workers=1)
    member.optimizer("sgd", lr=1e-44)
    worker = Worker(member, 0, TWO, TWO)
    answer = worker.take(worker.push(random(1))[1])
    assert answer.steps == ()


def test_norms_are_those_of_the_weights_and_not_of_what_is_pulled() -> None:
    """LARS: what a rest adds to the values counts, too."""
    member = stage(workers=1)
    member.optimizer("lars", lr=0.1, trust_coefficient=0.01, weight_decay=0.0)
    exact = stage(workers=1)
    exact.optimizer("lars", lr=0.1, trust_coefficient=0.01, weight_decay=0.0)
    for other in (member, exact):
        other.init("w", random(9), call=1)
    worker = Worker(member, 0, None, CodecSpec(BIT2, 1e-3))
    for step in range(4):
        gradient = random(step)
        worker.take(worker.push(gradient)[1])
        exact.push(0, "w", gradient, step)
    rest = member.chunk().back.residual[:COUNT]  # type: ignore[union-attr]
    assert rest.abs().max() > 0
    torch.testing.assert_close(
        torch.tensor(member.values("w")) + rest, torch.tensor(exact.values("w")), rtol=1e-5, atol=1e-6
    )


@pytest.mark.spec("R153")
def test_held_is_of_all_runs_or_none() -> None:
    member = stage(workers=1)
    worker = Worker(member, 0)
    payload = encode(TWO, worker.rest, random(1))
    before = member.snapshot()
    assert "ProtocolError: 1 runs, and versions held of 2" in refusal(
        member.say(0, worker.message(held=(0, 0)), payload)
    )
    assert member.snapshot() == before
    (piece,) = member.places("w")
    message = Pull(piece.chunk, True, (Ask(piece.start, piece.size, 0, 0),), 0, (0, 0))
    assert "versions held of 2" in refusal(member.say(0, message))


@pytest.mark.spec("R153")
def test_only_float32_is_compressed() -> None:
    worker = ServerStage(workers=1)
    worker.open()
    worker.init("w", torch.zeros(COUNT, dtype=torch.float64))
    before = worker.snapshot()
    payload = encode(TWO, torch.zeros(COUNT))
    assert "Mismatch: chunk 1 holds float64, and only float32" in refusal(
        worker.say(0, Worker(worker, 0).message(), payload)
    )
    assert worker.snapshot() == before


# --- the way back -------------------------------------------------------------------------------------


@pytest.mark.spec("R157", "R158")
@pytest.mark.parametrize("code", [TWO, CodecSpec(BIT1, 0.2), CodecSpec(FP16)], ids=["2bit", "1bit", "fp16"])
def test_a_sum_comes_back_as_it_was_written(code: CodecSpec) -> None:
    member = stage()
    workers = [Worker(member, rank, code, code) for rank in range(2)]
    rest = torch.zeros(COUNT)
    for step in range(5):
        total, answers = both(workers, [random(step), random(step + 10)])
        expected = decode(code, encode(code, rest, total), torch.empty(COUNT))
        for worker, answer in zip(workers, answers, strict=True):
            assert answer.steps == (Steps(False, (code,)),)
            assert not answer.adds
            assert torch.equal(worker.copy, expected)
        assert torch.equal(torch.tensor(member.values("w")), expected)


@pytest.mark.spec("R157")
def test_pull_after_missed_versions_gets_the_steps_since() -> None:
    worker = stage("async", workers=2)
    worker.optimizer("sgd", lr=0.1)
    busy, lazy = (Worker(worker, rank, TWO, TWO) for rank in range(2))
    lazy.take(lazy.pull(0))
    assert lazy.version == 0
    for step in range(3):
        busy.take(busy.push(random(step))[1])
    answer = lazy.take(lazy.pull(0))
    assert len(answer.steps[0].codes) == 3
    assert torch.equal(lazy.copy, busy.copy)
    assert lazy.copy.tolist() == worker.values("w")
    answer = lazy.take(lazy.pull(0))
    assert answer.steps == (Steps(False, ()),)
    assert lazy.copy.tolist() == worker.values("w")
    for step in range(20):
        busy.take(busy.push(random(step))[1])
    answer = lazy.take(lazy.pull(0))
    assert answer.steps == ()
    assert lazy.copy.tolist() == worker.values("w")


@pytest.mark.spec("R157")
def test_runs_that_are_not_pieces_come_as_they_are() -> None:
    """Two keys side by side, pushed together; one pull of both, and one of each by itself."""
    worker = ServerStage(workers=1)
    worker.open()
    worker.init("w", torch.zeros(COUNT))
    worker.init("v", torch.zeros(COUNT))
    w, v = worker.pieces["w"][0], worker.pieces["v"][0]
    runs = tuple(Run(piece.start, piece.size, 0) for piece in (w, v))
    payload = torch.cat([encode(TWO, random(1)), encode(TWO, random(2))])
    worker.say(0, Push(w.chunk, 1, (0,), 1.0, False, runs, TWO, TWO), payload)
    asks = tuple(Ask(piece.start, piece.size, 1, 0) for piece in (w, v))
    (answer,) = heard(worker.say(0, Pull(w.chunk, True, asks, 0, (-1, -1))), Pulled)
    assert [steps.whole for steps in answer.steps] == [False, False]
    whole = (Ask(w.start, w.size + v.size, 1, 0),)
    (answer,) = heard(worker.say(0, Pull(w.chunk, True, whole, 0, (-1,))), Pulled)
    assert answer.steps == ()


@pytest.mark.spec("R157")
def test_of_two_keys_one_may_come_as_it_is() -> None:
    worker = ServerStage(workers=1)
    worker.open()
    worker.init("w", torch.zeros(COUNT))
    worker.init("v", random(9))
    w, v = worker.pieces["w"][0], worker.pieces["v"][0]
    push = Push(w.chunk, 1, (0,), 1.0, False, (Run(w.start, w.size, 0),), TWO, TWO)
    worker.say(0, push, encode(TWO, random(1)))
    asks = (Ask(w.start, w.size, 1, 0), Ask(v.start, v.size, 0, 0))
    (said,) = worker.say(0, Pull(w.chunk, True, asks, 0, (-1, -1)))
    assert isinstance(said.message, Pulled)
    assert [steps.whole for steps in said.message.steps] == [False, True]
    octets = from_frame(said.payload[0], "uint8")
    got = decode(TWO, octets[: size(TWO, COUNT)].clone(), torch.empty(COUNT))
    assert got.tolist() == worker.values("w")
    assert octets[size(TWO, COUNT) :].clone().view(torch.float32).tolist() == worker.values("v")


@pytest.mark.spec("R156")
@pytest.mark.parametrize("other", [None, CodecSpec(FP16), CodecSpec(BIT2, 0.25)])
def test_a_round_whose_pushes_want_it_otherwise_is_not_written(other: CodecSpec | None) -> None:
    worker = stage()
    workers = [Worker(worker, 0, TWO, TWO), Worker(worker, 1, TWO, other)]
    total, answers = both(workers, [random(1), random(2)])
    assert answers[0].steps == ()
    assert torch.equal(workers[0].copy, total)
    back = worker.chunk().back
    assert back is None or not back.owes(0, COUNT)


@pytest.mark.spec("R159")
def test_new_values_have_no_rests_and_no_steps() -> None:
    member = stage(workers=1)
    member.optimizer("sgd", lr=0.1)
    worker = Worker(member, 0, TWO, TWO)
    worker.take(worker.push(random(1))[1])
    member.init("w", random(5), call=1)
    assert member.values("w") == random(5).tolist()
    assert not member.chunk().back.owes(0, COUNT)  # type: ignore[union-attr]
    worker.version = -1  # it took part in the broadcast
    answer = worker.take(worker.pull(1))
    assert answer.steps == ()
    worker.take(worker.push(random(2))[1])
    assert worker.copy.tolist() == member.values("w")


@pytest.mark.spec("R159")
def test_a_key_that_is_replaced_takes_its_rests_along() -> None:
    member = stage(workers=1)
    worker = Worker(member, 0, TWO, TWO)
    worker.take(worker.push(random(1))[1])
    old = member.chunk()
    member.declare("w", torch.zeros(7), 1)
    assert not old.back.owes(0, COUNT)  # type: ignore[union-attr]


def test_residual_of_sums_does_not_enter_the_weights() -> None:
    member = stage(workers=1)
    worker = Worker(member, 0, TWO, TWO)
    worker.take(worker.push(random(1))[1])
    member.optimizer("sgd", lr=0.1)
    before = torch.tensor(member.values("w"))
    worker.version = -1
    sent, said = worker.push(random(2))
    worker.take(said)
    rest = member.chunk().back.residual[:COUNT]  # type: ignore[union-attr]
    torch.testing.assert_close(worker.copy + rest, before - 0.1 * sent)


@pytest.mark.spec("R159")
def test_an_image_has_the_rests() -> None:
    member = stage(workers=1)
    member.optimizer("sgd", lr=0.1, momentum=0.9)
    worker = Worker(member, 0, TWO, TWO)
    for step in range(3):
        worker.take(worker.push(random(step))[1])
    image, release = member.server.control.snapshot()
    rest = member.chunk().back.residual[:COUNT].clone()  # type: ignore[union-attr]
    worker.take(worker.push(random(7))[1])  # the image does not change by it
    other = ServerStage(workers=1)
    other.restore(image)
    release()
    restored = other.chunk()
    assert torch.equal(restored.back.residual[:COUNT], rest)  # type: ignore[union-attr]
    back = other.server.control.snapshot()[0]
    assert _rests(back) == _rests(image)
    assert torch.equal(rest, torch.tensor(_rests(image)[0]))


def _rests(image: Snapshot) -> list[list[float]]:
    return [
        portion.state["kvps.rest"].tolist()
        for store in image.stores
        for key in store.keys
        for portion in key.portions
    ]


def test_rows_of_a_table_that_comes_back_by_steps() -> None:
    """A step is of a whole piece: what the values lack is added to them before rows are updated."""
    member = ServerStage(workers=1)
    member.open()
    member.init("w", torch.zeros(COUNT), shape=(10, 4))
    member.optimizer("sgd", lr=0.1)
    worker = Worker(member, 0, TWO, TWO)
    sent, said = worker.push(random(1))
    worker.take(said)
    assert member.chunk().back.owes(0, COUNT)  # type: ignore[union-attr]
    ids, rows = torch.tensor([2, 7]), torch.ones(8)
    member.say(0, PushRows("kv", "w", 1, (0,), 1, 4, 2), ids, rows)
    expected = (-0.1 * sent).view(10, 4)
    expected[ids] -= 0.1
    torch.testing.assert_close(torch.tensor(member.values("w")).view(10, 4), expected)
    assert not member.chunk().back.owes(0, COUNT)  # type: ignore[union-attr]
    worker.number = 2
    worker.take(worker.push(random(2))[1])
    assert worker.copy.tolist() == member.values("w")


def test_other_types_than_float32_come_back_as_they_are() -> None:
    worker = ServerStage(workers=1)
    worker.open()
    worker.init("w", torch.zeros(4, dtype=torch.float64))
    (piece,) = worker.places("w")
    push = Push(piece.chunk, 2, (0,), 1.0, True, (Run(piece.start, 4, 0),), None, TWO, (-1,))
    (answer,) = heard(worker.say(0, push, torch.ones(4, dtype=torch.float64)), Pulled)
    assert answer.steps == ()
    assert worker.values("w") == [1.0] * 4
