"""A model's parameters in a store: names, optimizer, and recovery from a rollback.

A front end (the Trainer, DistributedOptimizer) gives each parameter one key, its name. Where the
optimizer runs decides what the keys hold after the first round::

    in the store    gradients -> (sum, optimizer: in the store) -> weights
    here            gradients -> (sum: in the store) -> sums -> optimizer: here

When the servers return to a checkpoint (:class:`~kvps.errors.EpochChanged`), the step that is under
way is given up, since its gradients are of weights that are outdated. The weights are taken as
they are now, one line of log says so, and training goes on. Workers may be one step apart then; of
learning rates that differ for that, rank 0's counts, as ever. Where the optimizer runs here, all take
rank 0's weights and begin its states anew, or weights would drift apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from kvps.core.membership_client import EXIT_CONFIG
from kvps.core.optim.hyperparams import HyperParams
from kvps.errors import ConfigError, EpochChanged, Mismatch
from kvps.phrases import names_in_words
from kvps.store.base import KVStoreBase, Store
from kvps.store.catch_up import refuse
from kvps.store.create import create_own
from kvps.store.kvstore import KVStore
from kvps.store.options import StoreOptions
from kvps.tensors import NAMES
from kvps.torch.sync.steps import OwnedSteps, Steps

log = logging.getLogger("kvps")
T = TypeVar("T")
E = TypeVar("E", EpochChanged, EpochChanged | None)
LOST_WRITES = (
    "the script has written other weights to %s, but the optimizer runs in the store, which has the weights: "
    "each step overwrites them. To set weights, close() the front end, write them, and create it again; or "
    "use update_on_kvstore=False"
)


class ParameterSync:
    """The parameters of a model in a store.

    Args:
        kv: the store, which serves nothing else.
        params: name -> parameter. Those that are trained are pushed and pulled.
        forget: begins the states of the optimizer here anew; None where it runs in the store.
    """

    def __init__(
        self, kv: Store | None, params: Mapping[str, torch.Tensor], forget: Callable[[], None] | None
    ) -> None:
        self._kv = kv
        self.params = params
        self.hyper: HyperParams | None = None
        """The hyper-parameters of the optimizer in the store, as last installed."""
        self.is_given_up = False
        """The gradients of the present step could not be summed; there is nothing to update by."""
        self.is_torn = False
        """An optimizer here was cut off while it wrote the weights."""
        self.steps = Steps((kv,), lambda: (_trained(params),))
        """The options of the front end."""
        self._forget = forget
        self._has_returned = False
        """The servers went back at least once, so that ranks may be one step apart."""
        self._versions: dict[str, int] = {}
        """Parameter -> the number of writes to it, as torch counts them, when it had the store's weights."""
        self._is_warned = False
        """The user knows of other writes."""

    @property
    def kv(self) -> Store:
        """The store."""
        assert self._kv is not None, "this front end has no store"
        return self._kv

    @property
    def trained(self) -> list[str]:
        """The names of the parameters that are trained."""
        return _trained(self.params)

    def spread(self, buffers: Mapping[str, torch.Tensor], hyper: HyperParams | None) -> None:
        """Give every worker rank 0's values, and the store its optimizer, if it has one.

        A replacement that comes behind a step makes the calls that all make at the beginning, and then runs
        again, or resumes: see :mod:`kvps.store.catch_up`.

        Args:
            buffers: name -> tensor, of those that take rank 0's values once, too.
            hyper: of the store's optimizer; None if it runs here.

        Raises:
            ConfigError: if this worker replaces a lost one and no rank can give it the weights.
        """
        tensors = {**self.params, **buffers}
        names = list(tensors)
        values = [carried(tensor) for tensor in tensors.values()]
        if isinstance(self.kv, KVStore):
            self.kv.init(names, values)
            if hyper is not None:
                self.install(hyper)
            self.steps.begin()
            self.kv.pull(names, out=values)
        else:
            for name, value in zip(names, values, strict=True):
                self.kv.broadcast(name, value, out=value)
            if hyper is not None:
                self.install(hyper)
        for tensor, value in zip(tensors.values(), values, strict=True):
            if value.dtype != tensor.dtype:
                put_back(tensor, value)
        self.note_weights()
        if self.steps.is_added and hyper is None:
            error = ConfigError(
                "this worker was added to a job that runs, and with update_on_kvstore=False only the other "
                "workers have the weights and the state of the optimizer: use update_on_kvstore=True"
            )
            error.exit_code = EXIT_CONFIG
            raise error
        if self.steps.is_behind and hyper is None:
            refuse(
                "with update_on_kvstore=False, only the other workers have the weights",
                "use update_on_kvstore=True",
            )

    def passed_over(self, hyper: HyperParams) -> float:
        """Note what the script wants of the optimizer at a step that is passed over; return its
        learning rate."""
        self.hyper = hyper
        return hyper.number("lr")

    def pull(self) -> None:
        """Take the weights that the store has now."""
        names = self.trained
        self.kv.pull(names, out=[self.params[name].detach() for name in names])
        self.note_weights()

    def note_weights(self, names: Iterable[str] | None = None) -> None:
        """Note that these parameters, or all, have the weights of the store."""
        for name in self.params if names is None else names:
            self._versions[name] = self.params[name]._version

    def check_weights(self) -> None:
        """Warn once if the script has given parameters other weights than the store has.

        Call it before the first gradient of a step leaves. It asks the store only if torch has counted a
        write to a parameter: the script may have put back what was there.
        """
        if self._is_warned or not isinstance(self._kv, KVStore):
            return
        params = self.params
        written = [name for name in self.trained if params[name]._version != self._versions[name]]
        if not written:
            return
        stored = [torch.empty_like(params[name]) for name in written]
        self._kv.pull(written, out=stored)
        self.note_weights(written)
        changed = [name for name, value in zip(written, stored, strict=True) if not value.equal(params[name])]
        if changed:
            self._is_warned = True
            log.warning(LOST_WRITES, names_in_words(changed))

    @contextmanager
    def written(
        self, end: Callable[[], object] = lambda: None, owned: OwnedSteps | None = None
    ) -> Iterator[None]:
        """Let an optimizer here write the weights, and note if an exception cuts it off in the middle.

        Args:
            end: called when all are written, also if a hook of the optimizer fails after that.
            owned: knows whether it was such a hook; None where there are no hooks.
        """
        before = [param._version for param in self.params.values()]
        is_made = False
        try:
            yield
            is_made = True
        finally:
            is_made |= owned is not None and owned.is_made
            self.is_torn |= not is_made and before != [param._version for param in self.params.values()]
            if is_made or self.is_torn:
                end()

    # --- the optimizer in the store ---------------------------------------------------------------

    def install(self, hyper: HyperParams) -> None:
        """Have the store update by ``hyper``."""
        numbers: dict[str, Any] = hyper.to_wire()
        self.kv.set_optimizer(hyper.name, **numbers)
        self.hyper = hyper

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the store's optimizer.

        Raises:
            ConfigError: for a bad value. Mismatch: if rank 0 set another.
        """
        assert self.hyper is not None
        changed = self.hyper.with_lr(lr)
        self.survive(lambda: self.tell_rate(lr))
        self.hyper = changed

    def tell_rate(self, lr: float) -> None:
        """Tell the store another learning rate.

        Raises:
            Mismatch: if rank 0 told another, and no return explains it. EpochChanged: at a return.
        """
        try:
            self.kv.set_learning_rate(lr)
        except Mismatch as error:
            if not self._has_returned:
                raise
            log.debug("%s", error)  # this rank is one step apart from rank 0, whose rate counts

    def want(self, new: HyperParams) -> None:
        """Give the store the hyper-parameters that have changed: a rate alone costs less than a rule.

        Raises:
            Mismatch: if rank 0 wants something else. EpochChanged: at a return.
        """
        old = self.hyper
        if old is None or new == old:
            return
        if new == old.with_lr(new.number("lr")):
            self.tell_rate(new.number("lr"))
        else:
            self.install(new)
        self.hyper = new

    # --- returns ----------------------------------------------------------------------------------

    def survive(self, call: Callable[[], object], *, is_step: bool = False) -> None:
        """Make a call of the store; if the servers have returned to a checkpoint, go on from there.

        A step is given up then, another call made again.
        """
        while True:
            try:
                call()
                return
            except EpochChanged as error:
                self.go_on(error)
                if is_step:
                    return

    def go_on(self, error: EpochChanged) -> None:
        """Take the weights that the servers have now."""
        log.warning("%s", error)
        self._has_returned = True
        until_made(self._take_up, error)

    def _take_up(self, error: EpochChanged) -> None:
        names = self.trained
        values = [self.params[name].detach() for name in names]
        if self._forget is not None:
            # The store has nothing but sums; weights and states are here, and those of one rank may be a
            # step ahead. All go on from rank 0's weights, and without momenta.
            self.kv.broadcast(names, values, out=values)
            self._forget()
            self.is_given_up = True
            return
        new = [index for index, name in enumerate(names) if name not in error.after]
        if new:
            self.kv.init([names[index] for index in new], [values[index] for index in new])
        self.renew(error)
        self.pull()

    def renew(self, error: EpochChanged) -> None:
        """Give the store what it lacks of the optimizer since a return."""
        assert self.hyper is not None
        if error.has_optimizer:
            self.tell_rate(self.hyper.number("lr"))
        else:
            self.install(self.hyper)


def _trained(params: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, param in params.items() if param.requires_grad]


def named(params: object) -> dict[str, torch.Tensor]:
    """Return name -> parameter, each parameter once, of a front end's argument.

    Raises:
        ConfigError: for something else than parameters, or none that is trained.
    """
    pairs = pairs_of(params)
    found: dict[str, torch.Tensor] = {}
    seen: set[torch.Tensor] = set()
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise ConfigError(
                "params: give a module, its named_parameters(), or a dict name -> tensor; got "
                f"{type(pair).__name__}"
            )
        name, tensor = str(pair[0]), pair[1]
        if name in found:
            raise ConfigError(f"params: two parameters are named {name!r}")
        if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(f"parameter {name!r} has no shape yet; run a batch through the model")
        if tensor.dtype not in NAMES or tensor.layout is not torch.strided:
            raise ConfigError(
                f"parameter {name!r} is {tensor.dtype}, {tensor.layout}; use dense tensors of "
                f"{', '.join(NAMES.values())}"
            )
        if tensor not in seen:
            seen.add(tensor)
            found[name] = tensor
    if not any(tensor.requires_grad for tensor in found.values()):
        raise ConfigError("params: no parameter has requires_grad=True, so there is nothing to train")
    return found


def pairs_of(params: object) -> list[Any]:
    """Return the pairs of name and tensor of a module, a mapping or a list; else a list of what was given."""
    if isinstance(params, torch.nn.Module):
        return list(params.named_parameters())
    if isinstance(params, Mapping):
        return list(params.items())
    is_list = isinstance(params, Iterable) and not isinstance(params, torch.Tensor)
    return list(params) if is_list else [params]  # type: ignore[call-overload]


def store_of(
    kvstore: object, owner: str, options: Mapping[str, Any] | None = None, *, average: bool = False
) -> Store | None:
    """Return the store of a front end: its own, by a name; or the one it was given.

    Args:
        kvstore: the name of a store, a store, or None.
        owner: which front end.
        options: of its own store, as the user gave them.
        average: whether its own store takes means.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(kvstore, str):
        shared = StoreOptions.given(options)
        return create_own(kvstore, owner, shared, average=average)
    if options is not None:
        raise ConfigError(
            "kvstore_options= is for a store that is created here: give the options to kvps.create(), which "
            "creates the store that you pass as kvstore="
        )
    if kvstore is None or isinstance(kvstore, KVStoreBase):
        return cast("Store | None", kvstore)  # a plug-in has the methods that its capabilities need
    raise ConfigError(f"kvstore: give the name of a store, a store or None, got {type(kvstore).__name__}")


