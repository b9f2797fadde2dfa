"""``kvps-launch --dry-run``: flags in, manifests out, and nothing is started."""

from pathlib import Path

import pytest

from kvps.cli import launch
from kvps.platforms.kubernetes.manifests import KINDS, manifests
from tests.unit.platforms.kubernetes.jobs import SMALL

ROOT = Path(__file__).resolve().parents[3]
BASES = ROOT / "deploy" / "kubernetes"
ARGUMENTS = ["-n", "4", "-s", "2", "--image", "registry.example/kvps:1"]
COMMAND = ["--", "python", "train.py"]
EXAMPLE = [
    *("-n", "2", "-s", "2", "--image", "kvps:latest", "--max-restarts", "3", "--grace", "30"),
    *("--name", "digits", "--", "python", "/opt/kvps/examples/digits.py", "--store", "dist_sync"),
]
"""The job of deploy/kubernetes, which is that of deploy/docker-compose.yml."""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command prints to stdout."""
    assert launch.main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error of a command that does not work."""
    assert launch.main(arguments) == 78
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize("kind", KINDS)
def test_dry_run_prints_manifests(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    text = printed(capsys, *ARGUMENTS, f"--dry-run={kind}", *COMMAND)
    assert text == printed(capsys, *ARGUMENTS, "--dry-run", kind, *COMMAND)
    assert "\n---\napiVersion: " in text
    assert "name: kvps\n" in text


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_yaml_of_the_objects(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    text = printed(capsys, *ARGUMENTS, "--name", "digits", f"--dry-run={kind}", *COMMAND)
    assert list(yaml.safe_load_all(text)) == manifests(SMALL, kind)


def test_every_flag_reaches_the_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    more = [
        *("--namespace", "team", "--name", "digits", "--cpu", "3", "--memory", "5Gi", "--gpu", "2"),
        *("--server-cpu", "6", "--server-memory", "7Gi", "--checkpoint-claim", "cuts"),
        *("--checkpoint-every", "61", "--max-restarts", "9", "--grace", "21", "--env", "A=b c"),
    ]
    text = printed(capsys, *ARGUMENTS, "--dry-run=jobset", *more, *COMMAND)
    for part in (
        *("namespace: team", "name: digits", 'cpu: "3"', 'memory: "5Gi"', "nvidia.com/gpu: 2"),
        *('cpu: "6"', 'memory: "7Gi"', "claimName: cuts", '- "61"', "maxRestarts: 9", '- "21"'),
        *('value: "b c"', "replicas: 4", "replicas: 2"),
    ):
        assert f" {part}\n" in text, part


def test_the_secrets_are_made_by_commands_that_are_comments(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*ARGUMENTS, "--namespace", "team", "--keys", "/my keys", "--dry-run=k8s"]
    head, _ = printed(capsys, *flags, *COMMAND).split("---\n", 1)
    lines = head.splitlines()
    assert all(line.startswith("#") for line in lines)
    assert "#   kvps keygen '/my keys'" in lines
    for role in ("scheduler", "server", "worker"):
        start = f"#   kubectl create secret generic kvps-{role}-keys --namespace team \\"
        files = lines[lines.index(start) + 1 :]
        assert f"'/my keys/{role}.key'" in files[0]
        assert any("'/my keys/public/scheduler.pub'" in line for line in files)


def test_a_job_without_servers_needs_no_secret_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *ARGUMENTS, "-s", "0", "--dry-run=jobset", *COMMAND)
    assert "kvps-server" not in text


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--checkpoint-dir", "a"], "give --checkpoint-claim NAME"),
        (["--insecure"], "omit it"),
        (["--env-server", "A=1"], "--env-server and --env-worker have no manifest"),
        (["-n", "0"], "-n 0: use 1 or more workers"),
        (["-n", "x"], "-n='x' is not a number"),
        (["--name", "Digits"], "RFC 1123"),
        (["--env", "A"], "write it as NAME=VALUE"),
        (["--env", "KVPS_RANK=1"], "contradicts the manifest"),
        (["--gpu", "-1"], "--gpu"),
        (["--grace", "0"], "--grace"),
        (["--dry-run=compose"], "invalid choice"),
    ],
)
def test_a_wrong_flag_is_refused(capsys: pytest.CaptureFixture[str], more: list[str], told: str) -> None:
    assert told in refused(capsys, *ARGUMENTS, "--dry-run=jobset", *more, *COMMAND)


def test_an_image_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "-n", "1", "--dry-run=jobset", *COMMAND)
    assert "--image is missing" in told
    assert "docker build" in told


@pytest.mark.parametrize("flag", ["--image", "--name", "--namespace", "--gpu", "--checkpoint-claim"])
def test_a_flag_for_kubernetes_does_nothing_else(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert f"{flag} needs --dry-run" in refused(capsys, "-n", "1", flag, "1", "--", "true")


@pytest.mark.parametrize("kind", KINDS)
def test_the_bases_are_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, kind: str
) -> None:
    text = printed(capsys, f"--dry-run={kind}", *EXAMPLE)
    place = BASES / kind / "job.yaml"
    if request.config.getoption("--rewrite", default=False):
        place.write_text(text, encoding="utf-8")
    assert place.read_text(encoding="utf-8") == text, "run pytest tests/unit/launchers --rewrite"
    resources = (BASES / kind / "kustomization.yaml").read_text(encoding="utf-8")
    assert "\nresources: [job.yaml]\n" in resources
