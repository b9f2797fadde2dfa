"""A table among the tensors of a published version: three tensors, from which a reader looks up rows.

``NAME/ids`` int64 [n], ``NAME/rows`` [n, dim], in the order of an export, and ``NAME/recipe``, JSON in uint8,
from which a reader computes the row of an id that has none. An exported checkpoint has the same tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvps.core.embedding.id_hash import Ids, Initializer
from kvps.errors import KvpsError, ProtocolError
from kvps.tensors import TORCH

if TYPE_CHECKING:
    from kvps.core.embedding.spec import EmbeddingSpec

PARTS = ("ids", "rows", "recipe")


def text_of(recipe: EmbeddingSpec) -> str:
    """Return JSON by which a reader knows the rows of a table; files of an export have it, too."""
    told = {"dim": recipe.dim, "dtype": recipe.dtype, "init": list(recipe.first), "seed": recipe.seed}
    return json.dumps(told | {"optimizer": recipe.hyper.name})


def tensors_of(
    name: str, blocks: Iterable[tuple[torch.Tensor, torch.Tensor]], recipe: EmbeddingSpec
) -> dict[str, torch.Tensor]:
    """Return the tensors of a table that blocks of ids and rows make up."""
    ids = [torch.empty(0, dtype=torch.int64)]
    rows = [torch.empty((0, recipe.dim), dtype=TORCH[recipe.dtype])]
    for some, values in blocks:
        ids.append(some)
        rows.append(values)
    octets = torch.frombuffer(bytearray(text_of(recipe).encode()), dtype=torch.uint8)
    return dict(zip(names_of(name), (torch.cat(ids), torch.cat(rows), octets), strict=True))


def names_of(name: str) -> list[str]:
    """Return the names of the tensors of a table."""
    return [f"{name}/{part}" for part in PARTS]


class ServedTable:
    """A table of one version.

    Args:
        name: the table's.
        tensors: those of the version.

    Raises:
        ProtocolError: if its tensors are no table.
    """

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        ids, self._rows, recipe = (tensors[each] for each in names_of(name))
        try:
            given = json.loads(recipe.numpy().tobytes())
            self._first = Initializer(*given["init"]).check()
            self._seed, self._made_as = int(given["seed"]), TORCH[given["dtype"]]
            if ids.dtype != torch.int64 or self._rows.shape != (len(ids), given["dim"]):
                raise ProtocolError("its rows are not those of its ids")
        except (ValueError, TypeError, KeyError, KvpsError) as error:
            raise ProtocolError(f"table {name!r:.80} cannot be read: {error}") from error
        self._order = ids.numpy().argsort(kind="stable")
        self._ids: Ids = ids.numpy()[self._order]

    def lookup(self, ids: Ids) -> torch.Tensor:
        """Return the rows of ids, [len(ids), dim], each with the bits that a pull had."""
        if not len(self._ids):
            return self._fresh(ids)
        # An id that was dropped and made again during the export may be there twice: the last one is newer.
        at = (self._ids.searchsorted(ids, side="right") - 1).clip(0)
        found = self._rows[torch.from_numpy(self._order[at])]
        if (missing := np.flatnonzero(self._ids[at] != ids)).size:
            found[torch.from_numpy(missing)] = self._fresh(ids[missing])
        return found

    def _fresh(self, ids: Ids) -> torch.Tensor:
        rows = self._first.rows(ids, self._rows.shape[1], self._made_as, self._seed)
        return rows.to(self._rows.dtype)
