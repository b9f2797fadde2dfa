"""The calls of a training script on its worker core: one frozen class per call.

The store makes these from the user's arguments, already checked for shape and type; the core
answers each with one :class:`~kvps.core.effects.Finish`.

What a Timeout means depends on the call. A push is still applied, once; so are the others that change
something. Those in :data:`REPEATED` end with their caller's patience and may be made again. Those in
:data:`TOGETHER` count only when they succeed: the same call made again is the same one, waited for
again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from kvps.compression.policy import CompressionPolicy
from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.worker.plan import CopyVersion, Numbers
from kvps.dtypes import Spec
from kvps.errors import KvpsError
from kvps.protocol.stores import Open


class Views(enum.Enum):
    """Values are wanted where they lie."""

    VIEWS = "views"


Sinks = tuple[torch.Tensor, ...] | Views | None
"""Where pulled values go: into contiguous tensors, one per key; nowhere, as the call finishes with
views of them; or None if none are wanted."""


@dataclass(frozen=True, slots=True)
class Call:
    """What all calls have."""

    store: str


@dataclass(frozen=True, slots=True)
class OpenStore(Call):
    """Make the store known to every server."""

    opened: Open
    worker_grace_s: float


@dataclass(frozen=True, slots=True)
class Init(Call):
    """Create keys (``creator``) or wait until they are there. ``rows`` are contiguous values."""

    keys: tuple[tuple[str, Spec], ...]
    rows: tuple[torch.Tensor, ...]
    creator: int = 0
    """The rank whose values count."""


@dataclass(frozen=True, slots=True)
class Broadcast(Call):
    """Give every rank this call's value of rank 0; it is written into ``sinks``."""

    keys: tuple[tuple[str, Spec], ...]
    rows: tuple[torch.Tensor, ...]
    sinks: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Lookup(Call):
    """Learn what these keys are; finishes with their specs, None for an unknown one."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PushValues(Call):
    """Push ``rows``, contiguous and one per key, and perhaps pull what comes of it."""

    keys: tuple[str, ...]
    rows: tuple[torch.Tensor, ...]
    sinks: Sinks
    priority: Numbers
    eager: bool
    """Copy all values before anything else, so that the caller may reuse them soonest."""


@dataclass(frozen=True, slots=True)
class PullValues(Call):
    """Pull into ``sinks``, or finish with views."""

    keys: tuple[str, ...]
    sinks: Sinks
    priority: Numbers
    min_version: int


@dataclass(frozen=True, slots=True)
class MakeTable(Call):
    """Have every server make the table of ``key``, unless it has."""

    key: str
    recipe: EmbeddingSpec
    creator: int
    """The rank that calls: whoever does so first makes it."""


@dataclass(frozen=True, slots=True)
class PushTableRows(PushValues):
    """Push rows of a table, the only one of ``keys``; there are no ``rows`` and no ``sinks``."""

    dim: int
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """For each server ids [n], ascending and each once, and rows [n, dim]; nobody writes to them."""


@dataclass(frozen=True, slots=True)
class PullTableRows(Call):
    """Pull rows of a table, the only one of ``keys``; finishes with a tensor [n, dim]."""

    keys: tuple[str, ...]
    recipe: EmbeddingSpec
    ids: Ids
    """[n]."""


@dataclass(frozen=True, slots=True)
class SetTableRate(Call):
    """Set the learning rate of a table (rank 0)."""

    key: str
    lr: float


@dataclass(frozen=True, slots=True)
class ExportBlock(Call):
    """Finishes with some rows of a table that one server has, a Block."""

    key: str
    server: int
    dim: int
    start: int
    count: int
    since: int
    with_state: bool


@dataclass(frozen=True, slots=True)
class PushKeyRows(Call):
    """Push some rows of keys of two or more dimensions."""

    keys: tuple[str, ...]
    rows: tuple[torch.Tensor, ...]
    """Of each key three: the numbers of rows, int64 [k], ascending, each once and in the key; where
    each of these rows is in the last; and rows, [at least k, width]."""
    priority: Numbers
    eager: bool
    """As in PushValues."""


@dataclass(frozen=True, slots=True)
class PullKeyRows(Call):
    """Pull some rows; finishes with a tensor [k, width] for each key."""

    keys: tuple[str, ...]
    ids: tuple[torch.Tensor, ...]
    """Of each key int64 [k], ascending, each once and in the key."""
    places: tuple[torch.Tensor, ...]
    """Of each key where each of these rows goes in the tensor, int64 [k], each place once."""
    priority: Numbers


@dataclass(frozen=True, slots=True)
class Refresh(Call):
    """Bring copies of keys up to date; finishes with a Fresh for each."""

    keys: tuple[str, ...]
    sinks: tuple[torch.Tensor | None, ...]
    """Where those go that have to be read whole; None for a new tensor."""
    marks: tuple[CopyVersion | None, ...]
    """What each copy holds, if that is known."""
    priority: Numbers


@dataclass(frozen=True, slots=True)
class Allocate(Call):
    """Finishes with a tensor for each key, in memory that the servers can read if there is some."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Versions(Call):
    """Finishes with the version of each key."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResumeKeys(Call):
    """Number the next pushes of ``keys`` from what this rank owes; finishes with that number."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetOptimizer(Call):
    """Install ``hyper`` on every server (rank 0), or check that it is there."""

    hyper: HyperParams


