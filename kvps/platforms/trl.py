"""TRL's trainers publish: what their argument ``weight_transfer`` takes.

Written for the protocol of TRL 1.16 (``AsyncGRPOTrainer``, ``AsyncDistillationTrainer``): five methods,
called on the main process. No test has run a trainer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from kvps.errors import ConfigError
from kvps.platforms import vllm


class WeightTransfer:
    """Publishes the trainer's weights at each sync, and has a vLLM server load them.

    Args:
        store: the store that publishes.
        server: the URL of a vLLM server with the backend "kvps" (:mod:`kvps.platforms.vllm`), or TRL's
            ``VLLMClient``. None where rollouts are played by processes that call :func:`kvps.subscribe`.
        engine: what the server reads. Its ``scheduler`` must be an address that the server reaches.
        dtype: as for :meth:`kvps.KVStore.publish`.

    Raises:
        ConfigError: for a URL, where TRL is not installed.

    Example:
        >>> engine = InitInfo("policy", scheduler="tcp://10.0.0.1:9091")  # doctest: +SKIP
        >>> transfer = WeightTransfer(kv, "http://localhost:8000", engine)  # doctest: +SKIP
        >>> AsyncGRPOTrainer(model, reward, weight_transfer=transfer).train()  # doctest: +SKIP
    """

    def __init__(
        self,
        store: Any,
        server: Any = None,
        engine: vllm.InitInfo | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        self._store, self._engine, self._dtype = store, engine or vllm.InitInfo(), dtype
        self._client = _client(server) if isinstance(server, str) else server
        self.version: int | None = None
        """The version that was published last."""

    def init_weight_transfer(self) -> None:
        """Wait for the server, and tell it what to read."""
        if self._client is not None:
            self._client.wait_for_server_ready()
            self._client.init_weight_transfer_engine(asdict(self._engine))

    def pause(self) -> None:
        """Have the server generate nothing for now."""
        if self._client is not None:
            self._client.pause()

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights, and have the server load them."""
        weights = {name: tensor.detach().cpu() for name, tensor in iterator}  # one after another, from shards
        self.version = self._store.publish(self._engine.name, weights, self._dtype)
        if self._client is not None:
            vllm.transfer(self._client, self.version)
            self._client.finish_weight_update()

    def resume(self) -> None:
        """Have the server go on."""
        if self._client is not None:
            self._client.resume()

    def destroy(self) -> None:
        """Release nothing: the store is the caller's."""


def _client(url: str) -> Any:
    try:
        from trl.experimental.async_grpo.vllm_client import VLLMClient
    except ImportError as error:
        raise ConfigError(
            f"WeightTransfer(server={url!r}) needs TRL 1.16 or later ({error}): pip install trl"
        ) from error
    return VLLMClient(url)
