"""docs/launching/by-hand.md, followed to the letter by two machines."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.processes import BIN, ROOT, Processes

PAGE = (ROOT / "docs" / "launching" / "by-hand.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^<!-- machine (.) -->\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COPIED = re.compile(r"keys/[\w/]+\.(?:key|pub)")
PORTS = {9091, 9092}
"""Those that the page opens."""
TRAIN = """
import struct
import torch
import kvps

kv = kvps.create("dist_sync", timeout=60)
kv.init("w", torch.zeros(1 << 18))
out = torch.zeros(1 << 18)
for step in range(3):
    kv.pushpull("w", torch.ones(1 << 18), out=out)
for line in open("/proc/net/tcp").read().splitlines()[1:]:
    ends = [word.split(":") for word in line.split()[1:3]]
    if line.split()[3] == "01" and not ends[1][0].endswith("7F"):
        print("ports", *(int(port, 16) for _, port in ends), flush=True)
kv.barrier()
print("rank", kv.rank, "has", out[0].item(), flush=True)
"""
LIMIT_S = 90.0


@pytest.fixture
def machines(has_namespaces: None) -> Iterator[dict[str, str]]:
    """Machine -> its network namespace: A is 10.0.0.1, and B is 10.0.0.2."""
    names = {item: f"kvps-{os.getpid()}-{item}" for item in "AB"}
    a, b = names.values()
    commands = [
        f"ip netns add {a}",
        f"ip netns add {b}",
        f"ip -n {a} link add cable type veth peer name cable netns {b}",
        *(f"ip -n {name} addr add 10.0.0.{n}/24 dev cable" for n, name in ((1, a), (2, b))),
        *(f"ip -n {name} link set {link} up" for name in (a, b) for link in ("lo", "cable")),
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.thorough
def test_two_machines_train_as_the_page_says(processes: Processes, machines: dict[str, str]) -> None:
    folders = {name: processes.folder / name for name in machines}
    for folder in folders.values():
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
    keygen = subprocess.run([BIN / "kvps", "keygen", "keys"], cwd=folders["A"], check=False)
    assert keygen.returncode == 0
    copied = COPIED.findall(PAGE[PAGE.index("scp ") : PAGE.index("stays on A")])
    assert copied
    for path in copied:
        (folders["B"] / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folders["A"] / path, folders["B"] / path)

    processes.env["PATH"] = f"{BIN}{os.pathsep}{processes.env['PATH']}"
    started = []
    for name, block in BLOCK.findall(PAGE):
        script = f"cd {folders[name]}\nset -eu\n{block}wait\n"
        words = ("ip", "netns", "exec", machines[name], "bash", "-c", script)
        started.append(processes.start(name, *words))
    assert len(started) == 2
    for rank, item in enumerate(started):
        assert item.wait(LIMIT_S) == 0, started
        assert f"rank {rank} has 2.0" in item.out, started
    pairs = re.findall(r"^ports (\d+) (\d+)$", "".join([process.out for process in started]), re.M)
    assert pairs
    assert all(PORTS & {int(near), int(far)} for near, far in pairs), pairs
