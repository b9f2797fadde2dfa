"""The manifest: the file, written last, that makes the snapshots of a cut one checkpoint.

A manifest names the snapshot of every server with its size and SHA-256, and says of which job and
moment they are. Without it the snapshots beside it are none: a cut is complete only once it lies there.
Cuts are ordered by their number alone; a time of writing is for people.

Retention
---------
A job keeps its two newest checkpoints, and the newest with each store that it has closed since:
they are all that is left of that store. Checkpoints of *earlier jobs* in the same directory are
another matter: a job may be about to restore one of them, or have begun anew by mistake. So a
checkpoint of an earlier job is removed only when checkpoints of this job that all servers have
have passed it: they have all its stores, each at least at its version. A checkpoint with a tag is
never removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvps.checkpoint import validation
from kvps.core import placement

FORMAT = 2
NAME = "manifest.json"
_ENTRIES = (
    *("format", "cut", "tag", "job", "epoch", "servers", "workers", "version", "written"),
    *("images", "stores", "placement"),
)
_ADDED = {1: ("placement",)}
"""The entries that an older format does not have."""


def image_name(server: int, servers: int) -> str:
    """Return the name of one server's snapshot.

    Example:
        >>> image_name(0, 2)
        'server-0-of-2.safetensors'
    """
    return f"server-{server}-of-{servers}.safetensors"


class ImageFile(NamedTuple):
    """One snapshot of a cut."""

    name: str
    size: int
    """Bytes."""
    sha256: str
    """In hexadecimal digits."""


class StoreVersions(NamedTuple):
    """The content of a store in a cut, in keys and versions; for people."""

    keys: int
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint.

    Example::

        Manifest(cut=12, job=job, epoch=3, workers=4, version="0.1.0",
                 images=(ImageFile(image_name(0, 1), size, sha256),),
                 stores={"default": StoreVersions(keys=161, lowest=500, highest=500)})
    """

    cut: int
    """Its number; each cut of a folder has a higher one than those before."""
    job: bytes
    """16 bytes."""
    epoch: int
    workers: int
    version: str
    """The version of kvps."""
    images: tuple[ImageFile, ...]
    """The file of each server, in order."""
    stores: Mapping[str, StoreVersions] = field(default_factory=dict)
    tag: str = ""
    """The name that the user gave it. A cut with a name is kept."""
    written: str = ""
    """When, for people; nothing is decided by it."""
    placement: int = placement.RULE
    """The rule by which its servers held the elements of keys; 1 in a manifest of format 1."""

    @property
    def servers(self) -> int:
        """The number of servers that wrote it."""
        return len(self.images)

    @property
    def size(self) -> int:
        """Size of all snapshots in bytes."""
        return sum(file.size for file in self.images)

    def is_for(self, servers: int | None) -> bool:
        """Whether each of ``servers`` servers finds all that it holds in the snapshot of its own number."""
        return servers == self.servers and self.placement == placement.RULE

    def __str__(self) -> str:
        return f"{self.cut} ({self.tag})" if self.tag else str(self.cut)

    def to_json(self) -> str:
        """Return it as text; equal manifests have equal texts."""
        row = {
            "format": FORMAT,
            "cut": self.cut,
            "tag": self.tag,
            "job": self.job.hex(),
            "epoch": self.epoch,
            "servers": self.servers,
            "workers": self.workers,
            "version": self.version,
            "written": self.written,
            "images": [file._asdict() for file in self.images],
            "stores": {name: self.stores[name]._asdict() for name in sorted(self.stores)},
            "placement": self.placement,
        }
        return json.dumps(row, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Return what :meth:`to_json` wrote.

        Raises:
            ValueError: if it did not write that.
        """
        given = validation.parsed(text)
        found = given.get("format") if type(given) is dict else FORMAT
        if type(found) is not int or found not in (*_ADDED, FORMAT):
            raise ValueError(f"it has format {found!r:.40}, and this version reads 1 to {FORMAT}")
        missing = _ADDED.get(found, ())
        row = validation.record("the manifest", given, *[name for name in _ENTRIES if name not in missing])
        servers = validation.natural("servers", row["servers"], validation.RANK_MAX)
        images = validation.array("images", row["images"])
        if not servers or len(images) != servers:
            raise ValueError(f"it has {len(images)} snapshots of {servers} servers")
        stores = validation.table("stores", row["stores"])
        return cls(
            cut=validation.natural("cut", row["cut"]),
            job=validation.octets("job", row["job"], 16),
            epoch=validation.natural("epoch", row["epoch"]),
            workers=validation.natural("workers", row["workers"], validation.RANK_MAX),
            version=validation.text("version", row["version"]),
            images=tuple(_image_file(image_name(server, servers), row) for server, row in enumerate(images)),
            stores={
                validation.text("a store", name, least=1): _holding(store) for name, store in stores.items()
            },
            tag=validation.text("tag", row["tag"]),
            written=validation.text("written", row["written"]),
            placement=validation.natural("placement", row.get("placement", 1)),
        )


def _image_file(name: str, given: object) -> ImageFile:
    row = validation.record("a snapshot", given, *ImageFile._fields)
    if row["name"] != name:  # never a path that leads elsewhere
        raise validation.unlike(f"a snapshot called {name!r}", row["name"])
    sha256 = validation.octets("sha256", row["sha256"], 32).hex()
    return ImageFile(name, validation.natural("size", row["size"]), sha256)


def _holding(given: object) -> StoreVersions:
    row = validation.record("a store", given, *StoreVersions._fields)
    made = StoreVersions(*[validation.natural(name, row[name]) for name in StoreVersions._fields])
    if made.lowest > made.highest:
        raise ValueError(f"a store has versions {made.lowest} to {made.highest}")
    return made


KEPT = 2
"""The number of complete cuts without a tag that are kept."""


CLOSED_KEPT = 8
"""The number of checkpoints that are kept for stores that the job has closed since."""


def superfluous(complete: Sequence[Manifest], common: int) -> list[Manifest]:
    """Return the complete checkpoints that may be removed.

    Args:
        complete: all that are complete here, oldest first; the last was completed just now.
        common: the newest checkpoint of the same job that all servers have; 0 for none yet.
    """
    ours = [manifest for manifest in complete if manifest.job == complete[-1].job]
    reached: dict[str, int] = {}
    for image in ours:
        if image.cut <= common:
            for name, store in image.stores.items():
                reached[name] = max(store.highest, reached.get(name, 0))
    kept = {common, *(manifest.cut for manifest in complete[-KEPT:]), *_last_of_closed(ours)}
    return [
        manifest
        for manifest in complete
        if not manifest.tag
        and manifest.cut not in kept
        and (manifest in ours or _is_passed(manifest, reached))
    ]


def _is_passed(manifest: Manifest, reached: Mapping[str, int]) -> bool:
    return all(store.highest <= reached.get(name, -1) for name, store in manifest.stores.items())


def _last_of_closed(ours: Sequence[Manifest]) -> list[int]:
    """Return the newest cuts with a store that no newer cut of the job has."""
    found, seen = [], set[str]()
    for manifest in reversed(ours):
        if manifest is not ours[-1] and not manifest.stores.keys() <= seen:
            found.append(manifest.cut)
        seen |= manifest.stores.keys()
    return found[:CLOSED_KEPT]


def further(complete: Sequence[Manifest]) -> Manifest | None:
    """Return the newest checkpoint of an earlier job beside the first of this job; None if it is
    not the first.

    Only a checkpoint counts that has a store in common with the first: others are of another model.

    Args:
        complete: as for :func:`superfluous`.
    """
    *others, newest = complete
    if any(other.job == newest.job for other in others):
        return None
    like = [other for other in others if other.stores.keys() & newest.stores.keys()]
    return like[-1] if like else None
