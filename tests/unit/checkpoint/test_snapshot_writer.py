"""An image as a file: everything comes back, and a file that lies is found out."""

import hashlib
import json
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from kvps.checkpoint import atomic_file, snapshot_writer
from kvps.checkpoint.safetensors_writer import HEADER_MAX, TITLES, Column, stream_of
from kvps.core.optim.hyperparams import resolve
from kvps.core.server.snapshot.model import KeySnapshot, Snapshot, SnapshotPart, StoreSnapshot
from kvps.dtypes import BY_NAME, Spec
from kvps.errors import StorageError
from tests.support import snapshots
from tests.support.tiers import examples


def written(path: Path, image: Snapshot) -> atomic_file.Written:
    return atomic_file.put(path, snapshot_writer.stream(image).write)


def test_everything_comes_back(tmp_path: Path) -> None:
    for server in range(2):
        image = snapshots.image(server, 2)
        path = tmp_path / f"{server}.safetensors"
        size, _ = written(path, image)
        assert image.size_bytes < size == snapshot_writer.stream(image).size
        back = snapshot_writer.read(path)
        assert snapshots.same(back, image)
        assert size == path.stat().st_size
        assert back.size_bytes == image.size_bytes
    (history,) = {id(p.history): p.history for p in back.stores[0].keys[1].portions}.values()
    assert all(type(rank) is int for rank in history.pushed)


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "image"
    got = written(path, snapshots.image(0, 1))
    assert got.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_keys_of_nothing_come_back(tmp_path: Path) -> None:
    nothing = SnapshotPart(0, snapshots.history(), torch.empty(0, dtype=torch.int16), {})
    keys = (
        KeySnapshot("none", Spec("int8", (0,)), 0, ()),
        KeySnapshot("empty", Spec("int16", (2, 0)), 0, (nothing,)),
    )
    store = StoreSnapshot(snapshots.opened(), None, None, 0.0, 0, 0, keys)
    written(tmp_path / "image", Snapshot(0, 1, (store,)))
    assert snapshots.same(snapshot_writer.read(tmp_path / "image"), Snapshot(0, 1, (store,)))


def test_tensors_in_any_place_come_back(tmp_path: Path) -> None:
    """Strided ones and ones that need a gradient; large, small and empty ones mixed."""
    big = torch.arange(1_000_000, dtype=torch.float32)
    strided = torch.arange(10.0)[::2]
    assert not strided.is_contiguous()
    asking = torch.ones(3, requires_grad=True)
    keys = tuple(
        KeySnapshot(name, Spec("float32", (len(item),)), 0, (SnapshotPart(0, snapshots.history(), item, {}),))
        for name, item in {
            "e": big[:0],
            "b": big,
            "a": strided,
            "bb": big[1:],
            "c": asking,
            "d": big[:7],
        }.items()
    )
    store = StoreSnapshot(snapshots.opened(), None, None, 0.0, 0, 0, keys)
    written(tmp_path / "image", Snapshot(0, 1, (store,)))
    assert snapshots.same(snapshot_writer.read(tmp_path / "image"), Snapshot(0, 1, (store,)))


def test_tensors_read_from_a_file_may_be_written_to_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "image"
    written(path, snapshots.image(0, 1))
    before = path.read_bytes()
    for tensor in snapshot_writer.read(path).tensors():
        tensor.zero_()
    assert path.read_bytes() == before


def test_safetensors_opens_the_file(tmp_path: Path) -> None:
    path = tmp_path / "image.safetensors"
    image = snapshots.image(0, 1)
    written(path, image)
    found = load_file(path)
    keys = {key.name: key for key in image.stores[0].keys}
    assert found["0/weight/bfloat16"].tolist() == keys["brain"].portions[0].weight.tolist()
    assert {name.rpartition("/")[2] for name in found} == set(BY_NAME)
    assert TITLES.keys() == BY_NAME.keys() | {"bool"}, "masks are published, and are no values of a store"
    for tensor in found.values():
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_equal_histories_are_stored_once(tmp_path: Path) -> None:
    keys = tuple(
        KeySnapshot(
            str(number),
            Spec("float32", (2,)),
            0,
            (SnapshotPart(0, snapshots.history(number % 3), torch.zeros(2), {}),),
        )
        for number in range(30)
    )
    store = StoreSnapshot(snapshots.opened(), None, None, 0.0, 0, 0, keys)
    written(tmp_path / "image", Snapshot(0, 1, (store,)))
    row = header_of((tmp_path / "image").read_bytes())[0]
    assert len(image_row(row)["stores"][0]["histories"]) == 3
    assert snapshots.same(snapshot_writer.read(tmp_path / "image"), Snapshot(0, 1, (store,)))


