"""Bytes of anybody give a value or the declared error, in bounded time and memory.

By strategies of hypothesis: any bytes, msgpack and JSON of any structure, and true inputs with changes. Where atheris
is installed (``pip install atheris``), ``python -m tests.properties.test_hostile_bytes packet -max_total_time=60`` fuzzes
one of the readers with coverage.
"""

import contextlib
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from kvps import protocol as m
from kvps.checkpoint import atomic_file, snapshot_writer, validation
from kvps.checkpoint.manifest import ImageFile, Manifest, StoreVersions, image_name
from kvps.checkpoint.snapshot_reader import image_of
from kvps.core.scheduler import saved_state
from kvps.core.scheduler.scheduler import Scheduler
from kvps.core.scheduler.seat import Settings
from kvps.errors import KvpsError, ProtocolError, StorageError
from kvps.protocol import wire
from kvps.protocol.envelope import Envelope, Packet, Role
from kvps.torch.serialization import pack, unpack
from tests.support import snapshots
from tests.support.tiers import examples

SLACK = 20
"""How many times slower than on a machine of its own a reader may be: other tests run beside it, and coverage
traces each of its lines. What grows faster than the input takes far longer than that for 60,000 bytes."""
MS_PER_KIB, MS = 0.02 * SLACK, 1.0 * SLACK
TRIALS = 8
"""A collection of garbage may fall into one."""
TIMES, KIB = 10, 256
"""Memory: so many times the input, and so many KiB for what is loaded on first use."""


@dataclass(frozen=True)
class Reader:
    """What reads bytes of others."""

    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    true: tuple[bytes, ...]
    """What it is made for."""


