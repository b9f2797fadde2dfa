"""Judging a push changes nothing, and applying what was judged does what the verdict says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.core.gradients import DenseGradient
from kvps.core.server.chunks.rounds import Verdict
from kvps.errors import KvpsError
from kvps.protocol.values import Push, Run
from tests.support.server_harness import ServerStage
from tests.support.tiers import examples

SIZES = {"a": 2, "b": 1, "c": 3, "d": 4}
RANKS = 2


def everything(stage: ServerStage) -> object:
    """All that a push could change: also how spans are cut, and whether there is optimizer state."""
    chunk = stage.chunk()
    spans = [(span.start, span.stop) for span in chunk.spans]
    return stage.snapshot(), spans, chunk.state is None, stage.server.rules.is_torn


def trained(mode: str, rule: str, on_nonfinite: str) -> ServerStage:
    stage = ServerStage(RANKS)
    stage.open(mode, on_nonfinite=on_nonfinite)
    for key, size in SIZES.items():
        stage.init(key, torch.ones(size))
    if rule:
        stage.optimizer(rule, lr=0.1)
    return stage


@st.composite
def pushes(draw: st.DrawFn, stage: ServerStage) -> tuple[Push, torch.Tensor]:
    """A push of some keys by some ranks, each key with the number that is due or one beside it."""
    keys = sorted(draw(st.sets(st.sampled_from(sorted(SIZES)), min_size=1)))
    ranks = draw(st.sampled_from([(0,), (1,), (0, 1)]))
    runs = []
    for key in keys:
        owed = stage.span(key).owed(ranks[0])
        number = max(0, owed + draw(st.sampled_from([0, 0, 0, 0, -1, 1])))
        _, start, size = stage.pieces[key][0]
        runs.append(Run(start, size, number))
    row = torch.ones(sum(run.size for run in runs))
    if draw(st.integers(0, 9)) == 0:
        row[0] = torch.nan
    return Push(1, 1, ranks, 1.0, False, tuple(runs)), row


@pytest.mark.spec("R50", "R53", "R56")
@given(data=st.data())
@examples(150)
def test_judging_changes_nothing_and_applying_does_what_was_judged(data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from(["", "sgd", "adam", "lars"]))
    mode = data.draw(st.sampled_from(["sync", "async"] if rule else ["sync"]))
    stage = trained(mode, rule, data.draw(st.sampled_from(["apply", "skip"])))
    ingest, rules = stage.server.ingest, stage.server.rules
    for _ in range(data.draw(st.integers(1, 8))):
        message, row = data.draw(pushes(stage))
        before = everything(stage)
        try:
            judged = ingest.judge(rules.rule(message.chunk), message, DenseGradient([row]))
        except KvpsError:
            assert everything(stage) == before
            continue
        assert everything(stage) == before
        assert bool(judged.ranges) is (judged.verdict is Verdict.COUNTED)
        ingest.apply(judged, ())
        stage.take(stage.server._flush())
        if judged.verdict is not Verdict.COUNTED:
            assert everything(stage)[0] == before[0]  # type: ignore[index]
            continue
        assert not rules.is_torn
        for run in message.runs:
            for span in stage.chunk().spans_in(run.start, run.start + run.size):
                assert all(span.pushed[rank] > run.number for rank in message.ranks)
        again = ingest.judge(rules.rule(message.chunk), message, DenseGradient([row]))
        assert again.verdict is Verdict.DUPLICATE
