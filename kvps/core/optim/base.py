"""The interface of an updater, and the steps that all update rules share.

The rules are in :mod:`~kvps.core.optim.torch_rules` and :mod:`~kvps.core.optim.extra_rules`, their
parameters in :mod:`~kvps.core.optim.hyperparams`. A plug-in adds others by ``register``.

Theory of operation
-------------------
A server keeps many keys side by side in a *chunk*: one flat tensor of weights, and for each
optimizer one :data:`State`, a dict of tensors of the same length. A rule is applied to a *slice*
of the chunk: a range of elements with its gradient and the same range of every state tensor.

:class:`Updater` decides what is common to all rules, once::

    summed gradient -- x rescale_grad -- clip to [-c, c] -- cast --> _update(weight or master)
                                                                              |
                                     half weight <-- rounded copy --  float32 master

and a subclass decides only ``_update``. Everything happens in place and nothing is kept outside
of ``State``: an updater may be thrown away and made again from its
:class:`~kvps.core.optim.hyperparams.HyperParams` at any time. Rules that torch.optim has are in
:mod:`kvps.core.optim.torch_rules`, the others in :mod:`kvps.core.optim.extra_rules`.

Two rules ask for more than a slice. ``lars`` and ``lamb`` need norms of the *whole tensor*, which
may lie on several servers: each piece answers :meth:`Updater.partial_norms`, the caller adds the
answers, and gives the sum to :meth:`Updater.apply`. ``dcasgd`` needs to know what each rank last
read: the caller reports it by :meth:`Updater.pulled`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvps.core.optim.hyperparams import HyperParams
from kvps.errors import ConfigError

State = dict[str, Tensor]
"""Name -> flat tensor as long as the weight it belongs to."""

MASTER = "master"
"""The state entry of ``multi_precision``: the float32 weight behind a half one."""

CLIP_EPS = 1e-6
"""The number that torch.nn.utils.clip_grad_norm_ adds to a norm before it divides by it."""

_HALF = (torch.float16, torch.bfloat16)
_TRIED_STEPS = 1, 2, 1000
_TRIED_COUNT = 3
"""Elements that are tried: with a single one torch does not always check the numbers."""
_LARGE = 1000.0
_EXACT = 2**53
"""Largest magnitude up to which a float64 represents every whole number."""


class Terms(NamedTuple):
    """The numbers of one update.

    Args:
        step: updates that this range has had, this one included; the first is 1.
        lr, weight_decay: of this key, multipliers applied.
        norms: sums of squares over the whole tensor, float64; None unless ``needs_norms``.
        rank: the rank that pushed (async); None for a round of several ranks (sync).
        age: by how many versions the weights have moved since that rank read them; None if that is not known.
    """

    step: int
    lr: float
    weight_decay: float
    norms: Tensor | None = None
    rank: int | None = None
    age: int | None = None


class Updater(abc.ABC):
    """One optimizer, applied to slices of chunks. Subclasses write :meth:`_update`.

    One instance serves a whole store: it holds the hyper-parameters, never state of a key.

    Args:
        hyper: checked hyper-parameters; ``hyper.name`` chose this class.

    Attributes:
        needs_norms: :meth:`apply` wants ``norms``, and each slice must be (a piece of) exactly
            one key; other rules take any range of keys that share step, lr and weight decay.
        tracks_pulls: :meth:`pulled` wants to be told what ranks read.
        takes_integers: integer weights are allowed.
        spends_gradients: the gradient that :meth:`apply` is given may be overwritten.
        is_by_row: states have one element for each row of an embedding table; weights and gradients are
            [n, dim] then, and states [n, 1]. Keys cannot have such a rule.

    Example::

        updater = create(resolve("sgd", {"lr": 0.1, "momentum": 0.9}))
        state = updater.new_state(chunk)
        part = slice(0, 1000)
        updater.apply(chunk[part], gradient, {name: x[part] for name, x in state.items()},
                      Terms(step=1, lr=0.1, weight_decay=0.0))
    """

    needs_norms: ClassVar[bool] = False
    tracks_pulls: ClassVar[bool] = False
    takes_integers: ClassVar[bool] = False
    spends_gradients = True
    is_by_row: ClassVar[bool] = False

    def __init__(self, hyper: HyperParams) -> None:
        self.hyper = hyper
        self._rescale = hyper.number("rescale_grad")
        self._clip = hyper.optional("clip_gradient")
        self._prepares = self._rescale != 1.0 or self._clip is not None
        """Gradients are changed before they are applied."""
        self.max_norm = hyper.optional("clip_global_norm")
        """The norm over all keys of a step, above which its gradients are scaled down; None for no limit."""
        if self.needs_norms and self.max_norm is not None:
            raise ConfigError(
                f"optimizer '{hyper.name}' limits its steps by norms of each key, and does not go with "
                "clip_global_norm; omit clip_global_norm, or use another optimizer"
            )
        self.waits = self.needs_norms or self.max_norm is not None
        """A closed round is applied only when other parts of its key, or of its step, are measured."""
        self._multi_precision = hyper.flag("multi_precision")
        self.rates = hyper.for_key("")
        """(learning rate, weight decay) of a key without multipliers of its own."""
        self._tried: set[torch.dtype] = set()
        """Weight types that these hyper-parameters were tried on."""

    def new_state(self, weight: Tensor) -> State:
        """Return the state of a chunk that has had no update.

        Args:
            weight: the chunk, 1-D, any float dtype (integers where ``takes_integers``). It is
                read, not kept: with ``multi_precision`` a half chunk is copied to the master.

        Raises:
            ConfigError: this optimizer cannot update a weight of that dtype, or not with its numbers.
        """
        self.demand(weight.dtype)
        if weight.dim() == 1:
            self.demand_keys()
        if self._multi_precision and weight.dtype in _HALF:
            master = weight.float()
            return {MASTER: master, **self._new_state(master)}
        return self._new_state(weight)

    def demand_keys(self) -> None:
        """Check that this optimizer can update keys, and not only embedding tables.

        Raises:
            ConfigError: if it cannot.
        """
        if self.is_by_row:
            raise ConfigError(
                f"optimizer '{self.hyper.name}' has a number for each row of an embedding table; use it in "
                "embedding(..., optimizer=...), and 'adagrad' for keys"
            )

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return how many bytes of state each element of this type has; 0 if it cannot be updated."""
        try:
            few, many = (self.new_state(torch.zeros(count, dtype=dtype)) for count in (1, 2))
        except ConfigError:
            return 0
        return sum(many[name].nbytes - few[name].nbytes for name in few)

    def adopt(self, weight: Tensor, state: State) -> State:
        """Return state for ``weight`` that keeps what an older ``state`` of it knows.

        For a change of hyper-parameters on the way: entries that the new settings need and the
        old state lacks start as in :meth:`new_state`; those it no longer needs are dropped.
        Meant for two updaters of one name; the same entry of two optimizers may differ in
        meaning.

        Args:
            weight: the chunk.
            state: the whole chunk's old state. Its tensors are reused, not copied, where the
                dtype stays.

        Raises:
            ConfigError: as :meth:`new_state`.
        """
        kept = {
            name: state[name].to(fresh.dtype) if name in state else fresh
            for name, fresh in self.new_state(weight).items()
        }
        return kept | {name: old for name, old in state.items() if self._is_lazy(name)}

    def apply(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        """Update one slice in place.

        Args:
            weight: 1-D slice of the chunk.
            gradient: the summed gradient, as long; float32 where the weight is half, else the
                weight's dtype. It is used up: its contents are undefined afterwards.
            state: the same range of every tensor of the chunk's state.
            terms: the numbers of this update.

        Raises:
            ValueError: ``norms`` is missing and this optimizer needs them.
        """
        if self.needs_norms and terms.norms is None:
            raise ValueError(
                f"{self.hyper.name} needs norms of the whole tensor; add up partial_norms() of "
                "all pieces and pass the sum"
            )
        if not weight.numel():
            return
        target = state.get(MASTER, weight)
        if self._prepares or gradient.dtype != target.dtype:
            gradient = self._prepare(gradient, target.dtype, in_place=True)
        self._update(target, gradient, state, terms)
        if target is not weight:
            weight.copy_(target)

    def applier(
        self, dtype: torch.dtype, summed_in: torch.dtype
    ) -> Callable[[Tensor, Tensor, State, Terms], None]:
        """Return :meth:`apply` for slices of one type, without the steps that would change nothing.

        Args:
            dtype: type of the weights, of which each slice has some.
            summed_in: type of the gradients.
        """
        return self.apply if self._prepares or self.needs_norms or dtype != summed_in else self._update

    def clip_factor(self, squares: float) -> float:
        """Return the factor by which the gradients of a step are clipped, as torch's
        ``clip_grad_norm_`` computes it.

        Args:
            squares: the sum of squares of the step's gradients, as they are before
                ``rescale_grad``; may be NaN or infinity.

        Returns:
            1 for gradients within ``max_norm``; NaN, if ``squares`` is NaN.
        """
        assert self.max_norm is not None
        factor = self.max_norm / (math.sqrt(squares) * abs(self._rescale) + CLIP_EPS)
        return 1.0 if factor >= 1.0 else factor

    def partial_norms(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> Tensor:
        """Return this piece's share of the whole tensor's sums of squares.

        Nothing is changed. Shares are float64 vectors of one length; their sum over the pieces
        of a tensor is the ``norms`` of :meth:`apply`, called with the same arguments.
        """
        target = state.get(MASTER, weight)
        ready = self._prepare(gradient, target.dtype, in_place=False)
        return self._norms(target, ready, state, terms)

    def pulled(  # noqa: B027 (a hook that most rules leave empty)
        self, weight: Tensor, state: State, start: int, stop: int, rank: int
    ) -> None:
        """Note that ``rank`` has just read elements ``start:stop`` of a chunk.

        Args:
            weight: the whole chunk.
            state: the whole chunk's state; an entry may be added to it.
            start, stop: the range read.
            rank: the rank that read it.

        Does nothing unless ``tracks_pulls``.
        """

    @abc.abstractmethod
    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        """Change ``weight`` and ``state`` in place.

        ``gradient`` is rescaled, clipped and of the weight's dtype; it may be overwritten.
        ``weight`` is the master where there is one.
        """

    def _new_state(self, weight: Tensor) -> State:
        """Return the rule's own state for ``weight`` (the master where there is one)."""
        return {}

    def _norms(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> Tensor:
        """Return the sums of squares that ``_update`` wants; overwrite no argument."""
        return torch.zeros(0, dtype=torch.float64)

    def _is_lazy(self, name: str) -> bool:
        """Return whether ``name`` is a state entry that is created later than the state."""
        return False

    def _prepare(self, gradient: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
        """Return the gradient rescaled, then clipped, then cast: the one place that does so."""
        whole = not gradient.is_floating_point()
        if self._rescale != 1.0:
            factor = int(self._rescale) if whole else self._rescale
            gradient = gradient.mul_(factor) if in_place else gradient * factor
            in_place = True
        if self._clip is not None:
            low, high = -self._clip, self._clip
            if whole:  # torch refuses integer bounds that the dtype does not have
                limits = torch.iinfo(gradient.dtype)
                low, high = max(int(low), limits.min), min(int(high), limits.max)
            gradient = gradient.clamp_(low, high) if in_place else gradient.clamp(low, high)
        return gradient.to(dtype)

    def demand(self, dtype: torch.dtype) -> None:
        """Check that this optimizer can update weights of ``dtype`` with its numbers.

        Numbers that are each in range may still combine to a number that torch cannot apply. A gradient that
        is in would then end the server, so it is tried out before, on a few elements.

        Raises:
            ConfigError: if it cannot, and why.
        """
        self._check_dtype(dtype)
        if dtype in self._tried:
            return
        lr, weight_decay = self.hyper.largest()
        is_master = self._multi_precision and dtype in _HALF
        weight = torch.ones(_TRIED_COUNT, dtype=torch.float32 if is_master else dtype)
        gradient = torch.ones(_TRIED_COUNT, dtype=torch.float32 if dtype in _HALF else dtype)
        try:
            state = self._new_state(weight)
            for step in _TRIED_STEPS:
                terms = Terms(step, lr, weight_decay)
                ready = self._prepare(gradient.clone(), weight.dtype, in_place=True)
                if self.needs_norms:
                    norms = self._norms(weight, ready.clone(), state, terms)
                    terms = terms._replace(norms=norms)
                self._update(weight, ready, state, terms)
        except Exception as error:  # a plug-in may raise anything
            raise ConfigError(
                f"optimizer '{self.hyper.name}' cannot update a weight of {dtype} with these "
                f"hyper-parameters ({type(error).__name__}: {str(error)[:200]}); give smaller values: "
                f"{self._numbers()}"
            ) from error
        self._tried.add(dtype)

    def take_over(self, other: Updater) -> None:
        """Skip trials that ``other``, whose hyper-parameters are not smaller, has passed."""
        self._tried |= other._tried

    def _numbers(self) -> str:
        """Return its largest hyper-parameters, for an error text."""
        values = dict(self.hyper.values)
        values["lr"], values["weight_decay"] = self.hyper.largest()
        large = {
            name: value
            for name, value in values.items()
            if isinstance(value, int | float) and abs(value) > _LARGE
        }
        return ", ".join(f"{name}={value:g}" for name, value in large.items()) or "none is large"

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype.is_floating_point:
            return
        if not self.takes_integers:
            raise ConfigError(
                f"optimizer '{self.hyper.name}' cannot update a weight of {dtype}; use a float "
                "dtype for the key, or keep integer keys in a store without this optimizer"
            )
        if self.max_norm is not None:
            raise ConfigError(
                f"optimizer '{self.hyper.name}': clip_global_norm={self.max_norm:g} cannot scale a gradient "
                f"of {dtype}; use a float dtype for the key"
            )
        for name, value in (("rescale_grad", self._rescale), ("clip_gradient", self._clip)):
            if value is not None and (not value.is_integer() or abs(value) >= _EXACT):
                raise ConfigError(
                    f"optimizer '{self.hyper.name}': {name}={value:g} cannot apply to a weight of "
                    f"{dtype}; give a whole number below 2**53, or use a float dtype for the key"
                )
