"""vLLM as a reader of published weights: the weight-transfer backend "kvps".

vLLM calls :func:`plugin` in each of its processes, by the entry point ``vllm.general_plugins``. Each worker
of an engine subscribes, and a weight update names a version: ``{"version": 7}``. Written for vLLM 0.33, which
is imported when it is needed. No test has run an engine.

    vllm serve MODEL --weight-transfer-config '{"backend": "kvps"}'
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvps.errors import ConfigError, KvpsError
from kvps.subscriber import Subscription, subscribe


def plugin() -> None:
    """Register, or log why not: vLLM would not start if this raised."""
    try:
        register()
    except ConfigError as error:
        logging.getLogger("kvps").warning("vLLM has no backend 'kvps': %s", error)


def register() -> None:
    """Make the backend known to vLLM; calls after the first change nothing.

    Raises:
        ConfigError: if vLLM is not installed, or is a version without weight-transfer engines.
    """
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError as error:
        raise ConfigError(
            f"the backend 'kvps' needs vLLM 0.33 or later ({error}): pip install vllm"
        ) from error
    engine = type("KvpsWeightTransferEngine", (Engine, WeightTransferEngine), {})
    with suppress(ValueError):  # it is there
        WeightTransferEngineFactory.register_engine("kvps", engine)


@dataclass
class InitInfo:
    """The publication that a worker of the engine reads, and where its job is."""

    name: str = "policy"
    """The publication's."""
    scheduler: str | None = None
    """As for :func:`kvps.subscribe`; None for KVPS_SCHEDULER of the engine."""
    keys: str | None = None
    """A directory on the engine's host; None for KVPS_KEYS of the engine."""
    timeout: float = 300.0
    """Seconds that an update may wait for its version, and that reading it may take."""


@dataclass
class UpdateInfo:
    """Which version to load."""

    version: int


class Engine:
    """The part of an engine that is kvps'; :func:`register` puts it before vLLM's WeightTransferEngine."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    model: Any
    model_config: Any
    _subscription: Subscription | None = None
    _timeout_s: float = 0.0

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Subscribe; again, if the trainer is another."""
        self.shutdown()
        self._subscription = subscribe(init_info.name, init_info.scheduler, init_info.keys)
        self._timeout_s = init_info.timeout

    def start_weight_update(self) -> None:
        """Have the model take weights in the form of a checkpoint.

        Raises:
            ConfigError: before :meth:`init_transfer_engine`.
        """
        if self._subscription is None:
            raise ConfigError("start_weight_update() before init_transfer_engine(): which publication?")
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Read a version as a whole, then load it. If it cannot be read, the model keeps its weights.

        Raises:
            KvpsError: if the version cannot be read.
        """
        assert self._subscription is not None, "vLLM's worker demands start_weight_update() first"
        try:
            self._subscription.wait(timeout=self._timeout_s, version=update_info.version)
            tensors = self._subscription.tensors(self._timeout_s)
        except KvpsError:
            self.finish_weight_update()  # nothing was loaded, so vLLM puts back what there was
            raise
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Have the model use the weights."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """End the subscription."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None


def update(client: Any, version: int) -> None:
    """Have an engine load a version, and label what it generates from now on with its number.

    Args:
        client: vLLM's ``HTTPVLLMWeightSyncClient``, ``RayVLLMWeightSyncClient``, or an object with their
            methods, by which ``init_weight_transfer_engine(asdict(InitInfo(...)))`` was called.
        version: what ``kv.publish`` has returned.

    Raises:
        Exception: of the client. The update has ended; workers that could not read the version have their
            old weights.
    """
    transfer(client, version)
    client.finish_weight_update(weight_version=str(version))


def transfer(client: Any, version: int) -> None:
    """Do :func:`update`, apart from its end."""
    client.start_weight_update()
    try:
        client.update_weights({"version": version})
    except Exception:
        with suppress(Exception):  # it must not hide the first
            client.finish_weight_update()
        raise
