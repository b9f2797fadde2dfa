"""A table as a safetensors file, written block by block.

How many rows there will be is not known before the last block. So the file begins with room for its
header; ids follow as they come; versions, rows and states, each a column of its own, wait in temporary
files until the ids are through. The header is written last, and the file takes its name then. Columns of
wide elements come first, so that each begins at a multiple of its element size.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import torch

from kvps.checkpoint.atomic_file import replacing
from kvps.checkpoint.safetensors_writer import header_of
from kvps.core.embedding.published import text_of
from kvps.core.embedding.spec import WEIGHT, EmbeddingSpec
from kvps.core.embedding.table import ExportBatch
from kvps.errors import StorageError
from kvps.tensors import NAMES, to_frame

HEAD_BYTES = 4096
"""Room for the header; one with all states of any optimizer takes a quarter of it."""


def write(path: Path, blocks: Iterator[ExportBatch], recipe: EmbeddingSpec) -> int:
    """Write ``blocks`` to ``path``; return how many rows they had.

    Raises:
        StorageError: if that fails; what lay there before still does.
    """
    try:
        with replacing(path) as part, ExitStack() as stack:
            return _write(part, blocks, recipe, stack)
    except OSError as error:
        raise StorageError(f"cannot write the table to {path}: {error}") from error


def _write(part: Path, blocks: Iterator[ExportBatch], recipe: EmbeddingSpec, stack: ExitStack) -> int:
    file = stack.enter_context(part.open("wb"))
    file.write(bytes(HEAD_BYTES))
    spools: dict[str, tuple[IO[bytes], torch.dtype, int]] = {}
    count = 0
    for block in blocks:
        count += len(block.ids)
        for name, column in _columns(block):
            if name not in spools:
                spool: IO[bytes] = file
                if spools:
                    spool = tempfile.TemporaryFile(dir=part.parent)  # noqa: SIM115  # next line
                    stack.enter_context(spool)
                spools[name] = spool, column.dtype, column.shape[1] if column.dim() > 1 else 0
            if len(column):  # a numpy array of nothing has no strides that torch likes
                spools[name][0].write(to_frame(column.reshape(-1).contiguous()))
    for spool, _, _ in spools.values():
        if spool is not file:
            spool.seek(0)
            shutil.copyfileobj(spool, file, 1 << 20)
    shapes = (
        (name, NAMES[dtype], (count, width) if width else (count,))
        for name, (_, dtype, width) in spools.items()
    )
    head, _ = header_of(shapes, {"kvps.recipe": text_of(recipe)}, HEAD_BYTES)
    file.seek(0)
    file.write(head)
    return count


def _columns(block: ExportBatch) -> list[tuple[str, torch.Tensor]]:
    rest = [("rows" if name == WEIGHT else f"state.{name}", column) for name, column in block.columns.items()]
    rest.sort(key=lambda column: -column[1].element_size())
    return [("ids", torch.from_numpy(block.ids)), ("versions", torch.from_numpy(block.stamps)), *rest]
