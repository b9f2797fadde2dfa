"""Gradient synchronisation: pushes during backward, and sums back into ``.grad``.

Theory of operation
-------------------
A hook on each parameter is called when its gradient is complete (torch's post-accumulate hook). At the
last of the passes that make up a step it hands the gradient to
:class:`~kvps.torch.sync.in_flight.Buckets`, and whatever leaves is pushed and pulled in one call of the
store, which goes on by itself. When backward is over, the rest leaves. So between two steps a
gradient is in one of these states::

    here ---> collected ---> away ---> back
     |  hook             leaves   wait()
     +---- (no hook: a pass too few, or no gradient at all) ---> rest: :meth:`GradientSync.complete`

Gradients lie where servers read them, if these share memory
(:mod:`kvps.torch.sync.gradient_memory`). The store's answer is written where the gradient was, so
that nothing is allocated, and it must not be touched while it is away. Where it is no sum but
weights, it stays in the servers' memory until :meth:`GradientSync.bring_weights`: backward may
read the weights of now until it ends. Then the servers have used a gradient that has left, and it
cannot be taken back. So it is an error to discard it (by ``zero_grad()``, ``.grad = None`` or
another pass). A front end whose scripts may discard gradients keeps them until
:meth:`GradientSync.complete` (:attr:`GradientSync.is_held`). A sparse gradient leaves as rows,
where the store knows what changed: then rows of the sum come back, or those that are new of the
weight, which are written when they are waited for. An error of the store does not end backward,
whose caller could not know what to do about it: it is raised by the next :meth:`wait`.

What was pushed counts, and the other workers make their step. So after a Timeout, or an
interrupt such as Ctrl-C, the next :meth:`wait` waits on; until then the step can neither be
discarded nor get other gradients, which the other workers would not see
(:attr:`GradientSync.is_late`). If an exception ends backward itself, the gradients that have left
stay those of the step, and the next pass completes it (:meth:`GradientSync._take_up`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, cast

import torch

from kvps.errors import ConfigError, EpochChanged, KvpsError, Timeout
from kvps.phrases import names_in_words
from kvps.runtime.device import CallsBehindKernels, is_away
from kvps.runtime.ticket import Handle, finished
from kvps.store.arguments import is_row
from kvps.store.kvstore import KVStore
from kvps.store.row_copies import Holding
from kvps.store.rows import has_rows
from kvps.store.server_store import DistStore
from kvps.torch.sync.gradient_memory import GradientMemory
from kvps.torch.sync.in_flight import (
    Answer,
    Buckets,
    GradientBucket,
    InFlight,
    bucket_bytes,
)
from kvps.torch.sync.parameter_hooks import ParameterHooks, PassEnd, second_gradient
from kvps.torch.sync.parameter_sync import ParameterSync
from kvps.torch.sync.sparse_gradients import SparseBucket, adds_plainly, dense_of

log = logging.getLogger("kvps")


class Advice(NamedTuple):
    """The advice to users of a front end, for the mistakes that gradients on their way rule out."""

    passes: str
    """A parameter got two gradients in one step."""
    change: str
    """A gradient was changed after it had left."""
    discard: str = ""
    """A gradient was discarded after the servers had it."""


TORN = (
    "an exception cut off step() while the optimizer wrote the weights of this worker, so they differ from "
    "those of the others. Load a checkpoint on every worker: the weights, then load_state_dict() or "
    "load_states() of the front end; or end this process with an error, and restart the job"
)
LEVELS = 8
"""The number of priorities of parameters, in their order."""
OPTIMIZERS = Advice(
    "call step() or the optimizer's zero_grad() in between; if a step has several backward passes, use "
    "backward_passes_per_step=, or no_sync() around all but the last; if activation checkpointing with "
    "use_reentrant=True uses the parameter several times, no_sync() around the whole backward()",
    "call synchronize() before you change it, which waits for the mean",
)


class GradientSync:
    """The gradients of a model on their way through a store.

    Args:
        model: whose; the store must know its keys.
        passes: how many backward passes make up a step.
        limit_bytes: bytes that leave at once; None for a number that suits the store.
        divisor: of the results.
        before: called before the first gradient of a step leaves.
        brings_weights: the results are weights, and do not belong into ``.grad``.
        is_awaited: backward returns when everything is back.
        is_released: gradients in flight may be waited for in the next step (:meth:`release`).
        is_whole: all gradients of a step leave in one call, as one step of a store that clips
            their global norm.
        is_stepwise: gradients stay the script's until :meth:`complete`, and leave in one call. Weights
            that come back go straight to the parameters, and ``.grad`` is as before.
        advice: for the front end's user.
    """

    def __init__(
        self,
        model: ParameterSync,
        passes: int = 1,
        limit_bytes: int | None = None,
        *,
        divisor: int = 1,
        before: Callable[[], None] = lambda: None,
        brings_weights: bool = False,
        is_awaited: bool = False,
        is_released: bool = False,
        is_whole: bool = False,
        is_stepwise: bool = False,
        advice: Advice = OPTIMIZERS,
    ) -> None:
        self._model = model
        self._divisor = divisor
        self._before = before
        self._brings_weights = brings_weights
        self.is_awaited = is_awaited
        self._is_released = is_released
        self.scale = 1.0
        """The factor of gradients before they leave."""
        self._is_stepwise = is_stepwise
        self.is_held = is_stepwise
        """Gradients stay until :meth:`complete` is called."""
        self._is_local = False
        """This pass only adds up; another one will let the gradients leave."""
        # Other stores' calls may be collective: all ranks make them in the order of their scripts.
        is_early = isinstance(model.kv, DistStore) and not is_stepwise
        devices = {param.device for param in model.params.values() if is_early and is_away(param)}
        self._behind = CallsBehindKernels(devices) if devices else None
        """Begins calls of the store behind the kernels of devices; None for this thread."""
        self._follows_chunks = is_early and not devices
        """Whether a bucket waits for the gradients that complete its chunks; a call that disturbs
        nothing may carry parts of chunks."""
        sizes = {name: param.numel() * param.element_size() for name, param in model.params.items()}
        self._is_whole = is_whole
        if is_whole or is_stepwise:
            limit_bytes = sum(sizes.values()) + 1
        elif limit_bytes is None:
            limit_bytes = bucket_bytes(model.kv.chunk_bytes, is_on_device=bool(devices))
        self._buckets = Buckets(sizes, limit_bytes)
        self._tables = model.kv if isinstance(model.kv, KVStore) and model.kv.knows_changes else None
        """The store of sparse gradients; None for one in which they have to be made dense."""
        self._held: dict[str, Holding] = {}
        """Table -> the copy that the store gave last; of those whose sparse gradient has left before."""
        # A gradient that is waited for in the next step would lie where that step's is computed.
        self._memory = GradientMemory(None if is_released else model.kv, model.params)
        # Where each push is applied by itself, servers would copy what others push to meanwhile.
        may_hold = brings_weights and not is_stepwise and str(model.kv.type).startswith("dist_sync")
        self._holder = model.kv if may_hold and isinstance(model.kv, DistStore) else None
        """The store whose servers keep results unchanged until the end of a step."""
        self._away: dict[str, InFlight] = {}
        self.values: dict[str, torch.Tensor] = {}
        """Name -> the tensor of a gradient that has left in this step, and of the value that came back."""
        self._made: dict[str, tuple[torch.Tensor, int]] = {}
        """Name -> ``.grad`` as backward has left it, and the number of writes to it, as torch counts them."""
        self._arrived: list[InFlight] = []
        """The buckets of this step that are back, in the order in which they left."""
        self._arranged: list[str] = []
        """The parameters whose chunks the buckets know; none after a failure, as keys may be placed anew."""
        self._failure: Exception | None = None
        self.is_late = False
        """The step was cut off, by a Timeout or an interrupt, and is under way."""
        self._kept: set[str] = set()
        """The parameters whose gradients had left when a pass of this step failed."""
        self.is_agreed = False
        """The workers have agreed in this step on the parameters that were used."""
        self._collected: set[str] = set()
        """The parameters whose gradients backward has handed to the buckets in this step."""
        self._advice = advice
        self._is_begun = False
        self._end = PassEnd()
        self.hooks = ParameterHooks(model, passes, self._take if is_stepwise else self._on_gradient)

    # --- backward ---------------------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward passes inside only add up."""
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    def _take(self, name: str) -> None:
        self._demand_end()
        self._memory.take(name)

    def _on_gradient(self, name: str) -> None:
        self._demand_end()
        self._take_up()
        if name not in self._kept:
            try:
                self._let_leave(name)
            except ConfigError:  # the gradients of this pass are discarded
                self._end = PassEnd()
                raise

    def _take_up(self) -> None:
        """If the last pass has failed, let the next complete its step: what has left counts."""
        if not self._end.is_missed:
            return
        self._end = PassEnd()
        self._buckets.begin()
        self.hooks.begin()
        self._collected = set(self.values)
        self._kept |= self._collected
        if self._kept:
            log.warning(
                "backward() failed when the gradients of %d of %d parameters had been pushed. They count in "
                "this step on all workers, and the next backward() adds the others",
                len(self._kept),
                len(self._model.trained),
            )

    def _put_back(self) -> None:
        """Let ``.grad`` be what was pushed, where a pass has failed, and another one has gone on."""
        for name in self._kept:
            self._model.params[name].grad, _ = self._made[name]

    def _let_leave(self, name: str) -> None:
        gradient = self._model.params[name].grad
        if name in self.values:
            self._check_fresh(name, gradient)
        elif name in self._collected and self._failure is None:
            raise second_gradient(name, self._advice.passes)
        self._made.pop(name, None)  # a discarded gradient holds its place in memory no more
        self._memory.take(name)
        is_last = self.hooks.count(name)
        self._note(name)
        if self._is_local or self.is_held or not is_last:
            return
        self._end.wait(self._on_end)
        self._collected.add(name)
        self._leave(self._buckets.add(name))

    def _on_end(self) -> None:
        self._put_back()
        self._leave(self._buckets.flush())
        if self.is_awaited and self._failure is None:
            try:
                self.wait()
            except KvpsError as error:
                self._failure = error

    def _check_fresh(self, name: str, gradient: torch.Tensor | None) -> None:
        """A second gradient in a step must not be added to a pushed gradient, nor take its place
        on the servers.

        Raises:
            ConfigError: if it was, or would.
        """
        if gradient is not None and self._is_added(name, gradient):
            raise second_gradient(name, self._advice.passes)
        self._drop([name])

    def drop_discarded(self) -> None:
        """Forget the sums of gradients that were discarded: others will leave in their place.

        Raises:
            ConfigError: where they cannot be taken back. KvpsError: as :meth:`wait`.
        """
        self._drop([name for name in self.values if self._model.params[name].grad is None])

    def _drop(self, names: list[str]) -> None:
        if names and self._brings_weights:
            raise self._taken_back(names)
        for name in names:
            del self.values[name]  # its result has no place any more
        self.wait(names)

    def _is_added(self, name: str, gradient: torch.Tensor) -> bool:
        """Whether backward has added ``gradient`` to the pushed gradient, as far as can be told."""
        made, _ = self._made[name]
        # Torch adds elsewhere with create_graph=True, and where a dense gradient meets a sparse one.
        is_elsewhere = gradient.requires_grad or gradient.layout is not made.layout
        return gradient is made or is_elsewhere or self._is_there(name, gradient)

    def _is_there(self, name: str, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` is the pushed gradient (a view of it would have its memory)."""
        left = self.values[name]
        return {gradient.layout, left.layout} == {torch.strided} and (
            gradient.numel() > 0 and gradient.data_ptr() == left.data_ptr()
        )

    def _note(self, name: str) -> None:
        """Note a gradient as it is now, to notice later changes."""
        gradient = None if self._is_stepwise else self._model.params[name].grad
        if gradient is not None:
            self._made[name] = gradient, gradient._version

    def _taken_back(self, names: list[str]) -> ConfigError:
        """Return the error for gradients that were discarded after they were pushed."""
        return ConfigError(
            f"the gradient of {names_in_words(names)} was discarded before step(), but backward() had "
            f"already pushed it, and the servers update the weights with it: {self._advice.discard}"
        )

    # --- out and back -----------------------------------------------------------------------------

    def _leave(self, names: list[str]) -> None:
        if not names or self._failure is not None:
            return
        number = self._buckets.number
        sparse = {name for name in names if self.gradient(name).layout is not torch.strided}
        tables = {name for name in sparse if self._tables is not None and has_rows(self.gradient(name))}
        try:
            if tables and self._is_whole:
                raise ConfigError(
                    f"the gradient of {names_in_words(sorted(tables))} is sparse, and clip_global_norm= "
                    "clips dense gradients only: create the Embedding with sparse=False, or leave out "
                    "clip_global_norm="
                )
            if not self._is_begun:
                self._before()
                self._prepare()
                self._is_begun = True
            for name in [name for name in names if name in tables]:
                self._leave_rows(name, number)
            self._leave_dense([name for name in names if name not in tables], sparse, number)
        except KvpsError as error:
            self._memory.give_up(names)
            self._failure = error

    def _prepare(self) -> None:
        """Learn for the next steps where gradients lie."""
        trained = self._model.trained
        self._memory.prepare(trained)
        if self._follows_chunks and trained != self._arranged and isinstance(self._model.kv, DistStore):
            self._buckets.arrange(self._model.kv.chunks_of(trained))
            self._arranged = trained

    def _leave_dense(self, names: list[str], sparse: set[str], number: int) -> None:
        """Push gradients as they are in memory; those that are ``sparse`` are made dense."""
        if not names:
            return
        values = [self._dense(name) for name in names]
        out = values
        with torch.no_grad():
            if self._is_stepwise and self._brings_weights:
                out = [self._model.params[name].detach() for name in names]
                if self.scale != 1.0:
                    values = list(torch._foreach_mul(values, self.scale))
            elif self.scale != 1.0:
                torch._foreach_mul_(values, self.scale)
        by_name = dict(zip(names, values, strict=True))
        if self._holder is not None and all(is_row(self._model.params[name]) for name in names):
            call = partial(self._holder.pushpull_held, names, values, number)
        else:
            call = partial(self._pushpull, names, values, out, number)
        answer = Answer(self._begun(call), self._model.kv, dict(zip(names, out, strict=True)))
        is_marked = adds_plainly(self._model.kv)
        bucket = GradientBucket(by_name, answer, self._divisor, sparse & by_name.keys(), is_marked=is_marked)
        self._have_left(names, bucket)

    def _begun(self, call: Callable[[], Handle]) -> Callable[[], object]:
        """Begin a call of the store; return what waits for its end. One without others is made there."""
        if self._is_stepwise:
            return call
        if self._behind is None:
            return call().wait
        begun = self._behind.begin(call)
        return lambda: begun.result().wait()

    def _pushpull(
        self, names: list[str], values: list[torch.Tensor], out: list[torch.Tensor], number: int
    ) -> Handle:
        kv = self._model.kv
        if isinstance(kv, KVStore) and not self._is_stepwise:
            return cast("Handle", kv.pushpull(names, values, out=out, priority=number, async_op=True))
        if isinstance(kv, KVStore):
            # The first layers are needed first, in the next forward pass. Within one level chunks go to all
            # servers in turns.
            levels = [-(LEVELS * index // len(names)) for index in range(len(names))]
            kv.pushpull(names, values, out=out, priority=levels)
        else:
            for index, name in enumerate(names):  # a plug-in need not take lists
                kv.pushpull(name, values[index], out=out[index], priority=-index)
        return Handle(finished(), lambda: None)

    def _leave_rows(self, name: str, number: int) -> None:
        """Push a gradient's rows."""
        param = self._model.params[name]
        assert self._tables is not None
        gradient = self.gradient(name).detach().to(param.dtype)
        if self.scale != 1.0:
            gradient = gradient * self.scale
        away = SparseBucket(
            self._tables,
            self._held,
            name,
            gradient,
            param,
            number,
            self._divisor,
            brings_weights=self._brings_weights,
        )
        self._have_left([name], away)

    def _have_left(self, names: list[str], away: InFlight) -> None:
        self.values.update(away.values)
        self._away.update(dict.fromkeys(names, away))
        for name in () if self._is_stepwise else names:
            self.hooks.leave(name)
            self._note(name)

    def nothing_for(self, name: str) -> torch.Tensor:
        """Return a gradient of 0 for a parameter, in the layout in which its gradients leave."""
        param = self._model.params[name]
        layout = torch.sparse_coo if name in self._held else torch.strided
        return torch.zeros_like(param, requires_grad=False, layout=layout)

    def gradient(self, name: str) -> torch.Tensor:
        """Return a gradient that is here."""
        gradient = self._model.params[name].grad
        assert gradient is not None
        return gradient

    def _dense(self, name: str) -> torch.Tensor:
        """Return a gradient as it travels."""
        param = self._model.params[name]
        assert param.grad is not None
        if param.grad.layout is not torch.strided:
            return dense_of(param.grad.detach())
        if param.grad.dtype != param.dtype:
            return param.grad.detach().to(param.dtype)
        place = self._memory.sent(name)
        # Not detach(): what the store writes must not count as a change of .grad by somebody else.
        return param.grad.data if place is None else place

    @property
    def is_away(self) -> bool:
        """Whether gradients are under way."""
        return bool(self._away)

    def missing(self) -> list[str]:
        """Return the parameters whose gradient has not left in this step, and that have none."""
        return self.hooks.missing(self.values)

    def complete(self) -> None:
        """Let every gradient leave that is here.

        Raises:
            ConfigError: if a pushed gradient was changed, or was discarded where it cannot be taken back.
        """
        self.hooks.watch()
        self._put_back()
        discarded = [name for name in self.values if self._model.params[name].grad is None]
        if discarded and self._brings_weights:
            raise self._taken_back(discarded)
        for name in discarded if self._is_released else ():
            self._away.pop(name, None)
        changed = self.changed(self._away)
        if changed:
            raise ConfigError(
                f"the gradient of {names_in_words(changed)} was changed (for example clipped) after it was "
                f"pushed: {self._advice.change}"
            )
        left = [
            name
            for name in reversed(self._model.trained)  # as backward makes them
            if name not in self.values and self._model.params[name].grad is not None
        ]
        try:
            if self._is_stepwise:
                self._leave(left[::-1])
                return
            for name in left:
                self._leave(self._buckets.add(name))
            self._leave(self._buckets.flush())
        except BaseException:
            self._buckets.begin()
            self.is_late = bool(self.values)
            raise

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return the parameters whose ``.grad`` is no longer what backward, or the push,
        has left there.

        A GradScaler's unscaling is not seen, as torch does not count its writes.
        """
        found = []
        for name in names:
            gradient = self._model.params[name].grad
            if gradient is None or name not in self._made:
                continue
            made, version = self._made[name]
            is_other = gradient is not made and gradient.layout is made.layout
            if is_other or gradient._version != version:
                found.append(name)
        return found

    def wait(self, names: Iterable[str] | None = None) -> None:
        """Wait until gradients are back in ``.grad``.

        Args:
            names: of which parameters; None for all that are away.

        Raises:
            KvpsError: what became of one of them; all others have come to an end, too.
        """
        wanted = list(self._away) if names is None else names
        buckets = {id(self._away[name]): self._away[name] for name in wanted if name in self._away}
        failure, self._failure = self._failure, None
        if isinstance(failure, Timeout):
            raise failure  # of the end of backward; another call waits on
        self.is_late, is_late = True, False  # until it ends, by whatever exception
        for bucket in buckets.values():
            try:
                bucket.wait()
                self._deliver(bucket)
                self._arrived.append(bucket)
            except Timeout as error:
                is_late = True
                failure = error if failure is None else failure
                self._memory.give_up(bucket.values)
                for name in bucket.values:
                    self._note(name)
                continue
            except (KvpsError, RuntimeError) as error:  # of torch, too: a device may be gone
                self._memory.give_up(bucket.values)
                self._arranged = []
                is_graver = isinstance(failure, EpochChanged) and not isinstance(error, EpochChanged)
                failure = error if failure is None or is_graver else failure
            for name in bucket.values:
                self._away.pop(name, None)
        self.is_late = is_late
        if failure is not None:
            raise failure

    def _deliver(self, bucket: InFlight) -> None:
        """Put the results where the optimizer looks for them."""
        if self._brings_weights:
            return
        for name, value in bucket.values.items():
            param = self._model.params[name]
            if param.grad is None or self.values.get(name) is not value:
                continue
            if param.grad.layout is not torch.strided:
                param.grad = bucket.gradient(name)
            elif value.layout is not torch.strided:  # somebody has made it dense meanwhile
                param.grad = bucket.gradient(name).to_dense()
            elif not self._is_there(name, param.grad):
                with torch.no_grad():
                    param.grad.copy_(value)
            if not self._is_stepwise:
                self._note(name)

    def bring_weights(self) -> None:
        """Write the values that are back to the parameters."""
        self.is_late = True  # until all are written
        for bucket in () if self._is_stepwise else self._arrived:
            bucket.bring(bucket.values, self._model.params)
        self._model.note_weights()
        self.is_late = False

    def release(self) -> dict[str, InFlight]:
        """End the step, and let the caller wait for the buckets that are away.

        Returns:
            By name, what to wait for.

        Raises:
            KvpsError: what kept gradients from leaving; then nothing is released.
        """
        if self._failure is not None:
            self.wait()
        away = dict(self._away)
        self.begin()
        return away

    def discard(self) -> None:
        """Let the user give up the gradients of this step.

        Raises:
            ConfigError: if some have left that cannot be taken back. KvpsError: as :meth:`wait`.
        """
        self._demand_end()
        self._take_up()
        if self._kept:
            for name in self._kept:
                self._model.params[name].grad = None  # it is under way
            return
        gone = list(self.values) if self._brings_weights else []
        self.abandon()
        if gone:
            raise self._taken_back(gone)

    def abandon(self) -> None:
        """Wait for the buckets that are under way, if that has not failed before, and begin anew.

        Raises:
            KvpsError: as :meth:`wait`.
        """
        try:
            if not self.is_late:
                self.wait()
        finally:
            self.begin()

    def _demand_end(self) -> None:
        if self._model.is_torn:
            raise ConfigError(TORN)
        if self.is_late:
            raise ConfigError(
                "the last step was cut off (by a Timeout, or an exception), but its gradients count, and it "
                "is still under way: call step() again, which waits on, before the next zero_grad() or "
                "backward()"
            )

    def begin(self) -> None:
        """A step is over: later gradients are of the next."""
        self.is_late = self.is_agreed = False
        self._buckets.begin()
        self.hooks.begin()
        self._away.clear()
        self._arrived.clear()
        self.values.clear()
        self._collected.clear()
        self._kept.clear()
        self._made.clear()
        self._failure = None
        self._is_begun = False
