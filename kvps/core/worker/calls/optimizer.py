"""The calls on optimizers and compression: settings, state and residuals."""

from __future__ import annotations

import torch

from kvps import protocol as p
from kvps.compression.policy import CompressionPolicy
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.placement import EMBEDDING
from kvps.core.worker.calls.base import Call, OnTimeout, Operation, Values, frozen, settle
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import AwaitAcks
from kvps.core.worker.plan import PieceLocation
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_ID
from kvps.errors import KvpsError
from kvps.tensors import dtype_of, from_frame


@frozen
class SetOptimizer(Call):
    """Install ``hyper`` on every server (rank 0) after the pushes so far, or check that it is there."""

    title = "set_optimizer()"
    on_timeout = OnTimeout.RESUME
    creates = True

    hyper: HyperParams

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield from settle(store, tuple(store.keys))
        if store.is_replaying:
            return None  # a predecessor made it
        hyper, before = self.hyper, store.optimized
        store.optimized = store.next_call(before)
        number, after, _ = store.optimized
        message = p.Optimize(
            store.name,
            number,
            store.rank == 0,
            hyper.name,
            dict(hyper.values),
            dict(hyper.lr_mult),
            dict(hyper.wd_mult),
            after,
            store.is_resumed and store.rank != 0,
            store.attempts.count(p.Optimize, number),
        )
        try:
            yield [Request(server, message) for server in range(store.servers)]
        except KvpsError:
            store.optimized = before
            store.attempts.refuse(p.Optimize, number)
            raise
        return None


@frozen
class SetRate(Call):
    """Set the learning rate on every server (rank 0), or check it.

    The rounds pushed so far are updated with the old rate.
    """

    title = "set_learning_rate()"
    on_timeout = OnTimeout.RESUME
    creates = True

    lr: float

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield from settle(store, tuple(store.keys))
        if store.is_replaying:
            return None  # a predecessor made it
        before = store.rated
        store.rated = store.next_call(before)
        number, after, _ = store.rated
        is_new = store.is_resumed and store.rank != 0
        refused = store.attempts.count(p.Rate, number)
        message = p.Rate(store.name, number, store.rank == 0, self.lr, after, is_new, refused)
        try:
            yield [Request(server, message) for server in range(store.servers)]
        except KvpsError:
            store.rated = before
            store.attempts.refuse(p.Rate, number)
            raise
        return None


@frozen
class SaveState(Call):
    """Finishes with the state of every key, key -> (step, state name -> flat tensor), after the
    pushes so far.

    A key of which some part was never updated has no state yet.
    """

    title = "save_optimizer_states()"
    on_timeout = OnTimeout.RETRY

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield from settle(store, tuple(store.keys))
        keys = [key for key in store.keys.values() if not key.name.startswith(EMBEDDING)]
        where = [(key, piece) for key in keys for piece in key.pieces]
        answers = yield [
            Request(piece.server, p.GetState(piece.chunk, piece.start, piece.size)) for _, piece in where
        ]
        steps: dict[str, list[int]] = {}
        parts: dict[tuple[str, str], list[tuple[PieceLocation, torch.Tensor]]] = {}
        for (key, piece), answer in zip(where, answers, strict=True):
            message = answer.message
            assert isinstance(message, p.StateIs)
            steps.setdefault(key.name, []).append(message.step)
            for field, frame in zip(message.fields, answer.payload, strict=True):
                part = from_frame(frame, BY_ID[field.dtype].name)
                parts.setdefault((key.name, field.name), []).append((piece, part))
        states: dict[str, tuple[int, dict[str, torch.Tensor]]] = {
            name: (min(of_parts), {}) for name, of_parts in steps.items()
        }
        for (name, title), known in parts.items():
            if len(known) == len(store.keys[name].pieces):
                row = torch.empty(store.keys[name].spec.count, dtype=known[0][1].dtype)
                for piece, part in known:
                    row[piece.offset : piece.offset + piece.size] = part
                states[name][1][title] = row
        return states


@frozen
class LoadState(Call):
    """Put optimizer states on the servers, in the form SaveState gives them."""

    title = "load_optimizer_states()"
    creates = True

    states: dict[str, tuple[int, dict[str, torch.Tensor]]]

    def run(self, store: WorkerStore, values: Values) -> Operation:
        requests = []
        for name, (step, rows) in self.states.items():
            for piece in store.key(name).pieces:
                cut = [row[piece.offset : piece.offset + piece.size] for row in rows.values()]
                fields = tuple(
                    p.Field(title, dtype_of(row).id, piece.size) for title, row in zip(rows, cut, strict=True)
                )
                message = p.SetState(piece.chunk, piece.start, piece.size, step, fields)
                requests.append(Request(piece.server, message, payload=tuple(cut)))
        yield requests
        return None


@frozen
class Compress(Call):
    """Compress by ``rules`` what is pushed from now on; finishes at once.

    No server is asked, as each push says how it is encoded.
    """

    title = "set_gradient_compression()"

    rules: CompressionPolicy

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield []
        store.compress(self.rules)
        return None


@frozen
class SaveResiduals(Call):
    """Finishes with the residuals of this rank's pushes so far, key -> flat tensor."""

    title = "compression_state()"
    on_timeout = OnTimeout.RETRY

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield AwaitAcks()
        return {name: residual.to("cpu", copy=True) for name, residual in store.feedback.residuals.items()}


@frozen
class LoadResiduals(Call):
    """Replace all residuals by these, in the form that SaveResiduals gives them."""

    title = "load_compression_state()"

    residuals: dict[str, torch.Tensor]

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield AwaitAcks()
        store.feedback.residuals = {name: residual.clone() for name, residual in self.residuals.items()}
        return None