def _stored() -> tuple[bytes, dict[str, torch.Tensor]]:
    """Return the JSON of a snapshot, and its tensors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image"
        atomic_file.put(path, snapshot_writer.stream(snapshots.image(0, 2)).write)
        with safe_open(path, framework="pt") as file:
            text = file.metadata()[snapshot_writer.ENTRY]
        return text.encode(), load_file(path)


JSON, TENSORS = _stored()
MANIFEST = Manifest(
    12,
    bytes(16),
    3,
    4,
    "0.1.0",
    (ImageFile(image_name(0, 1), 99, "ab" * 32),),
    {"default": StoreVersions(161, 500, 501)},
    "best",
)


def _image(data: bytes) -> object:
    return image_of(validation.parsed(data.decode()), dict(TENSORS))


def _head(message: m.Message) -> bytes:
    envelope = Envelope(bytes(16), 9, Role.WORKER, 1, 17, 3)
    return bytes(wire.encode(Packet(envelope, message))[0])


OBJECT = {"rates": (0.1, 2**70), 3: None, "w": torch.arange(6.0).reshape(2, 3), "s": {1, 2}}
READERS = {
    "packet": Reader(
        lambda data: wire.decode([data]),
        (ProtocolError,),
        (
            _head(m.Pull(3, True, (m.Ask(0, 10, 1, 1), m.Ask(10, 5, 1, 1)))),
            _head(m.Optimize("kv", 1, True, "adam", {"lr": 0.1, "beta1": None})),
            _head(m.Declare("kv", True, 0, (m.Entry("w", 1, (3, 4), 0, 12),))),
        ),
    ),
    "object": Reader(unpack, (ProtocolError,), (pack(OBJECT), pack([OBJECT, "text", b"bytes"]))),
    "object with tensors aside": Reader(lambda data: unpack(data, []), (ProtocolError,), (pack(OBJECT, []),)),
    "state of a scheduler": Reader(
        lambda data: saved_state.load(data, Settings(2, 1), 0.0),
        (KvpsError,),
        (Scheduler(Settings(2, 1, persist=True), bytes(16), 0.0).snapshot(),),
    ),
    "manifest": Reader(
        lambda data: Manifest.from_json(data.decode()),
        (ValueError, KvpsError),
        (MANIFEST.to_json().encode(),),
    ),
    "snapshot": Reader(_image, (ValueError, KvpsError), (JSON,)),
}

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
TREES = st.recursive(
    PLAIN, lambda some: st.lists(some, max_size=6) | st.dictionaries(st.text(max_size=4), some, max_size=6)
)


@st.composite
def changed(draw: st.DrawFn, true: tuple[bytes, ...]) -> bytes:
    """A true input in which some bytes are others, missing, or twice there."""
    data = bytearray(draw(st.sampled_from(true)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.integers(0, 3)):
            case 0:
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                del data[at : at + draw(st.integers(1, 8))]
            case 2:
                data[at:at] = data[at : at + draw(st.integers(1, 8))]
            case _:
                data[at:at] = draw(st.binary(max_size=9))
    return bytes(data)


def inputs(reader: Reader) -> st.SearchStrategy[bytes]:
    """Return a strategy of what may come."""
    kinds = [
        st.binary(max_size=2000),
        TREES.map(lambda tree: bytes(msgpack.packb(tree))),
        TREES.map(lambda tree: json.dumps(tree).encode("utf-8", "replace")),
        st.integers(1, 5000).map(lambda count: b"\x91" * count),
        st.integers(1, 5000).map(lambda count: b"[" * count),
    ]
    if reader.true:
        kinds.append(changed(reader.true))
    return st.one_of(kinds)


def read(reader: Reader, data: bytes) -> None:
    """Read, and let pass only the errors that are promised."""
    with contextlib.suppress(*reader.errors, UnicodeDecodeError):
        reader.read(data)


def check(reader: Reader, data: bytes) -> None:
    """Read in the time that is promised."""
    limit_ms = MS + MS_PER_KIB * len(data) / 1024
    took_ms = []
    while not took_ms or (took_ms[-1] > limit_ms and len(took_ms) < TRIALS):
        began = time.thread_time()
        read(reader, data)
        took_ms.append(1000 * (time.thread_time() - began))
    assert took_ms[-1] <= limit_ms, f"{took_ms} ms for {len(data)} bytes"


@pytest.mark.parametrize("name", READERS)
def test_true_inputs_are_read(name: str) -> None:
    for data in READERS[name].true:
        READERS[name].read(data)


@pytest.mark.parametrize("name", READERS)
def test_any_bytes_give_a_value_or_the_declared_error(name: str) -> None:
    reader = READERS[name]

    @examples(100, suppress_health_check=list(HealthCheck))
    @given(inputs(reader))
    def checked(data: bytes) -> None:
        check(reader, data)

    checked()


@pytest.mark.parametrize("name", READERS)
def test_memory_is_bounded_by_the_input(name: str) -> None:
    reader = READERS[name]
    nasty = [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 60_000,
        b"[" * 60_000,
        b"\xc0" * 60_000,
    ]
    nasty += [bytes(wire.HEAD.size) + item for item in nasty] + list(reader.true)
    for data in nasty:
        check(reader, data)  # what is loaded on first use is there
        tracemalloc.start()
        try:
            read(reader, data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= TIMES * len(data) + KIB * 1024, (data[:20], len(data), peak)


def test_the_errors_are_kvps_own() -> None:
    with pytest.raises(StorageError):
        READERS["state of a scheduler"].read(b"")
    with pytest.raises(ProtocolError):
        READERS["packet"].read(b"")


def _fuzz(name: str, *options: str) -> None:
    """Fuzz one reader; ``options`` are libFuzzer's, such as -max_total_time=60 (seconds)."""
    import atheris  # type: ignore[import-not-found]  # where it is installed

    for module, held in list(sys.modules.items()):
        if module.partition(".")[0] == "kvps":  # not torch, which has 30,000 functions
            for var in vars(held).values():
                for function in (var, *vars(var).values()) if isinstance(var, type) else (var,):
                    if isinstance(function, FunctionType) and function.__module__ == module:
                        atheris.instrument_func(function)
    reader = READERS[name]
    with tempfile.TemporaryDirectory() as corpus:
        for number, var in enumerate(reader.true):
            (Path(corpus) / str(number)).write_bytes(var)
        atheris.Setup([sys.argv[0], *options, corpus], lambda data: check(reader, data))
        atheris.Fuzz()


if __name__ == "__main__":
    arguments: Any = sys.argv[1:]
    _fuzz(*arguments)
