"""Readings of memory: of this process, and of the control groups that it is in, of both versions."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvps.net import memory, memory_watch
from kvps.net.memory import memory_bytes
from kvps.net.memory_watch import MemoryUse, MemoryWatch, Read, memory_reader
from tests.integration.processes import until

MIB = 1 << 20


class Machine:
    """Folders that stand for /sys/fs/cgroup and /proc/self of a machine with 1,000 MiB."""

    def __init__(self, folder: Path) -> None:
        self.cgroup, self.process = folder / "cgroup", folder / "self"
        self.process.mkdir()
        self.cgroup.mkdir()

    def status(self, anon_mib: int, shmem_mib: int) -> None:
        """Give the process so much memory, and a file that is mapped."""
        lines = (("RssAnon", anon_mib), ("RssFile", 500), ("RssShmem", shmem_mib))
        text = "Name:\tkvps\n" + "".join([f"{name}:\t{mib << 10} kB\n" for name, mib in lines])
        (self.process / "status").write_text(text)

    def groups(self, *lines: str) -> None:
        """Name the groups of the process."""
        (self.process / "cgroup").write_text("\n".join(lines) + "\n")

    def group(self, path: str, limit: int | str, used_mib: int, cached_mib: int = 0) -> None:
        """Make a group."""
        folder = self.cgroup / path
        folder.mkdir(parents=True, exist_ok=True)
        is_v1 = path.startswith("memory")
        names = memory.V1 if is_v1 else memory.V2
        limit = limit * MIB if isinstance(limit, int) else limit
        (folder / names.limit).write_text(f"{limit}\n")
        (folder / names.used).write_text(f"{used_mib * MIB}\n")
        active, inactive = [("total_" if is_v1 else "") + name for name in ("active_file", "inactive_file")]
        stat = f"anon 7\n{active} {cached_mib * MIB // 2}\n{inactive} {cached_mib * MIB // 2}\n"
        (folder / "memory.stat").write_text(stat)

    @property
    def use_mib(self) -> tuple[int, int]:
        """The reading."""
        with memory_reader(self.cgroup, self.process) as read:
            used, total = read(0.0)
        return used // MIB, total // MIB


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for module in (memory, memory_watch):
        monkeypatch.setattr(module, "machine_bytes", lambda: 1000 * MIB)
    item = Machine(tmp_path)
    item.status(100, 50)
    return item


def test_without_a_limit_it_is_this_process_of_the_machine(machine: Machine) -> None:
    assert machine.use_mib == (150, 1000)
    machine.groups("0::/a.slice")
    machine.group("a.slice", "max", 900)
    assert machine.use_mib == (150, 1000)
    assert memory_bytes(machine.cgroup, machine.process) == 1000 * MIB


def test_a_container_counts_with_all_its_processes_and_without_pages_of_files(machine: Machine) -> None:
    machine.group("", 400, 390, cached_mib=40)
    assert machine.use_mib == (350, 400)
    assert memory_bytes(machine.cgroup, machine.process) == 400 * MIB


def test_of_several_groups_the_nearest_to_its_limit_counts(machine: Machine) -> None:
    machine.groups("1:name=systemd:/x", "0::/outer/inner")
    machine.group("outer", 500, 480)
    machine.group("outer/inner", 450, 200)
    assert machine.use_mib == (480, 500)
    assert memory_bytes(machine.cgroup, machine.process) == 450 * MIB
    machine.status(980, 0)
    assert machine.use_mib == (980, 1000)


def test_control_groups_of_version_1(machine: Machine) -> None:
    machine.groups("4:memory:/docker/ab", "3:cpu,cpuacct:/docker/ab", "0::/")
    machine.group("memory", 9223372036854771712 // MIB, 900)
    assert machine.use_mib == (150, 1000)
    machine.group("memory/docker/ab", 200, 190, cached_mib=20)
    assert machine.use_mib == (170, 200)
    assert memory_bytes(machine.cgroup, machine.process) == 200 * MIB


def test_unreadable_files_are_left_out(machine: Machine) -> None:
    (machine.process / "status").unlink()
    machine.group("", 400, 100)
    (machine.cgroup / "memory.stat").unlink()
    assert machine.use_mib == (100, 400)
    (machine.cgroup / "memory.current").unlink()
    assert machine.use_mib == (0, 1000)


def test_statistics_are_read_near_the_limit_only(machine: Machine) -> None:
    machine.group("", 400, 300, cached_mib=40)
    with memory_reader(machine.cgroup, machine.process) as read:
        assert read(0.8) == (300 * MIB, 400 * MIB)
        assert read(0.75) == (260 * MIB, 400 * MIB)


def test_open_files_give_new_numbers(machine: Machine) -> None:
    machine.group("", 400, 100)
    with memory_reader(machine.cgroup, machine.process) as read:
        assert read(0.0) == (100 * MIB, 400 * MIB)
        machine.group("", 400, 200, cached_mib=20)
        assert read(0.0) == (180 * MIB, 400 * MIB)


def test_memory_use_of_the_test_process_is_plausible() -> None:
    with memory_reader() as read:
        used, total = read(0.0)
    assert 0 < used < total <= memory_bytes()


@pytest.mark.parametrize(("used", "told"), [(8, [0, 1, 2, 3, 4, 5, 6, 7]), (7, [0, 4])])
def test_the_watch_tells_its_loop_until_it_ends(
    used: int, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading where memory is nearly all in use, else each fourth; files are opened anew meanwhile."""
    monkeypatch.setattr(memory_watch, "FIND_EVERY", 3)
    count = openings = 0
    heard: list[tuple[int, int]] = []

    def read(exact_from: float) -> MemoryUse:
        nonlocal count
        count += 1
        return MemoryUse(100 * used + count - 1, 1000)

    @contextmanager
    def reader() -> Iterator[Read]:
        nonlocal openings
        openings += 1
        yield read

    with MemoryWatch(lambda *reading: heard.append(reading), reader, every_s=0.001) as watch:
        until(lambda: len(heard) >= len(told), "readings")
    assert heard[: len(told)] == [(100 * used + number, 1000) for number in told]
    assert openings >= 2
    assert not watch._thread.is_alive()
