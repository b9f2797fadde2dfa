"""The description of a job that a platform is to run, checked where it is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvps.errors import ConfigError

NAME_MAX = 40
"""Characters of a name: Kubernetes appends a role, two numbers and five random letters, and allows
63 in all."""
NAMESPACE_MAX = 63
OWN_VARIABLES = (
    *("KVPS_SCHEDULER", "KVPS_BIND", "KVPS_WORKERS", "KVPS_SERVERS", "KVPS_RANK", "KVPS_KEYS"),
    *("KVPS_STATE", "KVPS_CHECKPOINT_DIR", "KVPS_CHECKPOINT_EVERY", "KVPS_GRACE"),
    *("KVPS_INSECURE", "KVPS_ADVERTISE"),
)
"""Variables that the manifests set, or that would contradict them."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_QUANTITY = re.compile(r"(0*[1-9][0-9]*(\.[0-9]+)?|0*\.[0-9]*[1-9][0-9]*)(m|[kMGTPE]i?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that one process requests; the memory is its limit, too."""

    cpu: str
    memory: str
    gpu: int = 0


@dataclass(frozen=True, slots=True)
class JobDescription:
    """A job: its processes, their resources, and how often each is started again.

    Raises:
        ConfigError: for a value that the platform or a kvps process would refuse.
    """

    name: str
    image: str
    workers: int
    servers: int
    command: tuple[str, ...]
    namespace: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of servers and workers."""
    worker: Resources = Resources("1", "4Gi")
    server: Resources = Resources("1", "4Gi")
    scheduler: Resources = Resources("250m", "512Mi")
    checkpoint_claim: str | None = None
    """The PersistentVolumeClaim for checkpoints and for the state of the scheduler; None for neither."""
    checkpoint_every: float = 0.0
    max_restarts: int = 0
    grace_s: float | None = None

    def __post_init__(self) -> None:
        _demand_name("--name", self.name, NAME_MAX)
        if self.namespace is not None:
            _demand_name("--namespace", self.namespace, NAMESPACE_MAX)
        if not self.image or self.image.startswith("-") or any(c.isspace() for c in self.image):
            raise ConfigError(
                f"--image {self.image!r} is not the name of an image: build it with 'docker build -f "
                "deploy/Dockerfile -t REGISTRY/kvps .', push it, and give --image REGISTRY/kvps"
            )
        if self.workers < 1:
            raise ConfigError(f"-n {self.workers}: use 1 or more workers")
        if not self.command:
            raise ConfigError("no command: put it after --, as in '-- python train.py'")
        for flag, given in (
            ("--cpu", self.worker.cpu),
            ("--memory", self.worker.memory),
            ("--server-cpu", self.server.cpu),
            ("--server-memory", self.server.memory),
        ):
            if not _QUANTITY.fullmatch(given):
                raise ConfigError(
                    f"{flag} {given!r} is not a quantity of Kubernetes above 0: write it as 500m, 2 or 4Gi"
                )
        for name in self.env:
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(f"--env {name!r} is not the name of a variable: use letters, digits and _")
            if name in OWN_VARIABLES:
                raise ConfigError(
                    f"--env {name} contradicts the manifest, which sets the place of each process: omit it"
                )
        claim = self.checkpoint_claim
        if claim is not None and not (_SUBDOMAIN.fullmatch(claim) and len(claim) <= 253):
            raise ConfigError(
                f"--checkpoint-claim {claim!r} is not the name of a PersistentVolumeClaim: use lower-case "
                "letters, digits, '-' and '.'"
            )
        if self.checkpoint_every and claim is None:
            raise ConfigError(
                f"--checkpoint-every {self.checkpoint_every:g} has no volume to write to: give "
                "--checkpoint-claim NAME with a PersistentVolumeClaim of the namespace"
            )


def _demand_name(flag: str, given: str, most: int) -> None:
    if not _LABEL.fullmatch(given) or len(given) > most:
        raise ConfigError(
            f"{flag} {given!r} is not an RFC 1123 label that begins with a letter: use lower-case letters, "
            f"digits and '-', {most} characters at most"
        )
