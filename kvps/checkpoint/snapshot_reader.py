"""The JSON of a snapshot, checked entry by entry, and its columns cut into parts.

This is the reading half of :mod:`kvps.checkpoint.snapshot_writer`, which says how a file is laid out. What is
wrong is a ``ValueError`` that names the store and the key.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from typing import NamedTuple

import torch

from kvps.checkpoint import tables, validation
from kvps.checkpoint.tables import by_rank, history_of
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.server.options import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, LATE, MODES, POLICIES
from kvps.core.server.snapshot.model import (
    JoinsSnapshot,
    KeySnapshot,
    Snapshot,
    SnapshotPart,
    SpanHistory,
    StoreSnapshot,
)
from kvps.dtypes import BY_NAME, Spec
from kvps.errors import KvpsError
from kvps.protocol.stores import Open
from kvps.tensors import NAMES

FORMAT = 1
CALLS = ("optimize_calls", "rate_calls", "optimize_after", "rate_after")
_STORE = ("open", "hyper", "sent_hyper", "sent_lr", *CALLS, "joins")
_TABLES = ("histories", "forms", "keys")

Form = tuple[tuple[str, str], ...]
"""Name and element type of each state of a portion, in order."""


class _Found(NamedTuple):
    """One portion as read from JSON, before it has its tensors."""

    start: int
    size: int
    history: SpanHistory
    form: Form


class _Counted(NamedTuple):
    """One key as read from JSON."""

    name: str
    spec: Spec
    call: int
    portions: list[_Found]


def image_of(given: object, tensors: dict[str, torch.Tensor]) -> Snapshot:
    """Return the snapshot that JSON and the tensors of a file describe.

    Raises:
        ValueError: if they describe none.
        KvpsError: if an optimizer or a shape in it cannot be.
    """
    if type(given) is dict and given.get("format") != FORMAT:
        found = reprlib.repr(given.get("format"))
        raise ValueError(f"it has format {found}, and this version of kvps reads {FORMAT}")
    row = validation.record("the snapshot", given, "format", "server", "servers", "stores")
    servers = validation.natural("servers", row["servers"], validation.RANK_MAX)
    server = validation.natural("server", row["server"], validation.RANK_MAX)
    if server >= servers:
        raise ValueError(f"there is no server {server} of {servers}")
    columns = _Columns(tensors)
    stores = tuple(
        _store(index, row_of, columns)
        for index, row_of in enumerate(validation.array("stores", row["stores"]))
    )
    columns.check_all_used()
    if len({store.name for store in stores}) < len(stores):
        raise ValueError("a store is in it twice")
    return Snapshot(server, servers, stores)


def _store(index: int, given: object, columns: _Columns) -> StoreSnapshot:
    if type(given) is dict:
        given = {"tables": [], **given}  # of before there were any
    row = validation.record("a store", given, *_STORE, *_TABLES, "tables")
    opened = _open(row["open"])
    try:
        histories = [history_of(row_of) for row_of in validation.array("histories", row["histories"])]
        forms = [_form(row_of) for row_of in validation.array("forms", row["forms"])]
        specs: dict[object, Spec] = {}
        keys = [_key(row_of, histories, forms, specs) for row_of in validation.array("keys", row["keys"])]
        if len({key.name for key in keys}) < len(keys):
            raise ValueError("a key is in it twice")
        return StoreSnapshot(
            opened,
            _hyper(row["hyper"]),
            _hyper(row["sent_hyper"]),
            validation.finite("sent_lr", row["sent_lr"]),
            keys=_with_tensors(index, keys, columns),
            joins=_joins(row["joins"]),
            tables=tuple(
                tables.table_of(f"{index}/table/{number}", row_of, columns.cut)
                for number, row_of in enumerate(validation.array("tables", row["tables"]))
            ),
            **{name: validation.natural(name, row[name]) for name in CALLS},
        )
    except (ValueError, KvpsError) as error:
        raise ValueError(f"store {opened.store!r}: {error}") from error


def _open(given: object) -> Open:
    """Options that an older writer did not know have their defaults."""
    row = validation.table("open", given)
    known = {field.name: field for field in fields(Open)}
    missing = [name for name, field in known.items() if field.default is MISSING and name not in row]
    if missing or row.keys() - known.keys():
        names = ", ".join(known)
        raise ValueError(f"the options of a store are {names}, got {reprlib.repr(list(row))}")
    made: dict[str, object] = {}
    for name, value in row.items():
        # Annotations are texts here: the module has postponed evaluation.
        kind = known[name].type
        if kind == "int":
            made[name] = validation.natural(name, value)
        elif kind == "float":
            made[name] = validation.finite(name, value)
        elif kind == "bool":
            made[name] = validation.flag(name, value)
        else:
            made[name] = validation.text(name, value, least=1)
    opened = Open(**made)  # type: ignore[arg-type]  # each has just been checked
    policies = opened.mode, opened.on_worker_lost, opened.late
    if not all(policy in known for policy, known in zip(policies, (MODES, POLICIES, LATE), strict=True)):
        raise validation.unlike("a mode and policies of stores", policies)
    if not CHUNK_BYTES_MIN <= opened.chunk_bytes <= CHUNK_BYTES_MAX:
        raise validation.unlike(f"for chunk_bytes {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}", opened.chunk_bytes)
    return opened


def _hyper(given: object) -> HyperParams | None:
    if given is None:
        return None
    name, mapping = validation.array("an optimizer", given, 2)
    return HyperParams.from_wire(validation.text("an optimizer's name", name, least=1), mapping)


def _joins(given: object) -> JoinsSnapshot:
    over, last, made = validation.array("joins", given, 3)
    return JoinsSnapshot(validation.natural("over", over), by_rank("last", last), by_rank("made", made))


def _form(given: object) -> Form:
    found = []
    for pair in validation.array("a form", given):
        name, dtype = validation.array("a state", pair, 2)
        found.append((validation.text("a state's name", name, least=1), _dtype(dtype)))
    if len(dict(found)) < len(found):
        raise ValueError("a form has a state twice")
    return tuple(found)


def _dtype(given: object) -> str:
    if type(given) is not str or given not in BY_NAME:
        raise validation.unlike(f"an element type of {', '.join(BY_NAME)}", given)
    return given


def _key(
    given: object, histories: list[SpanHistory], forms: list[Form], specs: dict[object, Spec]
) -> _Counted:
    name, dtype, shape, call, rows = validation.array("a key", given, 5)
    name = validation.text("a key's name", name, least=1)
    try:
        lengths = tuple([validation.natural("a shape", dim) for dim in validation.array("a shape", shape)])
        spec = specs.get((_dtype(dtype), lengths))
        if spec is None:
            specs[dtype, lengths] = spec = Spec(_dtype(dtype), lengths)
        portions = []
        end = 0
        for row in validation.array("portions", rows):
            start, size, history, form = validation.array("a portion", row, 4)
            start, size = validation.natural("start", start), validation.natural("size", size)
            if start < end or start + size > spec.count:
                raise ValueError(
                    f"a portion has elements {start} to {start + size}; expected some of {end} "
                    f"to {spec.count}"
                )
            end = start + size
            history = validation.natural("the number of a history", history, len(histories) - 1)
            form = validation.natural("the number of a form", form, len(forms) - 1)
            portions.append(_Found(start, size, histories[history], forms[form]))
        return _Counted(name, spec, validation.natural("call", call), portions)
    except (ValueError, KvpsError) as error:
        raise ValueError(f"key {name!r}: {error}") from error


def _with_tensors(index: int, keys: Iterable[_Counted], columns: _Columns) -> tuple[KeySnapshot, ...]:
    """Return the keys with their parts of the columns, which must be exactly used up."""
    sizes: dict[str, list[int]] = {}
    names: dict[tuple[str, str], str] = {}
    for key in keys:
        weights = sizes.setdefault(f"{index}/weight/{key.spec.dtype}", [])
        for portion in key.portions:
            weights.append(portion.size)
            for state in portion.form:
                name = names.get(state)
                if name is None:
                    names[state] = name = f"{index}/state/{state[0]}/{state[1]}"
                sizes.setdefault(name, []).append(portion.size)
    parts = {name: iter(columns.cut(name, some)) for name, some in sizes.items()}
    made = []
    for key in keys:
        weights_left = parts[f"{index}/weight/{key.spec.dtype}"]
        portions = tuple(
            [
                SnapshotPart(
                    part.start,
                    part.history,
                    next(weights_left),
                    {state[0]: next(parts[names[state]]) for state in part.form},
                )
                for part in key.portions
            ]
        )
        made.append(KeySnapshot(key.name, key.spec, key.call, portions))
    return tuple(made)


class _Columns:
    """The tensors of a file, each to be used up by the portions of one store."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._used: set[str] = set()

    def cut(self, name: str, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return the elements of one column in pieces of ``sizes``."""
        if not sizes:
            return ()
        column = self._tensors.get(name)
        if column is None:
            raise ValueError(f"the tensor {name!r} is missing")
        dtype = name.rpartition("/")[2]
        if NAMES.get(column.dtype) != dtype or tuple(column.shape) != (sum(sizes),):
            raise ValueError(
                f"the tensor {name!r} is {column.dtype} {list(column.shape)}; expected {dtype} [{sum(sizes)}]"
            )
        self._used.add(name)
        return torch.split_with_sizes(column, list(sizes))

    def check_all_used(self) -> None:
        """Refuse a file with tensors that belong to nothing."""
        left = sorted(self._tensors.keys() - self._used)
        if left:
            raise ValueError(f"the tensor {left[0]!r} belongs to no key")
