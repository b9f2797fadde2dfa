"""The calls on optimizers and compression: settings, state and residuals."""

from __future__ import annotations

import abc
from typing import ClassVar

import torch

from kvps import protocol as p
from kvps.compression.policy import CompressionPolicy
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.placement import EMBEDDING
from kvps.core.worker.calls.base import Call, OnTimeout, Operation, Values, frozen, settle
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import AwaitAcks
from kvps.core.worker.plan import PieceLocation
from kvps.core.worker.store import Made, WorkerStore
from kvps.dtypes import BY_ID
from kvps.errors import KvpsError
from kvps.protocol.envelope import Message
from kvps.tensors import dtype_of, from_frame


@frozen
class SetOnServers(Call):
    """Have every server set something (rank 0) after the pushes so far, or check that it is so."""

    on_timeout = OnTimeout.RESUME
    creates = True
    counted_as: ClassVar[str]
    """The field of a store that has the last call of this kind."""

    def run(self, store: WorkerStore, values: Values) -> Operation:
        yield from settle(store, tuple(store.keys))
        if store.is_replaying:
            return None  # a predecessor made it
        before: Made = getattr(store, self.counted_as)
        made = store.next_call(before)
        setattr(store, self.counted_as, made)
        kind = SetOnServers, self.counted_as
        is_new, refused = store.is_resumed and store.rank != 0, store.attempts.count(kind, made.number)
        try:
            yield store.everywhere(self.message(store, made, is_new, refused))
        except KvpsError:
            setattr(store, self.counted_as, before)
            store.attempts.refuse(kind, made.number)
            raise
        return None

    @abc.abstractmethod
    def message(self, store: WorkerStore, made: Made, is_new: bool, refused: int) -> Message:
        """Return the message to the servers.

        Args:
            store: the store.
            made: the number of this call, and the rounds before it.
            is_new: this rank has taken another's place, and is not rank 0.
            refused: how often this call was refused before.
        """


@frozen
class SetOptimizer(SetOnServers):
    """Install ``hyper`` on every server."""

    title = "set_optimizer()"
    counted_as = "optimized"

    hyper: HyperParams

    def message(self, store: WorkerStore, made: Made, is_new: bool, refused: int) -> Message:
        """Return the settings."""
        hyper = self.hyper
        numbers = dict(hyper.values), dict(hyper.lr_mult), dict(hyper.wd_mult)
        head = store.name, made.number, store.rank == 0, hyper.name
        return p.Optimize(*head, *numbers, made.after, is_new, refused)


@frozen
class SetRate(SetOnServers):
    """Set the learning rate; the rounds pushed so far are updated with the old rate."""

    title = "set_learning_rate()"
    counted_as = "rated"

    lr: float

    def message(self, store: WorkerStore, made: Made, is_new: bool, refused: int) -> Message:
        """Return the rate."""
        return p.Rate(store.name, made.number, store.rank == 0, self.lr, made.after, is_new, refused)


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
