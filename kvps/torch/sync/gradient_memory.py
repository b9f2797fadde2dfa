"""Gradient memory: gradients of a model in memory that servers read in place, so that no push copies them.

Theory of operation
-------------------
After ``zero_grad()`` autograd makes each gradient a new tensor. A hook calls
:meth:`GradientMemory.take`, which copies it to its *place*, while it is in the processor's cache,
and lets ``.grad`` be a view of the place. So there is one copy, as there would be with a push of
memory that servers do not read; but the tensor that autograd made is free again before the next
layer asks for memory. A backward pass that finds ``.grad`` there adds to it, and nothing is copied.

Servers read a place until the call that pushed it is over. If such a call fails, they may read it
later, with the pushes of other workers: the place is left to them, and its parameter gets another.

``.grad`` belongs to the user, who may keep it after the step. A place whose last ``.grad`` still
lives is left to its user, too. To know that, each ``.grad`` is a tensor over a numpy array of its
own: the array lives as long as any view of that tensor does.

Where servers read no memory of this process, as those on other hosts, there are no places.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvps.net.memory import keep_freed_memory
from kvps.store.base import Store
from kvps.store.server_store import DistStore

_NUMPY_LACKS = {torch.bfloat16: torch.int16}
"""Element types that numpy does not have, and types of the same size."""
SMALL_BYTES = 64 << 10


@dataclass(slots=True)
class Place:
    """The memory of one gradient.

    Args:
        sent: the tensor that is pushed, and to which the sum is written.
    """

    sent: torch.Tensor
    array: Any
    """The same memory as a numpy array."""
    shown: weakref.ref[Any] | None = None
    """The array under the last ``.grad``."""

    @classmethod
    def of(cls, sent: torch.Tensor) -> Place:
        """Return a place in the memory of ``sent``."""
        like = _NUMPY_LACKS.get(sent.dtype)
        return cls(sent, (sent if like is None else sent.view(like)).numpy())

    @property
    def is_kept(self) -> bool:
        """Whether somebody has a view of the last ``.grad``."""
        return self.shown is not None and self.shown() is not None

    def show(self) -> torch.Tensor:
        """Return another ``.grad`` in this place."""
        array = self.array[...]
        self.shown = weakref.ref(array)
        grad = torch.from_numpy(array)
        return grad if grad.dtype == self.sent.dtype else grad.view(self.sent.dtype)


class GradientMemory:
    """The places of the gradients of a model.

    Args:
        kv: the store; only stores with servers lend memory.
        params: name -> parameter; the store knows these keys.
    """

    def __init__(self, kv: Store | None, params: Mapping[str, torch.Tensor]) -> None:
        self._kv = kv if isinstance(kv, DistStore) else None
        self._params = params
        self._places: dict[str, Place] = {}
        self._known: set[str] = set()
        """The parameters that have a place, or get none."""

    def prepare(self, names: Sequence[str]) -> None:
        """Get places for the next gradients of these parameters, where they have none.

        Raises:
            KvpsError: the error of the store.
        """
        if self._kv is None:
            return
        new = [name for name in names if name not in self._known]
        if not new:
            return
        wanted = [name for name in new if _may_move(self._params[name])]
        # Small ones are pushed without those between them
        # (:meth:`kvps.torch.sync.in_flight.Buckets.arrange`), so they are to lie side by side.
        small = [name for name in wanted if self._params[name].nbytes < SMALL_BYTES]
        large = [name for name in wanted if self._params[name].nbytes >= SMALL_BYTES]
        for some in filter(None, (large, small)):
            for name, tensor in zip(some, self._kv.lent_like(some), strict=True):
                if tensor is not None:
                    self._places[name] = Place.of(tensor)
        self._known.update(new)
        if self._places:
            # The tensors that autograd makes live until the hook: they come from the heap, not
            # from new pages.
            keep_freed_memory()

    def take(self, name: str) -> None:
        """Move the gradient that backward has just computed to its place, if it has one."""
        place = self._places.get(name)
        if place is None:
            return
        param = self._params[name]
        gradient = param.grad
        if gradient is None or _lies_at(gradient, place.sent) or not _fits(gradient, place.sent):
            return
        if place.is_kept:
            self._leave(name)
            return
        param.grad = place.show()
        with torch.no_grad():
            param.grad.copy_(gradient)

    def sent(self, name: str) -> torch.Tensor | None:
        """Return the place of a parameter's ``.grad``; None if that lies elsewhere."""
        place, gradient = self._places.get(name), self._params[name].grad
        if place is None or gradient is None or not _lies_at(gradient, place.sent):
            return None
        return place.sent if _fits(gradient, place.sent) else None

    def give_up(self, names: Iterable[str]) -> None:
        """Leave the places of these parameters to servers that may read them still."""
        for name in names:
            place, param = self._places.get(name), self._params[name]
            if place is None:
                continue
            self._leave(name)
            if param.grad is not None and _lies_at(param.grad, place.sent):
                param.grad = param.grad.clone()

    def _leave(self, name: str) -> None:
        del self._places[name]
        self._known.discard(name)


def _may_move(param: torch.Tensor) -> bool:
    return param.device.type == "cpu" and param.is_contiguous() and param.numel() > 0


def _lies_at(gradient: torch.Tensor, place: torch.Tensor) -> bool:
    is_dense = gradient.layout is torch.strided
    return is_dense and gradient.data_ptr() == place.data_ptr()


def _fits(gradient: torch.Tensor, place: torch.Tensor) -> bool:
    return (
        gradient.layout is torch.strided
        and gradient.dtype == place.dtype
        and gradient.shape == place.shape
        and gradient.device == place.device
        and gradient.is_contiguous()
        and not gradient.requires_grad
    )
