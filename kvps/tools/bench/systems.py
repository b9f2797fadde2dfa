"""The systems that are measured, one row of the table each, and how each pushes and pulls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvps.errors import ConfigError
from kvps.tools.bench.rounds import CODECS

BASE = "gloo"
"""The system that all others are compared with."""


@dataclass(frozen=True, slots=True)
class System:
    """One row of the table."""

    name: str
    kind: str
    """The library that it uses: kvps or gloo."""
    what: str
    how: str = "copy"
    """Whether gradients and results are copied (``copy``) or used where they lie (``in-place``, or
    ``in-place-pushpull`` in one call); or by which codec they are compressed, both ways."""
    rule: str = "sum"
    env: Mapping[str, str] = field(default_factory=dict)


_ALL = (
    System("kvps", "kvps", "pushpull of the sum, copied in and out"),
    System("kvps sgd", "kvps", "the same, with SGD and momentum 0.9 on the servers", rule="sgd"),
    System("kvps zero-copy", "kvps", "push from kv.empty_like(keys), pull(keys, copy=False)", how="in-place"),
    System(
        "kvps zero-copy pushpull",
        "kvps",
        "the same in one call, pushpull(keys, gradients, copy=False)",
        how="in-place-pushpull",
    ),
    System(
        "kvps tcp",
        "kvps",
        "as kvps, through sockets, without encryption, as gloo",
        env={"KVPS_TRANSPORT": "tcp", "KVPS_INSECURE": "1"},
    ),
    System("kvps tcp keys", "kvps", "as kvps tcp, encrypted (CURVE)", env={"KVPS_TRANSPORT": "tcp"}),
    System("kvps no keys", "kvps", "as kvps, without keys", env={"KVPS_INSECURE": "1"}),
    *[
        System(f"kvps {codec}", "kvps", f"as kvps, compressed by {codec} both ways", how=codec)
        for codec in CODECS
    ],
    System("gloo", "gloo", "all_reduce of 25 MiB buckets, copied in and out"),
    System("gloo in place", "gloo", "the same, gradients already in the buckets", how="in-place"),
)
SYSTEMS = {system.name: system for system in _ALL}
COMPRESSED = tuple(f"kvps {codec}" for codec in CODECS)
NAMED_ONLY = ("kvps tcp keys", "kvps no keys", *COMPRESSED)
"""Systems that are measured only if they are named: what keys cost, and compression, which is for
slow networks."""


def chosen(
    names: Sequence[str] | None,
    systems: Mapping[str, System] = SYSTEMS,
    named_only: Iterable[str] = NAMED_ONLY,
) -> list[System]:
    """Return the systems to measure.

    Args:
        names: the systems that the user asked for; None for all but ``named_only``.
        systems: name -> system, of all that can be measured.
        named_only: the names of those that have to be asked for.

    Raises:
        ConfigError: for a name that no system has.
    """
    if names is None:
        return [system for name, system in systems.items() if name not in set(named_only)]
    for name in names:
        if name not in systems:
            raise ConfigError(f"no system {name!r}; use some of {', '.join(map(repr, systems))}")
    return [systems[name] for name in dict.fromkeys(names)]
