"""The place where a process serves HTTP, and the clients that may read there.

It stands apart from the endpoints: every command knows the flag, and few load a web server.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

from kvps import config
from kvps.errors import ConfigError

VARIABLE, TOKEN = "KVPS_HTTP", "KVPS_HTTP_TOKEN"
WILDCARDS = ("0.0.0.0", "::")
"""Hosts that stand for every address of this machine."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where to serve, and the token to ask for; None for none."""

    host: str
    port: int
    token: str | None = None
    is_shared: bool = False
    """All processes of a host may have been given it (KVPS_HTTP): where the port is in use, take a
    free one."""

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine can reach it."""
        return config.is_loopback(f"tcp://{self.shown}")

    @property
    def of_members(self) -> str:
        """The place for other processes of the same host, as text: a free port for each."""
        return replace(self, port=0).shown

    def url(self, port: int) -> str:
        """Return the address for a browser; ``port`` is the port on which the server listens."""
        host = socket.gethostname() if self.host in WILDCARDS else self.host
        return f"http://{replace(self, host=host, port=port).shown}/"

    def demand_safe(self, is_insecure: bool) -> None:
        """Check that other machines cannot reach it, or that the operator allowed it.

        Raises:
            ConfigError: if they can, and there is neither a token nor ``--insecure``.
        """
        if not (is_insecure or self.token or self.is_loopback):
            raise ConfigError(
                f"other machines can reach --http {self.shown}, and would see hosts, process ids and the "
                f"names of stores. Set {TOKEN} to a secret that readers send as a bearer token, bind to "
                "127.0.0.1:PORT, or give --insecure (KVPS_INSECURE=1) in a network that you trust"
            )

    def is_named_by(self, host: str) -> bool:
        """Return whether an honest client may send this header ``Host``.

        On loopback without a token, a page of another site whose name resolves to this host is
        kept out by it.
        """
        if self.token or not host or not self.is_loopback:
            return True
        try:
            return config.host_of(f"tcp://{host}") == self.host or config.is_loopback(f"tcp://{host}")
        except ValueError:  # no host at all
            return False

    @property
    def shown(self) -> str:
        """The place as ``--http`` takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def as_place(name: str, given: str) -> Place:
    """Return what ``name`` was given, as a place to serve at.

    Raises:
        ConfigError: if it is none.
    """
    try:
        address = f"tcp://{given}"
        host, port = config.host_of(address), config.port_of(name, address)
        return Place(host, port, config.text(TOKEN), is_shared=name == VARIABLE)
    except ConfigError:
        raise ConfigError(f"{name}={given!r} is not an address; write it as HOST:PORT") from None
