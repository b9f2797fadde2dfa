"""The endpoints, in front of a loop that a test turns by hand."""

import json
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvps.core.counts import Counts
from kvps.errors import ConfigError
from kvps.net.transport import Refusals
from kvps.observe import http, metrics, sampler
from kvps.observe.http import CLIENTS_MAX, HttpServer, serving
from kvps.observe.metrics import of_role
from kvps.observe.place import Place, as_place
from kvps.observe.sampler import STILL_MAX_S, Sample, Sampler, network_values
from kvps.runtime.member_process import serving_if_asked
from kvps.tools.dashboard import model as assets
from kvps.tools.dashboard.model import Dashboard


class Loop:
    """A loop and its clock; it turns when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.counts = Counts()
        self.is_ready = False
        self._items: list[Callable[[Any, float], None]] = []
        self.sampler: Sampler[Any] = Sampler(
            self,
            lambda core, now: Sample({("kvps_epoch", ""): 3.0}, {}, self.is_ready, "", {"phase": "new"}),
            lambda core: self.counts,
            lambda: network_values(
                Refusals(Counter(bytes=2, refused=1, unread=4), Counter(no_key=5), Counter(idle=3))
            ),
            lambda: self.now,
        )

    def put(self, item: Callable[[Any, float], None]) -> None:
        self._items.append(item)

    def turn(self) -> int:
        """Do what was put here; return how much that was."""
        items, self._items = self._items, []
        for item in items:
            item(self, self.now)
        if items:
            self.sampler.publish()
        return len(items)


def served(loop: Loop, path: str, token: str = "", place: Place | None = None) -> tuple[int, str, bytes]:
    server = HttpServer(place or Place("127.0.0.1", 0), "server", loop.sampler)
    try:
        return server.answer(path, token)
    finally:
        server.server_close()


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """Return what Prometheus reads, by name and label values."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_livez_is_the_loops_own_tick() -> None:
    loop = Loop()
    assert served(loop, "/livez")[0] == 200
    loop.sampler.ask()
    loop.now += STILL_MAX_S + 1  # the loop does not turn
    status, _, body = served(loop, "/livez")
    assert (status, body) == (503, b"the loop has not turned for 31 s (limit 30 s)\n")
    loop.turn()
    assert served(loop, "/livez")[0] == 200


def test_a_loop_that_stands_still_is_asked_once() -> None:
    loop = Loop()
    for _ in range(5):
        loop.sampler.ask()
    assert loop.turn() == 1
    loop.sampler.ask()
    assert loop.turn() == 1


def test_readyz_needs_a_ready_core_and_a_live_loop() -> None:
    loop = Loop()
    assert served(loop, "/readyz")[0] == 503
    loop.is_ready = True
    loop.sampler.ask()
    loop.turn()
    assert served(loop, "/readyz")[0] == 200
    loop.now += STILL_MAX_S + 1
    assert served(loop, "/readyz")[0] == 503


def test_metrics_are_what_was_counted() -> None:
    loop = Loop()
    loop.counts.add("kvps_pushes_total", "early", by=7)
    loop.counts.observe("kvps_round_duration_seconds", 0.3)
    loop.sampler.ask()
    loop.now += 0.25
    loop.turn()
    status, kind, text = served(loop, "/metrics")
    assert (status, kind) == (200, metrics.CONTENT_TYPE)
    found = samples(text)
    assert found["kvps_pushes_total", "early"] == 7
    assert found["kvps_pushes_total", "counted"] == 0
    assert found["kvps_epoch", ""] == 3
    assert found["kvps_loop_lag_seconds", ""] == found["kvps_loop_lag_max_seconds", ""] == 0.25
    assert found["kvps_round_duration_seconds_bucket", "0.25"] == 0
    assert found["kvps_round_duration_seconds_bucket", "0.5"] == 1
    assert found["kvps_round_duration_seconds_bucket", "+Inf"] == 1
    assert found["kvps_round_duration_seconds_sum", ""] == 0.3
    assert found["kvps_dropped_packets_total", "bytes"] == 2
    assert found["kvps_refused_connections_total", "no_key"] == 5
    assert found["kvps_closed_connections_total", "idle"] == 3
    assert found["kvps_unread_answers_total", ""] == 4
    assert found["kvps_up_info", metrics.__version__] == 1


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_role_shows_its_metrics_before_anything_has_happened(role: str) -> None:
    text = metrics.text_of(role, sampler.Sample())
    families = {
        text_string_to_metric_family.name: text_string_to_metric_family
        for text_string_to_metric_family in text_string_to_metric_families(text.decode())
    }
    for metric in of_role(role):
        family = families.pop(metric.name.removesuffix("_total"))
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert family.samples or (metric.label and not metric.labels)
    assert not families


