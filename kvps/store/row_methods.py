"""The methods of a store that read rows: those that a script names, or those that changed.

Rows are pushed by the calls that push anything (:mod:`kvps.store.kvstore`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvps.store.calling import Calling, Outcome, priority_of
from kvps.store.row_copies import Copies, changes_of, marks_of
from kvps.store.rows import picks_of, table_of


class RowMethods(Calling):
    """A store, by rows."""

    def row_sparse_pull(
        self,
        key: object,
        out: object = None,
        row_ids: object = None,
        priority: int | Sequence[int] = 0,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return some rows of a key after this rank's own pushes; only they travel.

        Each row is of one version, and all of a key's are of the same.

        Args:
            key: a str or int, or a list of them, each of two or more dimensions.
            out: None returns a new tensor. One of the key's shape: those of its rows are written that
                are pulled. One of the shape of the rows: they are written in the order of
                ``row_ids``. Or a list of either, one per device; for a list of keys, a list of these.
            row_ids: numbers of rows, a tensor, an array or a list, in any order and shape, repeats
                allowed; for a list of keys, a list of these.
            priority: keys of a higher priority travel first; a list gives each key its own.
            async_op: return a handle, whose ``wait()`` returns the result.
            timeout: seconds to wait, instead of the store's.

        Returns:
            The rows in the order of ``row_ids``, as a tensor of its shape with the further
            dimensions of the key behind it; or ``out``.

        Raises:
            KeyNotFound: for a key that was never initialised.
            Mismatch: for a number that is no row of the key, or an output that does not fit.
            ConfigError: without ``row_ids``. Timeout, WorkerLost, NonFinite: as :meth:`pull`.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init("table", torch.zeros(4, 2))
            >>> kv.push("table", ([2, 0, 2], torch.ones(3, 2)))
            >>> kv.row_sparse_pull("table", row_ids=[2, 1])
            tensor([[2., 2.],
                    [0., 0.]])
        """
        self._begin()
        names, is_many = self._names_of(key)
        self._know(names, timeout)
        self._demand_known(names)
        picks = picks_of(names, is_many, self._specs, row_ids, out)
        ids = tuple([one.ids for one in picks])
        places = tuple([one.places for one in picks])
        urgency, limit_s = priority_of(names, priority), self._limit(timeout)
        ticket = self._pull_rows(names, ids, places, urgency, limit_s)

        def deliver(found: object) -> object:
            rows = self._picked(found, names, ids, places)
            results = [pick.deliver(one) for pick, one in zip(picks, rows, strict=True)]
            return (out if out is not None else results) if is_many else results[0]

        return self._result(ticket, Outcome(None, deliver), async_op)

    def refresh(
        self,
        key: object,
        out: object,
        held: object = None,
        priority: int | Sequence[int] = 0,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Bring ``out`` up to date, after this rank's own pushes: a pull of what changed.

        Where a table is pushed to by rows, those rows alone travel that were updated since the last
        call, whoever pushed them. It is a pull of all of the key the first time; when ``out`` is
        another tensor, or was written to in between; when the key was not changed by rows; when half of
        the rows changed, or so much that the servers have forgotten it; and in ``local``, ``device`` and
        ``allreduce`` stores. What ``out`` holds then is what :meth:`pull` would write.

        (Writes that torch does not count, through ``out.data`` or ``out.numpy()``, go unseen: they stay
        where nothing new comes.)

        Args:
            key: a str or int, or a list of them.
            out: a tensor of the key's shape or a list of them, one per device; for a list of keys, a list
                of these.
            held: what the last call for this key and ``out`` returned; for a list of keys, a list.
            priority: keys of a higher priority travel first; a list gives each key its own.
            async_op: return a handle, whose ``wait()`` writes to ``out`` and returns the result.
            timeout: seconds to wait, instead of the store's.

        Returns:
            What ``out`` holds, for the next call; for a list of keys, a list.

        Raises:
            KeyNotFound: for a key that was never initialised.
            Mismatch: for an output that does not fit. Timeout, WorkerLost, NonFinite: as :meth:`pull`.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init("table", torch.zeros(4, 2))
            >>> kv.set_optimizer("sgd", lr=0.5)
            >>> table = torch.empty(4, 2)
            >>> held = kv.refresh("table", table)
            >>> kv.push("table", ([1], torch.ones(1, 2)))
            >>> held = kv.refresh("table", table, held)
            >>> table[:2]
            tensor([[ 0.0000,  0.0000],
                    [-0.5000, -0.5000]])
        """
        self._begin()
        names, is_many = self._names_of(key)
        self._know(names, timeout)
        self._demand_known(names)
        copies = Copies(names, is_many, out, held, self._specs, is_direct=not async_op)
        urgency, limit_s = priority_of(names, priority), self._limit(timeout)
        ticket, fresh = self._refreshed(names, copies.sinks, copies.marks, urgency, limit_s)
        return self._result(
            ticket, Outcome(None, lambda found: copies.deliver(fresh(found))), async_op
        )

    def pull_changed(
        self,
        key: object,
        held: object = None,
        priority: int | Sequence[int] = 0,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return those rows of a key that changed since the last call, after this rank's own pushes.

        It is :meth:`refresh` for callers that keep no copy, or not as a tensor. All rows come where it is not known
        what changed, as there. Without an optimizer a row changed whenever the sum of a round named it, or
        that of the round before, since it is 0 again.

        Args:
            key: a str or int, or a list of them, each of two or more dimensions.
            held: the ``held`` of what the last call returned; for a list of keys, a list.
            priority: keys of a higher priority travel first; a list gives each key its own.
            async_op: return a handle, whose ``wait()`` returns the result.
            timeout: seconds to wait, instead of the store's.

        Returns:
            :class:`~kvps.store.row_copies.RowChanges`: ``row_ids``, ascending, ``rows`` and ``held``; for a
            list of keys, a list.

        Raises:
            KeyNotFound: for a key that was never initialised.
            Mismatch: for a key without rows. Timeout, WorkerLost, NonFinite: as :meth:`pull`.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init("table", torch.zeros(2, 1))
            >>> row_ids, rows, held = kv.pull_changed("table")
            >>> row_ids
            tensor([0, 1])
        """
        self._begin()
        names, is_many = self._names_of(key)
        self._know(names, timeout)
        self._demand_known(names)
        marks = marks_of(names, is_many, held)
        specs = [table_of(name, self._specs[name]) for name in names]
        urgency, limit_s = priority_of(names, priority), self._limit(timeout)
        ticket, fresh = self._refreshed(names, (None,) * len(names), marks, urgency, limit_s)

        def deliver(found: object) -> object:
            changes = [changes_of(*one) for one in zip(specs, fresh(found), strict=True)]
            return changes if is_many else changes[0]

        return self._result(ticket, Outcome(None, deliver), async_op)
