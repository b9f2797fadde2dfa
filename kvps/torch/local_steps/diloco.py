"""Local steps around an unchanged training loop: DiLoCo and Streaming DiLoCo.

Theory of operation
-------------------
Each worker trains with its own optimizer, the *inner* one. Every ``sync_every`` steps it pushes a
*pseudo-gradient*: the weights that it began with, minus its own. The servers average these, give the mean to
the *outer* optimizer, and return the weights from which all go on (Douillard et al.: DiLoCo, arXiv
2311.08105).

The model is cut into fragments that take turns (:mod:`kvps.torch.local_steps.fragments`). So the peak on the
network is a fragment, and with a delay training goes on while the fragment is on its way (Streaming DiLoCo,
arXiv 2501.18512)::

    inner steps   |-------- p --------|-------- p --------|
    fragment 0                        push ...... take     the servers' mean, mixed with the steps meanwhile
    fragment 1                                            push ...... take

The weights, the momentum of the outer optimizer and the round numbers are in the servers, and so in their
checkpoints. Workers have only what the last merge gave them: a worker that joins late pulls the weights and
begins a turn, and a worker that is lost costs the others nothing but its own steps since its last push. Each
fragment has a store of its own: a checkpoint is taken where the keys of a store have been pushed equally
often, which fragments that take turns are only once in ``sync_every`` steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import torch

from kvps.core.nonfinite import count_nonfinite
from kvps.errors import ConfigError, EpochChanged, NonFinite
from kvps.phrases import names_in_words
from kvps.store import residual_state
from kvps.store.catch_up import refuse
from kvps.store.create import create_dist
from kvps.store.options import WORKER_GRACE_S, StoreOptions
from kvps.store.server_store import DistStore
from kvps.torch.local_steps.arguments import (
    DELAYED,
    OuterNumbers,
    Weight,
    has_means,
    is_dynamic,
    outer_of,
    share_of,
    store_type,
    warn_unless_entered,
)
from kvps.torch.local_steps.fragments import Schedule, fragments_of
from kvps.torch.local_steps.gate import Gate, counted, factor_of
from kvps.torch.local_steps.pace import MeanStore, Pace
from kvps.torch.sync.agreement import buffers_of, check_plain, demand_same
from kvps.torch.sync.in_flight import Answer
from kvps.torch.sync.parameter_sync import carried, named, put_back, until_made
from kvps.torch.sync.steps import Steps, check_groups

log = logging.getLogger("kvps")

TIMEOUT_S = 3600.0
"""Seconds that a merge may wait for other workers, which may have hundreds of steps to make."""
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The type of the servers' weights where the model's is too coarse for their small updates."""


