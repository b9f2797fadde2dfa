"""The HTTP endpoints of a process: /livez, /readyz, /metrics and /statusz, each from the newest sample.

They are read-only. A client may hold a connection for some seconds, and only some clients at a time: of more, the
oldest is cut off, so that nobody who opens connections keeps a probe out. Where KVPS_HTTP_TOKEN is set,
/metrics and /statusz ask for it as a bearer token; /livez and /readyz answer anybody by one line.
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvps import config
from kvps.errors import ConfigError
from kvps.observe import exposition
from kvps.observe.sampler import STILL_MAX_S, Sampler

log = logging.getLogger("kvps")
READ_MAX_S = 5.0
"""How long a client may send nothing."""
CLIENTS_MAX = 16
"""Connections at a time; of more, the oldest is cut off."""
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


class Server(ThreadingHTTPServer):
    """Serves the samples of one process.

    Args:
        place: where.
        role: ``scheduler`` or ``server``.
        sampler: has the samples.

    Raises:
        ConfigError: if it cannot listen there.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, place: Place, role: str, sampler: Sampler[Any]) -> None:
        self.place, self.role, self.sampler = place, role, sampler
        self._clients: list[socket.socket] = []
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        try:
            super().__init__((place.host, place.port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve HTTP at {place.host}:{place.port}: {error.strerror}. Choose another --http, or port 0 "
                "for a free one"
            ) from error

    def server_bind(self) -> None:
        """Bind; the base class would ask for the name of this host, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.place.host, int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to serve a client; cut the oldest off if there are too many."""
        with self._lock:
            self._clients.append(request)
            if len(self._clients) > CLIENTS_MAX:
                with suppress(OSError):
                    self._clients.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End with a client."""
        with self._lock, suppress(ValueError):
            self._clients.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave a client behind that broke off."""
        log.debug("an HTTP client broke off", exc_info=True)

    def answer(self, path: str, token: str) -> tuple[int, str, bytes]:
        """Return the status, the content type and the body of the answer to a GET.

        Args:
            path: what is asked for.
            token: the header ``Authorization``.
        """
        plain, sampler, sample = "text/plain; charset=utf-8", self.sampler, self.sampler.newest
        if path == "/livez":
            if sampler.is_live:
                return 200, plain, b"ok\n"
            why = f"the loop has not turned for {sampler.still_s:.0f} s (limit {STILL_MAX_S:g} s)\n"
            return 503, plain, why.encode()
        if path == "/readyz":
            is_ready = sample.is_ready and sampler.is_live
            return (200, plain, b"ok\n") if is_ready else (503, plain, b"not ready\n")
        if path not in ("/metrics", "/statusz"):
            return 404, plain, b"there are /livez, /readyz, /metrics and /statusz\n"
        wanted = None if self.place.token is None else f"Bearer {self.place.token}"
        if wanted is not None and not hmac.compare_digest(wanted.encode(), token.encode()):
            return 401, plain, b"a bearer token is needed\n"
        if path == "/metrics":
            return 200, exposition.CONTENT_TYPE, exposition.text_of(self.role, sample)
        shown = {"role": self.role, "live": sampler.is_live, **sample.status}
        return 200, "application/json", json.dumps(shown, indent=2).encode() + b"\n"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = READ_MAX_S

    def do_GET(self) -> None:
        """Answer."""
        path, token = self.path.partition("?")[0], self.headers.get("Authorization", "")
        status, kind, body = self.server.answer(path, token)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Return the name of the server, without the version of Python."""
        return "kvps"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""


@contextmanager
def serving(place: Place | None, role: str, sampler: Sampler[Any]) -> Iterator[Server | None]:
    """Serve at ``place`` as long as the block runs; nothing at all if it is None."""
    if place is None:
        yield None
        return
    server = Server(place, role, sampler)
    host, port = server.server_address[:2]
    log.info("http at %s:%s", host, port)
    thread = threading.Thread(target=server.serve_forever, name="kvps-http", daemon=True)
    sampler.start()
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        sampler.close()
        thread.join()
