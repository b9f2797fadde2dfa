"""Rounds of trial: gradients of a model's shapes in stores of reserved names, timed by all ranks together.

There is a store for each size of a chunk, because the first OPEN of a store fixes it. Servers keep the values of a store
that has ended for a while. So when the trials of a size are over, the keys are replaced by empty ones before the store is
closed, which frees their memory at once.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvps.core.autotune import Settings, sample
from kvps.errors import KvpsError
from kvps.phrases import bytes_in_words
from kvps.runtime.worker_session import WorkerSession
from kvps.store import residual_state
from kvps.store.autotune.workload import LEVELS, Workload
from kvps.store.create import create_own
from kvps.store.options import StoreOptions
from kvps.store.server_store import DistStore

OWNER = "autotune"
TIMES = "times"
"""The key of the control store with the times of the ranks."""
CALL_MAX_S = 20.0
"""Seconds that a call of a trial may take."""
PILOT_BYTES, SAMPLE_MOST_BYTES = 2 << 20, 256 << 20
"""Bytes of gradients whose time tells how many can be tried, and the most that are."""
PILOT_MAX_S = 1.0
"""Seconds of a round of the first; if it takes longer, nothing is tried."""
WHOLE_MAX_S, SAMPLE_S, TURN_LEAST_S = 0.4, 0.25, 0.03
"""If a round of the whole model takes longer than the first, a sample of it is tried whose rounds take the second. A turn
has as many rounds as take the third."""
GROWTHS, GROWTH_LEAST = 4, 1.25
"""How often a sample is made larger at most, and the factor below which it is not."""
ROUNDS_MOST, WARM_UP = 10, 2
"""The most rounds of a turn, and the rounds of a new store that are not timed."""


@dataclass(slots=True)
class _Scratch:
    """A store of trials."""

    kv: DistStore
    names: list[str]
    values: list[torch.Tensor]
    outs: list[torch.Tensor]


class Bench:
    """Rounds of a workload under one of several settings, timed by all ranks together.

    Args:
        session: this worker.
        work: what is pushed and pulled.
        control: the store in which ranks exchange times.
    """

    def __init__(self, session: WorkerSession, work: Workload, control: DistStore) -> None:
        self._session, self._work, self._control = session, work, control
        self._began_at = time.monotonic()
        self._workers = session.info.workers
        self._params = {
            name: param.detach()
            for name, param in work.params.items()
            if param.requires_grad and param.is_floating_point() and param.numel()
        }
        self.whole_bytes = sum(param.nbytes for param in self._params.values())
        self._taken: list[int] = []
        self._stores: dict[int, _Scratch] = {}
        self._count = 0
        self._rounds = 1
        self._present: Settings | None = None

    # --- what is tried ----------------------------------------------------------------------------

    @property
    def sample_bytes(self) -> int:
        """The bytes of a round."""
        params = self._params.values()
        return sum(n * param.element_size() for n, param in zip(self._taken, params, strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether the sample is the whole model."""
        return self.sample_bytes == self.whole_bytes

    def begin(self, defaults: Settings) -> None:
        """Choose the sample: the whole model, if its rounds are short.

        Raises:
            KvpsError: if rounds are too long to try anything, or a call fails.
        """
        self._control.init(TIMES, torch.zeros(2 * self._workers, dtype=torch.float64, device="cpu"))
        if not self._params:
            raise KvpsError("no parameter is trained in floating point")
        self._take(PILOT_BYTES)
        round_s, _ = self.turn(defaults, defaults)
        if round_s > PILOT_MAX_S:
            size = bytes_in_words(self.sample_bytes)
            raise KvpsError(f"a round of {size} takes {round_s:.1f} s, too long to try anything")
        # A small round is mostly waiting: it says too much for a larger one, so samples grow step by step.
        for _ in range(GROWTHS):
            whole_s = round_s * self.whole_bytes / self.sample_bytes
            share = 1.0 if whole_s <= WHOLE_MAX_S else SAMPLE_S / whole_s
            most = int(min(share * self.whole_bytes, SAMPLE_MOST_BYTES))
            if most < GROWTH_LEAST * self.sample_bytes:
                break
            self._drop(defaults.chunk_bytes)
            self._take(most)
            round_s, _ = self.turn(defaults, defaults)
        self._rounds = min(ROUNDS_MOST, max(1, math.ceil(TURN_LEAST_S / max(round_s, 1e-6))))

    def _take(self, most_bytes: int) -> None:
        width = max(param.element_size() for param in self._params.values())
        self._taken = sample([one.numel() for one in self._params.values()], most_bytes // width)

    # --- turns ------------------------------------------------------------------------------------

    def turn(self, settings: Settings, best: Settings) -> tuple[float, float]:
        """Make rounds under ``settings``.

        Args:
            settings: of this turn.
            best: the settings that will be needed again; stores of others are given up.

        Returns:
            Seconds of a round on the slowest rank, and seconds since the beginning.

        Raises:
            KvpsError: if a call fails.
        """
        for size in [
            one for one in self._stores if one not in (settings.chunk_bytes, best.chunk_bytes)
        ]:
            self._drop(size)
        scratch = self._stores.get(settings.chunk_bytes) or self._open(settings.chunk_bytes)
        apply(self._session, self._present, settings)
        self._present = settings
        begun_at = time.perf_counter()
        for _ in range(self._rounds):
            self._round(scratch, settings.priorities)
        return self._exchange((time.perf_counter() - begun_at) / self._rounds)

    def _round(self, scratch: _Scratch, has_priorities: bool) -> None:
        count = len(scratch.names)
        levels = LEVELS if self._work.has_levels and has_priorities else 1
        scratch.kv.pushpull(
            scratch.names,
            scratch.values,
            out=scratch.outs,
            priority=[-(levels * index // count) for index in range(count)],
            timeout=CALL_MAX_S,
        )

    def _exchange(self, seconds: float) -> tuple[float, float]:
        """Return the most that any rank says: seconds of a round, and seconds since the beginning."""
        told = torch.zeros(2 * self._workers, dtype=torch.float64, device="cpu")
        told[self._session.rank] = seconds
        told[self._workers + self._session.rank] = self.elapsed_s()
        heard = self._control.pushpull(TIMES, told, timeout=CALL_MAX_S)
        return float(heard[: self._workers].max()), float(heard[self._workers :].max())

    def elapsed_s(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self._began_at

    # --- stores -----------------------------------------------------------------------------------

    def _open(self, chunk_bytes: int) -> _Scratch:
        """Return a store of chunks of this size with the keys of the sample."""
        kv = create_own(
            self._work.store,
            f"{OWNER}.{self._count}",
            StoreOptions(CALL_MAX_S, "fail"),
            average=self._work.average,
            chunk_bytes=chunk_bytes,
        )
        self._count += 1
        names, weights = [], []
        for count, (name, param) in zip(self._taken, self._params.items(), strict=True):
            if count:
                shape = param.shape if count == param.numel() else torch.Size((count,))
                names.append(name)
                weights.append(torch.zeros(shape, dtype=param.dtype, device=param.device))
        scratch = self._stores[chunk_bytes] = _Scratch(kv, names, [], weights)
        residual_state.compress(kv, self._work.compression, "compression")
        kv.init(names, weights)
        hyper = self._work.hyper()
        if hyper is not None:
            kv.set_optimizer(hyper.name, **hyper.to_wire())
        lent = kv.lent_like(names)
        scratch.values = [
            torch.empty_like(weight) if one is None or weight.is_cuda else one
            for one, weight in zip(lent, weights, strict=True)
        ]
        for value in scratch.values:
            value.normal_(std=1e-3)
        for _ in range(WARM_UP):
            self._round(scratch, True)
        return scratch

    def _drop(self, chunk_bytes: int) -> None:
        """Take a store's memory from the servers: replace its keys by empty ones."""
        scratch = self._stores.pop(chunk_bytes)
        scratch.values = []
        blank = [torch.empty(0, dtype=out.dtype, device="cpu") for out in scratch.outs]
        scratch.kv.broadcast(scratch.names, blank, out=blank, timeout=CALL_MAX_S)
        scratch.kv.close()

    def end(self) -> None:
        """Give up all stores; an error of this is none of the job."""
        with suppress(KvpsError):
            for size in list(self._stores):
                self._drop(size)


def apply(session: WorkerSession, before: Settings | None, settings: Settings) -> None:
    """Set what can change at any time."""
    if before is None or before.uplink_bytes != settings.uplink_bytes:
        session.limit_uplink(settings.uplink_bytes)
    if before is None or before.threads != settings.threads:
        session.set_copy_threads(settings.threads)
