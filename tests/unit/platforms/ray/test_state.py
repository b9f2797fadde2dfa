"""The scheduler's state in memory of another process: the newest that is whole. Ray is not needed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvps.errors import ConfigError
from kvps.platforms.ray import state as module
from kvps.platforms.ray.state import KeptState, StateMemory


@pytest.fixture
def memory() -> Iterator[StateMemory]:
    with closing(StateMemory()) as item:
        yield item


def read(memory: StateMemory) -> bytes | None:
    """Read as a scheduler does that is started again."""
    with closing(KeptState(memory.paths)) as again:
        return again.read()


def test_the_newest_state_is_read_whatever_its_length(memory: StateMemory) -> None:
    assert read(memory) is None
    with closing(KeptState(memory.paths)) as kept:
        for state in (b"a" * 100_000, b"b", b"", b"c" * 10):
            kept.save(state)
            assert kept.read() == read(memory) == state


def test_a_scheduler_that_is_started_again_goes_on(memory: StateMemory) -> None:
    for number in range(5):
        with closing(KeptState(memory.paths)) as kept:
            kept.save(b"%d" % number)
        assert read(memory) == b"%d" % number


@pytest.mark.parametrize("written", [0, 10, 25])
def test_a_state_that_was_half_written_leaves_the_one_before(
    memory: StateMemory, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(KeptState(memory.paths)) as kept:
        kept.save(b"older")
        kept.save(b"before")

        def killed(fd: int, data: bytes) -> None:
            os.ftruncate(fd, 0)
            os.pwrite(fd, data[:written], 0)

        monkeypatch.setattr(module, "_write", killed)
        kept.save(b"newest of all")
    assert read(memory) == b"before"


def test_nothing_is_left_when_the_job_is_over(memory: StateMemory) -> None:
    with closing(KeptState(memory.paths)) as kept:
        kept.save(b"one")
        kept.save(b"two")
        kept.remove()
    assert read(memory) is None


def test_another_process_reads_and_writes_it(memory: StateMemory) -> None:
    text = (
        "import sys; from kvps.platforms.ray.state import KeptState; KeptState(sys.argv[1:]).save(b'there')"
    )
    subprocess.run([sys.executable, "-c", text, *memory.paths], check=True)
    assert read(memory) == b"there"


def test_memory_that_cannot_be_reached_is_named(memory: StateMemory) -> None:
    paths = memory.paths
    memory.close()
    with pytest.raises(ConfigError, match=r"cannot reach the memory for its state \(/proc/\d+/fd"):
        KeptState([paths[0], "/proc/0/fd/1"])
