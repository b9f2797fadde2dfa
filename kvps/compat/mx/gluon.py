"""The part of ``mx.gluon`` that belongs to a store: the Trainer, and the splitting of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kvps
from kvps.compat.mx import optimizer as optimizers
from kvps.compat.mx.elsewhere import missing
from kvps.compat.mx.kvstore import SPELLINGS, KVStore
from kvps.compat.mx.rule import Optimizer
from kvps.errors import ConfigError
from kvps.trainer import Params

_NAMES = {
    "Block": "use torch.nn.Module",
    "HybridBlock": "use torch.nn.Module, and torch.compile",
    "Parameter": "use torch.nn.Parameter",
    "ParameterDict": "pass the module itself to Trainer",
    "data": "use torch.utils.data, with kvps.data_sampler(data, kv.store)",
    "loss": "use torch.nn.functional; gluon's losses are sums over a batch: reduction='sum'",
    "metric": "use torch, and kvps.torch.average for means over workers",
    "model_zoo": "use torchvision",
    "nn": "use torch.nn",
    "rnn": "use torch.nn.LSTM or torch.nn.GRU",
}


class Trainer(kvps.Trainer):
    """A Trainer with gluon's arguments: optimizers of ``mx.optimizer``, their names and defaults,
    and stores of ``mx.kv``.

    Args:
        params: a torch module, its ``named_parameters()``, or a dict name -> tensor, in place of
            ``collect_params()``.
        optimizer: an optimizer of ``mx.optimizer``, or the name of one.
        optimizer_params: the arguments of the optimizer that ``optimizer`` names.
        kvstore: a store of ``mx.kv``, its name, or None.
        compression_params: as :meth:`kvps.compat.mx.kvstore.KVStore.set_gradient_compression` has them.
        update_on_kvstore: as :class:`kvps.Trainer` has it.

    Example:
        >>> import torch, kvps.compat.mx as mx
        >>> model = torch.nn.Linear(3, 1)
        >>> trainer = mx.gluon.Trainer(model, "sgd", {"learning_rate": 0.1}, kvstore="device")
        >>> model(torch.ones(2, 3)).sum().backward()
        >>> trainer.step(2)
    """

    def __init__(
        self,
        params: Params,
        optimizer: str | Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | KVStore | kvps.KVStoreBase | None = "device",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        if isinstance(optimizer, Optimizer):
            if optimizer_params:
                raise ConfigError(
                    "optimizer_params are for an optimizer that is named; give them to the optimizer itself"
                )
        else:
            optimizer = optimizers.create(optimizer, **dict(optimizer_params or {}))
        if isinstance(kvstore, KVStore):
            kvstore = kvstore.store
        elif isinstance(kvstore, str):
            kvstore = SPELLINGS.get(kvstore.lower(), kvstore)
        compression = None if compression_params is None else {"min_bytes": 0, **compression_params}
        super().__init__(
            params, optimizer.rule.name, optimizer.numbers(), kvstore, compression, update_on_kvstore
        )


class utils:  # noqa: N801  (the name of a module of MXNet)
    """The part of ``mx.gluon.utils`` that splits batches over devices."""

    split_and_load = staticmethod(kvps.split_and_load)


def __getattr__(name: str) -> object:
    raise missing("mx.gluon", name, _NAMES)