class DiLoCo:
    """Trains by local steps: a context manager around an unchanged loop.

    Inside the context, each ``inner_optimizer.step()`` counts. After every ``sync_every`` of them the workers
    merge what they have learned. Every worker creates it with the same arguments and makes the same number of
    steps; with ``mode="async"`` and one fragment, ``sync_every`` and the number of steps may differ, and
    ``dynamic_sync_every=True`` fits ``sync_every`` to the worker. Parameters, and the buffers of a module,
    begin with rank 0's values. Buffers are not merged later.

    Args:
        model: a module, its ``named_parameters()``, or a dict name -> parameter.
        inner_optimizer: a torch optimizer over the trained parameters. Its state stays on this worker.
        outer: the optimizer of the servers: ``"nesterov"``, ``"sgd"``, or a torch optimizer that servers can
            run; with ``mode="async"`` also ``"delayed_nesterov"``, whose momentum moves once for as many
            pushes as there are workers.
        lr, momentum: of the outer optimizer.
        sync_every: steps between two merges of a parameter.
        dynamic_sync_every: the fastest worker makes ``sync_every`` steps; a slower one makes fewer,
            in proportion to its speed, so that no push is much older than others. For ``mode="async"`` and
            one fragment.
        fragments: a number of fragments, balanced by bytes; or a list of them, each a module or a list of
            parameters and modules. Fragments take turns, so ``sync_every`` is a multiple of their number.
        delay: steps that training goes on while a fragment is on its way; less than ``sync_every /
            fragments``.
        alpha: the share of the local weights in the result of a merge, 0 to 1. With 0, a worker takes the
            servers' weights, and the steps that it made during ``delay`` are dropped; with a delay, try 0.5.
        compression: compress pseudo-gradients, as :meth:`kvps.KVStore.set_gradient_compression`. Add
            ``"pull": True`` to compress the merged weights, too.
        mode: ``"sync"`` waits for the other workers. ``"async"`` applies each pseudo-gradient at once,
            divided by the number of workers.
        weight: of this worker in the mean: a number above 0, ``"tokens"`` for those of
            :meth:`add_tokens`, or None for 1. Needs ``mode="sync"`` and ``late="drop"``, where there is a
            mean.
        gate: a worker's pseudo-gradient does not count if its norm is over so many times the median of all
            workers' norms, such as 4; None for no gate. It needs three workers or more, ``mode="sync"``,
            ``late="drop"`` and no quorum.
        penalty: a pseudo-gradient whose norm is over the median of all workers' norms counts less: its
            weight in the mean is multiplied by the square of the median over its norm. Beside ``gate``, or
            without it: then it does not count from 1,000 times the median on. It needs what ``gate`` needs.
        quorum: merge when so many workers have pushed and ``grace`` is over, without waiting for the others.
        grace, on_worker_lost, worker_grace: as in :func:`kvps.create`.
        late: as in :func:`kvps.create`. With ``"next"`` no worker's steps are lost, and each push counts as
            one part of the number of workers in the job, as with ``mode="async"``; those that are lost
            meanwhile still count.
        backup_device: where the weights of the last merge are kept; None for each parameter's own device.
        timeout: seconds that a merge may wait for the other workers.

    Attributes:
        syncs: number of merges that this worker has made, of a fragment each.
        wait_s: seconds that steps have waited for merges.
        age: by how many pushes of other workers the servers' weights had moved when this worker's last one
            was applied, since it took them; 0 with ``mode="sync"``. The mean is about the number of other
            workers if all are equally fast: much more says that this one is slow, and fewer ``sync_every``
            steps would help; ``dynamic_sync_every=True`` chooses them.

    Raises:
        ConfigError: for invalid arguments: fragments that miss or repeat a parameter, a delay that does not
            fit.

    Example:
        >>> import torch, kvps.torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> with kvps.torch.DiLoCo(model, optimizer, sync_every=10) as outer:  # doctest: +SKIP
        ...     for x in batches:
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()
        ...         optimizer.step()
    """

    _OWNER = "diloco"

    def __init__(
        self,
        model: Any,
        inner_optimizer: torch.optim.Optimizer,
        outer: str | torch.optim.Optimizer = "nesterov",
        lr: float = 0.7,
        momentum: float = 0.9,
        *,
        sync_every: int = 100,
        dynamic_sync_every: bool = False,
        fragments: Any = 1,
        delay: int = 0,
        alpha: float = 0.0,
        compression: Any = None,
        mode: str = "sync",
        weight: float | str | None = None,
        quorum: int | None = None,
        grace: float | str = "auto",
        late: str = "drop",
        gate: float | None = None,
        penalty: bool = False,
        on_worker_lost: str = "shrink",
        backup_device: torch.device | str | None = None,
        timeout: float = TIMEOUT_S,
        worker_grace: float = WORKER_GRACE_S,
    ) -> None:
        if not isinstance(inner_optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"inner_optimizer: give a torch optimizer, got {type(inner_optimizer).__name__}"
            )
        check_plain(inner_optimizer, self.__class__.__name__)
        params = named(model)
        check_groups(inner_optimizer, params)
        self._params = {name: param for name, param in params.items() if param.requires_grad}
        self._fragments = fragments_of(self._params, fragments)
        self._schedule = Schedule.of(sync_every, len(self._fragments), delay)
        self._alpha = share_of(alpha)
        store = store_type(mode)
        may_adapt = is_dynamic(dynamic_sync_every, mode, len(self._fragments))
        is_mean = has_means(mode, late)
        factor = factor_of(gate, penalty, quorum, is_mean=is_mean)
        self._weight = Weight(weight, len(self._fragments), is_mean)
        self._hyper = outer_of(outer, lr, momentum, mode)
        self._outer = OuterNumbers(outer)
        self._inner = inner_optimizer
        self._hook: Any = None
        self._away: Answer | None = None
        """The fragment on its way: its pseudo-gradients, which the merged weights replace."""
        self._share = 1.0
        """The part of its weight by which it counts; so much of ``alpha`` remains of the local weights."""
        self.syncs, self.wait_s, self.age = 0, 0.0, 0
        options = StoreOptions.of(timeout, on_worker_lost, worker_grace)
        self._stores = tuple(
            [
                create_dist(
                    store, self._OWNER, options, average=is_mean, quorum=quorum, grace=grace, late=late
                )
                for _ in self._fragments
            ]
        )
        cut = self._fragments
        self._steps = Steps(self._stores, lambda: cut)
        for kv in self._stores:
            residual_state.compress(kv, compression, "compression")
        # Only where each merge is one of all workers do their weights have the same start.
        self._has_common_start = mode == "sync" and quorum is None
        self._mean = MeanStore(self._OWNER, options, compression if self._has_common_start else None)
        self._gate: Gate | None = None
        if factor is not None:
            self._gate = Gate(self._OWNER, options, factor, len(self._fragments), is_penal=penalty)
        self._pace: Pace | None = None
        if may_adapt:
            device = next(iter(self._params.values())).device
            self._pace = Pace(self._OWNER, options, sync_every, self._schedule.delay + 1, device)
        demand_same(
            self._stores[0],
            type(self).__name__,
            params,
            buffers_of(model),
            fragments=len(self._fragments),
            gate=factor or 0.0,
            penalty=penalty,
            **({"sync_every": sync_every, "delay": delay} if self._has_common_start else {}),
        )
        self._rescale = 1.0 if is_mean else 1 / self._stores[0].num_workers
        constant = {name: param for name, param in params.items() if name not in self._params}
        self._start = self._spread({**constant, **buffers_of(model)}, backup_device)
        self._unentered = warn_unless_entered(inner_optimizer, type(self).__name__)
        self._steps.choose(DiLoCo._send, DiLoCo._drop, DiLoCo._begin_again)

    @property
    def stores(self) -> tuple[DistStore, ...]:
        """The stores of the global weights, one for each fragment."""
        return self._stores

    @property
    def kvstore(self) -> DistStore:
        """The store of the first fragment, for its ``rank``, ``num_workers`` and ``barrier()``."""
        return self._stores[0]

    @property
    def gated(self) -> int:
        """How often this worker's pseudo-gradient did not count, by ``gate``."""
        return 0 if self._gate is None else self._gate.closed

    @property
    def sync_every(self) -> int:
        """The steps of this worker between two merges of a parameter, in the turn that has begun."""
        return self._schedule.period * self._schedule.fragments

    # --- the beginning and the end ------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._hook is not None:
            raise ConfigError(f"this {type(self).__name__} is entered already")
        self._unentered.remove()
        self._hook = self._inner.register_step_post_hook(lambda *_: self._on_step())
        if self._pace is not None:
            self._pace.begin_turn()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._hook.remove()
        self._hook = None
        if error is None:
            self._take()
            for kv in self._stores:
                kv.close()
            self._mean.close()
            if self._gate is not None:
                self._gate.close()
            if self._pace is not None:
                self._pace.close()

    def _spread(
        self, constant: dict[str, torch.Tensor], backup: torch.device | str | None
    ) -> dict[str, torch.Tensor]:
        """Give all workers the servers' weights, which are rank 0's in a new job; return them."""
        wide = {
            name: param.detach().to(WIDE.get(param.dtype, param.dtype), copy=True)
            for name, param in self._params.items()
        }
        others = {name: carried(tensor) for name, tensor in constant.items()}
        for kv, names in zip(self._stores, self._fragments, strict=True):
            first = others if kv is self._stores[0] else {}
            kv.init([*names, *first], [*[wide[name] for name in names], *first.values()])
            self._install(kv)
        self._begin()
        if others:
            self._stores[0].pull(list(others), out=list(others.values()))
        for name, value in others.items():
            if value.dtype != constant[name].dtype:
                put_back(constant[name], value)
        start = {name: value.to(backup or self._params[name].device) for name, value in wide.items()}
        self._bring(start)
        return start

    def _install(self, kv: DistStore) -> None:
        numbers: dict[str, Any] = self._hyper.to_wire()
        if self._rescale != 1:
            numbers["rescale_grad"] = self._rescale
        if self._hyper.name == DELAYED:
            numbers["period"] = kv.num_workers
        kv.set_optimizer(self._hyper.name, **numbers)

    def _begin(self) -> None:
        """Begin where the other workers are, or, with a script that took another's place, run again until
        there."""
        if self._pace is None:  # else the steps between two merges are not known
            self._steps.begin("merges of each fragment" if len(self._fragments) > 1 else "merges")
        if not self._steps.is_behind:
            self._begin_turn()

    def _begin_turn(self, *, tells: bool = False) -> int:
        """Begin with the fragment whose round the other workers come to next; return the merges of this
        worker."""
        rounds = self._steps.owed(tells=tells)
        self._schedule.begin_at(rounds)
        if self._gate is not None:
            self._gate.begin(rounds)
        return sum(rounds)

    def resume(self) -> int:
        """Return the number of local steps that this worker has merged: where a replacement of a lost worker
        begins.

        It is 0 in a new job. A script that begins at this step spares a replacement the earlier steps, which
        are otherwise made again, without merges. Call it once, before the first step. With
        ``dynamic_sync_every``, it is the number that the fastest worker would have made.

        Example:
            >>> start = outer.resume()  # doctest: +SKIP
            >>> for step in range(start, steps): ...  # doctest: +SKIP
        """
        merges = self._begin_turn(tells=True)
        self._mean.resume()
        return merges * self._schedule.period

    def _bring(self, start: dict[str, torch.Tensor]) -> None:
        """Take the servers' weights, and begin from there."""
        for kv, names in zip(self._stores, self._fragments, strict=True):
            values = [torch.empty_like(self._params[name], dtype=start[name].dtype) for name in names]
            kv.pull(list(names), out=values)
            for name, value in zip(names, values, strict=True):
                self._adopt(start, name, value, 0.0)

    # --- steps --------------------------------------------------------------------------------------

    def _on_step(self) -> None:
        if self._pace is not None:
            self._pace.end_step()
        self._schedule.step()
        if self._schedule.arriving is None and self._schedule.due is None:
            return
        if self._schedule.arriving is not None:
            self._take()
        if self._schedule.due is not None:
            self._steps.run(self)  # lets the fragment leave
            if not self._schedule.delay:
                self._take()
        if self._pace is not None:
            self._pace.begin_step()

    def _drop(self) -> None:
        self._weight.left(self._schedule.next)
        self._schedule.left()
        self._schedule.taken()

    @torch.no_grad()
    def _send(self) -> None:
        """Send the pseudo-gradients of the next fragment.

        Raises:
            NonFinite: if a weight is not finite. Nothing was sent, and the fragment is due again after the
                next step.
            ConfigError: without tokens, if these are the weight; or if the outer torch optimizer was changed,
                or the inner one trains parameters that are not merged.
        """
        self._outer.check()
        self._check_trained()
        fragment = self._schedule.next
        names = self._fragments[fragment]
        deltas = [self._start[name].to(self._params[name].device) - self._params[name] for name in names]
        flawed = [name for name, delta in zip(names, deltas, strict=True) if count_nonfinite(delta.view(-1))]
        if flawed:
            raise NonFinite(
                f"the weights of {names_in_words(flawed)} are not finite after the local steps of rank "
                f"{self._stores[fragment].rank}. Nothing was pushed, and the servers' weights are unchanged. "
                "Call pull() to go on from them, with a new inner optimizer if its state is not finite "
                "either; and check the loss and the inner learning rate"
            )
        weight = self._weight.of(fragment)
        self._share = 1.0 if self._gate is None else self._gate.share_of(fragment, deltas)
        deltas, weight = counted(self._share, deltas, weight)
        try:
            kv = self._stores[fragment]
            handle = kv.pushpull(list(names), deltas, out=deltas, weight=weight, async_op=True)
        except EpochChanged as error:
            self._go_on(error)
            return
        self._away = Answer(handle.wait, kv, dict(zip(names, deltas, strict=True)))
        self._weight.left(fragment)
        if self._gate is not None:
            self._gate.left(fragment)
        steps = self._schedule.steps
        self._schedule.left()
        if self._pace is not None:
            self._pace.report(steps)

    def _check_trained(self) -> None:
        merged = set(self._params.values())
        late = [
            tuple(param.shape)
            for group in self._inner.param_groups
            for param in group["params"]
            if param.requires_grad and param not in merged
        ]
        if late:
            raise ConfigError(
                f"the inner optimizer trains {len(late)} parameters that are not merged, the first of shape "
                f"{late[0]}: they were frozen, or in no group, when this {type(self).__name__} was created, "
                "and each worker would have values of its own. Create it when they are trained"
            )

    @torch.no_grad()
    def _take(self, alpha: float | None = None) -> None:
        """Wait for the fragment in flight, if there is one, and take its merged weights, but for
        ``alpha``."""
        if self._away is None:
            return
        share = (self._alpha if alpha is None else alpha) * self._share
        fragment = self._schedule.in_flight
        assert fragment is not None
        began = time.monotonic()
        try:
            self._away.wait()
            if self._pace is not None:
                self._schedule.set_period(self._pace.next_steps())
        except EpochChanged as error:
            self._go_on(error)
            return
        finally:
            self.wait_s += time.monotonic() - began
        for name, value in self._away.values.items():
            self._adopt(self._start, name, value, share)
        self._away = None
        self._schedule.taken()
        self.syncs += 1
        self.age = int(self._stores[fragment].metrics()["push_age"])

    def _adopt(self, start: dict[str, torch.Tensor], name: str, value: torch.Tensor, alpha: float) -> None:
        """Begin again from a merged ``value``, of which ``alpha`` is left to the local one."""
        param = self._params[name].detach()
        merged = value.to(param.dtype)
        # Of a coarse type the start is what it can hold: the rounding is nothing that this worker has
        # learned.
        start[name].copy_(merged)
        wide = WIDE.get(param.dtype, param.dtype)
        param.copy_(torch.lerp(merged.to(wide), param.to(wide), alpha) if alpha else merged)

    # --- between steps ------------------------------------------------------------------------------

    def sync(self) -> None:
        """Merge all fragments now. All workers call it after the same step; then their weights are equal.

        A fragment whose turn was after this step is not merged again: an outer step without anything learned
        would be one of momentum alone.

        Raises:
            KvpsError: as the merge in a step.
        """
        self._take()
        unmerged = len(self._fragments) - self._schedule.fresh
        with torch.no_grad():
            for fragment in self._schedule.order()[unmerged:]:
                for name in self._fragments[fragment]:
                    self._params[name].copy_(self._start[name])
        for _ in range(unmerged):
            self._steps.run(self)
            self._take(alpha=0.0)

    @torch.no_grad()
    def average(self) -> None:
        """Give all workers the mean of their weights. All workers call it after the same step.

        Call it before a last evaluation, and before you save the model. Unlike :meth:`sync`, it is no step of
        the outer optimizer, and changes nothing on the servers: training may go on as if it had not been
        called. At the end of a run the outer momentum is still that of the larger steps before, and a merge
        would apply it.

        Raises:
            KvpsError: as the merge in a step.
        """
        self._take()
        base = {
            name: self._start[name].to(param.device)
            if self._has_common_start
            else torch.zeros_like(self._start[name], device=param.device)
            for name, param in self._params.items()
        }
        share = 1.0 if self._gate is None else self._gate.share
        learned = [param - base[name] for name, param in self._params.items()]
        values, weight = counted(share, learned, self._weight.overall())
        means = self._mean.of(dict(zip(self._params, values, strict=True)), weight)
        for name, param in self._params.items():
            param.copy_(means[name] + base[name])

    def pull(self) -> None:
        """Take the global weights, drop what this worker has learned since the last merge, and begin a turn.

        Call it to go on from weights that are not finite.
        """
        self._take()
        self._survive(partial(self._bring, self._start) if self._steps.is_behind else self._begin_again)

    def add_tokens(self, count: float) -> None:
        """Count ``count`` tokens, of any unit, towards this worker's weight.

        Raises:
            ConfigError: without ``weight="tokens"``, or for a negative number.
        """
        self._weight.add(count)

    def join(self) -> None:
        """Let the other workers continue without this worker, which has no more steps to make, until all
        have.

        Then every worker has the global weights.
        """
        self._take()
        if self._gate is not None:
            self._gate.leave()
        # Each join waits for the other workers, which go on merging the other fragments until they join.
        with ThreadPoolExecutor(len(self._stores)) as threads:
            joins = [threads.submit(kv.join) for kv in self._stores]
        for join in joins:
            self._survive(join.result)
        self.pull()

    def checkpoint(self, tag: str | None = None) -> int:
        """Write a checkpoint of the global weights and the outer optimizer, as
        :meth:`kvps.KVStore.checkpoint`."""
        self._take()
        return int(self._stores[0].checkpoint(tag))

    def restore(self, tag: str | None = None) -> int:
        """Return to the newest checkpoint, or to the newest with this tag; every worker calls.

        Returns:
            The number of the checkpoint, as :meth:`kvps.KVStore.restore`.
        """
        self._take()
        cuts = [kv.restore(tag) for kv in self._stores]
        self.pull()
        return int(cuts[0])

    # --- rollbacks of the servers -------------------------------------------------------------------

    @torch.no_grad()
    def _begin_again(self) -> None:
        self._begin_turn()
        self._bring(self._start)

    def _survive(self, call: Callable[[], object]) -> None:
        """Make a call; when the servers have returned to a checkpoint, go on from there."""
        try:
            call()
        except EpochChanged as error:
            self._go_on(error)

    def _go_on(self, error: EpochChanged) -> None:
        """Go on from the checkpoint to which the servers have returned.

        Each store tells of it once, by the next call that is made of it.
        """
        if self._steps.is_behind:
            refuse("the servers returned to a checkpoint meanwhile", "lose one process at a time")
        log.warning("%s", error)
        self._away = None
        self._schedule.taken()
        until_made(self._recover_all, error)

    def _recover_all(self, error: EpochChanged) -> None:
        for kv, names in zip(self._stores, self._fragments, strict=True):
            until_made(partial(self._recover, kv, names), error if names[0] in error.before else None)
        self._begin_again()

    def _recover(self, kv: DistStore, names: tuple[str, ...], error: EpochChanged | None) -> None:
        """Give a store what the checkpoint lacks; ``error`` is None if the store has not told of a rollback
        yet."""
        if error is None:
            kv.version(names[0])
            return
        new = [name for name in names if name not in error.after]
        if new:
            kv.init(new, [self._start[name] for name in new])
        if not error.has_optimizer:
            self._install(kv)
