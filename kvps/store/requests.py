"""Requests of a store: a user's arguments made into the calls of a worker core, and the result
made of their answers.

:class:`Requests` checks keys, values and outputs, reduces the values of several devices to one row
for each key, and says where a result is written. It starts no call:
:class:`~kvps.store.kvstore.KVStore` does. A kind of store may make rows, or write results, in a
way of its own: :class:`ServerRequests` brings rows from devices, in memory that a transport sends
without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from kvps.compression.policy import OFF, CompressionPolicy, KeyCompression
from kvps.core.worker import calls
from kvps.core.worker.calls import Fresh
from kvps.core.worker.plan import Priority, of_key
from kvps.errors import ConfigError
from kvps.phrases import names_in_words
from kvps.runtime.device import Staging, is_away, ready_on_device
from kvps.store.arguments import (
    Outcome,
    are_dense,
    check_values,
    outcome_for,
    outcome_on_devices,
    reduce,
    rows_of,
    shared,
    values_of,
    weighted,
)
from kvps.store.device_codec import DeviceCodec
from kvps.store.key_list import KeyList, KeyLists, names_of
from kvps.store.row_copies import Copies, Marks, changes_of, marks_of
from kvps.store.rows import apart, have_rows, picks_of, table_of
from kvps.tensors import Array, row_of, spec_of

COPY_FALSE = "copy=False returns read-only views of the values and takes no out=; remove out="


class PlannedCall(NamedTuple):
    """One call of a user: the calls of the core to begin, and the result."""

    call: calls.Call
    result: Callable[[Any], Any]
    """Makes the result from the value of the ticket of ``call``."""
    before: Iterable[calls.Call] = ()
    """Calls that are started before it, one by one, and end before its result is there."""


class Requests:
    """The requests of one store, by the method of the store that a user has called.

    Args:
        store: the name of the store.
        keys: the keys that it knows.
        on_device: values of several devices are summed on the first of them, and not on the CPU.
        knows_changes: the store can return only the changed rows of a table.
    """

    def __init__(self, store: str, keys: KeyLists, on_device: bool, knows_changes: bool) -> None:
        self._store = store
        self._specs = keys.specs
        self._on_device = on_device
        self._knows_changes = knows_changes
        self.push_call: type[calls.PushValues] = calls.PushValues
        """The call that pushes dense values: another one where the optimizer clips gradients by
        their global norm."""
        self.compression = OFF
        """The user's settings: which keys are pushed as fewer bytes."""
        self.takes_plain = True
        """Values that are rows as they are need no further look."""

    def compress(self, rules: CompressionPolicy) -> None:
        """Compress by these settings from now on."""
        self.compression = rules

    def setting_of(self, name: str) -> KeyCompression | None:
        """Return the compression of a key; None for none."""
        return self.compression.setting_of(name, self._specs[name])

    # --- keys that are made -----------------------------------------------------------------------

    def init(self, key: object, value: object) -> calls.Init:
        """Return the call that initialises keys."""
        names, is_many = names_of(key)
        values = values_of(names, is_many, value)
        specs = [spec_of(devices[0]) for devices in values]
        rows = rows_of([devices[:1] for devices in values], self._on_device)
        return calls.Init(self._store, tuple(zip(names, specs, strict=True)), rows)

    def broadcast(
        self, key: object, value: object, out: object
    ) -> tuple[calls.Broadcast, Callable[[Any], Any]]:
        """Return the call that gives rank 0's values to all, and the function that makes its result."""
        names, is_many = names_of(key)
        values = values_of(names, is_many, value)
        specs = {name: spec_of(devices[0]) for name, devices in zip(names, values, strict=True)}
        sinks, result = outcome_for(names, is_many, out, specs)
        rows = rows_of([devices[:1] for devices in values], self._on_device)
        assert isinstance(sinks, tuple)
        return calls.Broadcast(self._store, tuple(specs.items()), rows, sinks), result

    # --- values that are pushed and pulled --------------------------------------------------------

    def pushes(
        self, keys: KeyList, value: object, urgency: Priority, eager: bool, limit_s: float, weight: float
    ) -> Iterator[calls.Call]:
        """Push dense values in one call, and any rows in another."""
        rows = self.dense(keys, value, limit_s, weight)
        if rows is not None:
            yield self.push_call(self._store, keys.names, rows, None, urgency, eager, weight)
            return
        if weight != 1:
            raise ConfigError(
                f"weight={weight} with rows: only pushes of whole keys have a weight; push dense tensors"
            )
        if self.push_call is not calls.PushValues:
            raise ConfigError(
                f"store {self._store!r} clips gradients by their global norm, which rows have no part in: "
                "push dense gradients (sparse=False), or set the optimizer without clip_global_norm"
            )
        given = value if keys.is_many else [value]
        assert isinstance(given, list | tuple)
        dense, sparse = apart(keys.names, given, self._specs)
        if dense:
            whole = tuple([keys.names[index] for index in dense])
            rows = self.rows(whole, True, [given[index] for index in dense], limit_s)
            each = shared([of_key(urgency, index) for index in dense])
            yield self.push_call(self._store, whole, rows, None, each, eager)
        tables = tuple([keys.names[index] for index in sparse])
        each = shared([of_key(urgency, index) for index in sparse])
        parts = tuple([part for found in sparse.values() for part in found])
        yield calls.PushKeyRows(self._store, tables, parts, each, eager)

    def pull(self, keys: KeyList, out: object, copy: bool, urgency: Priority, least: int) -> PlannedCall:
        """Pull whole keys of at least version ``least``."""
        sinks, result = self.wanted(keys, out, copy)
        return PlannedCall(calls.PullValues(self._store, keys.names, sinks, urgency, least), result)

    def pushpull(
        self,
        keys: KeyList,
        value: object,
        out: object,
        copy: bool,
        urgency: Priority,
        limit_s: float,
        weight: float,
    ) -> PlannedCall:
        """Push and pull in one call; if there are rows, in several."""
        rows = self.dense(keys, value, limit_s, weight)
        if rows is None:
            request = self.pull(keys, out, copy, urgency, 0)
            return request._replace(before=self.pushes(keys, value, urgency, False, limit_s, weight))
        sinks, result = self.wanted(keys, out, copy)
        call = self.push_call(self._store, keys.names, rows, sinks, urgency, False, weight)
        return PlannedCall(call, result)

    def plain_pushpull(
        self, keys: KeyList, value: object, out: object, urgency: Priority
    ) -> calls.PushValues | None:
        """Push and pull rows as they are, in one call; None if some are to be made."""
        sinks = keys.rows(out, as_sinks=True, is_waited=True) if self.takes_plain else None
        rows = (
            sinks if value is out or sinks is None else keys.rows(value, is_waited=True)
        )  # front ends give the same
        if sinks is None or rows is None:
            return None
        return self.push_call(self._store, keys.names, rows, sinks, urgency, False)

    # --- rows that are pulled -----------------------------------------------------------------------

    def pull_rows(self, keys: KeyList, row_ids: object, out: object, urgency: Priority) -> PlannedCall:
        """Pull the rows ``row_ids``."""
        picks = picks_of(keys.names, keys.is_many, self._specs, row_ids, out)
        ids = tuple([pick.ids for pick in picks])
        places = tuple([pick.places for pick in picks])

        def deliver(tables: Any) -> object:
            results = [pick.deliver(rows) for pick, rows in zip(picks, tables, strict=True)]
            return (out if out is not None else results) if keys.is_many else results[0]

        return PlannedCall(calls.PullKeyRows(self._store, keys.names, ids, places, urgency), deliver)

    def refresh(
        self, keys: KeyList, out: object, held: object, urgency: Priority, is_direct: bool
    ) -> PlannedCall:
        """Bring ``out`` up to date; ``is_direct``: its owner waits until that is done."""
        copies = Copies(keys.names, keys.is_many, out, held, self._specs, is_direct=is_direct)
        return self._changes(keys.names, copies.sinks, copies.marks, urgency, copies.deliver)

    def pull_changed(self, keys: KeyList, held: object, urgency: Priority) -> PlannedCall:
        """Pull the rows that changed since ``held``."""
        marks = marks_of(keys.names, keys.is_many, held)
        specs = [table_of(name, self._specs[name]) for name in keys.names]

        def deliver(found: Sequence[Fresh]) -> object:
            changes = [changes_of(*pair) for pair in zip(specs, found, strict=True)]
            return changes if keys.is_many else changes[0]

        return self._changes(keys.names, (None,) * len(keys.names), marks, urgency, deliver)

    def _changes(
        self,
        names: tuple[str, ...],
        sinks: tuple[torch.Tensor | None, ...],
        marks: Marks,
        urgency: Priority,
        deliver: Callable[[Sequence[Fresh]], object],
    ) -> PlannedCall:
        """Ask for the changes; in a store that does not record them, for all rows, in new tensors."""
        if self._knows_changes:
            return PlannedCall(calls.Refresh(self._store, names, sinks, marks, urgency), deliver)
        wholes, result = self.wanted(KeyList(names, True, self._specs), out=None, copy=True)

        def all_rows(value: Any) -> object:
            return deliver([Fresh(None, whole=tensor) for tensor in result(value)])

        return PlannedCall(calls.PullValues(self._store, names, wholes, urgency, 0), all_rows)

    # --- what a kind of store may do in its own way ---------------------------------------------------

    def dense(
        self, keys: KeyList, value: object, limit_s: float, weight: float
    ) -> tuple[torch.Tensor, ...] | None:
        """Return one row for each key, times ``weight``; None if some values are rows of a table."""
        rows = keys.rows(value) if self.takes_plain else None
        if rows is None:
            far = keys.rows(value, on_devices=True) if self.takes_plain else None
            given = value if keys.is_many else [value]
            if far is None and not are_dense(given) and have_rows(keys.names, given, self._specs):
                return None
            try:
                if far is None:
                    rows = self.rows(keys.names, keys.is_many, value, limit_s)
                else:
                    rows = self.here(keys.names, list(map(torch.Tensor.detach, far)), limit_s)
            except RuntimeError as error:  # of a device, which has no memory, or is gone
                error.add_note(f"the values of {names_in_words(keys.names)} were not pushed")
                raise
        return rows if weight == 1 else weighted(rows, weight)

    def rows(
        self, names: tuple[str, ...], is_many: bool, value: object, limit_s: float
    ) -> tuple[torch.Tensor, ...]:
        """Return one row for each key: its value as it is, or the sum of its values."""
        values = values_of(names, is_many, value)
        check_values(names, values, self._specs, "push", self._on_device)
        values = self.decoded(names, values)
        return self.here(names, [reduce(devices, self._on_device) for devices in values], limit_s)

    def decoded(self, names: tuple[str, ...], values: list[list[Array]]) -> list[list[Array]]:
        """Return the values of each device as they are summed."""
        return values

    def here(
        self, names: tuple[str, ...], values: Sequence[torch.Tensor], limit_s: float
    ) -> tuple[torch.Tensor, ...]:
        """Return the value of each key as a row in this machine's memory."""
        return tuple(map(row_of, values))

    def wanted(self, keys: KeyList, out: object, copy: bool) -> Outcome:
        """Return the end of a pull: where its values go."""
        if not copy:
            if out is not None:
                raise ConfigError(COPY_FALSE)
            return calls.Views.VIEWS, lambda views: views if keys.is_many else views[0]
        plain = None if out is None else keys.rows(out, as_sinks=True)
        if plain is not None:
            return plain, lambda _: out
        far = None if out is None else keys.rows(out, as_sinks=True, on_devices=True)
        if far is not None:
            return outcome_on_devices(far, out)
        return outcome_for(keys.names, keys.is_many, out, self._specs)


