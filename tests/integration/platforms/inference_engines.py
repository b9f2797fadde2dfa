"""Doubles of vLLM, TRL and SGLang that enforce the order of calls; a thorough test compares their signatures.

:data:`CLASSES` and :data:`FUNCTIONS` say where the original of each is.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch

WHEELS = ("vllm==0.33.0", "trl==1.16.0", "sglang==0.5.23")
CLASSES = {
    "WeightTransferEngine": "vllm/distributed/weight_transfer/base.py",
    "WeightTransferEngineFactory": "vllm/distributed/weight_transfer/factory.py",
    "VLLMWeightSyncClient": "vllm/distributed/weight_transfer/base.py",
    "WeightTransferProtocol": "trl/experimental/async_grpo/async_grpo_trainer.py",
    "VLLMClient": "trl/experimental/async_grpo/vllm_client.py",
    "Engine": "sglang/srt/entrypoints/engine.py",
}
FUNCTIONS = {
    "initialize_layerwise_reload": "vllm/model_executor/model_loader/reload/layerwise.py",
    "finalize_layerwise_processing": "vllm/model_executor/model_loader/reload/layerwise.py",
    "disable_mtp_completeness_check": "vllm/model_executor/model_loader/mtp_validation.py",
}
TEXTS = {
    "vllm/plugins/__init__.py": 'DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"',
    "vllm/model_executor/model_loader/reload/__init__.py": '"finalize_layerwise_reload"',
    "sglang/srt/model_executor/model_runner_components/weight_updater.py": (
        "custom_loader(self.get_model(), named_tensors)"
    ),
}
"""What else the adapters rely on."""


class Model:
    """A model of an engine: takes a checkpoint's weights between the two calls of a reload."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.is_open = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert self.is_open, "no weight update is under way"
        for name, tensor in weights:
            self.weights[name].copy_(tensor)


# --- vLLM ---------------------------------------------------------------------------------------------


class WeightTransferEngine:
    init_info_cls: Any
    update_info_cls: Any
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.model, self.model_config = model, vllm_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return self.init_info_cls(**init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return self.update_info_cls(**update_dict)

    def init_transfer_engine(self, init_info: Any) -> None:
        raise NotImplementedError

    def start_weight_update(self) -> None:
        raise NotImplementedError

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError


class WeightTransferEngineFactory:
    _registry: ClassVar[dict[str, Callable[[], type[WeightTransferEngine]]]] = {}

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: Any, class_name: str | None = None) -> None:
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls._registry[name] = lambda: module_path_or_cls


def initialize_layerwise_reload(model: Model) -> None:
    assert not model.is_open
    model.is_open = True


def finalize_layerwise_processing(model: Model, model_config: Any) -> None:
    assert model.is_open
    assert model_config == "model config"
    model.is_open = False


@contextmanager
def disable_mtp_completeness_check() -> Iterator[None]:
    yield


VLLM = {
    "vllm.distributed.weight_transfer.base": {"WeightTransferEngine": WeightTransferEngine},
    "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": WeightTransferEngineFactory},
    "vllm.model_executor.model_loader.reload": {
        "initialize_layerwise_reload": initialize_layerwise_reload,
        "finalize_layerwise_reload": finalize_layerwise_processing,
    },
    "vllm.model_executor.model_loader.mtp_validation": {
        "disable_mtp_completeness_check": disable_mtp_completeness_check
    },
}


class VLLMWeightSyncClient(Protocol):
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Server:
    """A vLLM server of some tensor-parallel workers, each with an engine, as ``vllm/v1/worker/gpu_worker.py`` has it."""

    def __init__(self, *models: Model) -> None:
        self.engines = [
            WeightTransferEngineFactory._registry["kvps"]()(None, "model config", "cpu", model)
            for model in models
        ]
        self.active = [False] * len(models)
        self.version: str | None = "default"
        self.is_paused = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.init_transfer_engine(engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        for rank, engine in enumerate(self.engines):
            assert not self.active[rank], "start_weight_update called while a weight update is already active"
            engine.start_weight_update()
            self.active[rank] = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for rank, engine in enumerate(self.engines):
            assert self.active[rank], "start_weight_update must be called before update_weights."
            try:
                engine.update_weights(update_info)
            except BaseException:
                self.active[rank] = False
                raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        for rank, engine in enumerate(self.engines):
            assert self.active[rank], "finish_weight_update called without a matching start_weight_update."
            engine.finish_weight_update()
            self.active[rank] = False
        self.version = weight_version or self.version


# --- TRL ----------------------------------------------------------------------------------------------


class WeightTransferProtocol(Protocol):
    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class VLLMClient:
    """A client of the server that has begun last."""

    server: Server

    def __init__(self, server_url: str, server_timeout: float = 240.0) -> None:
        assert server_url == "http://localhost:8000"
        self.is_ready = False

    def wait_for_server_ready(self, poll_interval_s: float = 2.0) -> None:
        self.is_ready = True

    def pause(self, timeout: int = 1800) -> None:
        assert not self.server.is_paused
        self.server.is_paused = True

    def resume(self, timeout: int = 1800) -> None:
        assert self.server.is_paused
        self.server.is_paused = False

    def init_weight_transfer_engine(self, init_info: dict, timeout: int = 1800) -> None:
        assert self.is_ready
        self.server.init_weight_transfer_engine(init_info)

    def start_weight_update(self, timeout: int = 1800) -> None:
        assert self.server.is_paused
        self.server.start_weight_update()

    def update_weights(self, update_info: dict, timeout: int = 1800) -> None:
        self.server.update_weights(update_info)

    def finish_weight_update(self, timeout: int = 1800) -> None:
        self.server.finish_weight_update()


TRL = {"trl.experimental.async_grpo.vllm_client": {"VLLMClient": VLLMClient}}


# --- SGLang -------------------------------------------------------------------------------------------


class Engine:
    """An engine of some tensor-parallel workers, and its session of weight updates."""

    def __init__(self, *models: Model) -> None:
        self._models = models
        self._loaders = ["kvps.platforms.sglang.load"]
        self._is_open = False

    def begin_weight_update(self, selector: str = "all") -> Any:
        if self._is_open:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self._is_open = True
        for model in self._models:
            model.is_open = True
        return True, "Success"

    def end_weight_update(self) -> Any:
        if not self._is_open:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self._is_open = False
        for model in self._models:
            model.is_open = False
        return True, "Success"

    def update_weights_from_tensor(
        self, named_tensors: Any, load_format: str | None = None, flush_cache: bool = True
    ) -> Any:
        if not self._is_open:
            return (
                False,
                "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()",
            )
        if load_format not in self._loaders:
            raise NotImplementedError(f"Unknown load_format={load_format}")
        module, _, function = load_format.rpartition(".")
        for model in self._models:
            getattr(importlib.import_module(module), function)(model, named_tensors)
        return True, "Success"
