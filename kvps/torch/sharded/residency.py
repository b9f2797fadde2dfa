"""Residency of weights: which are local, which are being prefetched, and the placeholders of the rest.

Theory of operation
-------------------
A weight is in one of three states::

    away ---> coming ---> here ---> away
     expect()     bring()     free()

A parameter whose weight is away keeps its shape, and all its elements are one: NaN. So code that reads it by
mistake sees NaN, and never freed memory.

autograd saves weights for the backward pass, and a reference is enough to keep the memory. So while a block
computes, what autograd saves of a weight is replaced by its name and the place in it (:meth:`remember`),
and when backward asks, the weight is brought again. In a synchronous store it is the same version, as this
rank pushes a gradient of it only when backward is done with it. Other hooks for saved tensors, such as those
of activation checkpointing, get all that is not a weight, as without us.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch

from kvps.errors import EpochChanged
from kvps.net.memory import give_back
from kvps.runtime.ticket import Handle
from kvps.store.server_store import DistStore

PRIORITY = 1 << 20
"""The priority of pulls, which a pass waits for: they overtake gradients."""
GIVE_BACK_BYTES = 32 << 20
"""After weights of so many bytes have left, the heap's gaps are given back to the system. Without
that the heap grows with the number of blocks, to several times the memory in use."""

_autograd: Any = torch._C._autograd
"""torch has no public way to ask which hooks for saved tensors there are."""


class Arrival(NamedTuple):
    """Weights that are coming together."""

    handle: Handle
    values: dict[str, torch.Tensor]


class SavedSlice(NamedTuple):
    """The part of a weight that autograd has saved: its name, and its place in it."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Residency:
    """The weights of a model that lie in a store, and come here to be used.

    Args:
        kv: the store.
        params: name -> parameter.
        forms: name -> tensor without memory that says how the weight is laid out here.
        go_on: called when the servers have returned to a checkpoint, before weights are asked for again.
        check: called with the name of a weight that backward needs again.
    """

    def __init__(
        self,
        kv: DistStore,
        params: Mapping[str, torch.Tensor],
        forms: Mapping[str, torch.Tensor],
        go_on: Callable[[EpochChanged], None],
        check: Callable[[str], None],
    ) -> None:
        self._kv = kv
        self._params = params
        self._forms = forms
        self._go_on = go_on
        self._check = check
        self._coming: dict[str, Arrival] = {}
        self._held: Counter[str] = Counter()
        self._here: dict[str, int] = {}
        """Name -> the address of the memory of a weight that is local."""
        self._name_at: dict[int, str] = {}
        self._left_bytes = 0
        """The size of the weights that have left since free memory was given back."""
        self._outer: list[Any] = []
        """The hooks for saved tensors that ours have covered."""

    # --- to and fro -------------------------------------------------------------------------------

    def expect(self, names: Iterable[str]) -> None:
        """Ask for weights that will be needed soon."""
        due = [name for name in names if name not in self._here and name not in self._coming]
        if not due:
            return
        with torch.inference_mode(False):
            fresh = [self.empty(name) for name in due]
        handle = self._kv.pull(due, out=fresh, priority=PRIORITY, async_op=True)
        arrival = Arrival(cast("Handle", handle), dict(zip(due, fresh, strict=True)))
        self._coming.update(dict.fromkeys(due, arrival))

    def bring(self, names: Iterable[str]) -> None:
        """Return when all of these weights are here.

        Raises:
            KvpsError: why one cannot be.
        """
        wanted = list(names)
        while any(name not in self._here for name in wanted):
            try:
                self.expect(wanted)
                for name in wanted:
                    if name in self._coming:
                        self._coming[name].handle.wait()
                        self._place(name, self._coming.pop(name).values.pop(name))
            except EpochChanged as error:
                self._coming.clear()
                self._go_on(error)
            except BaseException:
                self._coming.clear()
                raise

    def free(self, names: Iterable[str] | None = None) -> None:
        """Free these weights, or all, except those that are in use."""
        for name in list(self._here) if names is None else names:
            if name in self._here and not self._held[name]:
                del self._name_at[self._here.pop(name)]
                self.leave(name)

    def forget(self) -> None:
        """Weights have changed: let go of all, also of those that are coming."""
        self._coming.clear()
        self.free()

    def hold(self, names: Iterable[str]) -> None:
        """Keep these weights here, once they are, until :meth:`release`."""
        self._held.update(names)

    def release(self, names: Iterable[str]) -> None:
        """Let go of weights: one holder of them needs them no more."""
        self._held.subtract(names)

    def leave(self, name: str) -> None:
        """Have a parameter stand for a weight that is not here."""
        form = self._forms[name]
        param = self._params[name]
        # One element for each: filling a parameter that is away must not fill the others.
        nothing = torch.full(
            (), float("nan") if form.is_floating_point() else 0, dtype=form.dtype, device="cpu"
        )
        with torch.inference_mode(False):
            param.data = nothing.to(param.device).expand(form.shape)
        self._left_bytes += form.nbytes
        if self._left_bytes >= GIVE_BACK_BYTES:
            self._left_bytes = 0
            give_back()

    def empty(self, name: str) -> torch.Tensor:
        """Return memory for a weight where its parameter is, with undefined values."""
        return torch.empty_like(self._forms[name], device=self._params[name].device)

    def stand_in(self, name: str) -> torch.Tensor:
        """Return the parameter's value, or undefined ones on the CPU where it has none."""
        param = self._params[name].detach()
        return param if all(param.stride()) else torch.empty_like(self._forms[name], device="cpu")

    def _place(self, name: str, value: torch.Tensor) -> None:
        with torch.inference_mode(False):
            self._params[name].data = value
        # One without elements has no memory, and is not looked for.
        address = value.untyped_storage().data_ptr() or -1 - len(self._name_at)
        self._here[name] = address
        self._name_at[address] = name

    # --- what autograd saves ----------------------------------------------------------------------

    def remember(self) -> bool:
        """Have autograd save weights by name from here on; return whether it did not already."""
        top = _autograd._top_saved_tensors_default_hooks(True)
        if top is not None and top[0] == self._pack:
            return False
        self._outer.append(top)
        _autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        return True

    def end_remembering(self) -> None:
        """End what :meth:`remember` began."""
        _autograd._pop_saved_tensors_default_hooks()
        self._outer.pop()

    def _pack(self, saved: torch.Tensor) -> object:
        piece = self._piece(saved)
        if piece is not None:
            return piece
        outer = self._outer[-1]
        return saved if outer is None else (outer[1], outer[0](saved))

    def _piece(self, saved: torch.Tensor) -> SavedSlice | None:
        if saved.layout is not torch.strided:
            return None
        name = self._name_at.get(saved.untyped_storage().data_ptr())
        if name is None or saved.dtype != self._forms[name].dtype:
            return None
        return SavedSlice(name, saved.size(), saved.stride(), int(saved.storage_offset()))

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedSlice):
            self._check(packed.name)
            self.bring([packed.name])
            weight = self._params[packed.name].detach()
            return weight.as_strided(packed.size, packed.stride, packed.offset)
        if isinstance(packed, tuple):
            unpack, inner = packed
            found: torch.Tensor = unpack(inner)
            return found
        assert isinstance(packed, torch.Tensor)
        return packed
