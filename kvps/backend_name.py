"""The backend "kvps" of torch.distributed, for scripts that import kvps without kvps.torch.

``import kvps`` imports no torch, and torch knows a backend by its name only once it is registered.
So the name is registered when both are there, whichever comes first. The first group that uses it
imports what is behind it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HOME = "torch.distributed.distributed_c10d"
"""The module of torch that has the table of backends."""
NAME = "kvps"


def register_with_torch() -> None:
    """Register the backend's name now, or as soon as torch.distributed is imported."""
    torchs = sys.modules.get(HOME)
    if torchs is None:
        sys.meta_path.insert(0, _Watcher())
    elif hasattr(torchs, "Backend"):  # else its import is under way
        _register(torchs)


class _Watcher:
    """Finds no module: it waits for the import of :data:`HOME`, and registers the name behind it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of :data:`HOME`, as the other finders have it; None for any other module."""
        if name != HOME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register(torchs: Any) -> None:
    """Register the name, and let ranks that no launcher has numbered meet in the cluster."""
    if NAME in torchs.Backend.backend_list:
        return
    device = importlib.import_module("torch.accelerator").current_accelerator()
    devices = sorted({"cpu", "cuda", device.type if device else "cpu"})
    torchs.Backend.register_backend(NAME, _make, extended_api=True, devices=devices)
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    of_torch = handlers["env"]  # torch has no door to change one

    def env(url: str, *args: Any, **more: Any) -> Any:
        if "kvps.torch" not in sys.modules and ("RANK" in os.environ or "rank=" in url):
            return of_torch(url, *args, **more)
        from kvps.torch.distributed.rendezvous import meet  # torch would refuse, or kvps.torch is there

        return meet(of_torch, url, *args, **more)

    handlers["env"] = env


def _make(options: Any, more: Any) -> Any:
    """Return a process group; torch calls this."""
    from kvps.torch.distributed.rendezvous import make

    return make(options, more)
