"""The golden frames of tests/vectors, read and written; and the document that quotes them."""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

from kvps import protocol as messages
from kvps.dtypes import DTYPES
from kvps.errors import BY_CODE
from kvps.protocol.envelope import ENTRIES_MAX, KEY_MAX, MESSAGES, RUNS_MAX, TEXT_MAX
from kvps.protocol.membership import Hello
from kvps.protocol.wire import ARRAY_MAX, FRAME_BYTES_MAX, HEAD_BYTES_MAX, PAYLOAD_FRAMES_MAX, decode, encode
from kvps.tensors import from_frame
from tests.vectors.packets import PACKETS, name_of

TESTS = Path(__file__).resolve().parents[2]
VECTORS = json.loads((TESTS / "vectors" / "packets.json").read_text(encoding="utf-8"))
WITH_CHECKSUMS = json.loads((TESTS / "vectors" / "checked.json").read_text(encoding="utf-8"))
FRAMES = {item["name"]: [bytes.fromhex(frame) for frame in item["frames"]] for item in VECTORS}
CHECKED = {item["name"]: [bytes.fromhex(frame) for frame in item["frames"]] for item in WITH_CHECKSUMS}
PROTOCOL = (TESTS.parent / "docs" / "protocol.md").read_text(encoding="utf-8")

HELLO_OF_1_0 = (
    "4b560101000000000000000000000000000000000000000002000000"
    "0000000000000000000000000000000000000000"
    "9c0100a5302e312e300002c0a56770752d31cd1267a0c2ab6770752d313a32393530304d"
)


# --- the vectors --------------------------------------------------------------------------------


@pytest.mark.spec("R4", "R5", "R13", "R73")
@pytest.mark.parametrize("name", FRAMES)
def test_writing_gives_the_vector(name: str) -> None:
    assert [bytes(frame) for frame in encode(PACKETS[name])] == FRAMES[name]


@pytest.mark.spec("R4", "R5", "R13", "R73")
@pytest.mark.parametrize("name", FRAMES)
def test_reading_the_vector_gives_the_packet(name: str) -> None:
    assert decode(FRAMES[name]) == PACKETS[name]


@pytest.mark.spec("R110", "R112")
@pytest.mark.parametrize("name", CHECKED)
def test_writing_and_reading_with_a_checksum_agrees_with_the_vector(name: str) -> None:
    assert [bytes(frame) for frame in encode(PACKETS[name], checked=True)] == CHECKED[name]
    assert decode(CHECKED[name]) == PACKETS[name]


@pytest.mark.spec("R73")
def test_every_message_has_a_vector() -> None:
    assert set(FRAMES) == set(CHECKED) == {name_of(cls) for cls in MESSAGES.values()}
    assert len(FRAMES) == len(VECTORS) == len(WITH_CHECKSUMS)


@pytest.mark.spec("R76")
def test_hello_is_frozen() -> None:
    (hello,) = [item for item in VECTORS if item.get("frozen")]
    assert hello == {"name": "HELLO", "frames": [HELLO_OF_1_0], "frozen": True}
    assert [field.name for field in fields(Hello)] == [
        *("major", "minor", "software", "features", "role", "rank", "host", "pid"),
        *("endpoint", "guardian", "master", "machine"),
    ]


@pytest.mark.spec("R13")
def test_payload_is_little_endian_in_the_order_of_the_runs() -> None:
    frame = FRAMES["PUSH"][1]
    assert frame.hex() == "0000803f000000c00000003f"
    assert from_frame(memoryview(frame), "float32").tolist() == [1.0, -2.0, 0.5]


# --- the document -------------------------------------------------------------------------------

CODE = re.compile(r"```(?:text)?\n(.*?)```", re.DOTALL)


def section(number: int) -> str:
    """The text of one numbered section."""
    match = re.search(rf"^## {number} .*?(?=^## |\Z)", PROTOCOL, re.DOTALL | re.MULTILINE)
    assert match, f"docs/protocol.md has no section {number}"
    return match[0]


def test_document_shows_its_vectors() -> None:
    shown = [re.sub(r"#.*|\s", "", text) for text in CODE.findall(section(13))]
    vectors = [FRAMES["HELLO"], FRAMES["PUSH"], CHECKED["PUSH"], FRAMES["ACK"]]
    assert shown == ["".join(frame.hex() for frame in frames) for frames in vectors]


@pytest.mark.spec("R73")
def test_document_has_every_message_with_its_tag_and_fields() -> None:
    stated = {
        (name, int(tag)): re.findall(r"`(\w+)`", text)
        for name, tag, text in re.findall(
            r"^### ([A-Z-]+) \((\d+)\)\n\nFields: (.*?)(?=^Payload|^$)", section(7), re.DOTALL | re.MULTILINE
        )
    }
    assert stated == {
        (name_of(cls), tag): [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for tag, cls in MESSAGES.items()
    }


@pytest.mark.spec("R8")
def test_document_has_every_record_with_its_fields() -> None:
    stated = {
        name: tuple(re.findall(r"`(\w+)`", text))
        for name, text in re.findall(r"^\| ([A-Z]\w+) \| (`.*) \|$", section(5), re.MULTILINE)
    }
    records = inspect.getmembers(messages, is_record)
    assert stated == {name: cls._fields for name, cls in records}


NOT_RECORDS = (NamedTuple, messages.Node, messages.Envelope, messages.Packet)
"""None is a field of a message."""


def is_record(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, tuple) and thing not in NOT_RECORDS


@pytest.mark.spec("R11", "R72")
def test_document_has_every_element_type_and_every_error_code() -> None:
    rows = re.findall(r"\b(\d+) \| (\w+?) \| (\d+) \|", section(5))
    assert {tuple(row) for row in rows} == {
        (str(dtype.id), dtype.name, str(dtype.itemsize)) for dtype in DTYPES
    }
    codes = dict(re.findall(r"^\| (\d+) \| (\w+) \|", section(10), re.MULTILINE))
    assert codes == {str(code): cls.__name__ for code, cls in BY_CODE.items()}


@pytest.mark.spec("R6", "R10")
def test_document_has_the_limits_of_the_code() -> None:
    text = section(5)
    for limit in (
        HEAD_BYTES_MAX,
        PAYLOAD_FRAMES_MAX,
        FRAME_BYTES_MAX,
        TEXT_MAX,
        KEY_MAX,
        ARRAY_MAX,
        ENTRIES_MAX,
        RUNS_MAX,
    ):
        assert re.search(rf"(?<![\d,]){limit:,}(?![\d,])", text), limit
