"""A model whose weights live on the servers: a worker has only the weights of the blocks that it
computes with.

Theory of operation
-------------------
Servers have the weights and the optimizer's state, and update with the mean of all workers'
gradients. On a worker,

* a block's weights come just before they are needed, and go when they were
  (:mod:`kvps.torch.sharded.param_groups`)
* what autograd saves of a weight is its name
  (:mod:`kvps.torch.sharded.residency`)
* a gradient leaves when it is complete, and is freed
  (:mod:`kvps.torch.sharded.gradient_sender`)

So :meth:`Sharded.step` has nothing to wait for. It ends the step: the next pull of a key waits for the round
that this rank's gradient is in, and returns exactly the version after it, the same on every rank. At any time
there are about three blocks here: one that computes, one that is coming, and as much of gradients on their
way; and the rest, which is in no block.

When the servers roll back to a checkpoint, the present step is abandoned: its gradients are not pushed, and
the next forward pass has the weights of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvps.errors import ConfigError, EpochChanged, Mismatch
from kvps.net.memory import be_tight
from kvps.store.create import create_dist, options_of
from kvps.store.kvstore import KVStore
from kvps.store.server_store import DistStore
from kvps.torch.sharded.gradient_sender import GradientHooks, GradientSender, RemoteOptimizer
from kvps.torch.sharded.initial_upload import Init, check_init, upload
from kvps.torch.sharded.param_groups import GroupHooks, cut
from kvps.torch.sharded.residency import Residency
from kvps.torch.sync.agreement import check_norms, demand_same
from kvps.torch.sync.parameter_hooks import graph_task
from kvps.torch.sync.parameter_sync import carried, check_free, is_distributed, named, put_back, store_of
from kvps.torch.sync.state_dict import StateInStore, in_words
from kvps.torch.sync.steps import Resumable


def shard(
    module: torch.nn.Module,
    kvstore: str | KVStore = "dist_sync",
    *,
    optimizer: torch.optim.Optimizer | str,
    blocks: Iterable[torch.nn.Module] | None = None,
    init: Init | None = None,
    device: torch.device | str | None = None,
    backward_passes_per_step: int = 1,
    kvstore_options: Mapping[str, Any] | None = None,
    **hyper: Any,
) -> Sharded:
    """Move a model to the servers; its weights are pulled when they are needed.

    Every worker calls it with the same arguments. Rank 0's values of parameters and buffers count; buffers
    stay on the workers. The optimizer runs on the servers.

    Args:
        module: a model, which may have been built under ``torch.device("meta")``.
        kvstore: the name of a synchronous store, which is then the model's own; or a store that was created
            with ``average=True`` and serves nothing else.
        optimizer: a torch optimizer over the trained parameters. Servers use its hyper-parameters, also when
            a scheduler changes them, and its ``step()`` is :meth:`Sharded.step`. It keeps no state: its
            ``state_dict()`` and ``load_state_dict()`` are those of the servers' optimizer. Or the
            name of an optimizer of the servers, with its hyper-parameters in ``hyper``.
        blocks: modules whose weights are pulled and freed together; None for the elements of each
            ``ModuleList`` and ``Sequential``. Weights outside all blocks stay from the start of forward to
            the end of backward.
        init: with a model on the meta device, called on rank 0 with each module that has parameters or
            buffers of its own, to fill them; None calls its ``reset_parameters()``.
        device: the device for the weights of a model on the meta device; None for torch's default device.
        backward_passes_per_step: the number of passes whose gradients are summed here before they are pushed,
            which takes memory for all gradients.
        kvstore_options: ``timeout``, ``on_worker_lost`` and ``worker_grace`` as in
            :func:`kvps.create`, for the store that ``kvstore`` names; None for the defaults.
        **hyper: hyper-parameters for the name of an optimizer, as ``set_optimizer`` takes them.

    Raises:
        ConfigError: for invalid arguments.
        Mismatch: (a ValueError) for a store that is not synchronous or computes sums, or if rank 0 has other
            parameters.

    Example:
        >>> import torch, kvps.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> sharded = kvps.torch.shard(model, "local", optimizer="sgd", lr=0.1)
        >>> model(torch.ones(4, 2)).mean().backward()
        >>> sharded.step()
    """
    return Sharded(
        module, kvstore, optimizer, blocks, init, device, backward_passes_per_step, hyper, kvstore_options
    )


class Sharded(Resumable):
    """A model whose weights live on the servers, created by :func:`shard`."""

    def __init__(
        self,
        module: torch.nn.Module,
        kvstore: str | KVStore,
        optimizer: torch.optim.Optimizer | str,
        blocks: Iterable[torch.nn.Module] | None,
        init: Init | None,
        device: torch.device | str | None,
        passes: int,
        hyper: Mapping[str, object],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"module: give a torch module, got {type(module).__name__}")
        self.module = module
        """The model."""
        params = named(module)
        self._blocks = cut(module, params, blocks)
        check_init(self._blocks, init)
        check_norms(module, "sharded model")
        kv = _checked_store(kvstore, options)
        be_tight()
        check_free(kv, params, "sharded model")
        buffers = dict(module.named_buffers())
        demand_same(kv, "shard", params, buffers, optimizer_state=in_words(optimizer))
        self._kv = kv
        self._rule = RemoteOptimizer(kv, params, optimizer, hyper)
        self._forms = {name: torch.empty_like(param, device="meta") for name, param in params.items()}
        self._weights = Residency(kv, params, self._forms, self._give_up, self._check)
        where = torch.get_default_device() if device is None else torch.device(device)
        upload(kv, self._blocks, params, self._weights, init, where)  # before there are any hooks
        sizes = {name: param.numel() * param.element_size() for name, param in params.items()}
        largest = max(sum(sizes[name] for name in block.names) for block in self._blocks)
        self._side: DistStore | None = None
        """The store for buffers, if there are any."""
        self._begin()
        self._steps = self._rule.steps
        self._steps.choose(Sharded._make_step, Sharded._drop_step, lambda sharded: sharded._weights.forget())
        sender = GradientSender(kv, sizes, largest)
        self._gradients = GradientHooks(self._rule, sender, passes, self._weights.free)
        self._passes = GroupHooks(self._blocks, self._weights, self._gradients)
        self._step: Callable[[], object] = self._end_step
        """Ends a step, by a step of the torch optimizer if there is one, which calls the script's
        hooks, too."""
        self._hooks = self._watch(optimizer)

    def _begin(self) -> None:
        """Set the store's optimizer, and take rank 0's buffers."""
        buffers = dict(self.module.named_buffers())
        if buffers:
            # Of their own: a store that takes means has no integers, such as a count of batches.
            self._side = create_dist(self._kv.type, "shard.buffers", options_of(self._kv))
            self._side.init(list(buffers), [carried(buffer) for buffer in buffers.values()])
            for own, found in zip(buffers.values(), self._side.pull(list(buffers)), strict=True):
                put_back(own, found)
        self._rule.install(self._rule.wanted())
        self._rule.steps.begin()

    def _watch(self, optimizer: torch.optim.Optimizer | str) -> list[Any]:
        hooks: list[Any] = []
        submodule: Any  # torch gives these methods no types
        for submodule in self.module.modules():
            if any(True for _ in submodule.parameters(recurse=False)):
                hooks.append(submodule.register_state_dict_post_hook(partial(self._put_weights)))
                hooks.append(submodule.register_load_state_dict_pre_hook(_refuse_to_load))
        if isinstance(optimizer, torch.optim.Optimizer) and self._rule.described is not None:
            # Before it, so that it finds no gradients, and changes nothing.
            hooks.append(optimizer.register_step_pre_hook(lambda *_: self._end_step()))
            self._step = lambda: optimizer.step()  # a scheduler may wrap it later
            hooks.append(StateInStore(optimizer, self._rule, self._rule.described))
        return hooks

    # --- a step -----------------------------------------------------------------------------------

    def step(self) -> None:
        """End the step: the gradients of ``backward()`` make one update, the same on every worker.

        It does not wait for other workers. A torch optimizer's own ``step()`` does the same.

        Raises:
            ConfigError: naming parameters that have no gradient.
            KvpsError: the error of a push of a gradient.
        """
        self._step()

    def _end_step(self) -> None:
        self._steps.run(self)

    def _make_step(self) -> None:
        is_given_up = self._gradients.is_given_up
        self._gradients.step()
        if is_given_up:
            self._weights.forget()
        self._passes.expect_first()

    def _drop_step(self) -> float:
        self._make_step()
        return self._rule.passed_over(self._rule.wanted())

    @property
    def steps(self) -> int:
        """The number of completed steps, as :meth:`resume` returns it before the first step of a
        replacement."""
        steps = self._steps
        return self.resume() if steps.made == 0 and steps.is_behind else steps.made

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate from the next step on, of an optimizer that was given by name.

        Every rank calls; rank 0's call counts.

        Raises:
            ConfigError: for a bad value, or where a torch optimizer has the rate.
        """
        self._rule.want_rate(lr)

    def _check(self, name: str) -> None:
        self._gradients.check(name)

    def _give_up(self, error: EpochChanged) -> None:
        self._gradients.give_up(error)

    # --- weights ----------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, *modules: torch.nn.Module) -> Iterator[None]:
        """Pull the weights of these modules, and of all inside, to read them.

        Args:
            modules: modules of the model; none for the model itself. Writes to their weights are lost.

        Example:
            >>> with sharded.gathered(model.head):  # doctest: +SKIP
            ...     print(model.head.weight.norm())
        """
        wanted = {id(param) for top in modules or (self.module,) for param in top.parameters()}
        names = [name for name, param in self._rule.params.items() if id(param) in wanted]
        self._weights.bring(names)
        self._weights.hold(names)
        try:
            yield
        finally:
            self._weights.release(names)
            if graph_task() == -1:
                self._weights.free(names)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and weight of each parameter, on the CPU, one block after the other.

        For a model that is larger than this worker's memory. A shared weight is yielded once.

        Example:
            >>> for name, weight in sharded.weights():  # doctest: +SKIP
            ...     np.save(f"{name}.npy", weight)
        """
        for names in self._once():
            values = self._kv.pull(names)
            for name in names:
                yield name, values.pop(0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers as the module alone would, from the servers, on the CPU.

        It equals ``module.state_dict()``; a call by one worker is enough. It takes memory for the whole
        model: see :meth:`weights`.
        """
        return dict(self.module.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load a :meth:`state_dict`, of this object or of the module, into the servers.

        Every worker calls; rank 0's values count, and the other ranks may pass ``{}``. The optimizer's state
        of these parameters is reset.

        Raises:
            ConfigError: in the middle of a step. Mismatch: if a name is missing or unexpected.
        """
        if self._gradients.is_begun:
            raise ConfigError("load_state_dict() was called in the middle of a step: call step() first")
        if self._kv.rank == 0 or state_dict:
            self._check_names(state_dict)
        self._weights.forget()
        for names in self._once():
            self._kv.broadcast(names, [self._given(name, state_dict) for name in names], None)
        for name, buffer in _lasting(self.module).items():
            value = carried(state_dict[name].to(buffer.dtype) if state_dict else buffer)
            assert self._side is not None, "there are buffers"
            put_back(buffer, self._side.broadcast(name, value, None))

    def _once(self) -> Iterator[list[str]]:
        """Yield the names of the parameters of each block, except parameters of earlier blocks."""
        seen: set[str] = set()
        for block in self._blocks:
            names = [name for name in block.names if name not in seen]
            seen.update(names)
            if names:
                yield names

    def _given(self, name: str, state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor:
        form = self._forms[name]
        if not state_dict:
            return torch.empty_like(form, device="cpu")
        return state_dict[name].detach().to(form.dtype)

    def _check_names(self, given: Collection[str]) -> None:
        lasting = _lasting(self.module).keys()
        all_names = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        missing = {*self._rule.params, *lasting}.difference(given)
        foreign = set(given).difference(all_names, lasting)
        if missing or foreign:
            what = f"lacks {min(missing)!r}" if missing else f"has {min(foreign)!r}, too"
            raise Mismatch(f"the state_dict {what}; load a complete state_dict of this model")

    def _put_weights(
        self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _: object
    ) -> None:
        """Put the servers' weights into the state_dict of a module, of its own parameters."""
        keys = {
            title: self._rule.key_of[param]
            for title, param in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        names = list(dict.fromkeys(keys.values()))
        found = dict(zip(names, self._kv.pull(names), strict=True))
        for title, name in keys.items():
            if prefix + title in state_dict:
                state_dict[prefix + title] = found[name]

    # --- the rest of the contract -----------------------------------------------------------------

    @property
    def kvstore(self) -> DistStore:
        """The store that has the weights, for its ``rank``, ``checkpoint()`` and optimizer states."""
        return self._kv

    def close(self) -> None:
        """Finish pending calls, remove all hooks, and close the store.

        The weights stay on the servers, and the module has none: save its ``state_dict()`` first.
        """
        self._passes.close()
        self._gradients.hooks.close()
        for hook in self._hooks:
            hook.close() if isinstance(hook, StateInStore) else hook.remove()
        self._weights.forget()
        if self._side is not None:
            self._side.close()
        self._kv.close()

    def __repr__(self) -> str:
        named_blocks = len(self._blocks) - 1
        return f"Sharded over {self._kv!r}: {named_blocks} blocks and the rest"


def _checked_store(kvstore: object, options: Mapping[str, Any] | None) -> DistStore:
    """Return the store of a sharded model.

    Raises:
        ConfigError: for an object that is not a store. Mismatch: for a store of another kind.
    """
    kind = kvstore if isinstance(kvstore, str) else str(getattr(kvstore, "type", ""))
    if kind.startswith(("dist_async", "dist_ssp")):
        raise Mismatch(
            f"store {kind!r} may update a weight between forward and backward, and shard() pulls it for "
            "each; use dist_sync"
        )
    if kind.startswith("allreduce"):
        raise Mismatch(f"store {kind!r} has no servers to keep the weights; use dist_sync")
    kv = store_of(kvstore, "shard", options, average=True)
    if not isinstance(kv, DistStore):
        raise ConfigError("kvstore: give 'dist_sync', or a store of that kind")
    if is_distributed(kv) and kv.num_workers > 1 and not kv.average:
        raise Mismatch(
            f"store {kv.name!r} computes sums; create it with average=True, or give the name of a store"
        )
    return kv


def _lasting(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return those buffers that are in a state_dict."""
    return {
        f"{path}.{title}" if path else title: buffer
        for path, submodule in module.named_modules()
        for title, buffer in submodule.named_buffers(recurse=False)
        if title not in submodule._non_persistent_buffers_set
    }


def _refuse_to_load(*_: object) -> None:
    raise ConfigError(
        "this model is sharded: its weights are on the servers. Call load_state_dict() of the object that "
        "shard() returned, on every worker"
    )
