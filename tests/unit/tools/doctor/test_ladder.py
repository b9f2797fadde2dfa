"""The ladder of time limits: mistakes that end a job which another limit would have kept."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import kvps
import kvps.torch
from kvps.observe.findings import Level
from kvps.tools.doctor.ladder import GRACE_S, MERGE_S, STORE_S, findings_of

STORE = "import kvps\nkv = kvps.create('dist_sync')\n"
WELL = f"""{STORE}
from datetime import timedelta
import torch
LIMIT = 10 * 60
torch.distributed.init_process_group("kvps", timeout=timedelta(seconds=LIMIT))
optimizer = kvps.torch.DistributedOptimizer(sgd, model, kvstore_options={{"worker_grace": 60.0}})
"""


def broken(script: str, step_s: float | None = None, **env: str) -> list[tuple[str, str]]:
    found = findings_of(script, env, step_s)
    return [(finding.text, finding.advice) for finding in found if finding.level is Level.FAIL]


def test_usual_limits_are_in_order() -> None:
    assert not broken(WELL)
    assert not broken(STORE + "\ntorch.distributed.init_process_group(backend='nccl')")
    assert len(findings_of(WELL, {})) == 7


def test_usual_limits_are_those_of_the_calls() -> None:
    limits = inspect.signature(kvps.create).parameters
    assert (limits["timeout"].default, limits["worker_grace"].default) == (STORE_S, GRACE_S)
    assert inspect.signature(kvps.torch.DiLoCo).parameters["timeout"].default == MERGE_S


@pytest.mark.parametrize(
    ("script", "text", "advice"),
    [
        (
            "kv = kvps.create('dist_sync', timeout=60)",
            "worker_grace of create() 240 s must be below timeout of create() 60 s (line 1)",
            "WorkerLost never comes",
        ),
        (
            "options = {'timeout': 900, 'worker_grace': 5}\no = DistributedOptimizer(a, m, kvstore_options=options)",
            "the silence that counts as a loss 12 s must be below worker_grace of DistributedOptimizer() 5 s (line 1)",
            "before its grace is over",
        ),
        (
            f"{STORE}dist.init_process_group('nccl', timeout=timedelta(minutes=2))",
            "timeout of create() 300 s must be below torch's timeout of init_process_group() 120 s (line 3)",
            "a collective of torch, which gives up first",
        ),
        (
            f"{STORE}t = Trainer(strategy=DDPStrategy(timeout=datetime.timedelta(0, 200)))",
            "timeout of create() 300 s must be below Lightning's timeout of DDPStrategy() 200 s (line 3)",
            "Lightning",
        ),
        (
            f"{STORE}config = TorchConfig(backend='gloo', timeout_s=100)",
            "timeout of create() 300 s must be below Ray's timeout_s of TorchConfig() 100 s (line 3)",
            "Ray",
        ),
        (
            f"{STORE}a = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=30))])",
            "timeout of create() 300 s must be below Accelerate's timeout of InitProcessGroupKwargs() 30 s (line 3)",
            "Accelerate",
        ),
        (
            "T = 2000\nwith kvps.torch.DiLoCo(model, adam, sync_every=500, timeout=T):\n    pass",
            "500 local steps of 5 s: 2500 s (line 2) must be below timeout of DiLoCo() 2000 s (line 2)",
            "raise timeout=",
        ),
        (
            f"import os\nos.environ['KVPS_SILENCE_MAX'] = '400'\n{STORE}",
            "the silence that counts as a loss 400 s must be below worker_grace of create() 240 s",
            "noticed",
        ),
    ],
)
def test_mistake_is_named_with_both_limits(script: str, text: str, advice: str) -> None:
    found = broken(script, step_s=5.0)
    assert text in [said for said, _ in found], found
    assert any(advice in why for _, why in found)


def test_limits_that_cannot_be_read_count_as_the_usual_ones() -> None:
    assert not broken("kv = kvps.create('dist_sync', timeout=limit(), worker_grace=other)\nother = third")
    assert not broken(f"{STORE}dist.init_process_group(timeout=timedelta(seconds=limit()))")
    assert not broken("t = Trainer(strategy=KvpsStrategy(timeout=timedelta(hours=1)))")
    assert not broken("t = Trainer(strategy=KvpsStrategy())")
    assert broken("t = Trainer(strategy=KvpsStrategy(timeout=timedelta(seconds=10)))")
    assert broken("kv = kvps.create('dist_sync', timeout=timedelta(seconds=-1) or 3 * 4)") == []


def test_script_without_limits_is_said_to_have_none() -> None:
    assert [finding.level for finding in findings_of("print('hello')\nx[0] = 3", {})] == [Level.SKIP]


def test_doctor_reads_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it was run')\nkv = kvps.create('dist_sync', timeout=60)\n")
    doctor = [sys.executable, "-m", "kvps.tools.doctor.command"]
    ended = subprocess.run([*doctor, "--limits", script], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "timeout of create() 60 s (line 2)" in ended.stdout
    script.write_text("kv = (")
    for words, says in (([script], "cannot read"), ([], "give one SCRIPT")):
        ended = subprocess.run([*doctor, "--limits", *words], capture_output=True, text=True)
        assert ended.returncode == 78
        assert says in ended.stderr
    ended = subprocess.run([*doctor, script], capture_output=True, text=True)
    assert "belongs to --predict or --limits" in ended.stderr
