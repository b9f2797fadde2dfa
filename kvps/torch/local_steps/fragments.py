"""Fragments of a model: the parts that are synchronised one after another, balanced by bytes or given by the
user.

:class:`Schedule` says after which step a fragment leaves, and after which its merged values are taken.
Fragments take turns. With period ``p = sync_every / fragments``, fragment 0 leaves after step p, fragment 1
after 2p, and each returns to its turn ``sync_every`` steps later. A fragment that left after step t is taken
back after step t + delay, before the next one leaves: at most one is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvps.errors import ConfigError
from kvps.phrases import names_in_words

Fragments = tuple[tuple[str, ...], ...]
"""The names of the parameters of each fragment; every trained parameter is in one of them."""


def fragments_of(params: Mapping[str, torch.Tensor], wanted: object) -> Fragments:
    """Return the fragments that a user asks for.

    Args:
        params: name -> parameter, of those that are trained.
        wanted: the number of fragments; or a list of them, each a module, or a list of parameters and
            modules.

    Raises:
        ConfigError: naming the parameters that are in no fragment, in two, or not in the model.

    Example:
        >>> layers = {"a": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(2)}
        >>> fragments_of(layers, 2)
        (('a',), ('b', 'c'))
    """
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return _balanced(params, wanted)
    if not isinstance(wanted, Sequence) or isinstance(wanted, str):
        raise ConfigError(
            f"fragments={wanted!r:.60}: give a number, or a list of modules or of lists of parameters"
        )
    return _given(params, wanted)


def _balanced(params: Mapping[str, torch.Tensor], count: int) -> Fragments:
    """Put each parameter, the largest first, into the fragment with the fewest bytes."""
    if not 1 <= count <= len(params):
        raise ConfigError(f"fragments={count}: use 1 to {len(params)}, the number of trained parameters")
    sizes = [0] * count
    chosen: dict[str, int] = {}
    for name in sorted(params, key=lambda name: -params[name].nbytes):
        lightest = sizes.index(min(sizes))
        chosen[name] = lightest
        # A parameter without elements counts, too, so that no fragment stays empty.
        sizes[lightest] += params[name].nbytes + 1
    return tuple(tuple([name for name in params if chosen[name] == number]) for number in range(count))


def _given(params: Mapping[str, torch.Tensor], wanted: Sequence[Any]) -> Fragments:
    names = {param: name for name, param in params.items()}
    found: list[tuple[str, ...]] = []
    places: dict[str, int] = {}
    for number, entry in enumerate(wanted):
        members = _parameters(entry, f"fragments[{number}]")
        foreign = [param for param in members if param not in names]
        if foreign:
            shapes = ", ".join([str(tuple(param.shape)) for param in foreign[:3]])
            raise ConfigError(
                f"fragments[{number}] has {len(foreign)} trained parameter(s) that the model has not, of "
                f"shape {shapes}; build fragments from the modules of the model"
            )
        mine = tuple([names[param] for param in members])
        repeated = [name for name in mine if name in places]
        if repeated:
            raise ConfigError(
                f"parameter {repeated[0]!r} is in fragments[{places[repeated[0]]}] and in "
                f"fragments[{number}]; each parameter belongs to one fragment"
            )
        if not mine:
            raise ConfigError(f"fragments[{number}] has no trained parameter; remove it")
        places.update(dict.fromkeys(mine, number))
        found.append(mine)
    missing = [name for name in params if name not in places]
    if missing:
        raise ConfigError(
            f"no fragment has {names_in_words(missing)}; add it to a fragment, or freeze it by "
            "requires_grad_(False)"
        )
    return tuple(found)


def _parameters(given: object, where: str) -> list[torch.Tensor]:
    """Return the trained parameters of a module, a parameter, or a list of either; each once."""
    found: list[torch.Tensor]
    if isinstance(given, torch.nn.Module):
        found = list(given.parameters())
    elif isinstance(given, torch.Tensor):
        found = [given]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        found = [param for element in given for param in _parameters(element, where)]
    else:
        raise ConfigError(
            f"{where} is a {type(given).__name__}; give a module, a parameter, or a list of them"
        )
    return list(dict.fromkeys([param for param in found if param.requires_grad]))


@dataclass(slots=True)
class Schedule:
    """The turns of the fragments on one worker.

    Example:
        >>> schedule = Schedule.of(sync_every=4, fragments=2, delay=1)
        >>> schedule.step(), schedule.due
        (None, None)
        >>> schedule.step(), schedule.due
        (None, 0)
        >>> schedule.left()
        >>> schedule.step(), schedule.arriving
        (None, 0)
    """

    period: int
    """Steps from one fragment's turn to the next one's."""
    fragments: int
    delay: int
    """Steps from the moment at which a fragment leaves until its merged values are taken."""
    next: int = 0
    """The fragment whose turn is next."""
    steps: int = 0
    """Steps since the last fragment left."""
    in_flight: int | None = None
    """The fragment that has left and is not taken back."""
    fresh: int = 0
    """Fragments that have left since the last step: no step was made of them since."""

    @classmethod
    def of(cls, sync_every: object, fragments: int, delay: object) -> Schedule:
        """Return a schedule.

        Args:
            sync_every: steps from one turn of a fragment to its next.
            fragments: the number of fragments.
            delay: steps until the merged values of a fragment are taken.

        Raises:
            ConfigError: if the turns do not fit into ``sync_every``, or ``delay`` into a turn.
        """
        if type(sync_every) is not int or sync_every < 1:
            raise ConfigError(f"sync_every={sync_every!r}: use a number of steps, 1 or more")
        if sync_every % fragments:
            raise ConfigError(
                f"sync_every={sync_every} is not a multiple of the {fragments} fragments, which take turns; "
                f"use {max(1, round(sync_every / fragments)) * fragments}"
            )
        period = sync_every // fragments
        if type(delay) is not int or not 0 <= delay < period:
            raise ConfigError(
                f"delay={delay!r}: use 0 to {period - 1} steps. A fragment returns before the next one "
                f"leaves, which is {period} steps later (sync_every / fragments)"
            )
        return cls(period, fragments, delay)

    def step(self) -> None:
        """Count a step."""
        self.steps += 1
        self.fresh = 0

    @property
    def due(self) -> int | None:
        """The fragment that leaves now; None for none."""
        return self.next if self.in_flight is None and self.steps >= self.period else None

    @property
    def arriving(self) -> int | None:
        """The fragment whose merged values are taken now; None for none."""
        return self.in_flight if self.steps >= self.delay else None

    def order(self) -> list[int]:
        """Return the fragments by their turns, the next one first; those that have just left are last."""
        return [(self.next + turn) % self.fragments for turn in range(self.fragments)]

    def left(self) -> None:
        """Note that the next fragment has left."""
        self.in_flight = self.next
        self.next = (self.next + 1) % self.fragments
        self.steps = 0
        self.fresh += 1

    def taken(self) -> None:
        """Note that the values of the fragment in flight were taken, or given up."""
        self.in_flight = None

    def set_period(self, period: int) -> None:
        """Give the turn that has begun, and those after it, another length of more than ``delay`` steps."""
        self.period = period

    def begin_at(self, rounds: Sequence[int]) -> None:
        """Begin a turn where the other workers are.

        Args:
            rounds: for each fragment, the number of the round that this worker owes next. All workers go
                through (round, fragment) in this order, so the smallest is next. With another order two
                workers could wait for each other's fragment.
        """
        self.in_flight, self.fresh = None, 0
        self.next = min(range(len(rounds)), key=lambda fragment: (rounds[fragment], fragment))
