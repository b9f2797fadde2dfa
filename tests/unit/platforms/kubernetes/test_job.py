"""The description of a job: what a platform would refuse is refused at once, with the next step."""

from typing import Any

import pytest

from kvps.errors import ConfigError
from kvps.platforms.kubernetes.pods import NAME_MAX, OWN_VARIABLES, JobDescription, Resources

GOOD: dict[str, Any] = {
    "name": "digits",
    "image": "registry.example/kvps:1",
    "workers": 4,
    "servers": 2,
    "command": ("python", "train.py"),
}


def made(**changes: Any) -> JobDescription:
    return JobDescription(**GOOD | changes)


@pytest.mark.parametrize("name", ["a", "digits", "a-1", "a" * NAME_MAX])
def test_an_rfc_1123_label_is_a_name(name: str) -> None:
    assert made(name=name, namespace=name).name == name


@pytest.mark.parametrize("name", ["", "A", "1a", "-a", "a-", "a_b", "a.b", "a b", "é", "a\n", "a" * 41])
def test_another_text_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--name .* RFC 1123 label.*40 characters"):
        made(name=name)


@pytest.mark.parametrize("name", ["", "Team", "a" * 64])
def test_another_text_is_no_namespace(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--namespace .*63 characters"):
        made(namespace=name)


@pytest.mark.parametrize("image", ["", "a b", "--rm"])
def test_an_image_has_a_name(image: str) -> None:
    with pytest.raises(ConfigError, match="docker build"):
        made(image=image)


def test_a_job_has_workers_and_a_command() -> None:
    with pytest.raises(ConfigError, match="-n 0: use 1 or more workers"):
        made(workers=0)
    with pytest.raises(ConfigError, match="no command"):
        made(command=())


@pytest.mark.parametrize("cpu", ["1", "0.5", "500m", ".5"])
def test_a_quantity_is_an_amount(cpu: str) -> None:
    assert made(worker=Resources(cpu, "4Gi")).worker.cpu == cpu


@pytest.mark.parametrize("cpu", ["", "0", "0.0", "-1", "much", "1 Gi", "1GB"])
def test_another_text_is_no_quantity(cpu: str) -> None:
    with pytest.raises(ConfigError, match=r"--cpu .* write it as"):
        made(worker=Resources(cpu, "4Gi"))
    with pytest.raises(ConfigError, match="--server-memory"):
        made(server=Resources("1", cpu))


@pytest.mark.parametrize("name", OWN_VARIABLES)
def test_a_variable_of_the_manifest_stays(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--env {name} contradicts"):
        made(env={name: "x"})


def test_a_variable_has_a_name() -> None:
    with pytest.raises(ConfigError, match="not the name of a variable"):
        made(env={"a-b": "x"})


def test_checkpoints_need_a_claim() -> None:
    with pytest.raises(ConfigError, match=r"--checkpoint-every 60 .* give --checkpoint-claim"):
        made(checkpoint_every=60.0)
    with pytest.raises(ConfigError, match="--checkpoint-claim 'A'"):
        made(checkpoint_claim="A")
    assert made(checkpoint_claim="a.b-1", checkpoint_every=60.0).checkpoint_every == 60.0
