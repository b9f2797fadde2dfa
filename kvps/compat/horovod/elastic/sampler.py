"""A sampler that goes on within an epoch after a rank was lost: it deals out only what no rank has
processed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from kvps.compat.horovod.engine.context import current


class ElasticSampler(torch.utils.data.Sampler[int]):
    """The indices of this rank's share of a data set.

    Call :meth:`record_batch` after each batch, and give the sampler to a
    :class:`~kvps.compat.horovod.elastic.TorchState`; after a return to a commit the rest of the
    epoch is dealt out anew.

    Args:
        dataset: has a length.
        shuffle: deal indices out in another order in each epoch, the same on every rank.
        seed: of these orders.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.indices: list[int] = []
        """This rank's indices, in their order."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; call it at the end of the epoch before, so that no index counts as processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that a batch was processed.

        Args:
            batch_idx: its number since the last return to a commit, or the begin of the epoch.
            batch_size: the number of samples in a batch.
        """
        start = batch_idx * batch_size
        self.processed_indices.update(self.indices[start : start + batch_size])

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the indices that were processed in it."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Return to a state, and deal out the rest."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Deal out unprocessed indices; each rank gets equally many, and some indices twice if need be."""
        engine = current().running()
        rest = [sample for sample in range(len(self.dataset)) if sample not in self.processed_indices]
        if self.shuffle:
            random.Random(f"{self.seed}.{self.epoch}").shuffle(rest)
        share = math.ceil(len(rest) / engine.size)
        whole = (
            rest
            + (rest * math.ceil(share * engine.size / max(1, len(rest))))[: share * engine.size - len(rest)]
        )
        self.indices = whole[engine.rank : share * engine.size : engine.size]

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.indices))

    def __len__(self) -> int:
        return len(self.indices)
