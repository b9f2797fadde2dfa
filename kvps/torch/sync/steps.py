"""The steps of a front end whose optimizer runs on the servers, and the place of a lost worker among them.

A step is made, or, where this worker replaces a lost worker, passed over until the step of the others
(:mod:`kvps.store.catch_up`). Which of the two is chosen at the beginning, and again when the
replay is over: a worker that replaces nobody asks nothing in its steps.

Steps of a torch optimizer that a front end makes: its hooks, its profiler mark, and its present numbers.

Where servers update the weights, the optimizer's own ``step()`` never runs. The script still has
that optimizer: its schedulers change it, its hooks count steps, and a ``step()`` by mistake would
change this worker's weights alone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from kvps.core.optim.from_torch import describe
from kvps.core.optim.hyperparams import HyperParams, resolve
from kvps.errors import ConfigError
from kvps.store.base import Store
from kvps.store.kvstore import KVStore
from kvps.store.server_store import DistStore

log = logging.getLogger("kvps")

Make = Callable[..., object]
"""Makes a step; called with the front end, and what its ``step()`` was given."""
Drop = Callable[..., float | None]
"""Drops what the script has computed for a step that is passed over; returns the script's learning
rate, if servers have it."""


class Steps:
    """The steps of one front end.

    Args:
        stores: one, or several that take turns: the k-th step pushes the keys of store ``k % len(stores)``.
        keys: returns the keys of each store that a step pushes.
    """

    def __init__(self, stores: Sequence[Store | None], keys: Callable[[], Sequence[Sequence[str]]]) -> None:
        self._stores = stores
        self._keys = keys
        self._unit = "steps"
        self.made = 0
        """The number of completed steps of this rank, the steps of a lost worker among them."""

    def begin(self, unit: str = "steps") -> None:
        """Find where this process begins; a replacement replays, unless :meth:`resume` follows.

        Args:
            unit: what the front end calls its steps.
        """
        self._unit = told = unit
        owed = 0
        for kv, keys in zip(self._stores, self._keys(), strict=True):
            if isinstance(kv, DistStore):
                owed += kv.take_place(keys, told).owed
                told = ""  # one store tells of it
            elif isinstance(kv, KVStore):
                owed += kv.take_owed(keys)
        self.made = 0 if self.is_behind else owed

    def choose(self, make: Make, drop: Drop, arrive: Callable[..., object]) -> None:
        """Choose how steps are made.

        Args:
            make: makes a step.
            drop: makes none.
            arrive: called with the front end behind the last step that is passed over: takes the
                newest weights.
        """
        self._make, self._drop, self._arrive = make, drop, arrive
        self._run: Make = self._pass_over if self.is_behind else make

    @property
    def is_behind(self) -> bool:
        """Whether this worker replaces a lost worker, and its script runs again towards the step
        of the others."""
        return any(isinstance(kv, KVStore) and kv.catch_up is not None for kv in self._stores)

    @property
    def is_added(self) -> bool:
        """Whether this worker came to a job that ran, and that has made a step."""
        is_added = any(isinstance(kv, DistStore) and kv.session.info.is_added for kv in self._stores)
        return is_added and self.made > 0

    def run(self, front: object, *given: object) -> None:
        """Make the next step of ``front``, or pass over it."""
        self._run(front, *given)
        self.made += 1

    def owed(self, *, tells: bool = False) -> list[int]:
        """Return for each store the number of the push that this rank owes next, and begin with it."""
        owed = [
            kv.take_owed(keys, tells=tells) if isinstance(kv, KVStore) else 0
            for kv, keys in zip(self._stores, self._keys(), strict=True)
        ]
        self.made = sum(owed)
        return owed

    def resume(self) -> int:
        """Return the number of steps that this rank has made, and begin with the next."""
        return sum(self.owed(tells=True))

    def _pass_over(self, front: object, *given: object) -> None:
        """Make no step: the lost worker, which this one replaces, has made it."""
        if self.is_behind:
            rate = self._drop(front, *given)
            kv = self._stores[self.made % len(self._stores)]
            assert isinstance(kv, DistStore)
            kv.pass_over()
            self._catch_up(front, rate)
        else:  # the script has called resume()
            self._make(front, *given)
        if not self.is_behind:
            self._run = self._make

    def _catch_up(self, front: object, rate: float | None) -> None:
        """End the replay behind its last step."""
        waiting = {
            kv: kv.catch_up for kv in self._stores if isinstance(kv, DistStore) and kv.catch_up is not None
        }
        if not all(catch_up.is_over for catch_up in waiting.values()):
            return
        for kv, catch_up in waiting.items():
            # What the others want of the optimizer does not count.
            if kv.rank == 0 and rate is not None:
                catch_up.check_rate(rate)
            kv.end_replay()
        self._arrive(front)
        log.warning("this worker has reached the others after %d %s", self.made + 1, self._unit)


class Resumable:
    """A front end whose optimizer may run on servers, so that a replacement of a lost worker goes
    on where it was."""

    _steps: Steps

    def resume(self) -> int:
        """Return the number of steps that this worker has made: where a replacement of a lost worker begins.

        It is 0 in a new job. A script that begins at this step spares a replacement the earlier
        steps, which are otherwise computed again and passed over. Call it once, before the first step.

        Example:
            >>> start = trainer.resume()  # doctest: +SKIP
            >>> for step in range(start, steps): ...  # doctest: +SKIP
        """
        return self._steps.resume()


_GUARDS: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
"""Optimizer -> the handle of the hook that its present front end has there."""


_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""The code of a step that calls hooks, around another step."""


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the step of an optimizer's class that calls no hooks; it takes the optimizer."""
    step: Any = type(optimizer).step
    while getattr(step, "__code__", None) is _HOOKED:
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def hook_once(optimizer: torch.optim.Optimizer) -> None:
    """Let each step of an optimizer's class call hooks once.

    torch wraps the class when its first optimizer is made. Threads that make it at the same time wrap
    the class twice, and each hook is called twice from then on.
    """
    kind: Any = type(optimizer)
    while getattr(getattr(kind.step, "__wrapped__", None), "__code__", None) is _HOOKED:
        kind.step = kind.step.__wrapped__
        kind.step.hooked = True


