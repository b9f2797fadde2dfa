"""One server's snapshot as one safetensors file, and back.

Tensors lie in *columns*: of each store, all weights of one element type side by side, and all
states of one name and type, in the order of the keys and their portions. So 100,000 small keys are
a handful of tensors for safetensors to find. What is no tensor is JSON in the file's metadata::

    stores[i].histories    each different history, once
    stores[i].forms        each different list of states, once: [name, element type] of each
    stores[i].keys         [name, element type, shape, call, portions]
                           portion: [start, size, number of its history, number of its form]

An embedding table has columns of its own, ``i/table/J/...`` (:mod:`kvps.checkpoint.tables`).

The next ``size`` elements of column ``i/weight/TYPE``, and of ``i/state/NAME/TYPE`` for each state
of the form, belong to the next portion. docs/checkpoints.md has the format in full.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvps.checkpoint import tables, validation
from kvps.checkpoint.safetensors_writer import Column, Stream, stream_of
from kvps.checkpoint.snapshot_reader import CALLS, FORMAT, Form, image_of
from kvps.core.embedding.stored import StoredRows
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.server.snapshot.model import KeySnapshot, Snapshot, SnapshotPart, SpanHistory, StoreSnapshot
from kvps.dtypes import BY_NAME
from kvps.errors import KvpsError, StorageError
from kvps.protocol.stores import Open
from kvps.tensors import NAMES

ENTRY = "kvps.image"
"""The entry of the file's metadata with the JSON."""


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Let Python not look for garbage: among 100,000 new keys it would take longer than they do."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# --- a snapshot as a file -----------------------------------------------------------------------


def stream(snapshot: Snapshot) -> Stream:
    """Return the file that holds ``snapshot``, ready to be written.

    Raises:
        StorageError: if the snapshot contradicts itself, or is too much for one file.
    """
    columns: dict[str, Column] = {}
    with _collector_paused():
        stores = [_store_row(index, store, columns) for index, store in enumerate(snapshot.stores)]
    row = {"format": FORMAT, "server": snapshot.server, "servers": snapshot.servers, "stores": stores}
    try:
        text = json.dumps(row, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    except ValueError as error:  # NaN
        raise StorageError(f"the snapshot of server {snapshot.server}: {error}") from error
    return stream_of(columns, {ENTRY: text})


def _store_row(index: int, store: StoreSnapshot, columns: dict[str, Column]) -> dict[str, object]:
    histories = _Histories()
    forms: dict[Form, int] = {}
    states: list[list[list[torch.Tensor | StoredRows]]] = []  # of each form, where its tensors go
    keys: list[object] = []
    for key in store.keys:
        weights = _column(columns, f"{index}/weight/{key.spec.dtype}") if key.portions else []
        portions = []
        for portion in key.portions:
            count = _checked_count(key, portion)
            form = tuple([(name, NAMES[tensor.dtype]) for name, tensor in portion.state.items()])
            number = forms.setdefault(form, len(forms))
            if number == len(states):
                names = [f"{index}/state/{name}/{dtype}" for name, dtype in form]
                states.append([_column(columns, name) for name in names])
            weights.append(portion.weight)
            for column, state in zip(states[number], portion.state.values(), strict=True):
                column.append(state)
            portions.append((portion.start, count, histories.number_of(portion.history), number))
        keys.append((key.name, key.spec.dtype, key.spec.shape, key.call, portions))
    return {
        "open": _options(store.opened),
        "hyper": _hyper_row(store.hyper),
        "sent_hyper": _hyper_row(store.sent_hyper),
        "sent_lr": store.sent_lr,
        **{name: getattr(store, name) for name in CALLS},
        "joins": [store.joins.over, *(sorted(join.items()) for join in store.joins[1:])],
        "histories": histories.rows,
        "forms": list(forms),
        "keys": keys,
        "tables": [
            tables.row_of(f"{index}/table/{number}", table, columns)
            for number, table in enumerate(store.tables)
        ],
    }


def _options(opened: Open) -> dict[str, object]:
    """Return the options of a store; options that older versions do not know are left out where they
    change nothing."""
    options = asdict(opened)
    for name in ("life", "rebuilds"):
        if not options[name]:
            del options[name]
    return options


def _checked_count(key: KeySnapshot, portion: SnapshotPart) -> int:
    """Return how many elements a portion has.

    Raises:
        StorageError: if its tensors do not fit together.
    """
    weight = portion.weight
    count = weight.numel()
    fits = weight.dim() == 1 and NAMES.get(weight.dtype) == key.spec.dtype
    for tensor in portion.state.values():
        fits = fits and tensor.dim() == 1 and tensor.numel() == count and tensor.dtype in NAMES
    if not fits:
        raise StorageError(
            f"key {key.name!r} at element {portion.start}: its weight must be flat and "
            f"{key.spec.dtype}, and each state flat, as long as the weight, and of one of the "
            f"types {', '.join(BY_NAME)}"
        )
    return count


def _column(columns: dict[str, Column], name: str) -> list[torch.Tensor | StoredRows]:
    found = columns.get(name)
    if found is None:
        columns[name] = found = Column(name.rpartition("/")[2])
    return found.parts


def _hyper_row(hyper: HyperParams | None) -> object:
    return None if hyper is None else (hyper.name, hyper.to_wire())


class _Histories:
    """Different histories and their numbers; most portions of a store share one."""

    def __init__(self) -> None:
        self.rows: list[object] = []
        self._numbers: dict[object, int] = {}
        self._last: tuple[SpanHistory, int] | None = None

    def number_of(self, history: SpanHistory) -> int:
        """Return the number of a history that equals this one."""
        if self._last is not None and self._last[0] == history:
            return self._last[1]
        row = tables.row_of_history(history)
        number = self._numbers.setdefault(row, len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
        self._last = (history, number)
        return number


# --- a file as a snapshot -----------------------------------------------------------------------


def read(path: Path, fd: int | None = None) -> Snapshot:
    """Return the snapshot in a file; ``fd`` is the same file, open, so that no other can take its place.

    Its tensors are the file's own pages, read when they are first touched; writing to them does not
    change the file. Portions with equal histories share one: copy its maps before you change them.

    Raises:
        StorageError: if it cannot be read or is no snapshot, naming the file and the fault.
    """
    try:
        with safe_open(path if fd is None else f"/dev/fd/{fd}", framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if ENTRY not in metadata:
            raise ValueError(f"its metadata has no {ENTRY!r}: it is no snapshot of a kvps server")
        with _collector_paused():
            return image_of(validation.parsed(metadata[ENTRY]), tensors)
    except (OSError, SafetensorError, ValueError, RuntimeError, KvpsError) as error:
        raise StorageError(f"cannot read the snapshot {path}: {error}") from error
