"""The training step over a store: gradients out, weights in.

Theory of operation
-------------------
A :class:`Trainer` gives each parameter one key, the parameter's name, and does each step in one
call of the store for all of them. Where the optimizer runs decides what travels::

    update_on_kvstore=True    gradients -> (sum, optimizer: in the store) -> weights
    update_on_kvstore=False   gradients -> (sum: in the store) -> sums -> optimizer: here

Gradients are summed over workers and divided by ``batch_size``, after the sum and, for half types,
in float32: the first batch size of rank 0 goes to the store's optimizer as a factor, and gradients
travel as they are. A step of another batch size scales its gradients by the ratio of the two
before it pushes them. So batch sizes may change, and differ between workers.

When the servers return to a checkpoint (a server was lost, see :class:`~kvps.errors.EpochChanged`), the
step that is under way is given up, since its gradients are of weights that nobody has any more. The
Trainer takes the weights as they are now, says so once in the log, and goes on. Workers may be one
step apart then; of learning rates that differ for that, rank 0's counts, as ever. Where the optimizer
runs here, all take rank 0's weights and begin its states anew, or weights would drift apart.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from kvps.core.hyper import Hyper, resolve
from kvps.core.torch_optim import describe
from kvps.errors import ConfigError, EpochChanged, Mismatch
from kvps.store.base import KVStoreBase
from kvps.store.create import create_own
from kvps.store.kvstore import KVStore
from kvps.store.optimizers import RulesOptimizer, TorchOptimizer
from kvps.tensors import NAMES

log = logging.getLogger("kvps")
Params: TypeAlias = (
    "torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"
)
LEVELS = 8
"""How many priorities the parameters are given, by their order."""
BATCH_KEY = "kvps.batch_size"
"""The key by which rank 0 tells its first batch size."""


class Trainer:
    """Applies an optimizer to parameters, with gradients summed over all workers.

    Every worker makes its Trainer with the same arguments. At once all parameters, and the buffers
    of a module, take rank 0's values. Buffers (running means, ...) are on their own from then on,
    as are parameters with ``requires_grad=False``. With the update in the store, the weights are
    the store's: load a checkpoint into the model before the Trainer is made, since what is written
    to a parameter later is overwritten by the next step.

    Args:
        params: a module, its ``named_parameters()``, or a dict name -> tensor. A parameter under
            two names is one.
        optimizer: a name (``"sgd"``, ``"adam"``, ...) or a torch optimizer over these parameters.
            For servers its class and numbers are read off once; its groups may differ in ``lr``
            and ``weight_decay``. With ``update_on_kvstore=False`` it is used itself.
        optimizer_params: hyper-parameters for a name, such as ``{"lr": 0.1, "momentum": 0.9}``,
            also ``lr_mult`` and ``wd_mult``, by parameter name.
        kvstore: the name of a store, which is then the Trainer's own; a store, which then serves
            nothing else; or None to train alone.
        update_on_kvstore: run the optimizer in the store. Default: True for dist stores that can,
            else False. It must be True for dist_async and dist_ssp.

    Raises:
        ConfigError: for arguments that cannot be.
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
        update_on_kvstore: bool | None = None,
    ) -> None:
        self._params = _named(params)
        tensors = dict(self._params)
        if isinstance(params, torch.nn.Module):
            tensors.update(params.named_buffers())
        hyper = _checked(optimizer, optimizer_params, self._params)
        self._kv: Any = _store(kvstore)
        self._on_store = _decide(self._kv, update_on_kvstore)
        if not self._on_store and isinstance(self._kv, KVStore) and not _is_distributed(self._kv):
            self._kv = None  # one process, and nothing to do for its store
        self._local: RulesOptimizer | TorchOptimizer | None = None
        self._hyper: Hyper | None = None
        self._batch: float | None = None
        """The batch size by which the store's optimizer divides; None before the first step."""
        self._is_given_up = False
        """The gradients of the present step could not be summed; there is nothing to update by."""
        self._has_returned = False
        """The servers went back at least once, so that ranks may be one step apart."""
        _check_free(self._kv, tensors)
        if self._on_store and isinstance(optimizer, torch.optim.Optimizer):
            hyper = describe(optimizer, {one: name for name, one in self._params.items()})
        replaces = self._spread(tensors, hyper if self._on_store else None)
        if self._on_store:
            return
        if replaces:
            raise ConfigError(
                "this worker replaces one that was lost; with update_on_kvstore=False only the "
                "other workers have the weights: start the job anew, or update in the store"
            )
        if isinstance(optimizer, torch.optim.Optimizer):
            self._local = TorchOptimizer(self._params, optimizer)
        else:
            assert hyper is not None
            self._local = RulesOptimizer(self._params, hyper)

    # --- steps ------------------------------------------------------------------------------------

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over workers, divide by ``batch_size``, and update the parameters.

        Args:
            batch_size: how many examples the *sum* is over: the size of the batch of all workers
                together for losses that add up, or the number of workers for losses that are means.
                In dist_async and dist_ssp each worker's gradients count alone.
            ignore_stale_grad: a parameter without a gradient on this worker counts as one with
                gradient 0 (so momentum and weight decay go on); else it is an error.

        Raises:
            ConfigError: if a parameter has no gradient; nothing was pushed.
        """
        if not self._on_store:
            self.allreduce_grads(ignore_stale_grad)
            self.update(batch_size, ignore_stale_grad)
            return
        self._survive(lambda: self._step(batch_size, ignore_stale_grad), is_step=True)

    def _step(self, batch_size: float, ignore_stale_grad: bool) -> None:
        batch = _positive(batch_size)
        names = self._with_gradients(ignore_stale_grad)
        gradients = [_gradient(name, self._params[name]) for name in names]
        factor = self._agreed_batch(batch) / batch
        if factor != 1.0:
            with torch.no_grad():
                gradients = list(torch._foreach_mul(gradients, factor))
        self._pushpull(names, gradients, [self._params[name].detach() for name in names])

    def _survive(self, call: Callable[[], object], is_step: bool = False) -> None:
        """Make a call of the store; if the servers have returned to a checkpoint, go on from there.

        A step is given up then, another call made again.
        """
        while True:
            try:
                call()
                return
            except EpochChanged as error:
                self._return(error)
                if is_step:
                    return

    def _return(self, error: EpochChanged) -> None:
        """Go on with the weights that the servers have now."""
        log.warning("%s", error)
        self._has_returned = True
        while True:
            try:
                self._take_up(error)
                return
            except EpochChanged as another:  # a second server was lost meanwhile
                error = another

    def _take_up(self, error: EpochChanged) -> None:
        names = [name for name, one in self._params.items() if one.requires_grad]
        values = [self._params[name].detach() for name in names]
        if self._local is not None:
            # The store has nothing but sums; weights and states are here, and those of one rank may be a
            # step ahead. All go on from rank 0's weights, and without momenta.
            self._kv.broadcast(names, values, out=values)
            self._local.forget()
            self._is_given_up = True
            return
        new = [index for index, name in enumerate(names) if name not in error.after]
        if new:
            self._kv.init([names[index] for index in new], [values[index] for index in new])
        assert self._hyper is not None
        if error.has_optimizer:
            self._set_rate(self._hyper.number("lr"))
        else:
            self._install(self._hyper)
        self._kv.pull(names, out=values)

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Put the sum over all workers into every ``.grad``: the first half of :meth:`step`.

        Raises:
            ConfigError: with update_on_kvstore=True; or as :meth:`step`.
        """
        self._needs_local("allreduce_grads")
        names = self._with_gradients(ignore_stale_grad)
        for name in names:
            if self._params[name].grad is None:
                self._params[name].grad = torch.zeros_like(self._params[name])
        gradients = [_gradient(name, self._params[name]) for name in names]
        if self._kv is not None:
            self._survive(lambda: self._pushpull(names, gradients, gradients), is_step=True)

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the parameters by their ``.grad / batch_size``: the second half of :meth:`step`.

        In between, gradients may be looked at and changed (clipped, say), alike on all workers.

        Raises:
            ConfigError: with update_on_kvstore=True; or as :meth:`step`.
        """
        local = self._needs_local("update")
        batch = _positive(batch_size)
        if self._is_given_up:  # what is in .grad is this rank's alone
            self._is_given_up = False
            return
        names = self._with_gradients(ignore_stale_grad)
        present = [name for name in names if self._params[name].grad is not None]
        with torch.no_grad():
            local.step(present, 1.0 / batch)

    # --- the optimizer ------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate; with several groups, that of the first."""
        if self._local is not None:
            return self._local.learning_rate
        assert self._hyper is not None
        return self._hyper.number("lr")

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate from the next step on; every worker calls, rank 0's counts.

        The rates of other groups keep their ratio to it.

        Raises:
            ConfigError: for a bad value. Mismatch: if rank 0 set another.
        """
        if self._local is not None:
            self._local.set_learning_rate(lr)
            return
        assert self._hyper is not None
        changed = self._hyper.with_lr(lr)
        self._survive(lambda: self._set_rate(lr))
        self._hyper = changed

    def _set_rate(self, lr: float) -> None:
        try:
            self._kv.set_learning_rate(lr)
        except Mismatch as error:
            if not self._has_returned:
                raise
            log.debug("%s", error)  # this rank is one step apart from rank 0, whose rate counts

    def save_states(self, path: str) -> None:
        """Write the optimizer's states (momenta, step counts) to a safetensors file.

        One worker's call is enough: all have, or see, the same states.

        Raises:
            StorageError: if it cannot be written.
        """
        if self._local is not None:
            self._local.save(path)
        else:
            self._survive(lambda: self._kv.save_optimizer_states(path))

    def load_states(self, path: str) -> None:
        """Put back what :meth:`save_states` wrote; every worker calls.

        Raises:
            StorageError: if it cannot be read. Mismatch: if it is of another optimizer or model.
        """
        if self._local is not None:
            self._local.load(path)
        else:
            self._survive(lambda: self._kv.load_optimizer_states(path))

    # --- small things -------------------------------------------------------------------------------

    def _spread(self, tensors: Mapping[str, torch.Tensor], hyper: Hyper | None) -> bool:
        """Give every worker rank 0's values, and the store its optimizer, if it has one.

        Return whether this worker replaces a lost one. It makes the calls that all make at the
        beginning before it resumes: from there on its calls are those of the others' present step.
        """
        if self._kv is None:
            return False
        names = list(tensors)
        values = [_carried(one) for one in tensors.values()]
        replaces = False
        if isinstance(self._kv, KVStore):
            self._kv.init(names, values)
            if hyper is not None:
                self._install(hyper)
            trained = [name for name, one in self._params.items() if one.requires_grad]
            replaces = self._kv.resume(trained) > 0
            self._kv.pull(names, out=values)
        else:
            for name, value in zip(names, values, strict=True):
                self._kv.broadcast(name, value, out=value)
            if hyper is not None:
                self._install(hyper)
        for tensor, value in zip(tensors.values(), values, strict=True):
            if value.dtype != tensor.dtype:
                tensor.detach().copy_(value.view(tensor.dtype).view(tensor.shape))
        return replaces

    def _install(self, hyper: Hyper) -> None:
        self._kv.set_optimizer(hyper.name, **hyper.to_wire())
        self._hyper = hyper

    def _agreed_batch(self, batch: float) -> float:
        """Return the batch size by which the store's optimizer divides: rank 0's first one."""
        if self._batch is not None:
            return self._batch
        if not isinstance(self._kv, KVStore):
            self._batch = 1.0  # a plug-in divides by nothing; this worker does
            return self._batch
        assert self._hyper is not None
        shared = torch.tensor([batch], dtype=torch.float64)
        self._kv.init(BATCH_KEY, shared)
        self._kv.pull(BATCH_KEY, out=shared)
        self._batch = float(shared)
        if self._batch != 1.0:
            rescale = self._hyper.number("rescale_grad") / self._batch
            values = {**self._hyper.values, "rescale_grad": rescale}
            self._install(replace(self._hyper, values=values))
        return self._batch

    def _with_gradients(self, ignore_stale_grad: bool) -> list[str]:
        """Return the names of what is trained."""
        names = [name for name, one in self._params.items() if one.requires_grad]
        if ignore_stale_grad:
            return names
        stale = [name for name in names if self._params[name].grad is None]
        if stale:
            more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
            raise ConfigError(
                f"parameter {stale[0]!r}{more} of {len(names)} has no gradient: no backward() has "
                "reached it since zero_grad(). Set requires_grad_(False) on what is not trained, "
                "or give ignore_stale_grad=True, which counts such a gradient as 0"
            )
        return names

    def _pushpull(
        self, names: list[str], values: list[torch.Tensor], out: list[torch.Tensor]
    ) -> None:
        if isinstance(self._kv, KVStore):
            # The first layers are needed first, in the next forward pass. Within one level chunks
            # go to all servers in turns.
            levels = [-(LEVELS * index // len(names)) for index in range(len(names))]
            self._kv.pushpull(names, values, out=out, priority=levels)
            return
        for index, name in enumerate(names):  # a plug-in need not take lists
            self._kv.pushpull(name, values[index], out=out[index], priority=-index)

    def _needs_local(self, call: str) -> RulesOptimizer | TorchOptimizer:
        if self._local is None:
            raise ConfigError(
                f"{call}() is half a step, and the store does both halves; call step(), or make "
                "the Trainer with update_on_kvstore=False"
            )
        return self._local


def _named(params: Params) -> dict[str, torch.Tensor]:
    """Return name -> tensor, each tensor once.

    Raises:
        ConfigError: for something else than parameters, or none that is trained.
    """
    if isinstance(params, torch.nn.Module):
        pairs: list[Any] = list(params.named_parameters())
    elif isinstance(params, Mapping):
        pairs = list(params.items())
    else:
        given: object = params
        is_list = isinstance(given, Iterable) and not isinstance(given, torch.Tensor)
        pairs = list(params) if is_list else [params]
    named: dict[str, torch.Tensor] = {}
    seen: set[torch.Tensor] = set()
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise ConfigError(
                "params: give a module, its named_parameters(), or a dict name -> tensor; got "
                f"{type(pair).__name__}"
            )
        name, tensor = str(pair[0]), pair[1]
        if name in named:
            raise ConfigError(f"params: two parameters are called {name!r}")
        if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(f"parameter {name!r} has no shape yet; run a batch through the model")
        if tensor.dtype not in NAMES or tensor.layout is not torch.strided:
            raise ConfigError(
                f"parameter {name!r} is {tensor.dtype}, {tensor.layout}; use dense ones of "
                f"{', '.join(NAMES.values())}"
            )
        if tensor not in seen:
            seen.add(tensor)
            named[name] = tensor
    if not any(tensor.requires_grad for tensor in named.values()):
        raise ConfigError(
            "params: none of them has requires_grad=True, so there is nothing to train"
        )
    return named


def _checked(
    optimizer: object, options: Mapping[str, Any] | None, params: Mapping[str, torch.Tensor]
) -> Hyper | None:
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
            "optimizer_params go with the name of an optimizer; give a torch optimizer its "
            "numbers when you make it"
        )
    theirs = {one for group in optimizer.param_groups for one in group["params"]}
    for name, tensor in params.items():
        if tensor.requires_grad and tensor not in theirs:
            raise ConfigError(
                f"parameter {name!r} is not in the optimizer's groups; add it there, or set "
                "requires_grad_(False) on it"
            )
    foreign = len(theirs - set(params.values()))
    if foreign:
        raise ConfigError(
            f"the optimizer has {foreign} parameters that are not in params; give both the same"
        )
    return None


def _store(kvstore: object) -> Any:
    if isinstance(kvstore, str):
        return create_own(kvstore, "trainer")
    if kvstore is None or isinstance(kvstore, KVStoreBase):
        return kvstore
    raise ConfigError(
        f"kvstore: give the name of a store, a store or None, got {type(kvstore).__name__}"
    )


def _decide(kv: Any, wanted: bool | None) -> bool:
    """Decide where the optimizer runs.

    Raises:
        Mismatch: if that is not where it was wanted.
    """
    if kv is None:
        if wanted:
            raise Mismatch("update_on_kvstore=True needs a store; give kvstore='device', say")
        return False
    is_capable = bool(kv.is_capable(KVStoreBase.OPTIMIZER))
    if wanted and not is_capable:
        raise Mismatch(
            f"store {kv.type!r} cannot run an optimizer; leave update_on_kvstore=True out"
        )
    if wanted is False and str(kv.type).startswith(("dist_async", "dist_ssp")):
        raise Mismatch(
            f"store {kv.type!r} applies each push by an optimizer of its own; leave "
            "update_on_kvstore=False out, or use dist_sync"
        )
    if wanted is None:
        return is_capable and (not isinstance(kv, KVStore) or _is_distributed(kv))
    return wanted


def _is_distributed(kv: KVStore) -> bool:
    return kv.type not in ("local", "device")


def _check_free(kv: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that a user's store is not in use.

    Raises:
        ConfigError: if it has an optimizer, or one of the keys.
    """
    if not isinstance(kv, KVStore):
        return
    taken = tensors.keys() & set(kv.keys())
    if taken or kv.has_optimizer:
        what = f"the key {min(taken)!r}" if taken else "an optimizer"
        raise ConfigError(
            f"store {kv.name!r} has {what} already; a Trainer brings its own keys and optimizer: "
            "give each Trainer a store of its own, or just the name of one"
        )


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or its bytes where its type (bool, complex) does not travel."""
    if tensor.dtype in NAMES:
        return tensor.detach()
    return (
        tensor.detach()
        .cpu()
        .clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
    )


def _gradient(name: str, param: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, 0 where there is none."""
    if param.grad is None:
        return torch.zeros_like(param, requires_grad=False)
    if param.grad.layout is not torch.strided:
        raise ConfigError(
            f"parameter {name!r} has a gradient of {param.grad.layout}; use a dense one "
            "(sparse=False in an Embedding)"
        )
    return param.grad.detach()


def _positive(batch_size: object) -> float:
    is_number = isinstance(batch_size, numbers.Real) and not isinstance(batch_size, bool)
    value = float(batch_size) if is_number else math.nan  # type: ignore[arg-type]
    if not 0 < value < math.inf:
        raise ConfigError(f"batch_size={batch_size!r}: use a number above 0")
    return value
