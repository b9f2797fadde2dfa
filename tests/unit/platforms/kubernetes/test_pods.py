"""Pods: every role has its own key alone, no rights, and flags that its command takes."""

import re
from pathlib import Path
from typing import Any

import pytest

from kvps.cli import scheduler as scheduler_command
from kvps.cli import server as server_command
from kvps.cli import worker as worker_command
from kvps.errors import ConfigError
from kvps.platforms.kubernetes.manifests import KINDS
from kvps.platforms.kubernetes.pods import NAME_MAX, OWN_VARIABLES, Data, JobDescription, Resources, document
from kvps.runtime import key_files as keys
from tests.unit.platforms.kubernetes.jobs import FULL, JOBS, SMALL, container, pods, variables

COMMANDS = {"scheduler": scheduler_command, "server": server_command, "worker": worker_command}
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def key_files(pod: Any) -> dict[str, str]:
    """Return the files that a pod sees below /keys, by the entry of its secret."""
    (secret,) = [item["secret"] for item in pod["spec"]["volumes"] if "secret" in item]
    return {item["key"]: item["path"] for item in secret["items"]}


# --- keys -----------------------------------------------------------------------------------------


def test_a_role_has_no_secret_key_of_another(kind: str) -> None:
    private = {
        role: sorted(name for name in key_files(pod) if name.endswith(".key"))
        for role, pod in pods(FULL, kind).items()
    }
    assert private == {
        "scheduler": ["look.key", "scheduler.key"],
        "server": ["server.key"],
        "worker": ["worker.key"],
    }


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_the_files_are_those_that_the_process_loads(role: str, tmp_path: Path) -> None:
    made = tmp_path / "keys"
    keys.write(made, keys.generate())
    mounted = tmp_path / "mounted"
    for path in key_files(pods(SMALL, "jobset")[role]).values():
        place = mounted / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((made / path).read_bytes())
        place.chmod(0o600)
    loaded = keys.load(str(mounted), role)
    assert loaded.role is not None
    if role == "scheduler":
        assert {member.role for member in loaded.opens.values()} == {
            "server",
            "worker",
            "admin",
            "look",
            "reader",
        }
        assert keys.load(str(mounted), "look").role is not None


# --- rights and resources -------------------------------------------------------------------------


def test_a_pod_has_no_rights(kind: str) -> None:
    for pod in pods(FULL, kind).values():
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container(pod)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_user_is_that_of_the_image() -> None:
    (user,) = re.findall(r"useradd --uid (\d+)", (ROOT / "deploy" / "Dockerfile").read_text())
    context = pods(SMALL, "jobset")["worker"]["spec"]["securityContext"]
    assert context["runAsUser"] == int(user)


def test_every_mount_has_its_volume(kind: str) -> None:
    for job in JOBS.values():
        for pod in pods(job, kind).values():
            volumes = [item["name"] for item in pod["spec"]["volumes"]]
            mounts = container(pod)["volumeMounts"]
            assert {mount["name"] for mount in mounts} == set(volumes)
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts)


@pytest.mark.parametrize(("role", "threads"), [("worker", "7"), ("server", "2")])
def test_threads_are_the_processors_that_are_requested(role: str, threads: str) -> None:
    assert variables(pods(FULL, "jobset")[role])["OMP_NUM_THREADS"] == threads


# --- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_each_command_takes_its_flags(kind: str, name: str) -> None:
    for role, pod in pods(JOBS[name], kind).items():
        main = container(pod)
        args = main["args"]
        if role != "worker":
            assert main["command"][:2] == ["sh", "-c"]
            assert args.pop(0) == COMMANDS[role].NAME
        else:
            assert main["command"] == [COMMANDS[role].NAME]
            assert tuple(args[args.index("--") + 1 :]) == JOBS[name].command
            args = args[: args.index("--")]
        COMMANDS[role]._parser().parse_args(args)


