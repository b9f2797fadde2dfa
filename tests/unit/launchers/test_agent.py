"""The agent, as ssh would start it: a process with an order on its stdin."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvps import __version__
from kvps.launchers.agent import (
    ERROR,
    MODULE,
    NOISE_MAX,
    OUT,
    REPORT,
    FrameReader,
    StartOrder,
    frame,
    greeting,
)
from tests.integration.processes import until

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "there.py").write_text(
        "import os, sys, time\n"
        "print(sys.argv[1:], os.environ['LEVEL'], os.environ['OMP_NUM_THREADS'] != '', flush=True)\n"
        "print('pid', os.getpid(), file=sys.stderr, flush=True)\n"
        "time.sleep(float(sys.argv[1]))\n"
        "sys.exit(3)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    yield process
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        stream.close()


def order(tmp_path: Path, seconds: str = "0") -> StartOrder:
    return StartOrder("there", [seconds, "two words"], {"LEVEL": "3"}, str(tmp_path))


def frames(out: bytes) -> dict[int, bytes]:
    found = {OUT: b"", ERROR: b""}
    reader = FrameReader()
    for kind, data in reader.feed(out):
        found[kind] += data
    assert reader.version == __version__
    return found


def ended(agent: subprocess.Popen[bytes], line: bytes) -> tuple[int, dict[int, bytes]]:
    """Give it its order, and keep the way open until it ends."""
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdin.write(line)
    agent.stdin.flush()
    out = agent.stdout.read()
    return agent.wait(), frames(out)


def test_a_process_there(agent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    code, found = ended(agent, order(tmp_path).line())
    assert code == 3
    assert found[OUT] == b"['0', 'two words'] 3 True\n"
    assert found[ERROR].startswith(b"pid ")


def test_signals_go_to_it(agent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    code, _ = ended(agent, order(tmp_path, "100").line() + b"what is this\nsignal 15\n")
    assert code == 128 + signal.SIGTERM


def test_agent_ends_with_its_connection(agent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdin.write(order(tmp_path, "100").line())
    agent.stdin.flush()
    reader, said = FrameReader(), b""
    while b"pid" not in said or not said.endswith(b"\n"):
        said += b"".join(data for _, data in reader.feed(os.read(agent.stdout.fileno(), 4096)))
    pid = int(said.partition(b"pid ")[2].split()[0])
    agent.stdin.close()
    assert agent.wait(30.0) == 128 + signal.SIGKILL
    until(lambda: not Path(f"/proc/{pid}").exists(), "its end")


def test_another_version(agent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    code, found = ended(agent, dataclasses.replace(order(tmp_path), version="0.0.9").line())
    assert code == 78
    assert b"and the launch has kvps 0.0.9: install the same version on both" in found[ERROR]


def test_a_directory_that_is_not_there(agent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    code, found = ended(agent, order(tmp_path / "nowhere").line())
    assert code == 78
    assert b"nowhere (No such file or directory)" in found[ERROR]


def test_no_order(agent: subprocess.Popen[bytes]) -> None:
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdin.close()
    found = frames(agent.stdout.read())
    assert agent.wait() == 78
    assert b"the launch ended before it said what to start" in found[ERROR]


# --- the stream from an agent to its launch -------------------------------------------------------


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
