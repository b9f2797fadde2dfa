"""SGLang as a reader of published weights: a weight loader for its tensor-parallel workers.

SGLang 0.5.23 lets an engine name functions that load weights. Each worker of an engine calls :func:`load`,
which subscribes, and reads the version that :func:`update` names. Nothing of a model goes from one process of
SGLang to another. No test has run an engine.

    engine = sglang.Engine(model_path=..., custom_weight_loader=[kvps.platforms.sglang.LOADER])
    with kvps.subscribe("policy", "tcp://10.0.0.1:9091") as policy:
        policy.wait()
        kvps.platforms.sglang.update(engine, policy)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from kvps.errors import ConfigError, KvpsError
from kvps.subscriber import Subscription, subscribe

LOADER = "kvps.platforms.sglang.load"
"""The name by which SGLang imports :func:`load`."""
CALLS = ("begin_weight_update", "update_weights_from_tensor", "end_weight_update")
_subscriptions: dict[tuple[str | None, ...], Subscription] = {}
"""Those of a worker, by name, scheduler and directory of keys."""


def update(engine: Any, subscription: Subscription, timeout: float = 300.0) -> None:
    """Have an engine load the version that a subscription reads, which therefore stays meanwhile.

    Args:
        engine: an ``sglang.Engine`` or ``HttpServerEngineAdapter`` without data parallelism, made with
            :data:`LOADER` among ``custom_weight_loader``.
        subscription: has read a version; the engine's hosts reach its scheduler, and have its keys in the
            same directory.
        timeout: seconds that a worker may take to read the version.

    Raises:
        ConfigError: if ``engine`` is no engine of SGLang 0.5.23, or before ``subscription.wait()``.
        KvpsError: if the engine refuses, in its words. Update it again before it generates.
    """
    missing = [call for call in CALLS if not callable(getattr(engine, call, None))]
    if missing:
        raise ConfigError(
            f"update(): {type(engine).__name__} has no {', '.join(missing)}; expected an engine of SGLang "
            "0.5.23 or later (pip install sglang)"
        )
    if subscription.version is None:
        raise ConfigError(
            f"update(): the subscription to {subscription.name!r} reads no version; call wait()"
        )
    where = (subscription.name, subscription.scheduler, subscription.keys)
    order = json.dumps([where, subscription.version, timeout])
    _demand(engine.begin_weight_update(), "begin_weight_update")
    try:
        # The name says all, so the tensor has no elements.
        loaded = engine.update_weights_from_tensor(
            [(order, torch.empty(0))], load_format=LOADER, flush_cache=True
        )
    finally:
        ended = engine.end_weight_update()
    _demand(loaded, "update_weights_from_tensor")
    _demand(ended, "end_weight_update")


def _demand(result: Any, call: str) -> None:
    """Look at what an engine returned: a pair, or the JSON of its HTTP server."""
    is_done, text = (result["success"], result["message"]) if isinstance(result, dict) else result
    if not is_done:
        raise KvpsError(f"SGLang's {call}() failed: {text}")


def load(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load a version into a model; SGLang calls this in each worker, and ends if it raises.

    Raises:
        KvpsError: if the version cannot be read; the model keeps its weights.
    """
    for text, _ in named_tensors:
        place, version, timeout = json.loads(text)
        where = tuple(place)
        found = _subscriptions.get(where)
        if found is None or version < (found.version or 0):  # a new job counts from 1 again
            found = _subscriptions[where] = subscribe(*where)
        if version != found.version:  # else a draft model follows its target
            found.wait(timeout=timeout, version=version)
        model.load_weights(found.tensors(timeout))
