"""The stream from an agent to its launch."""

import pytest

from kvps.launchers.agent import ERROR, NOISE_MAX, OUT, REPORT, FrameReader, frame, greeting

SENT = [(OUT, b"loss 0.1\n"), (ERROR, b""), (REPORT, b"worker 12 0\n"), (OUT, bytes(70_000))]
STREAM = greeting("0.1.0") + b"".join(frame(kind, data) for kind, data in SENT)


@pytest.mark.parametrize("noise", [b"", b"Welcome to n1!\nIt has 4 cores.\n"])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_frames_arrive_as_sent(noise: bytes, size: int) -> None:
    stream = noise + STREAM
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    reader = FrameReader()
    assert [part for piece in pieces for part in reader.feed(piece)] == SENT
    assert reader.version == "0.1.0"


def test_nobody_has_answered_yet() -> None:
    reader = FrameReader()
    assert list(reader.feed(b"\nkvps-agent 0.")) == []
    assert reader.version is None


@pytest.mark.parametrize("bad", [b"\x03\0\0\0\1x", b"\0\xff\xff\xff\xff"])
def test_a_stream_of_somebody_else(bad: bytes) -> None:
    reader = FrameReader()
    with pytest.raises(ValueError, match="a frame of kind"):
        list(reader.feed(greeting("0.1.0") + bad))


def test_noise_without_end() -> None:
    with pytest.raises(ValueError, match="bytes of something else"):
        list(FrameReader().feed(bytes(NOISE_MAX + 1)))