@pytest.mark.skipif(which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_promtool_accepts_the_metrics(role: str) -> None:
    text = metrics.text_of(role, sampler.Sample())
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_statusz_is_json() -> None:
    loop = Loop()
    loop.sampler.ask()
    loop.turn()
    status, kind, body = served(loop, "/statusz")
    assert (status, kind) == (200, "application/json")
    assert json.loads(body) == {"role": "server", "live": True, "phase": "new"}


def test_a_token_guards_what_is_not_for_everybody() -> None:
    loop, place = Loop(), Place("127.0.0.1", 0, "s3cret")
    for path in ("/metrics", "/statusz"):
        assert served(loop, path, "", place)[0] == 401
        assert served(loop, path, "Bearer wröng", place)[0] == 401
        assert served(loop, path, "Bearer s3cret", place)[0] == 200
    assert served(loop, "/livez", "", place)[0] == 200
    assert served(loop, "/etc/passwd", "Bearer s3cret", place)[0] == 404


def test_other_machines_need_a_token_or_insecure() -> None:
    Place("127.0.0.1", 9).demand_safe(False)
    Place("::1", 9).demand_safe(False)
    Place("0.0.0.0", 9).demand_safe(True)
    Place("0.0.0.0", 9, "token").demand_safe(False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "node-3"):
        with pytest.raises(ConfigError, match="other machines can reach --http"):
            Place(host, 9).demand_safe(False)


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_HTTP_TOKEN", "abc")
    assert as_place("--http", "127.0.0.1:0") == Place("127.0.0.1", 0, "abc")
    assert as_place("--http", "[::1]:80") == Place("::1", 80, "abc")
    assert as_place("KVPS_HTTP", "[::1]:80") == Place("::1", 80, "abc", is_shared=True)
    for bad in ("", "9000", "host", "host:x", "http://host:80", "host:80/metrics"):
        with pytest.raises(ConfigError, match=r"--http=.* is not an address; write it as HOST:PORT"):
            as_place("--http", bad)


def test_without_the_package_of_metrics_the_rest_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with serving(Place("127.0.0.1", 0), "server", Loop().sampler) as server:
        assert server.answer("/statusz", "")[0] == 200
        status, _, text = server.answer("/metrics", "")
    assert status == 501
    assert b"pip install 'kvps[metrics]'" in text


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = Place("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot serve HTTP at"):
            HttpServer(place, "server", Loop().sampler)


def test_a_port_in_use_that_all_processes_of_a_host_were_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = Place("127.0.0.1", taken.getsockname()[1], is_shared=True)
        with serving(place, "server", Loop().sampler) as server:
            assert server.server_port not in (0, place.port)


def test_url_is_usable_in_a_browser() -> None:
    assert Place("127.0.0.1", 0).url(80) == "http://127.0.0.1:80/"
    assert Place("::1", 0).url(80) == "http://[::1]:80/"
    assert Place("0.0.0.0", 0).url(80) == f"http://{socket.gethostname()}:80/"
    assert Place("10.0.0.1", 9464).of_members == "10.0.0.1:0"


def test_over_a_socket() -> None:
    with serving(Place("127.0.0.1", 0), "server", Loop().sampler) as server:
        assert server is not None
        url = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(f"{url}/livez?verbose", timeout=10) as answer:
            assert (answer.status, answer.read()) == (200, b"ok\n")
        for path, data, status in (("/nothing", None, 404), ("/livez", b"x", 501)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(url + path, data, timeout=10)
            assert refused.value.code == status
            refused.value.close()


def test_silent_clients_keep_no_probe_out() -> None:
    with serving(Place("127.0.0.1", 0), "server", Loop().sampler) as server:
        assert server is not None
        address = ("127.0.0.1", server.server_port)
        silent = [socket.create_connection(address, 10) for _ in range(CLIENTS_MAX + 5)]
        with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/livez", timeout=3) as answer:
            assert answer.status == 200
        assert silent[0].recv(1) == b""  # the oldest was cut off
        for item in silent:
            item.close()


def test_nothing_is_served_where_nothing_is_asked_for() -> None:
    loop = Loop()
    with serving_if_asked(None, "server", loop.sampler):
        assert not [thread for thread in threading.enumerate() if thread.name == "kvps-http"]
    assert loop.turn() == 0


def dashboard(loop: Loop, place: Place | None = None) -> HttpServer:
    """Return the endpoints of a scheduler, with a dashboard."""
    return HttpServer(place or Place("127.0.0.1", 0), "scheduler", loop.sampler, Dashboard())


def test_only_a_scheduler_has_the_dashboard() -> None:
    loop = Loop()
    for path in (*assets.FILES, "/events", "/history"):
        assert served(loop, path)[0] == 404
    server = dashboard(loop)
    for path, (_, kind) in assets.FILES.items():
        status, found, body = server.answer(path, "")
        assert (status, found, bool(body)) == (200, kind, True)
    assert json.loads(server.answer("/history", "")[2])["age_s"] == []
    assert b"/events" in server.answer("/nothing", "")[2]
    server.server_close()


def test_the_page_asks_no_other_host_and_has_no_inline_script() -> None:
    page = assets.read("/")[1].decode()
    assert not re.search(r"<script(?![^>]*src=\"/)|<style|style=|\son\w+=|https?:", page)
    own = b"".join([assets.read(path)[1] for path in ("/page.js", "/format.js", "/page.css")])
    assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?:|url\(", own)
    files = {name for name, _ in assets.FILES.values()} | {"LICENSE.uplot"}
    folder = Path(assets.__file__).parent / "page"
    assert {field.name for field in folder.iterdir()} == files


def test_the_token_guards_all_figures_and_none_of_the_files() -> None:
    server = dashboard(Loop(), Place("127.0.0.1", 0, "s3cret"))
    for path in server.guarded:
        assert server.answer(path, "")[0] == 401
        assert server.answer(path, "Bearer s3cret")[0] == 200
    assert server.answer("/", "")[0] == 200
    server.server_close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("", 200),
        ("127.0.0.1:9464", 200),
        ("localhost:9464", 200),
        ("LOCALHOST", 200),
        ("[::1]:9464", 200),
        ("127.0.0.1", 200),
        ("evil.example:9464", 403),
        ("127.0.0.1.evil.example", 403),
        ("[", 403),
    ],
)
def test_on_loopback_a_page_of_another_site_is_refused_by_its_host(host: str, status: int) -> None:
    server = dashboard(Loop())
    for path in server.guarded:
        assert server.answer(path, "", host)[0] == status
    assert server.answer("/livez", "", host)[0] == 200
    server.server_close()


def test_events_are_the_newest_samples_until_the_sampler_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEP_ALIVE_S", 0.01)
    loop = Loop()
    server = dashboard(loop)
    events = server.events()
    assert next(events) == b": nothing new\n\n"
    loop.sampler.ask()
    loop.turn()
    sent = json.loads(next(events).removeprefix(b"data: "))
    assert sent == json.loads(server.answer("/statusz", "")[2])
    assert next(events) == b": nothing new\n\n"
    loop.sampler.start()
    loop.sampler.close()
    assert list(events) == []
    server.server_close()


def test_a_reader_of_events_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SEND_BYTES", 4096)
    monkeypatch.setattr(http, "STREAMS_MAX", 1)
    monkeypatch.setattr(http._Handler, "timeout", 0.2)
    monkeypatch.setattr(HttpServer, "events", lambda self: iter([b"x" * 65536] * 1000))
    loop = Loop()
    with serving(Place("127.0.0.1", 0), "scheduler", loop.sampler, Dashboard()) as server:
        assert server is not None
        request = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.server_port), 10) as silent:
            silent.sendall(request)
            assert silent.recv(12) == b"HTTP/1.0 200"
            with socket.create_connection(("127.0.0.1", server.server_port), 10) as second:
                second.sendall(request)
                assert second.recv(12) in (b"HTTP/1.0 503", b"HTTP/1.0 200")
            assert server._streams.acquire(timeout=30.0)  # it was given back


