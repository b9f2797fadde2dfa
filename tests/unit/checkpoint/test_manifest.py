"""A manifest comes back as it was, and one that lies is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvps.checkpoint.manifest import ImageFile, Manifest, StoreVersions, image_name
from kvps.core.server.snapshot.model import Snapshot
from tests.support import snapshots

MANIFEST = Manifest(
    cut=12,
    job=snapshots.JOB,
    epoch=3,
    workers=4,
    version="0.1.0",
    images=tuple(ImageFile(image_name(server, 2), 1000 + server, "ab" * 32) for server in (0, 1)),
    stores={"default": StoreVersions(161, 499, 500), "größe": StoreVersions(0, 0, 0)},
    tag="epoch 3",
    written="2026-11-21 12:00",
)


def test_manifest_survives_json() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert (MANIFEST.servers, MANIFEST.size, str(MANIFEST)) == (2, 2001, "12 (epoch 3)")
    plain = replace(MANIFEST, tag="", stores={})
    assert Manifest.from_json(plain.to_json()) == plain
    assert str(plain) == "12"


Change = Callable[[dict[str, Any]], object]
LIES: dict[str, tuple[Change, str]] = {
    "format": (lambda row: row.update(format=3), "format 3"),
    "format as text": (lambda row: row.update(format="2"), "format '2'"),
    "old with more": (lambda row: row.update(format=1), "'placement'"),
    "placement": (lambda row: row.update(placement=-2), "placement"),
    "no entry": (lambda row: row.pop("tag"), "no 'tag'"),
    "more": (lambda row: row.update(colour=1), "'colour'"),
    "cut": (lambda row: row.update(cut=-1), "cut"),
    "cut text": (lambda row: row.update(cut="12"), "cut"),
    "job": (lambda row: row.update(job="00"), "job"),
    "job case": (lambda row: row.update(job="AB" * 16), "job"),
    "epoch": (lambda row: row.update(epoch=1.5), "epoch"),
    "servers": (lambda row: row.update(servers=3), "2 snapshots of 3 servers"),
    "no servers": (lambda row: row.update(servers=0, images=[]), "0 snapshots of 0 servers"),
    "workers": (lambda row: row.update(workers=None), "workers"),
    "version": (lambda row: row.update(version=1), "version"),
    "tag": (lambda row: row.update(tag="a\nb"), "tag"),
    "written": (lambda row: row.update(written="x" * 300), "written"),
    "images": (lambda row: row.update(images={}), "images"),
    "image": (lambda row: row["images"][0].pop("size"), "no 'size'"),
    "path": (lambda row: row["images"][0].update(name="../x"), "server-0-of-2"),
    "swapped": (lambda row: row["images"].reverse(), "server-0-of-2"),
    "size": (lambda row: row["images"][0].update(size=-1), "size"),
    "hash": (lambda row: row["images"][0].update(sha256="zz" * 32), "sha256"),
    "stores": (lambda row: row.update(stores=[]), "stores"),
    "store": (lambda row: row["stores"].update({"": {}}), "a store"),
    "holding": (lambda row: row["stores"].update(a=[1, 2, 3]), "a store"),
    "keys": (lambda row: row["stores"]["default"].update(keys=True), "keys"),
    "versions": (lambda row: row["stores"]["default"].update(lowest=501), "501 to 500"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_manifest_is_refused(lie: str) -> None:
    change, says = LIES[lie]
    row = json.loads(MANIFEST.to_json())
    change(row)
    with pytest.raises(ValueError, match=says):
        Manifest.from_json(json.dumps(row))


@pytest.mark.parametrize("text", ["", "{", "[]", "12", "NaN", "[" * 100_000, '{"format": 1}'])
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Manifest.from_json(text)


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_holdings_of_all_servers_add_up(servers: int) -> None:
    some = [snapshots.holdings(snapshots.image(server, servers)) for server in range(servers)]
    assert snapshots.together(some) == {"default": StoreVersions(len(snapshots.KEYS), 5, 7)}
    assert snapshots.together([*some, snapshots.holdings(Snapshot(0, 1, ()))]) == snapshots.together(
        reversed(some)
    )
    assert snapshots.together([]) == {}
