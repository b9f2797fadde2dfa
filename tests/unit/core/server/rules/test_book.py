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
    server = ServerStage(1)
    server.open("sync", **options)
    server.init("w", torch.ones(4, dtype=TORCH[dtype]))
    return server


def rule(server: ServerStage) -> Rule:
    """Return the rule of the first chunk."""
    return server.server.rules.rule(server.chunk().number)


def push(server: ServerStage, number: int, dtype: str = "float32", back: CodecSpec | None = None) -> None:
    message = Push(1, BY_NAME[dtype].id, (0,), 1.0, False, (Run(0, 4, number),), back=back)
    server.say(0, message, torch.full((4,), 2.0, dtype=TORCH[dtype]))


def test_values_are_published_from_the_first_push_on_that_wants_it() -> None:
    server = stage()
    server.optimizer("sgd", lr=0.5)
    push(server, 0)
    assert type(rule(server)) is Optimize
    push(server, 1, back=CodecSpec(INT8))
    assert type(rule(server)) is PublishedOptimize
    for number in (2, 3):  # the first of them settles the residuals
        push(server, number)
    assert server.values("w") == [-3.0] * 4


def test_values_that_no_codec_takes_are_never_published() -> None:
    server = stage("float64")
    for number in range(2):
        push(server, number, "float64", CodecSpec(INT8))
    assert type(rule(server)) is Assign
    assert server.values("w") == [2.0] * 4


def test_a_rate_keeps_rules_and_changes_the_next_update() -> None:
    server = stage()
    server.open("sync", "other")
    server.init("v", [0.0], store="other")
    server.optimizer("sgd", lr=0.5)
    push(server, 0)
    server.push(0, "v", [1.0], 0)
    before = rule(server)
    server.say(0, Rate("kv", 1, True, 1.0))
    assert rule(server) is before
    push(server, 1)
    assert server.values("w") == [-2.0] * 4
