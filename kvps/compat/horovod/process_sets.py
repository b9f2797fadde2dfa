"""Process sets: the ranks that run a collective together, made at ``init()`` or later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvps.compat.horovod.engine.context import Context, begin, current
from kvps.compat.horovod.engine.execution import Operation
from kvps.compat.horovod.negotiation.request import ADD_SET, REMOVE_SET, CollectiveRequest


class ProcessSet:
    """Some of the ranks.

    It can be used when it was given to ``init(process_sets=...)`` or :func:`add_process_set`.

    Args:
        ranks: different ranks of the job, in any order.

    Raises:
        ValueError: for anything else than ranks.

    Attributes:
        process_set_id: the number of the set; None while it is not registered.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        iterable: object = ranks
        given: list[object] = list(iterable) if isinstance(iterable, Iterable) else [None]
        numbers = [rank for rank in given if isinstance(rank, int) and type(rank) is int]
        if len(set(numbers)) != len(given):
            raise ValueError(
                f"ProcessSet({given}): give different ranks. Communicators of MPI are not supported"
            )
        self._ranks = sorted(numbers)
        self.process_set_id: int | None = None
        self.mpi_comm = None

    @property
    def ranks(self) -> list[int]:
        """The ranks, ascending."""
        return list(self._ranks)

    def size(self) -> int | None:
        """Return the number of ranks; None while the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the place of this process among the ranks; None while the set is not registered.

        Raises:
            ValueError: if this process is not in the set.
        """
        if self.process_set_id is None:
            return None
        own = current().running().rank
        if own not in self.ranks:
            raise ValueError(f"rank {own} is not in {self}; see included()")
        return self.ranks.index(own)

    def included(self) -> bool:
        """Return whether this process is in the set."""
        return current().running().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"

    __repr__ = __str__


class _Global(ProcessSet):
    """The set of all ranks, whatever job this process is in."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """All ranks; none before ``init()``."""
        engine = current().engine
        return [] if engine is None else list(range(engine.size))


global_process_set: ProcessSet = _Global()
"""The set of all ranks."""


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job, and wait until all ranks have called; nothing if it was called before.

    Args:
        comm: all ranks, or None: a job of kvps is the job that its launcher has started.
        process_sets: sets to register, in the same order on every rank; or ``"dynamic"``, to add sets later.

    Raises:
        ValueError: for another ``comm``, or process sets that cannot be.
        HorovodInternalError: if a rank is lost meanwhile, or registers other sets.
    """
    is_dynamic = process_sets == "dynamic"
    if isinstance(process_sets, str) and not is_dynamic:
        raise ValueError(f"process_sets={process_sets!r}: give a list of ProcessSet, or 'dynamic'")
    is_new = current().engine is None
    mine = begin(is_dynamic)
    given: object = comm
    everybody = list(range(mine.running().size))
    if given is not None and not (isinstance(given, Sequence) and sorted(given) in ([], everybody)):
        raise ValueError(
            f"comm={comm!r}: a job of kvps has the ranks that its launcher started. Omit comm=, and use "
            "process sets for a part of the ranks"
        )
    for added in process_sets or () if is_new and not is_dynamic else ():
        assert isinstance(added, ProcessSet)
        if added.ranks in (list(each) for each in mine.running().sets.values()):
            added.process_set_id = None  # a second object for one set counts for nothing
        else:
            _register(mine, added)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set; every rank of the job calls it, the members and the others.

    Args:
        process_set: a set, or its ranks.

    Raises:
        ValueError: if process sets are static, or there is a set of these ranks.
        HorovodInternalError: if another rank registers other ranks.
    """
    mine = current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _demand_dynamic(mine)
    if added.ranks in (list(each) for each in mine.running().sets.values()):
        raise ValueError(f"Attempted to add a duplicate process set: {added}")
    _register(mine, added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; every rank of the job calls it. Return whether there was such a set.

    Raises:
        ValueError: for anything but a process set, or if process sets are static.
        HorovodInternalError: if an operation of the set is not over.
    """
    mine = current()
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"give a hvd.ProcessSet, got {type(process_set).__name__}")
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    _demand_dynamic(mine)
    if number not in mine.running().sets:
        process_set.process_set_id = None
        return False
    request = CollectiveRequest(mine.name(None, REMOVE_SET), REMOVE_SET, root=number)
    mine.synchronize(mine.submit(Operation(request)))
    process_set.process_set_id = None
    return True


def ids_and_ranks() -> dict[int, list[int]]:
    """Return the number of each registered process set, and its ranks."""
    return {number: list(ranks) for number, ranks in current().running().sets.items()}


def _demand_dynamic(mine: Context) -> None:
    mine.running()
    if not mine.can_add_sets:
        raise ValueError(
            "process sets are static: call hvd.init(process_sets='dynamic'), or set "
            "HOROVOD_DYNAMIC_PROCESS_SETS=1"
        )


def _register(mine: Context, added: ProcessSet) -> None:
    size = mine.running().size
    if not added.ranks or any(not 0 <= rank < size for rank in added.ranks):
        raise ValueError(f"{added}: give ranks from 0 to {size - 1}")
    request = CollectiveRequest(mine.name(None, ADD_SET), ADD_SET, ranks=tuple(added.ranks))
    number = mine.synchronize(mine.submit(Operation(request)))
    assert isinstance(number, int)
    added.process_set_id = number
