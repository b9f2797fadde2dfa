"""When the rule of a chunk is composed, and of what."""

import torch

from kvps.compression.spec import INT8, CodecSpec
from kvps.core.server.rules.published import PublishedOptimize
from kvps.core.server.rules.rule import Assign, Optimize, Rule
from kvps.dtypes import BY_NAME
from kvps.protocol.stores import Rate
from kvps.protocol.values import Push, Run
from kvps.tensors import TORCH
from tests.support.server_harness import ServerStage


def stage(dtype: str = "float32", **options: object) -> ServerStage:
    one = ServerStage(1)
    one.open("sync", **options)
    one.init("w", torch.ones(4, dtype=TORCH[dtype]))
    return one


def rule(one: ServerStage) -> Rule:
    """Return the rule of the first chunk."""
    return one.server.rules.rule(one.chunk().number)


def push(one: ServerStage, number: int, dtype: str = "float32", back: CodecSpec | None = None) -> None:
    message = Push(1, BY_NAME[dtype].id, (0,), 1.0, False, (Run(0, 4, number),), back=back)
    one.say(0, message, torch.full((4,), 2.0, dtype=TORCH[dtype]))


def test_values_are_published_from_the_first_push_on_that_wants_it() -> None:
    one = stage()
    one.optimizer("sgd", lr=0.5)
    push(one, 0)
    assert type(rule(one)) is Optimize
    push(one, 1, back=CodecSpec(INT8))
    assert type(rule(one)) is PublishedOptimize
    for number in (2, 3):  # the first of them settles the residuals
        push(one, number)
    assert one.values("w") == [-3.0] * 4


def test_values_that_no_codec_takes_are_never_published() -> None:
    one = stage("float64")
    for number in range(2):
        push(one, number, "float64", CodecSpec(INT8))
    assert type(rule(one)) is Assign
    assert one.values("w") == [2.0] * 4


def test_a_rate_keeps_rules_and_changes_the_next_update() -> None:
    one = stage()
    one.open("sync", "other")
    one.init("v", [0.0], store="other")
    one.optimizer("sgd", lr=0.5)
    push(one, 0)
    one.push(0, "v", [1.0], 0)
    before = rule(one)
    one.say(0, Rate("kv", 1, True, 1.0))
    assert rule(one) is before
    push(one, 1)
    assert one.values("w") == [-2.0] * 4
