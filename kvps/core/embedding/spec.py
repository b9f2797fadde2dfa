"""The specification of an embedding table, on which all workers and servers must agree.

A recipe is a description and never code, checked where it is given and again where it arrives. It has the
length of rows, their initial values, the rules of admission and eviction, and the optimizer.

Admission
---------
Most ids of real data are seen once or twice, and a row for each would fill the servers. So a table
may admit an id only at its n-th push. The counts of ids without a row are kept in a count-min
sketch: a fixed number of counters, some of which each id shares with others. A count may come out
too high by that, and never too low: an id is admitted at its n-th push or earlier, never later.

When half as many pushes as there are counters in a row were counted, all counts are halved. So
the sketch never fills up, and what counts is how often an id comes *lately*.

A table may also admit by chance, which needs no counts: each push of an id without a row makes the row with
this probability, by a hash of the table's seed, the id and the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvps.core.embedding.id_hash import COUNT_SALT, Ids, Initializer, Seeds, first_of, hashes
from kvps.core.optim.from_torch import describe
from kvps.core.optim.hyperparams import HyperParams, resolve
from kvps.core.optim.torch_rules import UPDATERS, State, Updater, create
from kvps.dtypes import BY_NAME, Spec
from kvps.errors import ConfigError
from kvps.protocol.values import Embed
from kvps.tensors import TORCH

WEIGHT, USES = "weight", "uses"
"""The columns of a table that are no states of its optimizer. ``uses``, of a table with a half-life, has one
float64 for each row: log2 of the sum of 2 ** (step / half_life) over the steps that have updated the row. The
numbers of all rows decay alike, so that none has to be written for it."""
DEPTH = 4
WIDTH = 1 << 20
"""Counters in each of DEPTH rows: 4 MiB together. An id that was never counted is taken for a counted id in
about one case in forty, just before the counts are halved, and less often otherwise."""
ADMIT_MAX = 255
"""Largest value of a counter."""


class Admission:
    """Counts pushes of ids that have no row.

    Args:
        admit: at which push an id is admitted; 2 to :data:`ADMIT_MAX`.
        width: counters in each row; a power of two.
    """

    def __init__(self, admit: int, width: int = WIDTH) -> None:
        self._admit = admit
        self.counts = np.zeros((DEPTH, width), np.uint8)
        self.counted = 0
        """Pushes counted since the counts were last halved."""

    def count(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Count one push of each id, named once each; return which of them are admitted by it."""
        width, pairs = self.counts.shape[1], self._places(ids)
        seen = np.minimum.reduce([counts[at] for counts, at in pairs])
        counts_now = np.minimum(seen, ADMIT_MAX - 1) + np.uint8(1)
        for counts, at in pairs:
            np.maximum.at(counts, at, counts_now)
        self.counted += len(ids)
        if self.counted > width // 2:
            self.counts >>= 1
            self.counted = 0
        return np.asarray(counts_now >= self._admit)

    def _places(self, ids: Ids) -> list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
        """Return the rows of counters, and where those of ids are in each."""
        mask = np.uint64(self.counts.shape[1] - 1)
        places = [(hashes(ids, COUNT_SALT + row) & mask).view(np.int64) for row in range(DEPTH)]
        return list(zip(self.counts, places, strict=True))

    def counts_of(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """Return the counters of ids, [DEPTH, len(ids)]."""
        return np.stack([counts[at] for counts, at in self._places(ids)])

    def put(self, ids: Ids, found: npt.NDArray[np.uint8], counted: int) -> None:
        """Set the counters of ids, as another copy has them; without ids, all counters."""
        self.counted = counted
        if not len(ids):
            self.counts[:] = found
        for (counts, at), some in zip(self._places(ids), found, strict=True) if len(ids) else ():
            counts[at] = some

    def merge(self, counts: npt.NDArray[np.uint8], counted: int) -> None:
        """Merge another sketch of this width: no id has a smaller count afterwards than it had there."""
        np.maximum(self.counts, counts, out=self.counts)
        self.counted = max(self.counted, counted)


DIM_MAX = 1 << 16
WHOLE_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """The settings of one table, equal on all workers and servers."""

    dim: int
    """Elements of a row."""
    dtype: str
    """Element type of the rows; sums of gradients are float32 where it is a half type."""
    first: Initializer
    seed: int
    """Seed of the initial values; 0 to 2**63 - 1."""
    admit: int
    """Number of pushes after which an id gets a row; 1 for at once."""
    max_age: int
    """Versions that a row is kept without a push; 0 for ever."""
    max_rows: int
    """Maximum rows of the whole table; 0 for any number."""
    hyper: HyperParams
    chance: float = 1.0
    """Probability that a push makes the row of an id that ``admit`` lets in."""
    max_idle_s: float = 0.0
    """Seconds that a row is kept without a push; 0 for ever."""
    half_life: int = 0
    """Updates after which a push counts half when there are too many rows; 0 if the oldest go."""

    @classmethod
    def of(cls, dim: int, dtype: str, *terms: Any) -> EmbeddingSpec:
        """Return the specification of the fields of EMBED, in their order.

        Raises:
            ConfigError: naming what cannot be.
        """
        init, scale, seed, admit, age, rows, optimizer, numbers, *later = terms
        hyper = HyperParams.from_wire(optimizer, numbers)
        return cls(dim, dtype, Initializer(init, scale), seed, admit, age, rows, hyper, *later).check()

    @property
    def later(self) -> tuple[float, float, int]:
        """The fields that follow the hyper-parameters in messages and files."""
        return self.chance, self.max_idle_s, self.half_life

    @property
    def terms(self) -> tuple[str, float, int, int, int, int, str]:
        """The fields that follow the shape of a row in messages and files, up to the name of the
        optimizer."""
        return *self.first, self.seed, self.admit, self.max_age, self.max_rows, self.hyper.name

    def check(self) -> EmbeddingSpec:
        """Return it.

        Raises:
            ConfigError: naming what cannot be, and what could.
        """
        if not 1 <= self.dim <= DIM_MAX:
            raise ConfigError(f"dim={self.dim}: a row has 1 to {DIM_MAX} elements")
        if self.dtype not in BY_NAME or BY_NAME[self.dtype].kind == "int":
            raise ConfigError(f"dtype={self.dtype!r:.40}: rows are float32, float64, float16 or bfloat16")
        self.first.check()
        if not 1 <= self.admit <= ADMIT_MAX:
            raise ConfigError(
                f"admit={self.admit}: give the number of pushes, 1 to {ADMIT_MAX}, after which an "
                "id gets a row"
            )
        wholes = {"seed": self.seed, "evict age": self.max_age, "evict rows": self.max_rows}
        for name, value in (wholes | {"evict half_life": self.half_life}).items():
            if not 0 <= value <= WHOLE_MAX:
                raise ConfigError(f"{name}={value}: give a whole number from 0 to 2**63 - 1")
        if not 0 < self.chance <= 1:
            raise ConfigError(f"admit={self.chance}: give a probability above 0, and 1.0 at most")
        if not 0 <= self.max_idle_s < math.inf:
            raise ConfigError(f"evict seconds={self.max_idle_s}: give a finite number above 0")
        if self.half_life and not self.max_rows:
            raise ConfigError("evict half_life: says which of too many rows go; give 'rows', too")
        if self.hyper.lr_mult or self.hyper.wd_mult:
            raise ConfigError("lr_mult and wd_mult apply to keys, and a table is a single key; omit them")
        if self.hyper.optional("clip_global_norm") is not None:
            raise ConfigError(
                "clip_global_norm: the rows of a table are pushed by themselves, and have no part in the "
                "norm of a step; omit it, or clip elements with clip_gradient="
            )
        rule = UPDATERS.get(self.hyper.name)
        if rule is not None and (rule.needs_norms or rule.tracks_pulls):
            raise ConfigError(
                f"optimizer {self.hyper.name!r} needs norms of whole tensors, or the values that "
                "each rank has read, and a table has neither; use adagrad, adam, sgd "
                "or another elementwise optimizer"
            )
        return self

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments of ``kv.embedding`` by name, defaults filled in."""
        admit = self.admit if self.chance == 1 else self.chance
        evict = {"evict age": self.max_age, "evict rows": self.max_rows, "evict seconds": self.max_idle_s}
        evict["evict half_life"] = self.half_life
        told = {"dim": self.dim, "dtype": self.dtype, "init": tuple(self.first), "seed": self.seed}
        return {**told, "admit": admit, **evict, "optimizer": self.hyper.name, **self.hyper.values}

    def first_rows(self, ids: Ids, seeds: Seeds | None = None) -> torch.Tensor:
        """Return the first values of rows, [len(ids), dim]; of tables with these seeds, if given."""
        return self.first.rows(ids, self.dim, TORCH[self.dtype], self.seed if seeds is None else seeds)

    @property
    def evicts(self) -> bool:
        """Whether rows go."""
        return any((self.max_age, self.max_rows, self.max_idle_s))

    @property
    def is_rounded(self) -> bool:
        """Whether updates are computed in float32, and rounded to a half type by chance."""
        return BY_NAME[self.dtype].kind == "half" and not self.hyper.flag("multi_precision")

    @property
    def updated_in(self) -> torch.dtype:
        """The element type of rows in the optimizer."""
        return torch.float32 if self.is_rounded else TORCH[self.dtype]

    def difference(self, other: EmbeddingSpec) -> str:
        """Return the first argument in which two specifications differ; "" if they agree."""
        theirs = other.arguments
        return next((name for name, value in self.arguments.items() if theirs.get(name) != value), "")


def columns_of(recipe: EmbeddingSpec) -> dict[str, tuple[torch.dtype, int]]:
    """Return by name the type of each column of a table, and how many elements a row has in it.

    Columns are the weights, the optimizer's states, and ``uses`` with a half-life.

    Example:
        >>> columns_of(recipe_of("t", 4, "zeros", "rowwise_adagrad", 1, None, torch.float32, None))
        {'weight': (torch.float32, 4), 'sum': (torch.float32, 1)}
    """
    weight = torch.empty((0, recipe.dim), dtype=TORCH[recipe.dtype])
    columns = new_columns(recipe, create(recipe.hyper), weight)
    return {name: (column.dtype, column.shape[1]) for name, column in columns.items()}


def new_columns(recipe: EmbeddingSpec, updater: Updater, weight: torch.Tensor) -> State:
    """Return the columns of new rows with these weights, [n, dim], by name.

    Where rows are rounded, states are bfloat16, which has the range of float32: the squares of gradients are
    below that of float16. A state of which a row has one number is float32.
    """
    state = new_state(updater, weight.to(recipe.updated_in))
    if recipe.is_rounded and not updater.is_by_row:
        state = {name: column.bfloat16() for name, column in state.items()}
    if recipe.half_life:
        state[USES] = torch.full((len(weight), 1), -math.inf, dtype=torch.float64)
    return {WEIGHT: weight, **state}


def new_state(updater: Updater, weight: torch.Tensor) -> State:
    """Return the optimizer's states of rows, [n, width], in the types in which it updates them."""
    if updater.is_by_row:
        return updater.new_state(weight)
    state = updater.new_state(weight.view(-1))
    return {name: column.view(weight.shape) for name, column in state.items()}


def recipe_of(
    name: str,
    dim: object,
    init: object,
    optimizer: object,
    admit: object,
    evict: object,
    dtype: object,
    seed: object,
    **hyper: Any,
) -> EmbeddingSpec:
    """Return the recipe that the arguments of ``kv.embedding`` stand for.

    Args:
        name: of the table; it gives the seed where there is none.
        dim, seed: whole numbers; ``seed`` may be None.
        init: as :func:`~kvps.core.embedding.id_hash.first_of` takes it.
        optimizer: the name of one, or an object of torch.optim; ``hyper`` goes with a name.
        admit: a whole number of pushes, or a probability as a float.
        evict: None, or a dict of ``age`` (in versions), ``seconds``, ``rows`` (of the whole table) and
            ``half_life`` (in updates).
        dtype: a torch.dtype or its name.

    Raises:
        ConfigError: naming the argument, and what it may be.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        if hyper:
            raise ConfigError(
                f"optimizer: a torch optimizer has its own hyper-parameters; omit {min(hyper)}="
            )
        rule = describe(optimizer)
    else:
        rule = resolve(optimizer, hyper)
    bounds = {} if evict is None else evict
    if not isinstance(bounds, dict) or bounds.keys() - {"age", "rows", "seconds", "half_life"}:
        raise ConfigError(
            f"evict={evict!r:.80}: give None, or some of {{'age': versions, 'seconds': s, "
            "'rows': n, 'half_life': updates}"
        )
    if seed is None:
        digest = blake2b(name.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
    return EmbeddingSpec(
        dim=_whole("dim", dim),
        dtype=str(dtype).removeprefix("torch."),
        first=first_of(init),
        seed=_whole("seed", seed),
        admit=1 if isinstance(admit, float) else _whole("admit", admit),
        hyper=rule,
        chance=admit if isinstance(admit, float) else 1.0,
        max_idle_s=_seconds(bounds["seconds"]) if "seconds" in bounds else 0.0,
        **{
            field: _whole(f"evict {name}", bounds[name], least=1) if name in bounds else 0
            for field, name in (("max_age", "age"), ("max_rows", "rows"), ("half_life", "half_life"))
        },
    ).check()


def _seconds(value: object) -> float:
    if not isinstance(value, float | int) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"evict seconds={value!r:.40}: give a finite number above 0")
    return float(value)


def _whole(name: str, value: object, least: int = 0) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r:.40}: give a whole number, {least} or more")
    return int(value)


def message_of(store: str, key: str, recipe: EmbeddingSpec) -> Embed:
    """Return the message that says what :func:`recipe_of` reads."""
    dtype, values = BY_NAME[recipe.dtype].id, dict(recipe.hyper.values)
    return Embed(store, key, dtype, recipe.dim, *recipe.terms, values, *recipe.later)


def spec_of(servers: int) -> Spec:
    """Return what the key of a table is: one number for each server."""
    return Spec("int64", (servers,))