@pytest.mark.thorough
def test_a_hundred_thousand_keys_are_no_matter(tmp_path: Path) -> None:
    spec = Spec("float32", (8,))
    keys = tuple(
        KeySnapshot(
            f"layer{number}.weight",
            spec,
            0,
            (SnapshotPart(0, snapshots.history(number % 5), torch.zeros(8), {"m": torch.ones(8)}),),
        )
        for number in range(100_000)
    )
    hyper = resolve("sgd", {})
    store = StoreSnapshot(snapshots.opened(), hyper, hyper, 0.1, 1, 0, keys)
    began = time.thread_time()
    written(tmp_path / "image", Snapshot(0, 1, (store,)))
    back = snapshot_writer.read(tmp_path / "image")
    took_s = time.thread_time() - began
    assert [key.name for key in back.stores[0].keys] == [key.name for key in keys]
    assert took_s < 5  # 1.5 where nothing else runs


def test_a_header_that_no_reader_takes_is_refused() -> None:
    columns = {"a": Column("float32", [torch.zeros(1)])}
    with pytest.raises(StorageError, match="use more servers"):
        stream_of(columns, {"long": "x" * HEADER_MAX})


# --- images that contradict themselves --------------------------------------------------------


def with_portion(portion: SnapshotPart) -> Snapshot:
    key = KeySnapshot("w", Spec("float32", (4,)), 0, (portion,))
    return Snapshot(0, 1, (StoreSnapshot(snapshots.opened(), None, None, 0.0, 0, 0, (key,)),))


@pytest.mark.parametrize(
    "portion",
    [
        SnapshotPart(0, snapshots.history(), torch.zeros(4, dtype=torch.float64), {}),
        SnapshotPart(0, snapshots.history(), torch.zeros(2, 2), {}),
        SnapshotPart(0, snapshots.history(), torch.zeros(4), {"m": torch.zeros(3)}),
        SnapshotPart(0, snapshots.history(), torch.zeros(4), {"m": torch.zeros(2, 2)}),
        SnapshotPart(0, snapshots.history(), torch.zeros(4), {"m": torch.zeros(4, dtype=torch.bool)}),
    ],
)
def test_tensors_that_do_not_fit_are_not_written(portion: SnapshotPart) -> None:
    with pytest.raises(StorageError, match="key 'w' at element 0"):
        snapshot_writer.stream(with_portion(portion))


def test_nan_is_not_written() -> None:
    image = with_portion(SnapshotPart(0, snapshots.history(), torch.zeros(4), {}))
    store = replace(image.stores[0], sent_lr=float("nan"))
    with pytest.raises(StorageError, match="server 0"):
        snapshot_writer.stream(replace(image, stores=(store,)))


# --- files that lie ---------------------------------------------------------------------------