@dataclass(frozen=True, slots=True)
class SetRate(Call):
    """Set the learning rate on every server (rank 0), or check it."""

    lr: float


@dataclass(frozen=True, slots=True)
class StandAtBarrier(Call):
    """Flush, then wait at a barrier; or, with a ``failure``, let nobody pass it."""

    name: str | None
    failure: KvpsError | None = None


@dataclass(frozen=True, slots=True)
class JoinStore(Call):
    """Flush, and wait until every rank has run out of batches; finishes with the last to do so."""


@dataclass(frozen=True, slots=True)
class Flush(Call):
    """Finish when all earlier pushes are taken in."""


@dataclass(frozen=True, slots=True)
class RejoinStore(Call):
    """Count anew from what the servers hold; finishes with the version of each key.

    The core makes it itself, when the servers have returned to a cut.
    """


@dataclass(frozen=True, slots=True)
class TakeCheckpoint(Call):
    """Have a checkpoint taken, together with all ranks; finishes with its number."""

    tag: str


@dataclass(frozen=True, slots=True)
class RestoreCheckpoint(Call):
    """Give the store the values of the newest checkpoint of ``tag``, together with all ranks."""

    tag: str


@dataclass(frozen=True, slots=True)
class Compress(Call):
    """Compress by ``rules`` what is pushed from now on; finishes at once."""

    rules: CompressionPolicy


@dataclass(frozen=True, slots=True)
class SaveRests(Call):
    """Finishes with what compression left out of this rank's pushes so far (key -> flat tensor)."""


@dataclass(frozen=True, slots=True)
class LoadRests(Call):
    """Put such rests back, in place of all there are."""

    rests: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class AskStatus(Call):
    """Finishes with every server's STATUS answer."""


@dataclass(frozen=True, slots=True)
class SaveState(Call):
    """Finishes with (key -> (step, state name -> flat tensor))."""


@dataclass(frozen=True, slots=True)
class LoadState(Call):
    """Put optimizer states on the servers, in the form SaveState gives them."""

    states: dict[str, tuple[int, dict[str, torch.Tensor]]]


PUSHES = (PushValues, PushKeyRows)
"""Calls that push."""

REPEATED = (
    Allocate,
    Lookup,
    PullValues,
    PullKeyRows,
    Refresh,
    Versions,
    ResumeKeys,
    Broadcast,
    Flush,
    AskStatus,
    SaveState,
    SaveRests,
    PullTableRows,
    ExportBlock,
)
"""Calls that change nothing, or nothing more when they are made again."""

TOGETHER = (SetOptimizer, SetRate, StandAtBarrier, JoinStore, TakeCheckpoint, RestoreCheckpoint)
"""Calls in which the k-th of one rank meets the k-th of another."""
