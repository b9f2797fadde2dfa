"""Gradients whose call another thread begins: its result and its errors come to whoever waits."""

from concurrent.futures import Future

import pytest
import torch

from kvps.errors import KvpsError
from kvps.runtime.ticket import Handle, finished
from kvps.torch.sync.in_flight import BegunElsewhere, GradientBucket


def test_a_bucket_waits_for_a_call_that_is_begun_elsewhere_and_divides_once() -> None:
    value = torch.rand(4)
    expected = value / 2
    begun: Future[Handle] = Future()
    bucket = GradientBucket({"w": value}, BegunElsewhere(begun), 2, set(), is_marked=False)
    begun.set_result(Handle(finished(), lambda: None))
    bucket.wait()
    bucket.wait()
    assert torch.equal(bucket.gradient("w"), expected)


def test_an_error_at_the_beginning_is_raised_by_each_wait() -> None:
    begun: Future[Handle] = Future()
    begun.set_exception(KvpsError("no server has joined yet"))
    bucket = GradientBucket({"w": torch.rand(4)}, BegunElsewhere(begun), 1, set(), is_marked=False)
    for _ in range(2):
        with pytest.raises(KvpsError, match="no server has joined yet"):
            bucket.wait()
