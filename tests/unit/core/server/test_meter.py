"""What a server counts of pushes and reads, and what of it answers MEASURE."""

import math
from collections.abc import Sequence

import pytest
import torch

from kvps.compression.codecs import encode
from kvps.compression.spec import INT8, CodecSpec
from kvps.core.counts import STALENESS
from kvps.core.effects import Send
from kvps.core.membership_client import Identity
from kvps.core.server import measured, meter
from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.meter import Meter
from kvps.core.server.server import Server
from kvps.protocol.envelope import Envelope, Role
from kvps.protocol.membership import Measure, Measured, OldRound
from kvps.protocol.stores import Piece
from kvps.protocol.values import Ask, Pull, PullRows, Push, PushRows, Run
from kvps.tensors import Private
from tests.support.effects import taken
from tests.support.server_harness import ServerStage, heard, over


def counted(stage: ServerStage, name: str) -> dict[str, float]:
    """Return a counter by its labels."""
    return {label: n for (of, label), n in stage.server.counts.values().items() if of == name}


def gauges_of(server: Server) -> dict[tuple[str, str], float]:
    """Return the gauges of a server."""
    return measured.gauges(server.context, server.control, server.checkpointer.epoch, server.oldest_round_s)


def measure(stage: ServerStage, number: int = 1) -> Measured:
    """Ask for the figures, as the scheduler does."""
    (answer,) = heard(stage.scheduler(Measure(number)), Measured, "scheduler")
    return answer


class Lending(Private):
    """Memory that each peer reads where it lies."""

    def lends(self, route: str | bytes, pieces: Sequence[torch.Tensor]) -> bool:
        return True


@pytest.mark.parametrize("is_lent", [False, True])
def test_compressed_pushes_and_answers(is_lent: bool) -> None:
    """A peer that reads values where they lie is sent no steps."""
    stage, code = ServerStage(1), CodecSpec(INT8)
    if is_lent:
        stage.server.context.chunks.memory = Lending()
    stage.open()
    stage.init("a", torch.zeros(1000))
    stage.optimizer("sgd", lr=0.5)
    (piece,) = stage.pieces["a"]
    octets = encode(code, torch.zeros(1000))
    run = Run(piece.start, 1000, 0)
    stage.say(0, Push(piece.chunk, 1, (0,), 1.0, False, (run,), code, code), octets)
    (answer,) = stage.say(0, Pull(piece.chunk, True, (Ask(piece.start, 1000, 1, 0),), held=(0,)))
    assert answer.payload[0].nbytes == (4000 if is_lent else len(octets))
    ways = {"in"} if is_lent else {"in", "out"}
    assert counted(stage, "kvps_uncompressed_bytes_total") == dict.fromkeys(ways, 4000)
    assert counted(stage, "kvps_compressed_bytes_total") == dict.fromkeys(ways, len(octets))


def test_rows_count_as_their_key() -> None:
    stage = ServerStage(1)
    stage.open("async")
    stage.optimizer("sgd", lr=0.5)
    stage.init("t", torch.zeros(40), shape=(10, 4))
    ids = torch.tensor([3])
    stage.say(0, PullRows("kv", "t", 0, 0, 1), ids)
    stage.say(0, PushRows("kv", "t", 1, (0,), 0, 4, 1), ids, torch.ones(4))
    (traffic,) = measure(stage).traffic
    assert (traffic.key, traffic.others, traffic.moved_bytes) == ("t", 0, 16 + 24)
    assert sum(stage.server.counts.durations()[STALENESS].buckets) == 1


def test_counts_by_key_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "RUNS_MAX", 1)
    monkeypatch.setattr(meter, "READS_MAX", 1)
    found = Meter()
    for start in (0, 0, 8):
        found.on_values(1, (Run(start, 8, 0),), 4)
        found.read(0, 1, start, start + 1)
    found.on_rows(Piece(1, 8, 8), ())
    found.stale((0,), 1, 8, 20)
    assert not found.durations()
    found.stale((0,), 1, 0, 2)
    assert found.durations()[STALENESS].total_s == 1.0
    assert found.hot(Chunks()) == ()  # its chunk is not there any more


@pytest.mark.spec("R270")
def test_measure_is_answered_at_once_with_gauges_counters_and_rounds() -> None:
    stage = ServerStage(2, memory_limit=None)
    stage.open()
    stage.init("a", [0.0] * 4)
    stage.push(0, "a", [1.0] * 4, 0)
    stage.now += 3.0
    answer = measure(stage, 7)
    values = {(count.name, count.label): count.value for count in answer.counts}
    gauges = gauges_of(stage.server)
    assert answer.number == 7
    assert values == {
        at: value for at, value in {**stage.server.counts.values(), **gauges}.items() if math.isfinite(value)
    }
    assert math.isinf(gauges["kvps_memory_limit_bytes", ""])  # is left out
    assert values["kvps_memory_bytes", "weights"] == 16
    assert answer.rounds == (OldRound(0, "kv", "a", 0, (1,), 3.0),)
    assert values["kvps_round_age_seconds", ""] == 3.0
    stage.push(1, "a", [1.0] * 4, 0)
    answer = measure(stage, 8)
    (histogram,) = answer.histograms
    assert (histogram.name, sum(histogram.buckets)) == ("kvps_round_duration_seconds", 1)
    assert answer.rounds == ()
    assert gauges_of(stage.server)["kvps_round_age_seconds", ""] == 0.0


@pytest.mark.spec("R270")
def test_rounds_are_left_out_where_there_are_many_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "SPANS_MAX", 0)
    stage = ServerStage(2)
    stage.open()
    stage.init("a", [0.0])
    stage.push(0, "a", [1.0], 0)
    assert measure(stage).rounds == ()


@pytest.mark.spec("R270")
def test_another_jobs_measure_is_not_answered() -> None:
    stage = ServerStage(1)
    stage.job = bytes(16)
    assert not heard(stage.scheduler(Measure(1)), Measured)


def test_a_server_without_a_seat_has_no_incarnation() -> None:
    identity = Identity(Role.SERVER, "tcp://scheduler:1", "host", 7, "kvps 0.1")
    alone = Server(identity, 0.0)
    assert ("kvps_incarnation", "") not in gauges_of(alone)
    question = over(Envelope(bytes(16), 0, Role.SCHEDULER, 0, 0, 0), Measure(1))
    assert not [
        item for item in taken(alone, alone.on_packet("scheduler", question, 0.0)) if isinstance(item, Send)
    ]
