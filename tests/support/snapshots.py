"""Cuts that no server made: images with every kind of value in them, for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from kvps.checkpoint.directory import CheckpointDirectory
from kvps.checkpoint.manifest import ImageFile, Manifest, StoreVersions, image_name
from kvps.core.optim.hyperparams import resolve
from kvps.core.placement import Part, parts
from kvps.core.server.snapshot.model import KeySnapshot, Snapshot, SnapshotPart, SpanHistory, StoreSnapshot
from kvps.dtypes import Spec
from kvps.protocol.stores import Open
from kvps.tensors import TORCH

JOB = bytes(range(16))
BOUND = 64
KEYS: dict[str, Spec] = {
    "layer1.weight": Spec("float32", (12, 10)),  # cut: it has 64 elements or more
    "layer1.bias": Spec("float32", (10,)),
    "größe/a b": Spec("float32", (7,)),
    "scalar": Spec("float64", ()),
    "nothing": Spec("float32", (0, 3)),
    "half": Spec("float16", (100,)),
    "brain": Spec("bfloat16", (9,)),
    "i8": Spec("int8", (5,)),
    "i16": Spec("int16", (5,)),
    "i32": Spec("int32", (5,)),
    "i64": Spec("int64", (70,)),
    "u8": Spec("uint8", (3,)),
}


def opened(store: str = "default", bound: int = BOUND) -> Open:
    return Open(store, "sync", 0, True, "wait", bound)


def history(version: int = 5, step: int = 5, head: int = 0, since: int = 0) -> SpanHistory:
    return SpanHistory(
        version, step, {0: version, 7: version + 1}, {7: head} if head else {}, {0: since} if since else {}
    )


def values(spec: Spec, first: int = 0) -> torch.Tensor:
    """Elements that differ from each other wherever the type can tell them apart."""
    return (torch.arange(spec.count) % 120 + first).to(TORCH[spec.dtype])


def image(
    server: int,
    servers: int,
    *,
    keys: Mapping[str, Spec] = KEYS,
    version: int = 5,
    store: str = "default",
    bound: int = BOUND,
    cuts: Sequence[int] = (20, 75),
    place: Callable[[str, int, int, int, int], tuple[Part, ...]] = parts,
) -> Snapshot:
    """What one server holds; keys have another history from each of ``cuts`` on."""
    held = []
    for name, spec in keys.items():
        weight = values(spec)
        own = [part for part in place(name, spec.count, servers, bound, spec.width) if part.server == server]
        portions = []
        for part in own:
            end = part.start + part.size
            inner = [cut for cut in cuts if part.start < cut < end]
            edges = pairwise([part.start, *inner, end])
            portions += [_portion(weight, start, stop, version, cuts) for start, stop in edges]
        if own:
            held.append(KeySnapshot(name, spec, 1, tuple(portions)))
    hyper = resolve("adam", {"lr": 0.1, "lr_mult": {"layer1.bias": 2.0}})
    made = StoreSnapshot(opened(store, bound), hyper.with_lr(0.05), hyper, 0.05, 1, 3, tuple(held))
    plain = StoreSnapshot(opened("plain"), None, None, 0.0, 0, 0, ())
    return Snapshot(server, servers, (made, plain))


def _portion(weight: torch.Tensor, start: int, stop: int, version: int, cuts: Sequence[int]) -> SnapshotPart:
    number = sum(cut <= start for cut in cuts)
    state = {}
    if weight.is_floating_point() and number != 1:  # of some elements there was no update yet
        state = {"exp_avg": weight[start:stop].float() + 0.5, "exp_avg_sq": weight[start:stop] * 2}
    return SnapshotPart(start, history(version + number, version, number, number), weight[start:stop], state)


def manifest_of(
    cut: int, shelves: Sequence[CheckpointDirectory], images: Sequence[Snapshot], tag: str = ""
) -> Manifest:
    """Write images to the shelves of their servers; return the manifest, which is not written."""
    written = [shelf.write(cut, item) for shelf, item in zip(shelves, images, strict=True)]
    servers = len(images)
    return Manifest(
        cut=cut,
        job=JOB,
        epoch=3,
        workers=4,
        version="0.1.0",
        images=tuple(ImageFile(image_name(server, servers), *item) for server, item in enumerate(written)),
        stores=together(map(holdings, images)),
        tag=tag,
    )


def put(
    folder: Path, cut: int, servers: int = 2, tag: str = "", version: int = 5, **more: object
) -> Manifest:
    """Write a whole cut to a folder that all servers share."""
    shelves = [CheckpointDirectory(folder, server) for server in range(servers)]
    images = [image(server, servers, version=version, **more) for server in range(servers)]  # type: ignore[arg-type]
    manifest = manifest_of(cut, shelves, images, tag)
    for shelf in shelves:
        shelf.commit(manifest)
    return manifest


def same(first: Snapshot, other: Snapshot) -> bool:
    """Whether two images are equal, tensors and types of tensors included."""
    return _plain(first) == _plain(other)


def _plain(snapshot: Snapshot) -> object:
    def tensor(given: torch.Tensor) -> object:
        return str(given.dtype), tuple(given.shape), given.tolist()

    return (snapshot.server, snapshot.servers), [
        (
            (store.opened, store.hyper, store.sent_hyper, store.sent_lr),
            (store.optimize_calls, store.rate_calls),
            [
                (
                    (key.name, key.spec, key.call),
                    [
                        (
                            portion.start,
                            portion.history,
                            tensor(portion.weight),
                            [(name, tensor(row)) for name, row in portion.state.items()],
                        )
                        for portion in key.portions
                    ],
                )
                for key in store.keys
            ],
        )
        for store in snapshot.stores
    ]


def elements(images: Sequence[Snapshot]) -> dict[tuple[str, str], list[object]]:
    """Each element of each key with everything that is known of it, in order."""
    found: dict[tuple[str, str], list[tuple[object, ...]]] = {}
    for image in images:
        for store in image.stores:
            for key in store.keys:
                rows = found.setdefault((store.name, key.name), [])
                for portion in key.portions:
                    states = {name: row.tolist() for name, row in portion.state.items()}
                    for index, weight in enumerate(portion.weight.tolist()):
                        here = {name: row[index] for name, row in states.items()}
                        rows.append((portion.start + index, weight, portion.history, here))
    return {key: sorted(rows, key=lambda row: row[0]) for key, rows in found.items()}


def holdings(snapshot: Snapshot) -> dict[str, StoreVersions]:
    """Return what a manifest says of one server's stores; :func:`together` adds them up.

    A key counts where its first element lies, a table on server 0. A store without elements here is left
    out.
    """
    found = {}
    for store in snapshot.stores:
        firsts = [key.portions[0].start == 0 for key in store.keys if key.portions]
        tables = 0 if snapshot.server else len(store.tables)
        if firsts or store.tables:
            found[store.name] = StoreVersions(sum(firsts) + tables, *store.versions)
    return found


def together(some: Iterable[Mapping[str, StoreVersions]]) -> dict[str, StoreVersions]:
    """Return what all servers hold of each store."""
    found: dict[str, StoreVersions] = {}
    for each in some:
        for name, item in each.items():
            sofar = found.get(name, item._replace(keys=0))
            found[name] = StoreVersions(
                sofar.keys + item.keys, min(sofar.lowest, item.lowest), max(sofar.highest, item.highest)
            )
    return found
