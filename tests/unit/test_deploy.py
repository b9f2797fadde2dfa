"""The lock files of the image, and the compose file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = dict(
    line.lower().split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)


def locked(name: str) -> dict[str, str]:
    """Return package -> version; every line names the SHA-256 of a file."""
    lines = (ROOT / "deploy" / name).read_text().splitlines()
    found = [
        re.fullmatch(r"([\w-]+)==([\w.]+)(?:\+cpu)? --hash=sha256:[0-9a-f]{64}", one)
        for one in lines[1:]
    ]
    assert all(found), lines
    return {one.group(1).replace("_", "-"): one.group(2) for one in found if one}


@pytest.mark.parametrize("name", ["requirements.lock", "build.lock"])
def test_they_have_the_versions_that_make_installs(name: str) -> None:
    constraints = {package.replace("_", "-"): version for package, version in CONSTRAINTS.items()}
    for package, version in locked(name).items():
        assert constraints.get(package, version) == version, package


def test_they_have_all_that_kvps_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=]", one)[0] for one in project["dependencies"]}
    assert needed <= locked("requirements.lock").keys()
    assert "hatchling" in locked("build.lock")


@pytest.fixture
def services() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    text = (ROOT / "deploy" / "docker-compose.yml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def test_every_service_is_confined(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["pids_limit"] == 512, name
        assert service["mem_limit"] == "${KVPS_MEMORY:-4g}", name
        assert not {"privileged", "cap_add", "ports"} & service.keys(), name


def test_an_audit_without_answers_fails() -> None:
    """pip-audit skips what its database does not know, and would report no vulnerability in it."""
    assert "pip-audit --strict " in (ROOT / "Makefile").read_text()


def test_a_worker_with_a_gpu_is_a_worker_that_reserves_it(services: dict[str, Any]) -> None:
    gpu, worker = services["worker-gpu"], services["worker"]
    assert gpu.pop("profiles") == ["gpu"], "it starts only if its profile is named"
    (device,) = gpu.pop("deploy")["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert gpu == worker


def test_all_services_have_one_image_for_one_platform(services: dict[str, Any]) -> None:
    for name in ("keygen", "scheduler", "server", "worker", "worker-gpu"):
        assert services[name]["image"] == "kvps:${KVPS_TAG:-latest}"
        assert services[name]["platform"] == "${KVPS_PLATFORM:-}"
