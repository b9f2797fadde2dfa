"""vLLM, TRL and SGLang as readers: doubles of their classes, which enforce the order of calls, over real servers."""

import ast
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import kvps
from kvps.platforms import sglang, trl, vllm
from tests.integration.platforms import inference_engines as doubles
from tests.integration.platforms.inference_engines import Model, Server

LIMIT_S = 30
SHAPES = {"a": (30, 20), "b": (7,)}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def has(model: Model, seed: int) -> bool:
    return all(torch.equal(model.weights[name], value) for name, value in weights(seed).items())


@pytest.fixture
def kv() -> Iterator[kvps.KVStore]:
    with kvps.create("dist_sync") as item:
        yield item


@pytest.fixture
def guests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages are there, with what the adapters import of them."""
    for module, names in (doubles.VLLM | doubles.TRL).items():
        for end in range(1, len(module.split(".")) + 1):
            parent = ".".join(module.split(".")[:end])
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        sys.modules[module].__dict__.update(names)
    monkeypatch.setattr(doubles.WeightTransferEngineFactory, "_registry", {})
    vllm.plugin()
    vllm.plugin()  # vLLM may load plug-ins again


@pytest.mark.usefixtures("guests")
def test_workers_of_vllm_load_the_version_that_they_are_told(kv: kvps.KVStore) -> None:
    models = Model(**SHAPES), Model(**SHAPES)
    server = Server(*models)
    with pytest.raises(kvps.ConfigError, match="before init_transfer_engine"):
        server.start_weight_update()
    server.init_weight_transfer_engine(asdict(vllm.InitInfo("policy", timeout=LIMIT_S)))
    for seed in (1, 2):
        vllm.update(server, kv.publish("policy", weights(seed)))
        assert all(has(model, seed) for model in models)
        assert server.version == str(seed)
    older, newer = kv.publish("policy", weights(3)), kv.publish("policy", weights(4))
    vllm.update(server, older)
    assert all(has(model, 3) for model in models), "although a newer version is there"
    vllm.update(server, newer)
    server.init_weight_transfer_engine({"name": "policy", "timeout": 0.1})
    with pytest.raises(kvps.Timeout, match="no version of 'policy' that is newer than 4"):
        vllm.update(server, newer + 1)
    assert all(has(model, 4) and not model.is_open for model in models[:1]), "it has its old weights"
    server.engines[1].finish_weight_update()  # the worker that was not asked
    server.active[1] = False
    vllm.update(server, newer)
    for engine in server.engines:
        engine.shutdown()
        engine.shutdown()


@pytest.mark.usefixtures("guests")
def test_trainer_of_trl_publishes_and_pauses_the_server(
    kv: kvps.KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(**SHAPES)
    server = Server(model)
    monkeypatch.setattr(doubles.VLLMClient, "server", server, raising=False)
    transfer: doubles.WeightTransferProtocol = trl.WeightTransfer(
        kv, "http://localhost:8000", dtype="float32"
    )
    transfer.init_weight_transfer()
    for seed in (1, 2):  # as AsyncGRPOTrainer._sync_weight does
        transfer.pause()
        transfer.send_weights(iter(weights(seed).items()))
        assert server.is_paused
        transfer.resume()
        assert has(model, seed)
        assert transfer.version == seed
    transfer.destroy()
    only = trl.WeightTransfer(kv)
    only.init_weight_transfer()
    only.pause()
    only.send_weights(iter(weights(3).items()))
    only.resume()
    assert only.version == 3
    server.engines[0].shutdown()


def test_workers_of_sglang_load_the_version_of_a_subscription(kv: kvps.KVStore) -> None:
    models = Model(**SHAPES), Model(**SHAPES)
    engine = doubles.Engine(*models)
    with kvps.subscribe("policy") as policy:
        with pytest.raises(kvps.ConfigError, match="reads no version; call wait"):
            sglang.update(engine, policy)
        for seed in (1, 2):
            kv.publish("policy", weights(seed))
            policy.wait(newer_than=policy.version, timeout=LIMIT_S)
            kv.publish("other", weights(9))
            sglang.update(engine, policy)
            assert all(has(model, seed) for model in models)
        with pytest.raises(
            kvps.ConfigError, match="object has no begin_weight_update, update_weights_from_tensor"
        ):
            sglang.update(object(), policy)
        engine.begin_weight_update()
        with pytest.raises(
            kvps.KvpsError, match=r"begin_weight_update.*failed: a weight-update session is already open"
        ):
            sglang.update(engine, policy)
        engine.end_weight_update()
        broken = doubles.Engine()
        broken.update_weights_from_tensor = lambda *_, **__: {"success": False, "message": "no room"}  # type: ignore[method-assign]
        with pytest.raises(kvps.KvpsError, match=r"update_weights_from_tensor.*failed: no room"):
            sglang.update(broken, policy)
        assert broken.end_weight_update()[0] is False, "the session has ended"
    for subscription in sglang._subscriptions.values():
        subscription.close()
    sglang._subscriptions.clear()


def test_a_package_that_is_not_installed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    if {"vllm", "trl"} & sys.modules.keys():
        pytest.skip("they are installed")
    with pytest.raises(kvps.ConfigError, match=r"needs vLLM 0.33 or later \(No module.*pip install vllm"):
        vllm.register()
    vllm.plugin()
    assert "vLLM has no backend 'kvps'" in caplog.text
    with pytest.raises(kvps.ConfigError, match=r"needs TRL 1.16 or later.*pip install trl"):
        trl.WeightTransfer(None, "http://localhost:8000")
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from kvps.platforms import sglang, trl, vllm; print(*sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"vllm", "trl", "sglang", "kvps.store", "kvps.torch"} & set(found.stdout.split())


# --- the wheels -----------------------------------------------------------------------------------------


def signatures(source: str, names: set[str]) -> dict[str, Any]:
    """The arguments of the named functions, and of the methods of the named classes."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            found.update({f"{node.name}.{item.name}": _arguments(item.args) for item in methods})
        elif isinstance(node, ast.FunctionDef) and node.name in names:
            found[node.name] = _arguments(node.args)
    return found


