"""The communication hook: its future is done when the store's call is, well or not."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import GradBucket

import kvps
from kvps.runtime.ticket import Handle, Ticket
from kvps.torch import comm_hook

LIMIT_S = 30.0


class Bucket:
    """As DistributedDataParallel's."""

    def __init__(self) -> None:
        self.values = torch.tensor([1.0, 3.0])

    def buffer(self) -> torch.Tensor:
        return self.values


class State:
    """As CommState, with a call that the test ends."""

    def __init__(self) -> None:
        self.ticket = Ticket()
        self.delivered_by = ""

    def begin(self, bucket: Any) -> Handle:
        def deliver() -> None:
            self.delivered_by = threading.current_thread().name
            bucket.values /= 2

        return Handle(self.ticket, deliver)


def begun() -> tuple[State, Bucket, Any]:
    state, bucket = State(), Bucket()
    return state, bucket, comm_hook(state, bucket)  # type: ignore[arg-type]


def done(future: Any) -> threading.Event:
    over = threading.Event()
    future.add_done_callback(lambda _: over.set())
    return over


def test_the_future_is_the_bucket_when_the_call_is_over() -> None:
    state, bucket, future = begun()
    assert not future.done()
    state.ticket.end(None, None)
    assert done(future).wait(LIMIT_S)
    assert future.wait() is bucket.values
    assert bucket.values.tolist() == [0.5, 1.5]
    assert state.delivered_by == "kvps comm_hook", "the loop's thread must not wait for a copy"


def test_the_future_fails_with_what_became_of_the_call() -> None:
    state, bucket, future = begun()
    state.ticket.end(None, kvps.WorkerLost("worker 3 is lost"))
    assert done(future).wait(LIMIT_S)
    with pytest.raises((kvps.WorkerLost, RuntimeError), match="worker 3 is lost"):
        future.wait()
    assert bucket.values.tolist() == [1.0, 3.0]


def test_what_hangs_on_the_future_fails_too() -> None:
    """torch's wrappers, such as fp16_compress_wrapper, hang their own step on a hook's future."""
    state, _, future = begun()
    after = future.then(lambda found: found.value() * 2)
    state.ticket.end(None, kvps.ServerLost("server 0 is lost"))
    assert done(after).wait(LIMIT_S)
    with pytest.raises(RuntimeError, match="server 0 is lost"):
        after.wait()


def test_its_annotations_are_what_torch_asks_for() -> None:
    signature = inspect.signature(comm_hook)
    assert signature.parameters["bucket"].annotation is GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
