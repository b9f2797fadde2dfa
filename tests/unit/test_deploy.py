"""The lock files of the image, its base, and the compose file."""

import os
import re
import subprocess
import tomllib
from pathlib import Path
from shutil import which
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
        re.fullmatch(r"([\w-]+)==([\w.]+)(?:\+cpu)? --hash=sha256:[0-9a-f]{64}", line) for line in lines[1:]
    ]
    assert all(found), lines
    return {item.group(1).replace("_", "-"): item.group(2) for item in found if item}


@pytest.mark.parametrize("name", ["requirements.lock", "build.lock"])
def test_lock_files_have_the_versions_that_make_installs(name: str) -> None:
    constraints = {package.replace("_", "-"): version for package, version in CONSTRAINTS.items()}
    for package, version in locked(name).items():
        assert constraints.get(package, version) == version, package


def test_lock_files_have_all_that_kvps_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=]", item)[0] for item in project["dependencies"]}
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
        assert not {"privileged", "cap_add"} & service.keys(), name
        assert all(item.startswith("127.0.0.1:") for item in service.get("ports", ())), name
    assert [name for name, service in services.items() if "ports" in service] == ["grafana"]


def test_scripts_write_to_no_name_that_another_user_can_foresee() -> None:
    for script in (ROOT / "deploy").glob("*.sh"):
        assert "/tmp" not in script.read_text(encoding="utf-8"), script


def test_an_audit_without_answers_fails() -> None:
    """pip-audit skips what its database does not know, and would report no vulnerability in it."""
    assert "pip-audit --strict " in (ROOT / "Makefile").read_text()


DOCKER = """#!/bin/sh
case "$1 $2" in
"pull --quiet") exit {pull} ;;
"image inspect") printf '{digests}' ;;
*) exit 9 ;;
esac
"""


def lock_base(folder: Path, *base: str, pull: int = 0, digests: str) -> tuple[int, str, str]:
    """Run deploy/lock-base.sh in a copy of deploy/; return its code, what it printed, and what it wrote."""
    deploy, tools = folder / "deploy", folder / "tools"
    for item in (deploy, tools):
        item.mkdir()
    script = deploy / "lock-base.sh"
    script.write_text((ROOT / "deploy" / "lock-base.sh").read_text())
    docker = tools / "docker"
    docker.write_text(DOCKER.format(pull=pull, digests=digests))
    docker.chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", script, *base], env=env, capture_output=True, text=True, check=False)
    written = deploy / ".env"
    return ran.returncode, ran.stderr, written.read_text() if written.exists() else ""


def test_the_base_is_pinned_by_the_digest_of_its_registry(tmp_path: Path) -> None:
    digest = "sha256:" + "0a" * 32
    found = lock_base(tmp_path, digests=f"python@{digest}\\n")
    assert found == (0, "", f"KVPS_BASE=python:3.11-slim-bookworm@{digest}\n")


def test_another_base_is_pinned_anew(tmp_path: Path) -> None:
    digest, base = "sha256:" + "1b" * 32, "mirror.example/python:3.12-slim"
    found = lock_base(tmp_path, f"{base}@sha256:old", digests=f"mirror.example/python@{digest}\\n")
    assert found == (0, "", f"KVPS_BASE={base}@{digest}\n")


def test_an_image_of_no_registry_has_no_digest(tmp_path: Path) -> None:
    code, said, written = lock_base(tmp_path, digests="")
    assert (code, written) == (1, "")
    assert "python:3.11-slim-bookworm has no digest" in said


def test_a_base_that_cannot_be_pulled_is_not_pinned(tmp_path: Path) -> None:
    digest = "sha256:" + "0a" * 32
    code, _, written = lock_base(tmp_path, pull=1, digests=f"python@{digest}\\n")
    assert (code, written) == (1, "")


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


def test_monitoring_starts_only_if_its_profile_is_named_and_has_the_token(services: dict[str, Any]) -> None:
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["monitoring"]
        assert services[name]["volumes"] == ["./monitoring:/etc/kvps:ro"]
    token = "${KVPS_HTTP_TOKEN:-}"
    for name in ("scheduler", "server", "prometheus"):
        assert services[name]["environment"]["KVPS_HTTP_TOKEN"] == token
    assert services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == token
    for name in ("scheduler", "server"):
        assert services[name]["environment"]["KVPS_HTTP"] == "${KVPS_HTTP:-}", "off by default"


def test_prometheus_finds_the_rules_and_every_process_with_endpoints() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    folder = ROOT / "deploy" / "monitoring"
    config = yaml.safe_load((folder / "prometheus.yml").read_text(encoding="utf-8"))
    assert [(folder / name).is_file() for name in config["rule_files"]] == [True]
    ((job,), (found,)) = config["scrape_configs"], config["scrape_configs"][0]["dns_sd_configs"]
    assert (job["job_name"], found["names"]) == ("kvps", ["scheduler", "server"])
    source = yaml.safe_load((folder / "grafana/datasources/kvps.yml").read_text(encoding="utf-8"))
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


@pytest.mark.skipif(which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_configuration() -> None:
    path = ROOT / "deploy" / "monitoring" / "prometheus.yml"
    words = ["promtool", "check", "config", "--syntax-only", str(path)]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
