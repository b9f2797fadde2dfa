"""The choice of a job's settings, on which all ranks agree.

A front end knows its whole model before it opens its store, whose chunk size the first OPEN fixes. So :func:`settle` has
:class:`~kvps.store.autotune.bench.Bench` time rounds of such a model, and :class:`~kvps.core.autotune.Search` decides.

All ranks take every step together, in a control store: they first meet in a round of the key ``here``, rank 0 says in
``met`` whether all came in time, they exchange times in rounds of ``times``, and at last rank 0 writes ``choice``. A process that finds ``choice`` takes it, as the
replacement of a lost worker does. An error ends the trials and leaves the defaults: no call of a trial lasts longer
than 20 s, and a missing rank is waited for :data:`MEET_MAX_S`.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvps import config
from kvps.core.autotune import Knob, Search, Settings
from kvps.core.worker import calls
from kvps.core.worker.connection import UPLINK_BYTES
from kvps.errors import KvpsError, Timeout
from kvps.runtime import process
from kvps.runtime.ticket import TIMEOUT_S
from kvps.runtime.worker_session import WorkerSession
from kvps.store.autotune.bench import OWNER, Bench, apply
from kvps.store.autotune.words import chosen, told
from kvps.store.autotune.workload import Workload
from kvps.store.base import KVStoreBase
from kvps.store.create import create_own, default_chunk_bytes, share_memory
from kvps.store.names import kind_of
from kvps.store.options import StoreOptions
from kvps.store.server_store import DistStore

log = logging.getLogger("kvps")
VARIABLE = "KVPS_AUTOTUNE"
HERE, MET, CHOICE = "here", "met", "choice"
"""The keys of the control store: ranks that will try, whether rank 0 saw all of them, and the settings that were chosen."""
MEET_MAX_S, LIMIT_S = 60.0, 20.0
"""Seconds that a rank waits for the others to begin, and after which nothing more is tried."""
CHUNKS = (192 << 10, 384 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20)
LARGER, SMALLER = 3, 3
"""Sizes of a chunk to try, and how many of them above and below the default."""


def settle(work: Workload, alias: str | None = None) -> int | None:
    """Choose settings for this job, unless that is done, and return the size of a chunk for the front end's store.

    All ranks call it. Of a job's front ends the first decides for all.

    Args:
        work: what the settings are for.
        alias: another project's variable that means the same as KVPS_AUTOTUNE.

    Returns:
        The bytes of a chunk; None for the default.
    """
    if not config.autotune(alias) or work.store.lower() in KVStoreBase.registry:
        return None
    kind = kind_of(work.store)
    if kind.mode != "sync":
        log.info("%s has no effect on %s: only rounds of dist_sync are tried", VARIABLE, kind.type)
        return None
    session = process.session(TIMEOUT_S)
    if session.tuned is None:
        session.tuned = _agree(session, work)
    return session.tuned.chunk_bytes


def keeps_priorities(kv: Any) -> bool:
    """Whether chunks of the first layers are to travel first in a store."""
    settings = getattr(kv.session, "tuned", None) if isinstance(kv, DistStore) else None
    return settings is None or settings.priorities


def _agree(session: WorkerSession, work: Workload) -> Settings:
    """Return the settings of the job: those that it has chosen before, or those that are best by trial."""
    defaults = Settings(default_chunk_bytes(session), UPLINK_BYTES, 0, True)
    control = create_own("dist_sync", OWNER, StoreOptions())
    known = session.call(calls.Lookup(control.name, (CHOICE,)), TIMEOUT_S).wait()
    assert isinstance(known, dict)
    text = "this job has chosen before"
    best = defaults
    if known[CHOICE] is None:
        try:
            _meet(control)
            best, text = _try(session, work, control, defaults)
        except _AloneError as error:
            log.warning("%s: %s; the defaults are kept", VARIABLE, error)
            return defaults
        except KvpsError as error:
            text = f"the defaults are kept, as nothing could be tried: {error}"
    numbers = torch.tensor(best.to_numbers(), dtype=torch.float64, device="cpu")
    control.init(CHOICE, numbers)
    settings = Settings.from_numbers(control.pull(CHOICE).tolist())
    apply(session, None, settings)
    if session.rank == 0:
        log.warning("%s: %s", VARIABLE, text if known[CHOICE] is None else chosen(text, settings))
    return settings


class _AloneError(KvpsError):
    """Rank 0 does not try anything."""


class _StandsInError(KvpsError):
    """This process replaces a lost worker."""


def _meet(control: DistStore) -> None:
    """Wait until all ranks are here.

    Raises:
        _AloneError: if rank 0 has not come; it will find that this rank has not come.
        KvpsError: if another rank has not come, or this process replaces one that had.
    """
    one, none = torch.ones(1, device="cpu"), torch.zeros(1, device="cpu")
    try:
        control.init(HERE, one, timeout=MEET_MAX_S)
    except Timeout as error:
        raise _AloneError(
            f"rank 0 has tried nothing within {MEET_MAX_S:g} s. Set {VARIABLE} on every rank"
        ) from error
    if control.resume([HERE]) > 0:
        raise _StandsInError("this worker was replaced meanwhile")
    control.push(HERE, one)
    try:
        control.pull(HERE, timeout=MEET_MAX_S)
    except Timeout as error:
        if control.rank == 0:
            control.init(MET, none)
        raise Timeout(
            f"not all ranks have come within {MEET_MAX_S:g} s. Set {VARIABLE} on every rank"
        ) from error
    # The push of a rank that comes late completes the round, though rank 0 waits for it no more.
    control.init(MET, one)
    if not control.pull(MET).item():
        raise Timeout(f"rank 0 had waited {MEET_MAX_S:g} s for this rank, and tries nothing")


def _try(
    session: WorkerSession, work: Workload, control: DistStore, defaults: Settings
) -> tuple[Settings, str]:
    """Return the best settings, and what was tried in words.

    Raises:
        KvpsError: if a call of a trial fails; then nothing is changed.
    """
    bench = Bench(session, work, control)
    try:
        bench.begin(defaults)
        knobs = _knobs(session, work, defaults, bench)
        search = Search(defaults, knobs, LIMIT_S)
        while search.turn is not None:
            seconds, now = bench.turn(search.turn, search.best)
            search.add(seconds, now)
        elapsed_s = bench.elapsed_s()
    finally:
        bench.end()
        apply(session, None, defaults)
    return search.best, told(search, defaults, bench, elapsed_s)


def _knobs(session: WorkerSession, work: Workload, defaults: Settings, bench: Bench) -> list[Knob]:
    """Return what is worth trying for a job."""
    now, own = defaults.chunk_bytes, torch.get_num_threads()
    # A sample shows the cost of a chunk, the wait for its last byte, in full, and the saving, fewer messages, in part.
    # So it may wrongly favour smaller chunks, and not larger ones.
    larger = [size for size in CHUNKS if size > now][:LARGER]
    smaller = [size for size in reversed(CHUNKS) if size < now][:SMALLER] if bench.is_whole else []
    sizes = [size for size in (*larger, *smaller) if min(size, now) < bench.sample_bytes]
    knobs = []
    if config.chunk_bytes() is None:
        knobs.append(Knob("chunk_bytes", tuple(sizes)))
    if not share_memory(session):
        knobs.append(Knob("uplink_bytes", (4 * UPLINK_BYTES, UPLINK_BYTES // 2)))
    threads = {1, own // 2 if own >= 4 else 1} if own > 1 else set()
    knobs.append(Knob("threads", tuple(sorted(threads))))
    if work.has_levels:
        knobs.append(Knob("priorities", (False,)))
    return [knob for knob in knobs if knob.values]
