"""The options of a store on a server: their allowed values, and those that must be the same on
every worker."""

from __future__ import annotations

from dataclasses import fields

from kvps.core.nonfinite import ACTIONS
from kvps.errors import ConfigError
from kvps.protocol.stores import Open

MODES = ("sync", "async", "ssp")
POLICIES = ("wait", "shrink", "fail")
LATE = ("drop", "next")
AGREED = tuple([field.name for field in fields(Open) if field.name not in ("store", "chunk_bytes", "life")])
"""Options of a store that must be the same on every worker."""
CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 64 << 10, 32 << 20
"""Bytes of a chunk. Twice the most must fit a frame: sums of halves travel as float32."""


def check_options(opened: Open) -> None:
    """Check that a store can have these options.

    Raises:
        ConfigError: naming the option that it cannot have.
    """
    options = {"mode": MODES, "on_worker_lost": POLICIES, "on_nonfinite": ACTIONS, "late": LATE}
    for option, choices in options.items():
        choice = getattr(opened, option)
        if choice not in choices:
            raise ConfigError(
                f"store {opened.store!r}: {option} {choice!r:.40} must be one of {', '.join(choices)}"
            )
    if opened.average and opened.mode != "sync":
        raise ConfigError(
            f"store {opened.store!r}: average needs a sync store; a store of mode {opened.mode} "
            "applies each push by itself, so there is nothing to divide"
        )
    if opened.quorum and opened.mode != "sync":
        raise ConfigError(
            f"store {opened.store!r}: quorum needs a sync store; a store of mode {opened.mode} has no rounds"
        )
    if opened.quorum and opened.bundles:
        raise ConfigError(
            f"store {opened.store!r}: bundles wait for all workers of a machine, and a quorum does not; open "
            "it without bundles"
        )
    odd = opened.mode != "sync" or opened.quorum or opened.bundles or opened.on_worker_lost == "shrink"
    if opened.rebuilds and (odd or opened.on_nonfinite != "apply"):
        raise ConfigError(
            f"store {opened.store!r}: on_server_lost='rebuild' needs rounds of all workers: mode sync, "
            "no quorum, no host aggregation, on_worker_lost 'wait' or 'fail', on_nonfinite 'apply'"
        )
    if not CHUNK_BYTES_MIN <= opened.chunk_bytes <= CHUNK_BYTES_MAX:
        raise ConfigError(
            f"store {opened.store!r}: chunk_bytes {opened.chunk_bytes} must be from "
            f"{CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}"
        )


def check_quorum(opened: Open, workers: int) -> None:
    """Check that a job has as many workers as a store needs for a round.

    Raises:
        ConfigError: if it has not.
    """
    if opened.quorum > workers:
        raise ConfigError(
            f"store {opened.store!r}: quorum {opened.quorum} is more than the {workers} workers of this job, "
            "so no round could close by it; use a smaller quorum"
        )