def check_groups(optimizer: torch.optim.Optimizer, params: Mapping[str, torch.Tensor]) -> None:
    """Check that a torch optimizer is over ``params``, and over nothing else.

    Raises:
        ConfigError: naming what is missing.
    """
    theirs = {param for group in optimizer.param_groups for param in group["params"]}
    for name, tensor in params.items():
        if tensor.requires_grad and tensor not in theirs:
            raise ConfigError(
                f"parameter {name!r} is not in the optimizer's groups; add it there, or set "
                "requires_grad_(False) on it"
            )
    foreign = len(theirs - set(params.values()))
    if foreign:
        raise ConfigError(
            f"the optimizer has {foreign} parameters that are not in params, and that other workers lack: "
            "give both the same parameters; groups that are added later have parameters that were given"
        )


class KnownGroups:
    """The groups of a torch optimizer, to which a script may add parameters that the front end knows.

    Args:
        optimizer: the script's.
        params: name -> parameter, of those that the front end knows.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._params = params
        self._count = 0
        """The number of parameters that were checked."""

    def check(self) -> None:
        """Check parameters that were added.

        Raises:
            ConfigError: as :func:`check_groups`.
        """
        count = sum([len(group["params"]) for group in self._optimizer.param_groups])
        if count != self._count:
            check_groups(self._optimizer, self._params)
            self._count = count


class OwnedSteps:
    """The steps of a torch optimizer that a front end makes; others are refused.

    It is a context manager: a step inside it is the front end's.

    Args:
        optimizer: the script's.
        owner: the front end. After its end, or once another front end owns the optimizer, nothing
            is refused for it.
        reason: why another step is wrong, and what to call.
        params: name -> parameter, of those that the front end knows: a step with others is refused.
        may_evaluate: a step with a closure is the script's business: the closure may sum gradients.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> sgd = torch.optim.SGD([weight])
        >>> _ = sgd.register_step_post_hook(lambda *_: print("stepped"))
        >>> OwnedSteps(sgd, sgd, "call trainer.step()", {"weight": weight}).run(lambda: None)
        stepped
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        owner: object,
        reason: str,
        params: Mapping[str, torch.Tensor],
        *,
        may_evaluate: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._may_evaluate = may_evaluate
        self._owner = weakref.ref(owner)
        self._reason = reason
        self._groups = KnownGroups(optimizer, params)
        self._is_own = False
        self._may_pass = False
        self.is_made = False
        """The last step of the front end has written the weights; a hook after it may have failed."""
        hook_once(optimizer)
        before = _GUARDS.pop(optimizer, None)
        if before is not None:
            before.remove()
        self._handle = _GUARDS[optimizer] = optimizer.register_step_pre_hook(self._check)
        self._after = optimizer.register_step_post_hook(self._note_made)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._after.id, last=False)  # before those of the script, which may fail

    def __enter__(self) -> None:
        self.is_made = False
        self._groups.check()
        self._is_own = True

    def __exit__(self, *_: object) -> None:
        self._is_own = self._may_pass = False

    def run(self, update: Callable[..., Any], *closure: Any) -> Any:
        """Return the result of ``update``, which is a step: hooks are called before and after it,
        and a profile and schedulers see it.

        Args:
            update: makes the step; called with the closure, if there is one.
            closure: of the step.
        """
        vars(self._optimizer)["_opt_called"] = True
        hooked = torch.optim.Optimizer.profile_hook_step(lambda _, *given: update(*given))
        with self:
            return hooked(self._optimizer, *closure)

    def let_pass(self) -> None:
        """Allow one step of the script's own."""
        self._may_pass = True

    def close(self) -> None:
        """Allow all steps from now on."""
        self._handle.remove()
        self._after.remove()

    @property
    def has_pre_hooks(self) -> bool:
        """Whether anybody else has a hook that is called before a step, and may read gradients."""
        own = int(self._handle.id in self._optimizer._optimizer_step_pre_hooks)
        hooks = len(self._optimizer._optimizer_step_pre_hooks) - own
        return bool(hooks or torch_optimizer._global_optimizer_pre_hooks)

    def _note_made(self, *_: object) -> None:
        self.is_made = True

    def _check(self, _: object, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        is_evaluating = self._may_evaluate and (len(args) > 1 or bool(options))
        if self._is_own or self._may_pass or is_evaluating or self._owner() is None:
            self._may_pass = False
            return
        raise ConfigError(self._reason)


class Described:
    """The hyper-parameters of a torch optimizer, described anew only when its groups have changed.

    Args:
        optimizer: one that servers can run.
        params: name -> parameter, the keys of the store.
        max_norm: the global norm to which the servers clip gradients; None for no limit.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, torch.Tensor],
        max_norm: float | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._key_of = {param: name for name, param in params.items()}
        self._groups = KnownGroups(optimizer, params)
        self._seen: list[list[Any]] = []
        self._hyper: HyperParams | None = None

    def now(self) -> HyperParams:
        """Return the present hyper-parameters.

        Raises:
            ConfigError: if servers cannot run the optimizer with these.
        """
        self._groups.check()
        options = self._options()
        if self._hyper is None or options != self._seen:
            hyper = describe(self._optimizer, self._key_of)
            clip = {"clip_global_norm": self._max_norm}
            self._hyper = resolve(hyper.name, {**hyper.to_wire(), **clip})
            self._seen = options
        return self._hyper

    def scaled_as(self, old: HyperParams) -> HyperParams:
        """Return the present hyper-parameters with the factor of gradients of ``old``."""
        factor = {"rescale_grad": old.number("rescale_grad")}
        new = self.now()
        return replace(new, values={**new.values, **factor})

    def set_rate(self, hyper: HyperParams) -> None:
        """Give the groups the learning rates of ``hyper``, which differs in these only."""
        for group in self._optimizer.param_groups:
            for param in group["params"][:1]:
                rate, _ = hyper.for_key(self._key_of[param])
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        self._hyper, self._seen = hyper, self._options()

    def _options(self) -> list[list[Any]]:
        return [
            [
                value.item() if isinstance(value, torch.Tensor) else value
                for name, value in group.items()
                if name not in ("params", "param_names")
            ]
            for group in self._optimizer.param_groups
        ]