class ServerRequests(Requests):
    """The requests of one store with servers.

    Args:
        store, keys, on_device: as :class:`~kvps.store.requests.Requests`.
        codec: compresses the values of each device, in place of their sum on its way to servers.
        staging: brings rows from devices.
        allocate: returns memory for some keys, within a limit in seconds.
    """

    def __init__(
        self,
        store: str,
        keys: KeyLists,
        on_device: bool,
        codec: DeviceCodec | None,
        staging: Staging,
        allocate: Callable[[tuple[str, ...], float], list[torch.Tensor]],
    ) -> None:
        super().__init__(store, keys, on_device, knows_changes=True)
        self._codec = codec
        self._staging = staging
        self._allocate = allocate

    def compress(self, rules: CompressionPolicy) -> None:
        """Compress by these settings: each value of a device by itself, where a codec does."""
        super().compress(rules)
        self.takes_plain = self._codec is None or rules.are_off

    def decoded(self, names: tuple[str, ...], values: list[list[Array]]) -> list[list[Array]]:
        """Return the values of each device compressed and decoded, where a codec does that."""
        if self._codec is None or self.compression.are_off:
            return values
        settings = [self.setting_of(name) for name in names]
        return [
            devices if setting is None else self._codec.decoded(name, setting, devices)
            for name, setting, devices in zip(names, settings, values, strict=True)
        ]

    def here(
        self, names: tuple[str, ...], values: Sequence[torch.Tensor], limit_s: float
    ) -> tuple[torch.Tensor, ...]:
        """Return the value of each key as a row, on its device where it is compressed there, else in
        this machine's memory."""
        if self._codec is not None or self.compression.are_off:
            rows: list[torch.Tensor | None] = [None] * len(values)
        else:
            rows = [
                ready_on_device(value) if is_away(value) and self.setting_of(name) else None
                for name, value in zip(names, values, strict=True)
            ]  # a compressed row leaves its device as few bytes
        left = [index for index, row in enumerate(rows) if row is None]
        brought = self._staging.bring(
            [values[index] for index in left],
            lambda indices: self._allocate(tuple([names[left[index]] for index in indices]), limit_s),
        )
        for index, row in zip(left, brought, strict=True):
            rows[index] = row
        return tuple([row for row in rows if row is not None])