def _arguments(args: ast.arguments) -> tuple[object, ...]:
    given = [ast.unparse(value) for value in args.defaults]
    return [arg.arg for arg in args.args], given, [arg.arg for arg in args.kwonlyargs]


@pytest.mark.thorough
@pytest.mark.parametrize("wheel", doubles.WHEELS)
def test_doubles_have_the_signatures_of_the_wheels(wheel: str, tmp_path: Path) -> None:
    """The wheel is read as text: nothing of it is installed or imported."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-q",
        "-d",
        tmp_path,
    ]
    got = subprocess.run([*command, wheel], capture_output=True, text=True, timeout=300)
    files = list(tmp_path.glob("*.whl"))
    if not files:
        pytest.skip(f"the package index does not give {wheel}: {got.stderr.strip()[-200:]}")
    with zipfile.ZipFile(files[0]) as archive:
        known = set(archive.namelist())
        for path in {path for path in (doubles.CLASSES | doubles.FUNCTIONS).values() if path in known}:
            names = {name for name, where in (doubles.CLASSES | doubles.FUNCTIONS).items() if where == path}
            theirs = signatures(archive.read(path).decode(), names)
            ours = signatures(Path(doubles.__file__).read_text(), names)
            ours.pop("Engine.__init__", None)  # it has the models of its workers
            assert ours
            assert ours == {name: theirs.get(name) for name in ours}, path
        for path, text in doubles.TEXTS.items():
            assert path not in known or text in archive.read(path).decode(), path
    package = wheel.partition("=")[0]
    paths = [*doubles.CLASSES.values(), *doubles.FUNCTIONS.values(), *doubles.TEXTS]
    assert all(path in known for path in paths if path.startswith(f"{package}/"))