def test_a_stream_is_not_cut_off_by_many_other_clients() -> None:
    loop = Loop()
    with serving(Place("127.0.0.1", 0), "scheduler", loop.sampler, Dashboard()) as server:
        assert server is not None
        address = ("127.0.0.1", server.server_port)
        with socket.create_connection(address, 30) as stream:
            stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert stream.recv(12) == b"HTTP/1.0 200"
            silent = [socket.create_connection(address, 10) for _ in range(CLIENTS_MAX + 2)]
            assert silent[0].recv(1) == b""
            while b"nothing new" not in (some := stream.recv(4096)):
                assert some
            for item in silent:
                item.close()


def test_every_answer_forbids_other_hosts_and_inline_scripts() -> None:
    with serving(Place("127.0.0.1", 0), "scheduler", Loop().sampler, Dashboard()) as server:
        assert server is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=10) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'self'" in policy
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_a_document_is_made_outside_the_loop_and_the_loop_does_what_comes_after() -> None:
    made: list[Sample] = []

    class Queue:
        def put(self, item: Callable[[Any, float], None]) -> None:
            item(None, 7.0)

    def document(sample: Sample) -> dict[str, object]:
        made.append(sample)
        return {"at": sample.at}

    done: list[Any] = []
    sampler_ = Sampler(
        Queue(),
        lambda core, now: Sample({}, {}, True, ""),
        lambda core: Counts(),
        dict,
        also=lambda core, now: done.append("after"),
        document=document,
    )
    sampler_.ask()
    assert (done, made) == (["after"], [])
    sampler_.start()
    with sampler_.changed:
        assert sampler_.changed.wait_for(lambda: sampler_.newest.status, 30.0)
    assert sampler_.newest.status == {"at": 7.0}
    sampler_.close()
