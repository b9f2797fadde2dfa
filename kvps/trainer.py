"""The training step over a store: gradients out, weights in.

Theory of operation
-------------------
A :class:`Trainer` gives each parameter a key, the parameter's name, and makes each step with one call of the
store for all parameters. Where the optimizer runs decides what travels::

    update_on_kvstore=True    gradients -> (sum, optimizer: in the store) -> weights
    update_on_kvstore=False   gradients -> (sum: in the store) -> sums -> optimizer: here

Gradients are summed over workers and divided by ``batch_size``, after the sum and, for half types,
in float32: the first batch size of rank 0 goes to the store's optimizer as a factor, and gradients
travel as they are. A step of another batch size scales its gradients by the ratio of the two
before it pushes them. So batch sizes may change, and differ between workers.

Gradients leave in ``step()``, in one call (:mod:`kvps.torch.sync.gradient_sync`), and stay in ``.grad``. With
``overlap=True`` they leave while backward is running, and ``step()`` waits for those that are still in
flight. With the optimizer in the store they leave before ``step(batch_size)`` has been called: they are
scaled for the batch size of the step before, or for ``trainer.batch_size`` if that was set; and it is an
error to discard them, since the store has used them.

Sparse gradients, of an ``Embedding(sparse=True)``, are pushed as rows to a store that has the optimizer,
which then updates only these rows. With the optimizer here, the gradients and their sums are sparse again.

For the effect of a rollback on a step see :mod:`kvps.torch.sync.parameter_sync`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn, TypeAlias

import torch

from kvps.core.optim.hyperparams import HyperParams, resolve
from kvps.errors import ConfigError
from kvps.phrases import and_more
from kvps.store import residual_state
from kvps.store.base import KVStoreBase
from kvps.store.kvstore import KVStore
from kvps.store.local_optimizer import RulesOptimizer, TorchOptimizer
from kvps.torch.broadcast import broadcast_object, broadcast_optimizer_state, join
from kvps.torch.sync.agreement import (
    AgreedBatch,
    check_clipping,
    check_norms,
    check_plain,
    demand_same,
    positive,
)
from kvps.torch.sync.gradient_sync import Advice, GradientSync
from kvps.torch.sync.parameter_sync import (
    ParameterSync,
    check_free,
    is_distributed,
    named,
    runs_in_store,
    store_of,
)
from kvps.torch.sync.state_dict import StateInStore, in_words
from kvps.torch.sync.steps import Described, OwnedSteps, Resumable, check_groups

Params: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"
ADVICE = Advice(
    "call step() in between; if a step has several backward passes, or activation checkpointing with "
    "use_reentrant=True uses the parameter several times, create the Trainer with overlap=False",
    "create the Trainer with overlap=False to change gradients (and with update_on_kvstore=False, to change "
    "their sum between allreduce_grads() and update())",
    "create the Trainer with overlap=False, then gradients leave in step()",
)
CLIP_HERE = (
    "the sums of gradients are on the workers: leave clip_global_norm= out, and call "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm * batch_size) between allreduce_grads() and "
    "update(batch_size)"
)

IN_STORE = (
    "step() of the torch optimizer was called, but its steps are made in the store: it would change the "
    "weights of this worker alone. Call trainer.step(batch_size)"
)
NOT_SUMMED = (
    "step() of the torch optimizer was called, but gradients are not summed over the workers yet: it would "
    "change the weights of this worker alone. Call trainer.step(batch_size), or trainer.allreduce_grads() "
    "before step()"
)


class Trainer(Resumable):
    """Applies an optimizer to parameters, with gradients summed over all workers.

    Every worker creates its Trainer with the same arguments. This sets all parameters, and the buffers of a
    module, to rank 0's values. Buffers (running means, ...) and parameters with ``requires_grad=False`` are
    not synchronised afterwards. With the update in the store, the store has the weights: load a checkpoint
    into the model before you create the Trainer, because the next step overwrites later writes to a parameter
    (with sparse gradients: only in updated rows). A warning tells of the first, but not of writes through
    ``.data``, which torch does not count.

    Args:
        params: a module, its ``named_parameters()``, or a dict name -> tensor. A parameter with two names
            counts once.
        optimizer: a name (``"sgd"``, ``"adam"``, ...) or a torch optimizer over these parameters.
            Servers use its class and hyper-parameters, also when a scheduler changes them; its
            groups may differ in ``lr`` and ``weight_decay``. With ``update_on_kvstore=False`` the
            optimizer itself is used. Its hooks are called in each :meth:`step`; its own ``step()``
            is refused, unless :meth:`allreduce_grads` was called.
        optimizer_params: hyper-parameters for a name, such as ``{"lr": 0.1, "momentum": 0.9}``,
            also ``lr_mult`` and ``wd_mult``, by parameter name.
        kvstore: the name of a store, which is then the Trainer's own; a store, which then serves
            nothing else; or None to train alone.
        compression_params: compress gradients, as :meth:`kvps.KVStore.set_gradient_compression`: ``"fp16"``,
            or ``{"type": "2bit", "threshold": 0.5}``. Keys are the names of parameters, which the patterns of
            ``rules`` match. Gradients are compressed before they are divided by ``batch_size``.
        update_on_kvstore: run the optimizer in the store. Default: True for dist stores that can,
            else False. It must be True for dist_async and dist_ssp. A sparse gradient travels as rows, and
            the result is the rows that any worker has updated, or their sum.
        overlap: push gradients as soon as backward computes them, so that it hides the transfer
            between hosts. Then a step has one backward pass, nothing may change a gradient in
            between, and with the optimizer in the store no gradient may be discarded, and
            ``.grad`` is None after :meth:`step`.
        clip_global_norm: with the optimizer in a dist_sync store, the servers scale the gradients
            of each step (their sum divided by ``batch_size``) down to this norm over all parameters, as
            ``torch.nn.utils.clip_grad_norm_`` does. Dense gradients only; not with ``overlap``.
        kvstore_options: ``timeout``, ``on_worker_lost`` and ``worker_grace`` as in
            :func:`kvps.create`, for the store that ``kvstore`` names; None for the defaults. The
            Trainer's other stores (of :meth:`join`) take the same options, or those of a store
            that is passed.

    Raises:
        ConfigError: for invalid arguments.
        Mismatch: (a ValueError) if ``update_on_kvstore`` does not fit the store, or rank 0 has
            other parameters.

    Example:
        >>> import torch, kvps
        >>> model = torch.nn.Linear(2, 1)
        >>> trainer = kvps.Trainer(model, "sgd", {"lr": 0.1})
        >>> model(torch.ones(8, 2)).sum().backward()
        >>> trainer.step(batch_size=8)
    """

    def __init__(
        self,
        params: Params,
        optimizer: str | torch.optim.Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | KVStoreBase | None = "device",
        compression_params: str | Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        overlap: bool = False,
        *,
        clip_global_norm: float | None = None,
        kvstore_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._params = named(params)
        tensors = dict(self._params)
        if isinstance(params, torch.nn.Module):
            tensors.update(params.named_buffers())
        if isinstance(optimizer, str) and clip_global_norm is not None:
            optimizer_params = {**(optimizer_params or {}), "clip_global_norm": clip_global_norm}
        hyper = _checked(optimizer, optimizer_params, self._params)
        kv = store_of(kvstore, "trainer", kvstore_options)
        on_store = runs_in_store(kv, update_on_kvstore)
        is_alone = isinstance(kv, KVStore) and not is_distributed(kv)
        if is_alone and not on_store and compression_params is None:
            kv = None  # one process, and nothing to do for its store
        if hyper is not None:
            clip_global_norm = hyper.optional("clip_global_norm")
        check_clipping(clip_global_norm, on_store, overlap, CLIP_HERE, "overlap=True")
        if kv is not None and (on_store or kv.num_workers > 1):
            check_norms(params, "Trainer")
        check_free(kv, tensors, "Trainer")
        residual_state.compress(kv, compression_params, "compression_params")
        self._kv = kv
        self._local: RulesOptimizer | TorchOptimizer | None = None
        self._owned: OwnedSteps | None = None
        """The steps of a torch optimizer whose gradients a store sums up."""
        self._described: Described | None = None
        """The numbers of a torch optimizer that runs in the store, which a scheduler may change."""
        if isinstance(optimizer, torch.optim.Optimizer) and kv is not None:
            self._owned = OwnedSteps(
                optimizer,
                self,
                IN_STORE if on_store else NOT_SUMMED,
                self._params,
                may_evaluate=not on_store,
            )
            if on_store:
                self._described = Described(optimizer, self._params, clip_global_norm)
                hyper = self._described.now()
        if not on_store and isinstance(optimizer, torch.optim.Optimizer):
            self._local = TorchOptimizer(self._params, optimizer)
        elif not on_store:
            assert hyper is not None
            self._local = RulesOptimizer(self._params, hyper)
        self._model = ParameterSync(kv, self._params, None if self._local is None else self._local.forget)
        if kv is not None:
            buffers = {name: tensor for name, tensor in tensors.items() if name not in self._params}
            demand_same(
                kv,
                "Trainer",
                self._params,
                buffers,
                update_on_kvstore=on_store,
                optimizer_state=in_words(optimizer) if on_store else "",
            )
            self._model.spread(buffers, hyper if on_store else None)
        self._stored: StateInStore | None = None
        """The state of a torch optimizer that runs in the store."""
        if self._described is not None and isinstance(kv, KVStore):
            assert isinstance(optimizer, torch.optim.Optimizer)
            self._stored = StateInStore(optimizer, self._model, self._described)
        self._steps = self._model.steps
        self._steps.choose(Trainer._make_step, Trainer._drop_step, lambda trainer: trainer._model.pull())
        self._agreed = AgreedBatch(self._model)
        if self._steps.is_behind:
            self._agreed.take()
        self.batch_size: float | None = None
        """The batch size for which gradients are scaled that are pushed during backward (``overlap``)."""
        self._overlaps = overlap
        self._exchange: GradientSync | None = None
        """None where there is nothing to exchange."""
        if kv is not None:
            if overlap and not isinstance(kv, KVStore):
                raise ConfigError(f"overlap=True needs a store of kvps, but {kv.type!r} is a plug-in")
            self._exchange = GradientSync(
                self._model,
                before=self._scale,
                brings_weights=on_store,
                is_stepwise=not overlap,
                advice=ADVICE,
            )
            self._exchange.is_held |= on_store  # until a batch size is known

    # --- steps ------------------------------------------------------------------------------------

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over workers, divide by ``batch_size``, and update the parameters.

        What counts is ``.grad`` of each worker as it is now: clipped gradients are summed as they
        are, which is not the clipped sum. To clip the sum, use ``clip_global_norm=``, or
        ``update_on_kvstore=False`` and clip between :meth:`allreduce_grads` and :meth:`update`.

        Args:
            batch_size: the number of examples in the *sum*: the batch size of all workers together for summed
                losses, or the number of workers for mean losses. In dist_async and dist_ssp, the gradients of
                each worker count by themselves.
            ignore_stale_grad: take a missing gradient of a parameter on this worker as 0 (so momentum and
                weight decay continue); otherwise it is an error.

        Raises:
            ConfigError: if a parameter has no gradient; nothing was pushed.
        """
        if self._local is not None:
            positive(batch_size)
            self._sum(ignore_stale_grad)
            self.update(batch_size, ignore_stale_grad)
            return
        if self._owned is None:
            self._steps.run(self, batch_size, ignore_stale_grad)
        else:
            self._owned.run(lambda: self._steps.run(self, batch_size, ignore_stale_grad))

    def _make_step(self, batch_size: float, ignore_stale_grad: bool) -> None:
        self._model.survive(lambda: self._step(batch_size, ignore_stale_grad), is_step=True)

    def _drop_step(self, batch_size: float, ignore_stale_grad: bool) -> float:
        positive(batch_size)
        assert self._exchange is not None
        self._exchange.begin()
        for param in self._params.values() if self._overlaps else ():
            param.grad = None  # as behind a step that is made
        return self._model.passed_over(self._wanted())

    def _step(self, batch_size: float, ignore_stale_grad: bool) -> None:
        batch = positive(batch_size)
        names = self._with_gradients(ignore_stale_grad)
        exchange = self._exchange
        assert exchange is not None
        if exchange.is_late and batch != self.batch_size:
            raise ConfigError(
                f"batch_size={batch:g}, but the step that was cut off (by a Timeout, or an exception) has "
                f"pushed gradients for {self.batch_size:g}: call step({self.batch_size:g}), which waits on"
            )
        if exchange.values and batch != self.batch_size:
            exchange.abandon()
            raise ConfigError(
                f"batch_size={batch:g}, but gradients were already pushed with the scale "
                f"of {self.batch_size:g}, and the servers used them in this step. Set "
                f"trainer.batch_size = {batch:g} before backward(), or create the Trainer without overlap"
            )
        self.batch_size = batch
        spent = names if self._overlaps else [name for name in names if self._params[name].grad is None]
        try:
            self._exchanged(exchange, names)
            exchange.bring_weights()
        finally:
            if not exchange.is_late:
                exchange.begin()
                exchange.is_held = not self._overlaps
                for name in spent:
                    self._params[name].grad = None  # it holds weights, or was taken as 0

    def _exchanged(self, exchange: GradientSync, names: list[str]) -> None:
        """Send the gradients that have not left, and wait for all."""
        exchange.drop_discarded()
        self._fill(names)
        exchange.complete()
        exchange.wait()

    def _fill(self, names: list[str]) -> None:
        """Let gradients that are missing be 0."""
        for name in names:
            if self._params[name].grad is None:
                self._params[name].grad = torch.zeros_like(self._params[name])

    def _scale(self) -> None:
        """Scale gradients for their batch before they are pushed."""
        if self._local is None and self._exchange is not None:
            assert self.batch_size is not None
            self._model.check_weights()
            self._exchange.scale = self._agreed.size(self.batch_size) / self.batch_size
            if self._described is not None:
                self._model.want(self._wanted())  # what a scheduler has changed

    def _wanted(self) -> HyperParams:
        """Return the hyper-parameters that the script wants of the store's optimizer now."""
        hyper = self._model.hyper
        assert hyper is not None
        return hyper if self._described is None else self._described.scaled_as(hyper)

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Put the sum over all workers into every ``.grad``: the first half of :meth:`step`.

        Raises:
            ConfigError: with update_on_kvstore=True; or as :meth:`step`.
        """
        self._sum(ignore_stale_grad)
        if self._exchange is not None:
            self._exchange.begin()

    def _sum(self, ignore_stale_grad: bool) -> None:
        """Put the sums into every ``.grad``; the step goes on."""
        self._needs_local("allreduce_grads")
        names = self._with_gradients(ignore_stale_grad)
        if self._owned is not None:
            self._owned.let_pass()
        exchange = self._exchange
        if exchange is None:
            self._fill(names)
            return

        def sums() -> None:
            self._exchanged(exchange, names)
            exchange.is_late = True  # until they are used

        try:
            self._model.survive(sums, is_step=True)
        finally:
            if not exchange.is_late:
                exchange.begin()

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the parameters by their ``.grad / batch_size``: the second half of :meth:`step`.

        Between the two halves you may read and change gradients (clip them, for example), in the same way on
        all workers.

        Raises:
            ConfigError: with update_on_kvstore=True; or as :meth:`step`.
        """
        local = self._needs_local("update")
        batch = positive(batch_size)
        if self._model.is_given_up:  # what is in .grad is this rank's alone
            self._model.is_given_up = False
            return
        names = self._with_gradients(ignore_stale_grad)
        present = [name for name in names if self._params[name].grad is not None]
        end = (lambda: None) if self._exchange is None else self._exchange.begin
        with torch.no_grad(), self._model.written(end, self._owned), self._owned or nullcontext():
            local.step(present, 1.0 / batch)

    def close(self) -> None:
        """Finish pending calls, release the parameters, and close the store, also one that was given.

        Servers drop the values of a store that every worker has closed. A later Trainer begins anew.
        """
        if self._exchange is not None:
            self._exchange.abandon() if self._exchange.is_late else self._exchange.discard()
            self._exchange.hooks.close()
        if self._stored is not None:
            self._stored.close()
        if isinstance(self._kv, KVStore):
            self._kv.close()

    def join(self) -> None:
        """Let the other workers continue without this worker, which has run out of batches, until all have.

        Afterwards every worker has the weights and the optimizer's state of the worker that joined last, and
        the next step belongs to the same round everywhere.

        Raises:
            ConfigError: if the store is not a dist store.

        Example:
            >>> for x, y in loader:  # others may have more of them  # doctest: +SKIP
            ...     train(x, y)
            >>> trainer.join()  # doctest: +SKIP
        """
        if self._kv is None:
            return
        if not isinstance(self._kv, KVStore):
            raise ConfigError(f"join() needs a store of kvps, but {self._kv.type!r} is a plug-in")
        if self._exchange is not None:
            self._exchange.discard()
        join(self._model, None if self._local is None else self._take_state)

    def _take_state(self, root: int, **options: Any) -> None:
        if isinstance(self._local, TorchOptimizer):
            broadcast_optimizer_state(self._local.optimizer, root, **options)
        elif self._local is not None:
            self._local.put(broadcast_object(self._local.all_states(), root, **options))

    @property
    def param_groups(self) -> NoReturn:
        """Refuse to be stepped by a GradScaler.

        Raises:
            AttributeError: always, as ``hasattr()`` expects.
        """
        raise AttributeError(
            "a Trainer has no param_groups, by which a GradScaler finds gradients: use autocast with "
            "bfloat16, which needs no scaler, or kvps.torch.DistributedOptimizer, which a GradScaler can step"
        )

    # --- the optimizer ------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate; with several groups, the rate of the first."""
        if self._local is not None:
            return self._local.learning_rate
        if self._described is not None:
            return self._described.now().number("lr")
        assert self._model.hyper is not None
        return self._model.hyper.number("lr")

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate from the next step on; every worker calls, rank 0's call counts.

        The rates of other groups keep their ratio to it.

        Raises:
            ConfigError: for a bad value. Mismatch: if rank 0 set another.
        """
        if self._local is not None:
            self._local.set_learning_rate(lr)
            return
        self._model.set_rate(lr)
        if self._described is not None:
            assert self._model.hyper is not None
            self._described.set_rate(self._model.hyper)

    def save_states(self, path: str) -> None:
        """Write the optimizer's states (momenta, step counts) to a safetensors file.

        A call by one worker is enough, because all have the same states. With compression every worker calls:
        its residuals are its own, and are written to ``PATH.rests-RANK``.

        Raises:
            StorageError: if it cannot be written.
        """
        if self._local is not None:
            self._local.save(path)
        else:
            self._model.survive(lambda: self._model.kv.save_optimizer_states(path))
        self._model.survive(lambda: residual_state.save(self._kv, path))

    def load_states(self, path: str) -> None:
        """Load the file of :meth:`save_states`; every worker calls.

        The residuals of a worker start at zero if its rank has no file beside ``path``.

        Raises:
            StorageError: if it cannot be read. Mismatch: if it belongs to another optimizer or model.
        """
        if self._local is not None:
            self._local.load(path)
            self._model.is_torn = False
        else:
            self._model.survive(lambda: self._model.kv.load_optimizer_states(path))
        self._model.survive(lambda: residual_state.load(self._kv, path))

    # --- small things -------------------------------------------------------------------------------

    def _with_gradients(self, ignore_stale_grad: bool) -> list[str]:
        """Return the names of the trained parameters."""
        names = self._model.trained
        if ignore_stale_grad:
            return names
        stale = [name for name in names if self._params[name].grad is None]
        if stale:
            raise ConfigError(
                f"parameter {stale[0]!r}{and_more(len(stale) - 1)} of {len(names)} has no gradient: no "
                "backward() has reached it since zero_grad(). Set requires_grad_(False) on parameters that "
                "are not trained, or use ignore_stale_grad=True, which takes a missing gradient as 0"
            )
        return names

    def _needs_local(self, call: str) -> RulesOptimizer | TorchOptimizer:
        if self._local is None:
            raise ConfigError(
                f"{call}() is half a step, but the store does both halves; call step() (to clip the sum of "
                "gradients by its norm, create the Trainer with clip_global_norm=), or create the Trainer "
                "with update_on_kvstore=False"
            )
        return self._local


def _checked(
    optimizer: object, options: Mapping[str, Any] | None, params: Mapping[str, torch.Tensor]
) -> HyperParams | None:
    """Return the hyper-parameters of an optimizer's name; None for a torch optimizer.

    Raises:
        ConfigError: for bad ones, or a torch optimizer over other parameters than ``params``.
    """
    if isinstance(optimizer, str):
        return resolve(optimizer, options or {})
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: give a name or a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if options:
        raise ConfigError(
            "optimizer_params needs the name of an optimizer; a torch optimizer gets its "
            "hyper-parameters when you create it"
        )
    check_plain(optimizer, "Trainer")
    check_groups(optimizer, params)
    return None
