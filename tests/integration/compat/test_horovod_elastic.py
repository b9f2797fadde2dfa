"""Elastic training over ``kvps.compat.horovod``: commits, returns to them, and what each rank goes on with."""

import pytest
import torch

import kvps.compat.horovod as hvd
from tests.support.drop_in import Run, alone, batch, close, loss_of, net, sgd


def test_a_failure_returns_to_the_last_commit(two: Run) -> None:
    def work(rank: int) -> tuple[int, list[int], torch.nn.Module]:
        model = net(rank)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0)
        failures: list[int] = []
        state.register_reset_callbacks([lambda: failures.append(state.step)])

        @hvd.elastic.run
        def train(state: hvd.elastic.TorchState) -> int:
            while state.step < 3:
                state.optimizer.zero_grad()
                loss_of(state.model, batch(rank, state.step)).backward()
                state.optimizer.step()
                state.step += 1
                if state.step == 2 and not failures:
                    hvd.allreduce(torch.ones(1 + rank), name="no")  # fails on both
                state.commit()
            return state.step

        return train(state), failures, state.model

    for steps, failures, model in two(work):
        assert (steps, failures) == (3, [1])
        close(model, alone())


def test_a_wrong_argument_ends_an_elastic_function(two: Run) -> None:
    def work(rank: int) -> None:
        @hvd.elastic.run
        def train(state: hvd.elastic.ObjectState) -> None:
            hvd.alltoall(torch.ones(3))

        with pytest.raises(hvd.HorovodInternalError, match="3 rows are not divisible"):
            train(hvd.elastic.ObjectState())

    two(work)


def test_states_of_objects(two: Run) -> None:
    def work(rank: int) -> None:
        state = hvd.elastic.ObjectState(epoch=0, seen=[])
        if rank == 1:
            state.epoch, state.seen = 4, [1]
            state.commit()
        state.seen.append(9)
        state.sync()  # from rank 1, which has committed
        assert (state.epoch, state.seen, state.commits) == (4, [1, 9], 1)
        state.epoch = 7
        state.restore()
        assert state.epoch == 4
        bare = hvd.elastic.State()
        bare.on_hosts_updated(0.0, None)
        for call in (bare.save, bare.restore, bare.sync):
            with pytest.raises(NotImplementedError):
                call()

    two(work)


@pytest.mark.thorough
def test_interrupts_go_on_without_a_return(two: Run) -> None:
    def work(rank: int) -> list[int]:
        seen: list[int] = []

        @hvd.elastic.run
        def train(state: hvd.elastic.ObjectState) -> list[int]:
            seen.append(state.step)
            if len(seen) == 1:
                state.step = 5
                raise hvd.HostsUpdatedInterrupt(skip_sync=True)
            return seen

        return train(hvd.elastic.ObjectState(step=0))

    assert two(work) == [[0, 5], [0, 5]]


@pytest.mark.thorough
def test_a_sampler_deals_out_what_no_rank_has_processed(two: Run) -> None:
    def work(rank: int) -> tuple[list[int], list[int], list[int]]:
        sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
        state = hvd.elastic.TorchState(sampler=sampler)
        first = list(sampler)
        sampler.record_batch(0, 2)
        state.save()
        state.sync()
        rest = list(sampler)
        sampler.set_epoch(1)
        shuffled = hvd.elastic.ElasticSampler(range(5), seed=3)
        assert len(shuffled) == 3
        return first, rest, list(shuffled)

    (first, rest, mixed), (others, their_rest, their_mixed) = two(work)
    assert (first, others) == ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])
    assert (rest, their_rest) == ([4, 6, 8], [5, 7, 9])
    assert set(mixed + their_mixed) == set(range(5))
