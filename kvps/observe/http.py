"""The HTTP endpoints of a process: probes, metrics and status, and at the scheduler the dashboard.

They are read-only, and answer from the newest sample. A client may hold a connection for some
seconds, and only some clients at a time: of more, the oldest is cut off, so that open connections
never keep a probe out. A few clients may have /events, each for as long as it reads them. Where
KVPS_HTTP_TOKEN is set, all but /livez, /readyz and the dashboard's files ask for it as a bearer token.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from kvps.errors import ConfigError
from kvps.observe import metrics
from kvps.observe.place import Place
from kvps.observe.sampler import NOTHING, STILL_MAX_S, Sample, Sampler

log = logging.getLogger("kvps")
READ_MAX_S = 5.0
"""How long a client may send nothing."""
CLIENTS_MAX = 16
"""Connections at a time; of more, the oldest is cut off."""
STREAMS_MAX = 6
"""Clients that have events at a time; of more, the newest is sent away."""
KEEP_ALIVE_S = 2.0
"""How often something is sent along a stream: a client that is gone is noticed by that."""
SEND_BYTES = 256 << 10
"""Bytes of events that may wait in the kernel for a client that does not read."""
PLAIN, JSON = "text/plain; charset=utf-8", "application/json"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every answer: a page has nothing from another host, and no inline script."""


class Dashboard(Protocol):
    """The page that a scheduler serves: it draws what /history, /statusz and /events have."""

    def file(self, path: str) -> tuple[str, bytes] | None:
        """Return the content type and the content of the file at ``path``; None if there is none."""

    def history(self) -> dict[str, object]:
        """Return the samples of the last minutes."""


class HttpServer(ThreadingHTTPServer):
    """Serves the samples of one process.

    Args:
        place: where.
        role: ``scheduler`` or ``server``.
        sampler: has the samples.
        dashboard: the page with its history; None without a dashboard.

    Raises:
        ConfigError: if it cannot listen there.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, place: Place, role: str, sampler: Sampler[Any], dashboard: Dashboard | None = None
    ) -> None:
        self.place, self.role, self.sampler, self.dashboard = place, role, sampler, dashboard
        self._streams = threading.BoundedSemaphore(STREAMS_MAX)
        self._clients: list[socket.socket] = []
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        try:
            super().__init__((place.host, place.port), _Handler)
        except OSError as error:
            if place.is_shared and place.port and error.errno == errno.EADDRINUSE:
                super().__init__((place.host, 0), _Handler)
                return
            raise ConfigError(
                f"cannot serve HTTP at {place.host}:{place.port}: {error.strerror}. Choose another --http, "
                "or port 0 for a free one"
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

    def answer(self, path: str, token: str, host: str = "") -> tuple[int, str, bytes]:
        """Return the status, the content type and the body of the answer to a GET.

        Args:
            path: the path of the request.
            token: the header ``Authorization``.
            host: the header ``Host``.
        """
        sampler, sample = self.sampler, self.sampler.newest
        if path == "/livez":
            if sampler.is_live:
                return 200, PLAIN, b"ok\n"
            why = f"the loop has not turned for {sampler.still_s:.0f} s (limit {STILL_MAX_S:g} s)\n"
            return 503, PLAIN, why.encode()
        if path == "/readyz":
            is_ready = sample.is_ready and sampler.is_live
            return (200, PLAIN, b"ok\n") if is_ready else (503, PLAIN, b"not ready\n")
        if self.dashboard is not None and (file := self.dashboard.file(path)) is not None:
            return (200, *file)  # it shows nothing without what is guarded below
        if path not in self.guarded:
            return 404, PLAIN, f"there are /livez, /readyz, {', '.join(self.guarded)}\n".encode()
        if not self.place.is_named_by(host):
            return 403, PLAIN, b"ask by the address of this host, or by localhost\n"
        wanted = None if self.place.token is None else f"Bearer {self.place.token}"
        if wanted is not None and not hmac.compare_digest(wanted.encode(), token.encode()):
            return 401, PLAIN, b"a bearer token is needed\n"
        if path == "/metrics":
            if not metrics.has_library():
                return 501, PLAIN, f"{metrics.MISSING}\n".encode()
            return 200, metrics.CONTENT_TYPE, metrics.text_of(self.role, sample)
        if path == "/history" and self.dashboard is not None:
            with sampler.changed:
                return 200, JSON, json.dumps(self.dashboard.history()).encode()
        if path == "/events":
            return 200, "text/event-stream; charset=utf-8", b""
        return 200, JSON, json.dumps(self.document(sample), indent=2).encode() + b"\n"

    @property
    def guarded(self) -> tuple[str, ...]:
        """The paths that the token guards."""
        more = () if self.dashboard is None else ("/history", "/events")
        return "/metrics", "/statusz", *more

    def document(self, sample: Sample) -> dict[str, object]:
        """Return what /statusz and /events show of a sample."""
        return {"role": self.role, "live": self.sampler.is_live, **sample.status}

    def events(self) -> Iterator[bytes]:
        """Yield each new sample as a server-sent event; end with the sampler."""
        sampler, seen = self.sampler, NOTHING
        while not sampler.is_ended:
            with sampler.changed:
                if sampler.newest is seen:
                    sampler.changed.wait(KEEP_ALIVE_S)
                newest = sampler.newest
            if newest is seen:
                yield b": nothing new\n\n"
                continue
            seen = newest
            yield b"data: " + json.dumps(self.document(newest)).encode() + b"\n\n"

    def begin_stream(self, request: Any) -> bool:
        """Return whether another client may have events; it no longer counts against the limit of clients."""
        if not self._streams.acquire(blocking=False):
            return False
        with self._lock, suppress(ValueError):
            self._clients.remove(request)
        return True

    def end_stream(self) -> None:
        """Let another client have events."""
        self._streams.release()


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    timeout = READ_MAX_S

    def do_GET(self) -> None:
        """Answer."""
        path, token = self.path.partition("?")[0], self.headers.get("Authorization", "")
        status, kind, body = self.server.answer(path, token, self.headers.get("Host", ""))
        if path == "/events" and status == 200:
            self._stream(kind)
            return
        self._head(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")

    def _stream(self, kind: str) -> None:
        """Send events as long as the client reads them: a write that waits for long ends the connection."""
        if not self.server.begin_stream(self.request):
            self._head(503, PLAIN)
            self.send_header("Retry-After", "5")
            self.end_headers()
            self.wfile.write(b"too many clients have this page open\n")
            return
        try:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
            self._head(200, kind)
            self.end_headers()
            for event in self.server.events():
                self.wfile.write(event)
        except OSError:
            log.debug("a reader of events left, or did not read", exc_info=True)
        finally:
            self.server.end_stream()
            self.close_connection = True

    def version_string(self) -> str:
        """Return the name of the server, without the version of Python."""
        return "kvps"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""


@contextmanager
def serving(
    place: Place, role: str, sampler: Sampler[Any], dashboard: Dashboard | None = None
) -> Iterator[HttpServer]:
    """Serve at ``place`` as long as the block runs."""
    server = HttpServer(place, role, sampler, dashboard)
    host, port = server.server_address[:2]
    log.info("http at %s:%s", host, port)
    if not metrics.has_library():
        log.info("%s", metrics.MISSING)
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
