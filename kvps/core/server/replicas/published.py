"""The copy of what is published: which versions there are, and their blocks.

A version is complete at the standby after its blocks are there. A block that is the present buffer of its
chunk needs no bytes: the standby has these values by then, and keeps its own buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvps import protocol as p
from kvps.core.effects import Hold
from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.publications import Block, Publications
from kvps.dtypes import BY_NAME
from kvps.protocol.envelope import Message

Sent = tuple[Message, tuple[memoryview, ...], Hold | None]


class PublishedChanges:
    """The changes of publications since they were copied; all of them, to begin with."""

    def __init__(self) -> None:
        self._states: dict[str, p.CopyPublication] = {}
        self._sent: dict[str, set[tuple[int, int | None]]] = {}
        """Publication -> (version, block) of what was sent; None for its end."""

    def messages(
        self, publications: Publications, chunks: Chunks, has_room: Callable[[], bool]
    ) -> Iterator[Sent | None]:
        """Yield what the standby is to be told; None at the end if there was no room for all."""
        for name, publication in publications.by_name.items():
            versions, sent = publication.versions, self._sent.setdefault(name, set())
            for number, version in versions.items():
                for at, block in version.blocks.items():
                    if (number, at) in sent:
                        continue
                    if not has_room():
                        yield None
                        return
                    sent.add((number, at))
                    yield _copied(name, number, at, block, chunks)
                if version.completed_at is not None and (number, None) not in sent:
                    sent.add((number, None))
                    manifest = version.manifest or memoryview(b"")
                    age_s = publications.now - version.completed_at
                    message = p.CopyVersion(name, number, max(0.0, age_s), len(manifest))
                    yield message, (manifest,) if manifest else (), None
            numbers = publication.last, tuple(publication.announced), tuple(versions)
            state = p.CopyPublication(name, publication.store, publication.keep, *numbers)
            if state != self._states.get(name):
                self._states[name] = state
                self._sent[name] = {known for known in sent if known[0] in versions}
                yield state, (), None


def _copied(name: str, number: int, at: int, block: Block, chunks: Chunks) -> Sent:
    """Return a block as the standby is told of it."""
    chunk, types = chunks.by_number.get(at), (BY_NAME[block.dtype].id, BY_NAME[block.as_dtype].id)
    if chunk is not None and chunk.buffer is block.buffer:
        return p.CopyBlock(name, number, at, *types, True, 0), (), None
    block.fill(block.size)
    octets = block.buffer.octets
    return p.CopyBlock(name, number, at, *types, False, len(octets)), (octets,), block.buffer.hold()
