"""A torch optimizer whose gradients are averaged over all workers while backward is still running.

Theory of operation
-------------------
The wrapped optimizer does not change: its groups, its state and its ``step()`` are used, so schedulers, hooks
and closures work as usual. The additions are around it:

    backward     each gradient leaves as soon as it is there      (:mod:`kvps.torch.sync.gradient_sync`)
    its end      all are back: ``.grad`` is the mean, on every worker the same, to the bit
    ``step()``   what no hook has seen leaves now; then the optimizer's own step

With ``update_on_kvstore=True`` the store runs the optimizer: it returns weights, the state is only in the
store, and only ``step()`` waits. Rates that a scheduler has changed are sent before the first gradient of the
next step. A gradient that has been pushed updates the weights, and cannot be taken back. So gradients
leave in ``step()``: those of a ``backward()`` that is followed by ``zero_grad()`` never do. With
``overlap_backward=True`` they leave during backward, and it is an error to discard them.

A GradScaler looks at gradients before it steps, through ``param_groups``. If the optimizer runs here, these
are the means, so all workers see the same, and the scaler needs nothing else. If it runs in the store, the
workers first agree whether any of their gradients is infinite. So with ``overlap_backward`` gradients wait
for ``step()``, too, if a scaler is used, which is known from the first step on, in which nothing is pushed
early.

With ``overlap_forward=True`` neither ``backward()`` nor ``step()`` waits; the next reader of a parameter
does, such as the next forward pass (:mod:`kvps.torch.deferred_updates`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch

from kvps.errors import ConfigError, EpochChanged
from kvps.phrases import names_in_words
from kvps.runtime.current import claim
from kvps.store import residual_state
from kvps.store.base import KVStoreBase
from kvps.store.catch_up import refuse
from kvps.store.create import options_of
from kvps.torch.broadcast import broadcast_optimizer_state, join
from kvps.torch.deferred_updates import DeferredUpdates
from kvps.torch.sync.agreement import (
    Agreement,
    buffers_of,
    check_clipping,
    check_norms,
    check_plain,
    demand_same,
    divisor_of,
    is_free,
    numbered,
)
from kvps.torch.sync.gradient_sync import OPTIMIZERS, Advice, GradientSync
from kvps.torch.sync.parameter_sync import (
    ParameterSync,
    check_free,
    named,
    runs_in_store,
    store_of,
)
from kvps.torch.sync.state_dict import StateInStore, WrappedOptimizer, in_words
from kvps.torch.sync.steps import Described, OwnedSteps, check_groups

log = logging.getLogger("kvps")
Named: TypeAlias = "torch.nn.Module | Iterable[tuple[str, torch.Tensor]] | None"
OPS = ("average", "sum")
NOT_OURS = (
    "step() of the wrapped optimizer was called, but the DistributedOptimizer makes its steps: this one "
    "would change the weights of this worker alone. Call step() of the DistributedOptimizer"
)
EARLY = Advice(
    "call step() in between; if a step has several backward passes, use backward_passes_per_step=, or "
    "no_sync() around all but the last, or leave out overlap_backward=True, with which a reentrant "
    "checkpoint works, too",
    "the servers update the weights with the gradient that was pushed; to clip the mean by its norm, use "
    "clip_global_norm=; to change it otherwise, use update_on_kvstore=False",
    "leave out overlap_backward=True, then gradients leave in step()",
)
CLIPPED = (
    "between backward() and step(). With update_on_kvstore=True the servers average the gradients that the "
    "workers push, and the mean of clipped gradients is not the clipped mean. To clip the mean by its norm, "
    "use clip_global_norm= in place of clip_grad_norm_; to change it otherwise, use "
    "update_on_kvstore=False, with which .grad is the mean; to scale gradients, scale the loss"
)
CLIP_HERE = (
    ".grad is the mean: leave clip_global_norm= out, and call "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) between backward() and step()"
)
RESTS = "compression"
"""The entry of :meth:`DistributedOptimizer.state_dict` with the residuals of compression; torch ignores
it."""


class DistributedOptimizer(WrappedOptimizer):
    """Steps a torch optimizer with gradients that are averaged over all workers.

    Every worker creates it with the same arguments. This sets the parameters, and the buffers of a module, to
    rank 0's values. From then on ``.grad`` has the mean over all workers when ``backward()`` returns, so you
    can clip or read it before ``step()``. Where workers of a :class:`kvps.LocalCluster` share an accelerator,
    it has the mean after :meth:`synchronize`: torch has one thread for the backward passes of a device.

    Args:
        optimizer: an optimizer over the trained parameters. With ``update_on_kvstore``, servers must be able
            to run it; its groups may differ in ``lr`` and ``weight_decay``.
        named_parameters: a module, or its ``named_parameters()``; None numbers the parameters.
        kvstore: the name of a store, which is then the optimizer's own; or a store, which then serves
            nothing else (for ``op="average"``, created with ``average=True``).
        compression: compress gradients, as :meth:`kvps.KVStore.set_gradient_compression`: ``"fp16"``, or
            ``{"type": "2bit", "threshold": 0.01}``. Keys are the names of parameters, which the patterns of
            ``rules`` match. A gradient that is not finite is not compressed, so that a GradScaler sees it.
        backward_passes_per_step: the number of passes whose gradients are summed here before they are pushed.
        op: ``"average"`` divides by the number of workers in a round: workers that are lost, have left or
            have joined do not count. ``"sum"`` does not divide.
        update_on_kvstore: run the optimizer in the store. Gradients leave in ``step()``, and ``.grad`` is
            None after it. The store has the weights: the next step overwrites those that the script writes to
            a parameter, and a warning tells of the first (not of writes through ``.data``).
        find_unused: parameters may have no gradient in some steps; a parameter without a gradient on any
            worker does not change. This costs a round trip in ``step()``, and the mean is in ``.grad`` only
            after :meth:`synchronize`: call it before you clip gradients.
        overlap_forward: let ``step()`` return at once, and each parameter wait for its update until it is
            read, in the next forward pass or elsewhere. ``named_parameters`` is the module then. ``.grad`` is
            None after ``step()``; call :meth:`synchronize` before you clip or read gradients, and before you
            read memory that a parameter shares with a view of your own.
        overlap_backward: with ``update_on_kvstore``, push gradients during backward, so that it hides the
            transfer between hosts. Then each ``backward()`` belongs to a step: ``zero_grad()`` or another
            ``backward()`` before ``step()`` is an error, since the servers have used the gradients. (With the
            optimizer on the workers, gradients always leave during backward, and may be discarded.)
        bucket_bytes: bytes of gradients that are pushed together; None for the best size for the store.
        clip_global_norm: with ``update_on_kvstore`` and a dist_sync store, the servers scale the averaged
            gradients of each step down to this norm over all parameters, as
            ``torch.nn.utils.clip_grad_norm_`` does. Dense gradients only; they are pushed in one call, so
            ``bucket_bytes`` and ``overlap_backward`` are refused.
        kvstore_options: ``timeout``, ``on_worker_lost`` and ``worker_grace`` as in :func:`kvps.create`, for
            the store that ``kvstore`` names; None for the defaults. The optimizer's other stores (for
            ``find_unused``, a GradScaler, :meth:`join`) take the same options, or those of a store that is
            passed.

    Raises:
        ConfigError: for invalid arguments.
        Mismatch: (a ValueError) if ``update_on_kvstore`` does not fit the store, or rank 0 has
            other parameters.

    Example:
        >>> import torch, kvps.torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = kvps.torch.DistributedOptimizer(optimizer, model, "local")
        >>> model(torch.ones(8, 2)).mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Named = None,
        kvstore: str | KVStoreBase = "dist_sync",
        compression: str | Mapping[str, Any] | None = None,
        backward_passes_per_step: int = 1,
        op: str = "average",
        update_on_kvstore: bool = False,
        *,
        find_unused: bool = False,
        overlap_forward: bool = False,
        overlap_backward: bool = False,
        bucket_bytes: int | None = None,
        clip_global_norm: float | None = None,
        kvstore_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer: give a torch optimizer, got {type(optimizer).__name__}")
        check_plain(optimizer, "DistributedOptimizer")
        if op not in OPS:
            raise ConfigError(f"op={op!r}: use one of {', '.join(OPS)}")
        self._inner = optimizer
        params = named(numbered(optimizer) if named_parameters is None else named_parameters)
        check_groups(optimizer, params)
        is_summed = op == "sum" or (isinstance(kvstore, str) and is_free(kvstore))
        kv = store_of(kvstore, "optimizer", kvstore_options, average=not is_summed)
        if kv is None:
            raise ConfigError("kvstore: give the name of a store, such as 'dist_sync', or a store")
        self._on_store = runs_in_store(kv, bool(update_on_kvstore))
        check_clipping(clip_global_norm, self._on_store, overlap_backward, CLIP_HERE, "overlap_backward=True")
        if clip_global_norm is not None and bucket_bytes is not None:
            raise ConfigError(
                "bucket_bytes= has no meaning with clip_global_norm=, which pushes all gradients of a step "
                "in one call; leave out bucket_bytes="
            )
        self._described = Described(optimizer, params, clip_global_norm)
        if overlap_backward and not self._on_store:
            raise ConfigError(
                "overlap_backward=True is for update_on_kvstore=True; with the optimizer on the workers, "
                "gradients leave during backward anyway"
            )
        self._is_late = self._on_store and not overlap_backward
        if self._on_store or kv.num_workers > 1:
            check_norms(named_parameters, "DistributedOptimizer")
        buffers = buffers_of(named_parameters)
        check_free(kv, {**params, **buffers}, "DistributedOptimizer")
        residual_state.compress(kv, compression, "compression")
        is_device_shared = claim(params.values())
        demand_same(
            kv,
            "DistributedOptimizer",
            params,
            buffers,
            update_on_kvstore=self._on_store,
            find_unused=find_unused,
            op=op,
            optimizer_state=in_words(optimizer) if self._on_store else "",
        )
        self._model = ParameterSync(kv, params, None if self._on_store else lambda: optimizer.state.clear())
        self._model.spread(buffers, self._described.now() if self._on_store else None)
        self._stored: StateInStore | None = None
        """The state of the wrapped optimizer, if it runs in the store."""
        if self._on_store:
            self._stored = StateInStore(optimizer, self._model, self._described)
        self._exchange = GradientSync(
            self._model,
            backward_passes_per_step,
            bucket_bytes,
            divisor=divisor_of(kv, op),
            advice=EARLY if self._on_store else OPTIMIZERS,
            before=self._send_rates,
            brings_weights=self._on_store,
            # Where workers use different parameters, one's backward would wait for what another sends
            # in its step only; where they share a device in one process, for another's backward behind it.
            is_awaited=not (self._on_store or overlap_forward or find_unused or is_device_shared()),
            is_released=overlap_forward,
            is_whole=clip_global_norm is not None,
        )
        # With overlap_backward, until it is known that no scaler is used.
        self._exchange.is_held = self._on_store
        self._owned = OwnedSteps(optimizer, self, NOT_OURS, params)
        self._steps = self._model.steps
        self._steps.choose(
            DistributedOptimizer._step_in_store,
            DistributedOptimizer._drop_step,
            lambda optimizer: optimizer._model.pull(),
        )
        if self._steps.is_behind and find_unused:
            refuse("with find_unused=True, steps push other parameters", "do without find_unused")
        self._used = Agreement(kv.num_workers, len(params), options_of(kv)) if find_unused else None
        self._overflow: Agreement | None = None
        self._is_synchronized = False
        self._late: DeferredUpdates | None = None
        if overlap_forward:
            if not isinstance(named_parameters, torch.nn.Module):
                raise ConfigError(
                    "overlap_forward=True puts hooks on modules: pass the module as named_parameters"
                )
            self._late = DeferredUpdates(named_parameters, self._model, optimizer, self._on_store)

    # --- a step -----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters when the gradients of all workers have arrived.

        Args:
            closure: evaluates the model again and returns the loss; its gradients are averaged, too.

        Raises:
            ConfigError: naming parameters that have no gradient, without ``find_unused``.
            KvpsError: the error of a push or pull of a gradient.
        """
        if self._late is not None:
            late = self._late
            if self._may_put_off(late, closure):
                self._owned.run(lambda: self._put_off(late))
                return None
            late.finish()
        if self._on_store:
            given = () if closure is None else (closure,)
            return self._owned.run(self._step_on_store, *given)
        if closure is None:
            if not self._is_synchronized:
                self.synchronize()
            return self._step_here(None)

        def averaged() -> Any:
            self._exchange.is_late = False  # it computes other gradients
            loss = closure()
            self.synchronize()
            self._exchange.begin()
            self._model.is_given_up = False  # the optimizer is in the middle of a step of zeros
            return loss

        return self._step_here(averaged)

    def _step_here(self, closure: Callable[[], Any] | None) -> Any:
        self._is_synchronized = False
        if self._model.is_given_up:
            self._model.is_given_up = False
            self._exchange.begin()
            return None
        scaling: dict[str, Any] = {
            name: value for name, value in vars(self).items() if name in ("grad_scale", "found_inf")
        }
        vars(self._inner).update(scaling)  # a scaler has left them here for a fused step
        self._exchange.is_late = True  # until the step is made
        try:
            with self._model.written(self._exchange.begin, self._owned), self._owned:
                return self._inner.step() if closure is None else self._inner.step(closure)
        finally:
            for name in scaling:
                del vars(self._inner)[name]

    def _step_on_store(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_unchanged()
        self._steps.run(self)
        return loss

    def _step_in_store(self) -> None:
        found = vars(self).get("found_inf")
        if found is not None and not self._exchange.is_held:
            raise ConfigError(
                "a GradScaler now steps this optimizer, but the gradients have already been pushed: "
                "use the scaler from the first step, or leave out overlap_backward=True"
            )
        try:
            # What has left before a Timeout was finite.
            if found is None or self._exchange.values or not self._is_infinite(found):
                self._complete()
                self._exchange.wait()
                self._exchange.bring_weights()
        except EpochChanged as error:
            self._model.go_on(error)
        for param in self._model.params.values():
            param.grad = None  # it holds weights, or nothing
        self._exchange.begin()
        self._exchange.is_held = self._is_late or found is not None

    def _check_unchanged(self) -> None:
        """Check that gradients of which the store will take the mean are those that backward has made.

        Raises:
            ConfigError: if some were changed, and not to 0.
        """
        if not self._exchange.is_held:
            return
        kv = self._model.kv
        changed = [
            name
            for name in self._exchange.changed(self._model.params)
            if bool(self._exchange.gradient(name).any())
        ]
        if changed and not is_free(str(kv.type)) and kv.num_workers > 1:
            raise ConfigError(
                f"the gradient of {names_in_words(changed)} was changed (for example clipped) {CLIPPED}"
            )

    def _drop_step(self) -> float:
        if "found_inf" in vars(self):
            refuse("a GradScaler may have dropped steps", "use bfloat16, which needs no scaler")
        for param in self._model.params.values():
            param.grad = None
        self._exchange.begin()
        return self._model.passed_over(self._described.now())

    def _is_infinite(self, found: torch.Tensor) -> bool:
        """Whether any worker's gradient is infinite; if not, all are unscaled."""
        if self._overflow is None:
            kv = self._model.kv
            self._overflow = Agreement(1 if is_free(str(kv.type)) else kv.num_workers, 1, options_of(kv))
        if bool(self._agreed(self._overflow, found.reshape(1) > 0)):
            return True
        scale = vars(self).get("grad_scale")
        if scale is not None:
            present = [param.grad for param in self._model.params.values() if param.grad is not None]
            torch._foreach_div_(present, float(scale))
        return False

    def _may_put_off(self, late: DeferredUpdates, closure: object) -> bool:
        """Whether this step can be deferred to the next forward pass."""
        is_scaled = "found_inf" in vars(self)
        has_more = self._steps.is_behind or self._owned.has_pre_hooks
        is_bound = self._is_synchronized or has_more
        return not (late.is_compiled or is_scaled or is_bound or closure)

    def _put_off(self, late: DeferredUpdates) -> None:
        self._check_unchanged()
        late.finish()  # what no module has asked for since
        try:
            if self._model.is_given_up:
                self._model.is_given_up = False
                self._exchange.discard()
                return
            self._complete()
            late.put_off_step(self._exchange.release())
            self._exchange.is_held = self._is_late
        except EpochChanged as error:
            self._model.go_on(error)
            self._model.is_given_up = False
            self._exchange.begin()

    # --- gradients --------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until ``.grad`` of all parameters has the mean over all workers.

        ``backward()`` has done so already, unless some gradients are not pushed yet: those of passes inside
        :meth:`no_sync`, or of fewer passes than ``backward_passes_per_step``. Afterwards call step() under
        :meth:`skip_synchronize`, or step() itself, which then has nothing to wait for.

        With ``overlap_forward``, it also makes the deferred updates. Between step() and backward(), or with
        ``update_on_kvstore=True``, that is all it does.

        Raises:
            ConfigError: with ``update_on_kvstore=True``, where sums are never returned; or as step().
        """
        if self._late is not None:
            self._late.finish()
            if self._on_store or all(param.grad is None for param in self._model.params.values()):
                return  # between step() and backward(), it is the weights that a script waits for
        self._needs_means("synchronize() waits for")
        try:
            self._complete()
            self._exchange.wait()
        except EpochChanged as error:
            self._model.go_on(error)
            for param in self._model.params.values():
                if param.grad is not None:
                    param.grad.zero_()  # it was of weights that nobody has any more
        self._is_synchronized = True

    def _needs_means(self, what: str) -> None:
        if self._on_store:
            raise ConfigError(
                f"{what} the mean of gradients, but with update_on_kvstore=True the servers return weights: "
                "to clip the mean by its norm, use clip_global_norm= in place of clip_grad_norm_; to read "
                "or change the mean, use update_on_kvstore=False"
            )

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let step() inside use ``.grad`` as it is: after synchronize(), and perhaps clipping.

        Raises:
            ConfigError: without synchronize() before it; or as synchronize().
        """
        self._needs_means("skip_synchronize() steps with")
        if not self._is_synchronized:
            raise ConfigError("skip_synchronize() needs synchronize() before it")
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients of backward passes inside; the first pass after the block pushes them.

        Example:
            >>> with optimizer.no_sync():  # doctest: +SKIP
            ...     loss(first_half).backward()
            >>> loss(second_half).backward()  # doctest: +SKIP
            >>> optimizer.step()  # doctest: +SKIP
        """
        with self._exchange.paused():
            yield

    def join(self) -> None:
        """Let the other workers continue without this worker, which has run out of batches, until all have.

        Afterwards every worker has the weights and the optimizer's state of the worker that joined last, and
        the next step belongs to the same round everywhere. Means are over the workers that still have
        batches.

        Raises:
            ConfigError: with ``find_unused``, or with a scaler and ``update_on_kvstore=True``: there the
                other workers need an answer from this worker in each step. Give all workers equally many
                batches.

        Example:
            >>> for x, y in loader:  # others may have more of them  # doctest: +SKIP
            ...     train(x, y)
            >>> optimizer.join()  # doctest: +SKIP
        """
        if self._used is not None or self._overflow is not None:
            why = "find_unused=True" if self._used is not None else "a GradScaler"
            raise ConfigError(
                f"join() is not possible with {why}: the other workers need this worker in each step. Give "
                "all workers equally many batches, as kvps.data_sampler does"
            )
        self._finish()
        self._exchange.discard()
        join(self._model, None if self._on_store else partial(broadcast_optimizer_state, self._inner))

    def _finish(self) -> None:
        """Make all deferred updates."""
        if self._late is not None:
            self._late.finish()

    def _complete(self) -> None:
        """Let all gradients leave, with zeros for parameters that have a gradient on another worker only.

        Raises:
            ConfigError: naming parameters without a gradient, without ``find_unused``; or as
                :meth:`GradientSync.complete`.
        """
        self._exchange.complete()
        missing = self._exchange.missing()
        if self._exchange.is_agreed:
            return
        if self._used is None:
            if missing:
                raise self._exchange.hooks.no_gradient(
                    missing,
                    "zero_grad()",
                    "Use them, set requires_grad_(False) on them, or use find_unused=True",
                )
            return
        lacks = set(missing)
        names = list(self._model.params)
        used = [name not in lacks and self._model.params[name].requires_grad for name in names]
        elsewhere = self._agreed(self._used, torch.tensor(used, device="cpu"))
        for name, is_used in zip(names, elsewhere.tolist(), strict=True):
            if is_used and name in lacks:
                self._model.params[name].grad = self._exchange.nothing_for(name)
        self._exchange.complete()
        self._exchange.is_agreed = True

    def _agreed(self, agreement: Agreement, flags: torch.Tensor) -> torch.Tensor:
        """Return which flags are set at any worker; if that is cut off, the step is still under way."""
        try:
            return agreement.any(flags)
        finally:
            if agreement.is_open:
                self._exchange.is_late = True
                vars(self).pop("grad_scale", None)  # a scaler multiplies by what it finds here

    # --- rates ------------------------------------------------------------------------------------

    def _send_rates(self) -> None:
        """Send the store the rates that a scheduler has changed."""
        if self._on_store:
            self._model.check_weights()
            self._model.want(self._described.now())

    # --- what every optimizer has -----------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer.

        A GradScaler reads the gradients through these groups, after they have been averaged.
        """
        if not self._on_store and self._exchange.is_away:
            self.synchronize()
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer; empty if it is in the store."""
        self._finish()
        return self._inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; a step that was begun but not made is abandoned.

        Raises:
            ConfigError: with ``overlap_backward``, if gradients were pushed since the last step.
        """
        self._exchange.discard()
        self._is_synchronized = False
        self._inner.zero_grad(set_to_none)

    def close(self) -> None:
        """Finish pending calls, release the parameters, and close the store."""
        if self._late is not None:
            self._late.close()
        if self._on_store and self._exchange.values:
            log.warning(
                "%r was closed after a backward() without a step(), whose gradients the servers have used",
                self._model.kv.name,
            )
        self._exchange.abandon()
        self._exchange.hooks.close()
        self._owned.close()
        if self._stored is not None:
            self._stored.close()
        self._model.kv.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the groups and the state, as the wrapped optimizer would. State in the store is fetched; a
        call by one worker is enough. The residuals of this worker's compressed gradients are in the entry
        ``"compression"``: to keep these, too, save a state on each worker.
        """
        self._finish()
        owed = residual_state.state_of(self._model.kv)
        return self._inner.state_dict() | ({RESTS: owed} if owed else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict` of this object or of the wrapped optimizer.

        Every worker calls; for state in the store, rank 0's call counts. A worker loads residuals only if
        they are of its rank; otherwise its residuals start at zero.
        """
        self._finish()
        whole = {name: value for name, value in state_dict.items() if name != RESTS}
        self._inner.load_state_dict(whole)
        self._model.is_torn = False
        residual_state.put(self._model.kv, state_dict.get(RESTS, {}))
