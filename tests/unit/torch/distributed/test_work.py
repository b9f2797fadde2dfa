"""What a caller holds: torch's Work, with kvps's errors."""

import threading
from datetime import timedelta

import pytest
import torch

from kvps.errors import ConfigError, Timeout, WorkerLost
from kvps.torch.distributed.work import Work, all_of

TENSOR = torch.ones(2)


def test_work_is_done_when_it_is_ended() -> None:
    work = Work("all_reduce", [TENSOR])
    future = work.get_future()
    assert not work.is_completed()
    assert not work.is_success()
    assert not future.done()
    work.end()
    assert work.wait()
    work.synchronize()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result() == [TENSOR]
    assert future.wait() == [TENSOR]
    assert work.get_future().wait() == [TENSOR], "asked for later"


def test_a_failure_is_raised_as_it_is_and_told_to_futures() -> None:
    work = Work("all_reduce", [TENSOR])
    future = work.get_future()
    error = WorkerLost("worker 2 is lost")
    work.end(error)
    with pytest.raises(WorkerLost, match="worker 2 is lost"):
        work.wait()
    assert work.exception() is error
    assert work.is_completed()
    assert not work.is_success()
    for item in (future, work.get_future()):
        with pytest.raises(RuntimeError, match="WorkerLost: worker 2 is lost"):
            item.wait()


def test_a_wait_may_have_a_limit() -> None:
    work = Work("barrier", [])
    with pytest.raises(Timeout, match=r"barrier is not done after 0\.01 s, and continues"):
        work.wait(timedelta(seconds=0.01))
    work.end()
    assert work.wait(timedelta(seconds=0.01))


def test_a_callback_may_wait_for_another_work_without_keeping_that_from_its_end() -> None:
    first, second = Work("one", [TENSOR]), Work("two", [TENSOR])
    chained = first.get_future().then(lambda _: second.wait())
    first.end()  # the callback waits now, somewhere else
    second.end()
    assert chained.wait()


def test_only_recv_has_a_source() -> None:
    assert Work("recv", [], 2)._source_rank() == 2
    with pytest.raises(RuntimeError, match="send has no source rank"):
        Work("send", [])._source_rank()


def test_the_last_of_several_stands_for_all() -> None:
    work = Work("one", [TENSOR])
    work.stand_for([TENSOR, TENSOR])
    work.end()
    assert len(work.get_future().wait()) == 2


def test_waiting_threads_are_woken() -> None:
    work = Work("one", [])
    done: list[bool] = []
    threads = [threading.Thread(target=lambda: done.append(work.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    work.end()
    for thread in threads:
        thread.join(30.0)
    assert done == [True] * 3


def test_a_work_of_several_is_over_when_all_are_and_has_the_first_error() -> None:
    tensors = [torch.zeros(1), torch.zeros(2)]
    works = [Work(str(number), [tensor]) for number, tensor in enumerate(tensors)]
    whole = all_of("both", works)
    works[1].end()
    assert not whole.is_completed()
    works[0].end()
    assert whole.wait()
    assert [len(item) for item in whole.result()] == [1, 2]
    assert all_of("none", []).wait()
    failed = Work("failed", [])
    failed.end(ConfigError("no"))
    with pytest.raises(ConfigError, match="no"):
        all_of("one", [works[0], failed]).wait()