def test_variables_reach_the_processes_as_they_were_given() -> None:
    for role in ("server", "worker"):
        found = variables(pods(FULL, "jobset")[role])
        assert found["LEVEL"] == "3"
        assert found["PATH_LIKE"] == "$$(HOME)/x"  # Kubernetes makes one $ of two
    assert "LEVEL" not in variables(pods(FULL, "jobset")["scheduler"])


def test_a_pod_has_the_grace_of_its_worker_and_more(kind: str) -> None:
    for role, pod in pods(FULL, kind).items():
        assert pod["spec"]["terminationGracePeriodSeconds"] == 30  # 19.5 s, rounded up, and 10 s
        if role == "worker":
            args = container(pod)["args"]
            assert args[args.index("--grace") + 1] == "19.5"
            assert "lifecycle" not in container(pod)
        else:  # the others stay for the last round
            wait = container(pod)["lifecycle"]["preStop"]["exec"]["command"]
            assert wait == ["sleep", "20"]
    for pod in pods(SMALL, kind).values():
        assert pod["spec"]["terminationGracePeriodSeconds"] == 15
        assert "lifecycle" not in container(pod)


def test_state_and_checkpoints_are_on_the_claim(kind: str) -> None:
    places = {"scheduler": "/state", "server": "/checkpoints"}
    for role, pod in pods(FULL, kind).items():
        claims = [item for item in pod["spec"]["volumes"] if "persistentVolumeClaim" in item]
        assert bool(claims) == (role in places)
        if claims:
            (mount,) = [item for item in container(pod)["volumeMounts"] if item["name"] == "kept"]
            assert mount["mountPath"] == places[role]
            # Two jobs may share a claim, and so may two TrainJobs of one runtime.
            name = "$(JOBSET_NAME)" if kind == "trainjob" else "digits"
            assert mount["subPathExpr"] == name + places[role]
            assert places[role] in container(pod)["args"]
    scheduler = pods(SMALL, kind)["scheduler"]
    assert {"name": "kept", "emptyDir": {}} in scheduler["spec"]["volumes"]


# --- probes ---------------------------------------------------------------------------------------


# --- the description of a job ---------------------------------------------------------------------


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


# --- YAML -----------------------------------------------------------------------------------------


ODD_TEXTS = [
    *("", " ", "a b", "a: b", "- a", "#", "true", "No", "y", "null", "~", "1", "1.5", "0x10", "1e3"),
    *("tcp://h:1", "a\nb", "a\tb", '"', "\\", "'", "{}", "[a]", "&a", "*a", "!a", "|", ">", "%a", "@a"),
    *("é", "日", "\U0001f600", "\x7f", "\x85", "\u2028", "\x01", "2026-01-01", "on", ".inf", "---", "..."),
]


def test_document_is_indented_as_a_person_would() -> None:
    data: Data = {"a": [{"b": 1, "c": {"d": True}}, "x"], "e": {}, "f": [], "g": "1", "h": [["i", 2]]}
    assert document(data) == (
        'a:\n  - b: 1\n    c:\n      d: true\n  - x\ne: {}\nf: []\ng: "1"\nh:\n  - - i\n    - 2\n'
    )


@pytest.mark.parametrize("text", ["true", "No", "1", "", "a: b", "~"])
def test_a_text_of_another_type_is_quoted(text: str) -> None:
    assert document({"a": text}) == f'a: "{text}"\n'


def test_a_character_beyond_ascii_is_one_escape() -> None:
    assert document("\U0001f600") == '"\\U0001f600"\n'


def test_pyyaml_reads_what_was_written() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    texts: list[Data] = [*ODD_TEXTS]
    keyed: dict[str, Data] = {item: item for item in ODD_TEXTS}
    data: Data = {"texts": texts, "keyed": keyed, "numbers": [0, -1, 2**40, True, False], "empty": [{}, []]}
    assert yaml.safe_load(document(data)) == data