def header_of(octets: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", octets[:8])
    return json.loads(octets[8 : 8 + length]), octets[8 + length :]


def image_row(header: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(header["__metadata__"][snapshot_writer.ENTRY])
    return row


def forged(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON of an image."""
    header, tensors = header_of(path.read_bytes())
    row = image_row(header)
    change(row)
    header["__metadata__"][snapshot_writer.ENTRY] = json.dumps(row)
    pack(path, header, tensors)


def pack(path: Path, header: dict[str, Any], tensors: bytes) -> None:
    octets = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(octets)) + octets + tensors)


def store(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda row: row["stores"][0].update(changes)


def key(place: int, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda row: row["stores"][0]["keys"][0].__setitem__(place, value)


def portion(place: int, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda row: row["stores"][0]["keys"][0][4][0].__setitem__(place, value)


def hist(place: int, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda row: row["stores"][0]["histories"][0].__setitem__(place, value)


def option(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda row: row["stores"][0]["open"].update(changes)


def drop(*path: object) -> Callable[[dict[str, Any]], object]:
    def change(row: Any) -> None:
        for step in path[:-1]:
            row = row[step]
        del row[path[-1]]

    return change


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "format": (lambda row: row.update(format=9), "format 9"),
    "no format": (drop("format"), "format None"),
    "no stores": (drop("stores"), "has no 'stores'"),
    "more": (lambda row: row.update(extra=1), "'extra'"),
    "server": (lambda row: row.update(server=2), "no server 2 of 2"),
    "servers": (lambda row: row.update(servers=-1), "servers"),
    "stores": (lambda row: row.update(stores={}), "stores"),
    "a store": (lambda row: row.update(stores=[1]), "a store"),
    "store twice": (lambda row: row["stores"].append(row["stores"][1]), "store is in it twice"),
    "open": (store(open=[]), "open"),
    "no option": (drop("stores", 0, "open", "mode"), "options"),
    "more options": (option(colour="red"), "options"),
    "mode": (option(mode="fast"), "a mode"),
    "policy": (option(on_worker_lost="pray"), "a mode"),
    "staleness": (option(staleness=-1), "staleness"),
    "bound": (option(bigarray_bound=1.5), "bigarray_bound"),
    "bundles": (option(bundles=0), "bundles"),
    "name": (option(store="a\nb"), "store"),
    "chunk": (option(chunk_bytes=1), "chunk_bytes"),
    "hyper": (store(hyper=["sgd"]), "optimizer"),
    "hyper's name": (store(hyper=[3, {}]), "optimizer's name"),
    "optimizer": (store(hyper=["magic", {}]), "magic"),
    "lr": (store(hyper=["sgd", {"lr": -1}]), "lr"),
    "hyper map": (store(sent_hyper=["sgd", []]), "map"),
    "sent_lr": (store(sent_lr=float("nan")), "NaN"),
    "sent_lr large": (store(sent_lr=10**400), "sent_lr"),
    "sent_lr text": (store(sent_lr="1"), "sent_lr"),
    "calls": (store(optimize_calls=-1), "optimize_calls"),
    "rate calls": (store(rate_calls=True), "rate_calls"),
    "no histories": (store(histories=[]), "history"),
    "version": (hist(0, -1), "version"),
    "step": (hist(1, 0.5), "step"),
    "pushed": (hist(2, [[0, -1]]), "pushed"),
    "pushed pair": (hist(2, [[0]]), "pushed"),
    "pushed twice": (hist(2, [[0, 1], [0, 2]]), "rank twice"),
    "rank": (hist(3, [["0", 1]]), "a rank"),
    "no forms": (store(forms=[]), "form"),
    "form": (store(forms=[[["m", "float31"]]]), "element type"),
    "form's dtype": (store(forms=[[["m", 3]]]), "element type"),
    "form's name": (store(forms=[[["", "float32"]]]), "state's name"),
    "form twice": (store(forms=[[["m", "float32"], ["m", "int8"]]]), "state twice"),
    "other form": (lambda row: row["stores"][0]["forms"].reverse(), "expected"),
    "key": (store(keys=[[1]]), "a key"),
    "key's name": (key(0, ""), "key's name"),
    "key twice": (lambda row: row["stores"][0]["keys"].append(["layer1.weight", "int8", [], 0, []]), "twice"),
    "dtype": (key(1, "complex64"), "element type"),
    "other dtype": (key(1, "int64"), "expected"),
    "dims": (key(2, [-1]), "shape"),
    "shape": (key(2, [2**41]), "limits"),
    "shape too small": (key(2, [3]), "expected some of"),
    "call": (key(3, None), "call"),
    "portions": (key(4, 7), "portions"),
    "portion": (key(4, [[0, 1]]), "a portion"),
    "start": (portion(0, 2**63), "start"),
    "size": (portion(1, 3), "expected"),
    "overlap": (portion(1, 50), "expected"),
    "history": (portion(2, 99), "number of a history"),
    "short history": (store(histories=[[1, 1, []]]), "a history"),
    "long history": (store(histories=[[1, 1, [], [], [], []]]), "a history"),
    "form number": (portion(3, -1), "number of a form"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies(tmp_path: Path, lie: str) -> None:
    path = tmp_path / "image.safetensors"
    written(path, snapshots.image(0, 2))
    change, says = LIES[lie]
    forged(path, change)
    with pytest.raises(StorageError, match=says) as caught:
        snapshot_writer.read(path)
    assert str(path) in str(caught.value)


def test_an_older_writer_did_not_know_every_option(tmp_path: Path) -> None:
    path = tmp_path / "image"
    written(path, snapshots.image(0, 2))
    forged(path, drop("stores", 0, "open", "bundles"))
    assert snapshots.same(snapshot_writer.read(path), snapshots.image(0, 2))


def test_tensors_and_json_must_agree(tmp_path: Path) -> None:
    path = tmp_path / "image"
    written(path, snapshots.image(0, 2))
    whole = path.read_bytes()
    header, tensors = header_of(whole)
    name = "0/weight/float32"
    pack(path, {("x" if item == name else item): row for item, row in header.items()}, tensors)
    with pytest.raises(StorageError, match=f"'{name}' is missing"):
        snapshot_writer.read(path)
    pack(path, {**header, "__metadata__": {}}, tensors)
    with pytest.raises(StorageError, match="no snapshot of a kvps server"):
        snapshot_writer.read(path)
    end = max(row["data_offsets"][1] for item, row in header.items() if item != "__metadata__")
    header["9/weight/uint8"] = {"dtype": "U8", "shape": [1], "data_offsets": [end, end + 1]}
    pack(path, header, tensors + b"x")
    with pytest.raises(StorageError, match="belongs to no key"):
        snapshot_writer.read(path)
    header["9/weight/uint8"]["dtype"] = "Q7"
    pack(path, header, tensors + b"x")
    with pytest.raises(StorageError, match="cannot read the snapshot"):
        snapshot_writer.read(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[1e999]", "Infinity", "", "null", '"x"'])
def test_json_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "image"
    pack(path, {"__metadata__": {snapshot_writer.ENTRY: text}}, b"")
    with pytest.raises(StorageError, match="cannot read the snapshot"):
        snapshot_writer.read(path)


def _moved(octets: bytes, by: int) -> bytes:
    """Move the last tensor of an image in the header alone."""
    header, tensors = header_of(octets)
    last = max((row["data_offsets"], name) for name, row in header.items() if "dtype" in row)[1]
    header[last]["data_offsets"] = [at + by for at in header[last]["data_offsets"]]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def _named_twice(octets: bytes) -> bytes:
    """Name the first tensor of an image twice, the second time with the bytes of another."""
    header, tensors = header_of(octets)
    (name, _), (_, row), *_ = [(name, row) for name, row in header.items() if "dtype" in row]
    text = json.dumps(header)[:-1].encode() + f", {json.dumps({name: row})[1:]}".encode()
    return struct.pack("<Q", len(text)) + text + tensors


def _pickled(octets: bytes) -> bytes:
    """Return a pickle that makes a file where it is read; torch.save writes such files."""
    return b'cbuiltins\nexec\n(S\'open("executed", "w")\'\ntR.'


FILES: dict[str, Callable[[bytes], bytes]] = {
    "a header of 2^60 bytes": lambda octets: struct.pack("<Q", 1 << 60) + octets[8:],
    "a header of 0 bytes": lambda octets: bytes(8) + octets[8:],
    "tensors that overlap": lambda octets: _moved(octets, -1),
    "a tensor past the end": lambda octets: _moved(octets, 1),
    "a name twice": _named_twice,
    "a pickle": _pickled,
}


@pytest.mark.parametrize("kind", FILES)
def test_files_that_are_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "image"
    written(path, snapshots.image(0, 2))
    path.write_bytes(FILES[kind](path.read_bytes()))
    with pytest.raises(StorageError, match="cannot read the snapshot"):
        snapshot_writer.read(path)
    assert [field.name for field in tmp_path.iterdir()] == ["image"], "something was executed"


def test_a_file_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(StorageError, match="cannot read the snapshot"):
            snapshot_writer.read(path)


@examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_raises_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever the header says, it is an image or a StorageError."""
    path = tmp_path / "image"
    written(path, snapshots.image(0, 2))
    octets = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", octets[:8])
    for _ in range(data.draw(st.integers(1, 4))):
        octets[data.draw(st.integers(0, length + 7))] = data.draw(st.integers(0, 255))
    path.write_bytes(octets)
    with suppress(StorageError):
        assert isinstance(snapshot_writer.read(path), Snapshot)
