"""The loop of elastic training: run, and after a failure return to the last commit and run again.

The launcher starts a lost rank again (``kvps-launch --max-restarts``), and the new process takes
its seat. The others wait for it in ``init()``, and all of them form a new generation.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from kvps import config
from kvps.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt, InvalidArgument
from kvps.compat.horovod.elastic.state import State
from kvps.compat.horovod.engine.context import ALL_HERE_S
from kvps.compat.horovod.mpi_ops import init, shutdown

log = logging.getLogger("kvps")
P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Return a function that runs ``func(state, ...)`` to its end, through losses of ranks.

    The state is taken from the rank that has committed most often before each run, and restored
    after each failure.

    Args:
        func: trains, and calls ``state.commit()`` now and then. It is called again after a failure.

    Raises:
        HorovodInternalError: if a lost rank does not come back within HOROVOD_ELASTIC_TIMEOUT (600 s).
    """

    @functools.wraps(func)
    def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        is_synced = False
        while True:
            try:
                if not is_synced:
                    state.sync()
                return func(state, *args, **kwargs)
            except InvalidArgument:  # it would only happen again
                raise
            except HorovodInternalError as error:
                log.warning("elastic: returning to the last commit: %s", error)
                state.restore()
                is_synced = False
            except HostsUpdatedInterrupt as interrupt:
                is_synced = interrupt.skip_sync
            _begin_anew()
            state.on_reset()

    return wrapper


def _begin_anew() -> None:
    """Shut down, and initialise with the ranks that are there or come back.

    Raises:
        HorovodInternalError: if that takes too long.
    """
    limit_s = config.number("HOROVOD_ELASTIC_TIMEOUT", ALL_HERE_S) or ALL_HERE_S
    until = time.monotonic() + limit_s
    while True:
        shutdown()
        try:
            init()
        except HorovodInternalError:
            if time.monotonic() > until:
                raise
        else:
            return
