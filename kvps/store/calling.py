"""The steps that all calls of a store share: from arguments to names, rows, sinks and priorities.

They check what a call is given before anything leaves, and remember what they found of a list of keys,
as most calls are those of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from kvps.core.worker.calls import Sinks, Views
from kvps.core.worker.operations.refresh import Fresh
from kvps.core.worker.plan import Numbers, alike, of_key
from kvps.errors import ConfigError, EpochChanged, KeyNotFound
from kvps.runtime.ticket import Handle, Ticket
from kvps.store.arguments import (
    Form,
    as_list,
    check_values,
    names_of,
    rows_of,
    sinks_for,
    values_of,
)
from kvps.store.contract import Contract
from kvps.store.row_copies import Marks
from kvps.store.rows import Rows, are_rows
from kvps.store.rows import rows_of as row_values
from kvps.tensors import Array

LISTS_MAX = 256
"""How many lists of keys are remembered."""
VIEWS = Views.VIEWS
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of pulled values: where they go, and from what the call finishes with, what it
    returns."""

    rows: Sinks
    result: Callable[[Any], Any]


class Calling(Contract):
    """A store, below its calls."""

    def _begin(self) -> None:
        if self._is_closed:
            raise ConfigError(f"store {self._name!r} is closed; create another one")
        self._raise_later()

    def _raise_later(self) -> None:
        """Raise what an earlier push, whose caller had gone on, has failed with."""
        while self._later:
            error = self._later.pop(0)
            if not isinstance(error, EpochChanged):
                raise error
            if not error.was_raised:  # several calls end with one
                error.was_raised = True
                raise error

    def _limit(self, timeout: float | None) -> float:
        return self._timeout_s if timeout is None else seconds("timeout", timeout)

    def _know(self, names: tuple[str, ...], timeout: float | None) -> None:
        """Learn of keys that another rank has initialised and this one has not declared."""
        if names in self._forms:
            return
        unknown = tuple(name for name in names if name not in self._specs)
        if unknown:
            self._specs.update(self._lookup(unknown, self._limit(timeout)))

    def _demand_known(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._specs:
                raise KeyNotFound(
                    f"key {name!r} was never initialised; call init({name!r}, value) on every "
                    "worker first"
                )

    def _pushes(
        self,
        names: tuple[str, ...],
        is_many: bool,
        value: object,
        priority: object,
        eager: bool,
        timeout: float | None,
    ) -> list[Ticket]:
        """Push dense values in one call, and rows, if there are any, in another."""
        urgency, limit_s = priority_of(names, priority), self._limit(timeout)
        self._know(names, timeout)
        if not self._have_rows(names, is_many, value):
            rows = self._rows(names, is_many, value, timeout)
            return [self._push(names, rows, None, urgency, eager, limit_s)]
        given = value if is_many else [value]
        assert isinstance(given, list | tuple)
        if len(given) != len(names):
            raise ConfigError(f"{len(names)} keys need as many values, got {len(given)}")
        self._demand_known(names)
        some: list[tuple[int, Rows]] = []
        dense: list[int] = []
        for index, (name, one) in enumerate(zip(names, given, strict=True)):
            if are_rows(one, self._specs[name]):
                some.append((index, row_values(name, self._specs[name], one)))
            else:
                dense.append(index)
        tickets = []
        if dense:
            whole = tuple([names[index] for index in dense])
            values = self._rows(whole, True, [given[index] for index in dense], timeout)
            each = alike([of_key(urgency, index) for index in dense])
            tickets.append(self._push(whole, values, None, each, eager, limit_s))
        pushed = tuple([names[index] for index, _ in some])
        each = alike([of_key(urgency, index) for index, _ in some])
        found = tuple([rows for _, rows in some])
        tickets.append(self._push_rows(pushed, found, each, eager, limit_s))
        return tickets

    def _have_rows(self, names: tuple[str, ...], is_many: bool, value: object) -> bool:
        """Whether some of the values of these keys are rows; quick where they are plain tensors."""
        given = value if is_many else [value]
        if not isinstance(given, list | tuple):
            return False
        if TENSORS.issuperset(map(type, given)):
            return torch.sparse_coo in set(map(attrgetter("layout"), given))
        return any(
            are_rows(one, self._specs.get(name)) for name, one in zip(names, given, strict=False)
        )

    def _rows(
        self, names: tuple[str, ...], is_many: bool, value: object, timeout: float | None
    ) -> tuple[torch.Tensor, ...]:
        self._know(names, timeout)
        form = self._form(names)
        given = value if is_many else [value]
        if form is not None and form.fits(given):
            return tuple(given)  # type: ignore[arg-type]  # it fits: it is a list
        values = values_of(names, is_many, value)
        check_values(names, values, self._specs, "push")
        return self._rows_of(names, values, self._limit(timeout))

    def _rows_of(
        self, names: tuple[str, ...], values: list[list[Array]], limit_s: float
    ) -> tuple[torch.Tensor, ...]:
        """Return one row for each key: the sum of its values, in this machine's memory."""
        return rows_of(values, self._kind.on_device)

    def _wanted(self, names: tuple[str, ...], is_many: bool, out: object, copy: bool) -> Outcome:
        """Return what becomes of pulled values."""
        if not copy:
            if out is not None:
                raise ConfigError("copy=False returns the values where they are; remove out=")
            return Outcome(VIEWS, lambda found: found if is_many else found[0])
        form = self._form(names)
        given = out if is_many else [out]
        if form is not None and form.fits_as_sinks(given):
            return Outcome(tuple(given), lambda _: out)  # type: ignore[arg-type]  # as above
        sinks = sinks_for(names, is_many, out, self._specs)
        return Outcome(sinks.rows, lambda _: sinks.deliver())

    def _refreshed(
        self,
        names: tuple[str, ...],
        sinks: tuple[torch.Tensor | None, ...],
        marks: Marks,
        priority: Numbers,
        limit_s: float,
    ) -> tuple[Ticket, Callable[[Any], Sequence[Fresh]]]:
        """Ask for what is new; return what makes Fresh ones of what the call finishes with.

        In a store that knows of no changes it is all there is, in new tensors.
        """
        wanted = self._wanted(names, is_many=True, out=None, copy=True)
        ticket = self._pull(names, wanted.rows, priority, 0, limit_s)
        return ticket, lambda found: [Fresh(None, whole=one) for one in wanted.result(found)]

    def _names_of(self, key: object) -> tuple[tuple[str, ...], bool]:
        """Return the names of one key or a list of keys, and whether it was a list."""
        keys = as_list(key)
        if keys is None:
            return names_of(key)
        names = self._names.get(keys)
        if names is None:
            names, _ = names_of(key)
            if len(self._names) >= LISTS_MAX:
                self._names.clear()
            self._names[keys] = names
        return names, True

    def _form(self, names: tuple[str, ...]) -> Form | None:
        form = self._forms.get(names)
        if form is None:
            form = Form.of(names, self._specs)
            if form is not None:
                if len(self._forms) >= LISTS_MAX:
                    self._forms.clear()
                self._forms[names] = form
        return form

    def _result(
        self, ticket: Ticket, wanted: Outcome, async_op: bool, before: Sequence[Ticket] = ()
    ) -> Any:
        handle = Handle(ticket, lambda: wanted.result(ticket.value), before)
        return handle if async_op else handle.wait()


def seconds(name: str, value: object) -> float:
    """Return a time limit.

    Raises:
        ConfigError: unless it is a number over 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError(f"{name}={value!r}: use a number of seconds over 0")
    return float(value)


def priority_of(names: tuple[str, ...], given: object) -> Numbers:
    if type(given) is int:
        return given
    if isinstance(given, list | tuple) and all(type(one) is int for one in given):
        if len(given) == len(names):
            return alike(given)
        raise ConfigError(f"{len(names)} keys need as many priorities, got {len(given)}")
    raise ConfigError(f"priority={given!r:.40}: use a whole number, or one for each key")
