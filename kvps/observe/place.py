"""The place where a process serves HTTP, and who may read there.

It stands apart from the endpoints: every command knows the flag, and few load a web server.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvps import config
from kvps.errors import ConfigError

TOKEN = "KVPS_HTTP_TOKEN"


@dataclass(frozen=True, slots=True)
class Place:
    """Where to serve, and the token to ask for; None for none."""

    host: str
    port: int
    token: str | None = None

    def demand_safe(self, is_insecure: bool) -> None:
        """Check that other machines cannot reach it, or that the operator allowed it.

        Raises:
            ConfigError: if they can, and there is neither a token nor ``--insecure``.
        """
        if not (is_insecure or self.token or config.is_loopback(f"tcp://{self._shown}")):
            raise ConfigError(
                f"other machines can reach --http {self._shown}, and would see hosts, process ids and the names "
                f"of stores. Set {TOKEN} to a secret that readers send as a bearer token, bind to "
                "127.0.0.1:PORT, or give --insecure (KVPS_INSECURE=1) in a network that you trust"
            )

    def is_named_by(self, host: str) -> bool:
        """Return whether the header ``Host`` may be that of an honest client.

        On loopback without a token, a page of another site whose name resolves to this host is kept out by it.
        """
        if self.token or not host or not config.is_loopback(f"tcp://{self._shown}"):
            return True
        try:
            return config.host_of(f"tcp://{host}") == self.host or config.is_loopback(
                f"tcp://{host}"
            )
        except ValueError:  # no host at all
            return False

    @property
    def _shown(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def as_place(name: str, given: str) -> Place:
    """Return what ``name`` was given, as a place to serve at.

    Raises:
        ConfigError: if it is none.
    """
    try:
        address = f"tcp://{given}"
        return Place(config.host_of(address), config.port_of(name, address), config.text(TOKEN))
    except ConfigError:
        raise ConfigError(f"{name}={given!r} is not an address; write it as HOST:PORT") from None
