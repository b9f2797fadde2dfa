"""The processes of a manifest, as its pods would start them."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from kvps.platforms.kubernetes.manifests import manifests
from kvps.platforms.kubernetes.pods import JobDescription
from kvps.runtime import key_files as keys
from tests.integration.processes import BIN, Process, Processes, free_port, has_checkpoint, until

SCRIPT = """
import sys, torch, kvps
kv = kvps.create("dist_sync")
kv.init("w", torch.zeros(8))
out = torch.empty(8)
kv.pushpull("w", torch.full((8,), float(kv.rank + 1)), out=out)
assert out.tolist() == [3.0] * 8, out
kv.close()
print("trained", kv.rank)
"""


ENDLESS = """
import os, sys, torch, kvps
kv = kvps.create("dist_sync")
kv.init("w", torch.zeros(8))
out = torch.empty(8)
done = kv.resume(["w"])
print("began at", done, flush=True)
while not os.path.exists(sys.argv[1]):
    try:
        kv.pushpull("w", torch.ones(8), out=out)
        done += 1
    except kvps.EpochChanged:
        done = kv.resume(["w"])
print("trained", kv.version("w"), flush=True)
kv.close()
"""


class Pods:
    """Processes in place of the pods of one JobSet."""

    def __init__(self, processes: Processes, job: JobDescription) -> None:
        self._processes = processes
        self._made = processes.folder / "made"
        keys.write(self._made, keys.generate())
        self._port = free_port()
        (jobset,) = [manifest for manifest in manifests(job, "jobset") if manifest["kind"] == "JobSet"]
        spec: Any = jobset["spec"]
        self.pods = {item["name"]: item["template"]["spec"]["template"] for item in spec["replicatedJobs"]}

    def start(self, role: str, index: int) -> Process:
        """Start the container of a pod."""
        (container,) = self.pods[role]["spec"]["containers"]
        words: list[object] = []
        for word in (*container["command"], *container["args"]):
            if word.startswith("kvps-"):
                words += [self._processes.interpreter, BIN / word]
            else:
                words.append(self._here(word, role))
        return self._processes.start(role, *words, **self._variables(role, index))

    def probe(self) -> Process:
        """Start the liveness probe of the scheduler."""
        (container,) = self.pods["scheduler"]["spec"]["containers"]
        command, *words = container["livenessProbe"]["exec"]["command"]
        words = [self._here(word, "scheduler") for word in words]
        return self._processes.start("probe", BIN / command, *words, **self._variables("scheduler", 0))

    def _variables(self, role: str, index: int) -> dict[str, str]:
        (container,) = self.pods[role]["spec"]["containers"]
        return {
            item["name"]: self._here(item["value"], role) if "value" in item else str(index)
            for item in container["env"]
        }

    def _here(self, text: str, role: str) -> str:
        """Return a word of the manifest as it is on this machine."""
        if text.startswith("tcp://"):
            port = 0 if text.endswith(":9092") else self._port
            return f"tcp://127.0.0.1:{port}"
        if text == "/keys":
            return str(self._mounted(role))
        if text in ("/state", "/checkpoints"):
            return str(self._processes.folder / text[1:])
        return text.replace("$$", "$")  # as Kubernetes reads it

    def _mounted(self, role: str) -> Path:
        """Return a directory with the key files that the pod mounts, and no others."""
        (secret,) = [pod["secret"] for pod in self.pods[role]["spec"]["volumes"] if "secret" in pod]
        mounted = self._processes.folder / f"keys-{role}"
        for item in secret["items"]:
            place = mounted / item["path"]
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            place.write_bytes((self._made / item["path"]).read_bytes())
            place.chmod(0o600)
        return mounted


@pytest.mark.parametrize("has_claim", [False, True])
def test_the_pods_train_and_end(processes: Processes, has_claim: bool) -> None:
    job = JobDescription(
        name="digits",
        image="kvps",
        workers=2,
        servers=2,
        command=(sys.executable, str(processes.script(SCRIPT))),
        env={"KVPS_LOG_LEVEL": "info"},
        checkpoint_claim="cuts" if has_claim else None,
        max_restarts=2 if has_claim else 0,
        grace_s=5.0 if has_claim else None,
    )
    pods = Pods(processes, job)
    scheduler = pods.start("scheduler", 0)
    servers = [pods.start("server", index) for index in range(2)]
    first = pods.start("worker", 1)
    probe = pods.probe()
    assert probe.wait() == 0, probe
    others = [first, pods.start("worker", 0)]
    for process in (*others, *servers, scheduler):
        assert process.wait() == 0, process
    assert "trained 1" in first.out  # the rank is the index of its pod


def test_a_pod_with_the_key_of_another_role_ends_with_78(processes: Processes) -> None:
    job = JobDescription("digits", "kvps", 1, 1, ("true",))
    pods = Pods(processes, job)
    scheduler = pods.start("scheduler", 0)
    pods.pods["server"]["spec"]["volumes"] = pods.pods["worker"]["spec"]["volumes"]
    server = pods.start("server", 0)
    assert server.wait() == 78, server
    assert "server.key" in server.err
    scheduler.signal(signal.SIGTERM)
    assert scheduler.wait() == 143


@pytest.mark.thorough
def test_a_job_whose_pods_are_all_deleted_continues(processes: Processes) -> None:
    stop = processes.folder / "stop"
    command = (sys.executable, str(processes.script(ENDLESS)), str(stop))
    job = JobDescription(
        "digits", "kvps", 2, 2, command, checkpoint_claim="c", checkpoint_every=0.2, max_restarts=3
    )
    pods = Pods(processes, job)
    roles = [("scheduler", 0), ("server", 0), ("server", 1), ("worker", 0), ("worker", 1)]
    started = [pods.start(*each) for each in roles]
    until(lambda: has_checkpoint(processes.folder / "checkpoints"), "checkpoint")
    for process in started:
        process.signal(signal.SIGTERM)
    assert [process.wait() for process in started] == [143] * 5
    started = [pods.start(*each) for each in roles]
    for worker in started[3:]:
        assert int(worker.expect(r"began at (\d+)", 60.0)[1]) > 0, worker
    stop.touch()
    assert [process.wait() for process in started] == [0] * 5, started
