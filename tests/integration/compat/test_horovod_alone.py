"""``kvps.compat.horovod`` in a job of one rank: nothing waits, and nothing changes."""

import pytest
import torch

import kvps.compat.horovod as hvd
from tests.support.drop_in import ranks

pytestmark = pytest.mark.thorough


def test_single_rank_runs_every_operation_alone() -> None:
    def work(rank: int) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
        assert hvd.allgather(torch.ones(2)).tolist() == [1.0, 1.0]
        assert hvd.alltoall(torch.ones(2)).tolist() == [1.0, 1.0]
        assert hvd.reducescatter(torch.ones(2)).tolist() == [1.0, 1.0]
        assert hvd.broadcast(torch.ones(2), 0).tolist() == [1.0, 1.0]
        assert hvd.SyncBatchNorm(2)(torch.randn(4, 2)).shape == (4, 2)
        assert hvd.join() == 0

    for run in ranks(1):
        run(work)
