"""One rank of an elastic job over ``kvps.compat.horovod``: trains to the end, and dies once on the way.

    kvps-launch -n 3 -s 1 --max-restarts 2 -- python tests/integration/compat/elastic_worker.py FOLDER RANK

The rank kills its process at batch 5 unless FOLDER has the file ``died``. Every rank prints its weights at the end.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import kvps.compat.horovod as hvd

BATCHES = 12
COMMIT_EVERY = 3


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, folder: Path, dying: int) -> int:
    while state.batch < BATCHES:
        if state.batch == 5 and hvd.rank() == dying and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.optimizer.zero_grad()
        x = torch.full((2, 3), float(state.batch + hvd.rank()))
        state.model(x).sum().backward()
        state.optimizer.step()
        state.batch += 1
        if state.batch % COMMIT_EVERY == 0:
            state.commit()
    return state.batch


def main(folder: Path, dying: int) -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.batch)])
    batches = train(state, folder, dying)
    weights = [round(item, 4) for item in model.weight.flatten().tolist()]
    sys.stdout.write(f"rank {hvd.rank()} batches {batches} weights {weights} resets {resets}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