def runs_in_store(kv: Store | None, wanted: bool | None) -> bool:
    """Decide where the optimizer runs.

    Raises:
        Mismatch: if that is not where it was wanted.
    """
    if kv is None:
        if wanted:
            raise Mismatch("update_on_kvstore=True needs a store; give one, such as kvstore='device'")
        return False
    is_capable = bool(kv.is_capable(KVStoreBase.OPTIMIZER))
    if wanted and not is_capable:
        raise Mismatch(f"store {kv.type!r} cannot run an optimizer; omit update_on_kvstore=True")
    if wanted is False and str(kv.type).startswith(("dist_async", "dist_ssp")):
        raise Mismatch(
            f"store {kv.type!r} applies each push with its own optimizer; use "
            "update_on_kvstore=True, or dist_sync"
        )
    if wanted is None:
        return is_capable and (not isinstance(kv, KVStore) or is_distributed(kv))
    return wanted


def is_distributed(kv: KVStore) -> bool:
    """Whether it is more than this process's."""
    return kv.type not in ("local", "device")


def check_free(kv: Store | None, tensors: Mapping[str, torch.Tensor], owner: str) -> None:
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
            f"store {kv.name!r} has {what} already; a {owner} has its own keys and "
            f"optimizer: give each {owner} its own store, or the name of a store"
        )


def until_made(act: Callable[[E], T], error: E) -> T:
    """Return the result of ``act``, which makes what the servers lack since a return.

    Args:
        act: called with the newest return, again where a second server was lost meanwhile.
        error: the return; None where none is known.
    """
    while True:
        try:
            return act(error)
        except EpochChanged as another:
            error = another


def put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write to ``tensor`` what :func:`carried` made of a tensor like it."""
    own = value if value.dtype == tensor.dtype else value.view(tensor.dtype)
    tensor.detach().copy_(own.view(tensor.shape))


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or its bytes where its type (bool, complex) does not travel."""
    if tensor.dtype in NAMES:
        return tensor.detach()
    whole = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return whole.view(-1).view(torch.uint8)
