"""Coverage only in the tests that have to reach every branch of the rules; it is off in all others, and while tests are collected.

A test under coverage takes two to three times as long, most of it in files that are not covered: in hypothesis and
in the simulation.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest


def configure(config: pytest.Config, folders: Sequence[Path]) -> None:
    """Have pytest-cov, if this run asks for it, cover the tests in ``folders``, and no others."""
    plugin: Any = config.pluginmanager.getplugin("_cov")
    if plugin is None:
        return
    if hasattr(config, "workerinput"):
        # pytest-cov has begun one that nobody reads, and begins that of this worker when the session starts.
        # Coverage that stops goes back to the one before it, so that all would be traced all the time.
        plugin.cov_controller.pause()
        importlib.import_module("torch")  # here, where nothing is traced
    config.pluginmanager.register(Covering(plugin, folders))


class Covering:
    """Switches the coverage of this process."""

    def __init__(self, plugin: Any, folders: Sequence[Path]) -> None:
        self._plugin = plugin
        self._folders = folders
        self._is_on = True

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Import all files that are covered, and switch coverage off: tests import many others."""
        if (controller := self._plugin.cov_controller) is not None:
            for folder in controller.cov.config.source or ():
                import_all(folder.replace("/", "."))
            self._switch(False)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Switch coverage on or off for a test and its fixtures."""
        self._switch(any(map(item.path.is_relative_to, self._folders)))
        return (yield)

    def _switch(self, is_on: bool) -> None:
        if is_on != self._is_on:
            self._is_on = is_on
            controller = self._plugin.cov_controller
            (controller.resume if is_on else controller.pause)()


def import_all(name: str) -> None:
    """Import a module, and all that is in it if it is a package."""
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
        importlib.import_module(module.name)
