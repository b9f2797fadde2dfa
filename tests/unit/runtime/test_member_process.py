"""The parts that processes of every role share."""

import os

import pytest

from kvps.runtime.member_process import let_threads_sleep

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment that says nothing."""
    found: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", found)
    return found


def of_threads(environ: dict[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in NAMES if name in environ}


def test_threads_sleep_between_computations(environ: dict[str, str]) -> None:
    let_threads_sleep()
    assert of_threads(environ) == {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize("name", NAMES)
def test_the_operator_decides_how_threads_wait(environ: dict[str, str], name: str) -> None:
    environ[name] = "given"
    let_threads_sleep()
    assert of_threads(environ) == {name: "given"}
