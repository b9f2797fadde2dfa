"""Deltas: the changes of some bytes from one version to a later one, as elements or as runs of elements.

*Scattered* changes are a byte and an element each: the number of elements skipped, and the new element. Where
more than 255 lie between two, the new version's element is sent every 256. *Runs* are two numbers of 4 bytes
each, the element at which a run begins and its length; then the elements of all. The smaller form is taken.
zlib makes neither smaller: gaps and changed values do not repeat.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvps.errors import ProtocolError

Octets: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
STEP = 256
"""Elements from one that is sent to the next at most, where changes are scattered."""
SHARE_MAX = 0.25
"""Share of changed elements above which it takes longer to find them than to send all at 1 Gbit/s. Up to it
a delta takes less than all bytes."""


class Delta(NamedTuple):
    """Changes of some bytes."""

    sent: int
    """Elements that are sent."""
    runs: int
    """Runs that they lie in; 0 if they are scattered."""
    octets: bytes


def difference(old: Octets, new: Octets, width: int) -> Delta | None:
    """Return what has changed; None if too much has.

    Args:
        old: bytes that begin and end with elements.
        new: as many.
        width: bytes of an element: 1, 2, 4 or 8.
    """
    elements = new.view(f"u{width}")
    differs = old.view(f"u{width}") != elements
    if np.count_nonzero(differs) > SHARE_MAX * len(elements):
        return None
    at = np.flatnonzero(differs)
    ends = np.flatnonzero(np.diff(at) != 1)
    starts = at[np.concatenate(([0], ends + 1))] if len(at) else at
    gaps = np.diff(at, prepend=-1) - 1
    fillers = gaps // STEP
    as_runs = 8 * len(starts) + width * len(at)
    scattered = (1 + width) * (len(at) + int(fillers.sum()))
    if as_runs < scattered:
        lengths = at[np.append(ends, len(at) - 1)] - starts + 1
        parts = starts.astype("<u4"), lengths.astype("<u4"), elements[at]
        return Delta(len(at), len(starts), b"".join([part.tobytes() for part in parts]))
    skips = np.full(scattered // (1 + width), STEP - 1)
    skips[np.cumsum(fillers + 1) - 1] = gaps % STEP
    at = np.cumsum(skips + 1) - 1
    return Delta(len(at), 0, skips.astype(np.uint8).tobytes() + elements[at].tobytes())


def apply(octets: Octets, width: int, count: int, runs: int, frame: memoryview) -> None:
    """Overwrite what has changed.

    Raises:
        ProtocolError: if a change lies elsewhere, or ``frame`` is not what it should be.
    """
    elements, head = octets.view(f"u{width}"), 8 * runs or count
    if frame.nbytes != head + count * width:
        raise ProtocolError(f"{count} changed elements in {runs} runs do not take {frame.nbytes} bytes")
    values = np.frombuffer(frame, f"u{width}", count, head) if count else elements[:0]
    if runs:
        starts, lengths = np.frombuffer(frame, "<u4", 2 * runs).astype(np.int64).reshape(2, runs)
        if int(lengths.sum()) != count:
            raise ProtocolError(f"runs of {int(lengths.sum())} elements come with {count}")
        sent = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(count)
    else:
        sent = np.cumsum(np.frombuffer(frame, np.uint8, count).astype(np.int64) + 1) - 1
    if count and int(sent.max()) >= len(elements):
        raise ProtocolError(f"element {int(sent.max())} of {len(elements)} cannot have changed")
    elements[sent] = values
