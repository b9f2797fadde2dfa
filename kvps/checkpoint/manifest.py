"""The manifest: the file, written last, that makes the snapshots of a cut one checkpoint.

A manifest names the image of every server with its size and SHA-256, and says of which job and
moment they are. Without it the images beside it are none: a cut is complete only once it lies there.
Cuts are ordered by their number alone; a time of writing is for people.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvps.checkpoint import validation
from kvps.core.server.snapshot.model import Snapshot

FORMAT = 1
NAME = "manifest.json"
_ENTRIES = (
    *("format", "cut", "tag", "job", "epoch", "servers", "workers", "version", "written"),
    *("images", "stores"),
)


def image_name(server: int, servers: int) -> str:
    """Return the name of one server's image.

    Example:
        >>> image_name(0, 2)
        'server-0-of-2.safetensors'
    """
    return f"server-{server}-of-{servers}.safetensors"


class ImageFile(NamedTuple):
    """One image of a cut."""

    name: str
    size: int
    """Bytes."""
    sha256: str
    """In hexadecimal digits."""


class StoreVersions(NamedTuple):
    """How much of a store is in a cut, in keys and versions; for people."""

    keys: int
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint.

    Example::

        Manifest(cut=12, job=job, epoch=3, workers=4, version="0.1.0",
                 images=(ImageFile(image_name(0, 1), size, sha256),),
                 stores={"default": Holding(keys=161, lowest=500, highest=500)})
    """

    cut: int
    """Its number; each cut of a folder has a higher one than those before."""
    job: bytes
    """16 bytes."""
    epoch: int
    workers: int
    version: str
    """Of kvps."""
    images: tuple[ImageFile, ...]
    """Of each server, in order."""
    stores: Mapping[str, StoreVersions] = field(default_factory=dict)
    tag: str = ""
    """A name that somebody gave it. One that has a name is kept."""
    written: str = ""
    """When, for people; nothing is decided by it."""

    @property
    def servers(self) -> int:
        """How many servers wrote it."""
        return len(self.images)

    @property
    def size(self) -> int:
        """Bytes of all images."""
        return sum(image.size for image in self.images)

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
            "images": [image._asdict() for image in self.images],
            "stores": {name: self.stores[name]._asdict() for name in sorted(self.stores)},
        }
        return json.dumps(row, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Return what :meth:`to_json` wrote.

        Raises:
            ValueError: if it did not write that.
        """
        given = validation.parsed(text)
        if type(given) is dict and given.get("format") != FORMAT:
            found = given.get("format")
            raise ValueError(f"it has format {found!r:.40}, and this version reads {FORMAT}")
        row = validation.record("the manifest", given, *_ENTRIES)
        servers = validation.natural("servers", row["servers"], validation.RANK_MAX)
        images = validation.array("images", row["images"])
        if not servers or len(images) != servers:
            raise ValueError(f"it has {len(images)} images of {servers} servers")
        stores = validation.table("stores", row["stores"])
        return cls(
            cut=validation.natural("cut", row["cut"]),
            job=validation.octets("job", row["job"], 16),
            epoch=validation.natural("epoch", row["epoch"]),
            workers=validation.natural("workers", row["workers"], validation.RANK_MAX),
            version=validation.text("version", row["version"]),
            images=tuple(
                _image_file(image_name(server, servers), one) for server, one in enumerate(images)
            ),
            stores={
                validation.text("a store", name, least=1): _holding(one)
                for name, one in stores.items()
            },
            tag=validation.text("tag", row["tag"]),
            written=validation.text("written", row["written"]),
        )


def _image_file(name: str, given: object) -> ImageFile:
    row = validation.record("an image", given, *ImageFile._fields)
    if row["name"] != name:  # never a path that leads elsewhere
        raise validation.unlike(f"an image called {name!r}", row["name"])
    sha256 = validation.octets("sha256", row["sha256"], 32).hex()
    return ImageFile(name, validation.natural("size", row["size"]), sha256)


def _holding(given: object) -> StoreVersions:
    row = validation.record("a store", given, *StoreVersions._fields)
    made = StoreVersions(*[validation.natural(name, row[name]) for name in StoreVersions._fields])
    if made.lowest > made.highest:
        raise ValueError(f"a store has versions {made.lowest} to {made.highest}")
    return made


def now_in_words() -> str:
    """Return the time as manifests have it: UTC, as ISO 8601 writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def holdings(image: Snapshot) -> dict[str, StoreVersions]:
    """Return what a manifest says of one server's stores; :func:`together` adds them up.

    A key counts where its first element lies, a table on server 0. A store without elements here is left
    out.
    """
    found = {}
    for store in image.stores:
        firsts = [key.portions[0].start == 0 for key in store.keys if key.portions]
        tables = 0 if image.server else len(store.tables)
        if firsts or store.tables:
            found[store.name] = StoreVersions(sum(firsts) + tables, *store.versions)
    return found


def together(some: Iterable[Mapping[str, StoreVersions]]) -> dict[str, StoreVersions]:
    """Return what all servers hold of each store."""
    found: dict[str, StoreVersions] = {}
    for each in some:
        for name, one in each.items():
            sofar = found.get(name, one._replace(keys=0))
            found[name] = StoreVersions(
                sofar.keys + one.keys,
                min(sofar.lowest, one.lowest),
                max(sofar.highest, one.highest),
            )
    return found
