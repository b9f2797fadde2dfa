"""Log lines as JSON: what each line has, who speaks, and the lines of other processes."""

import json
import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from kvps.errors import ConfigError
from kvps.observe import logs


@pytest.fixture
def speaking() -> Iterator[None]:
    """Restore who speaks."""
    before = logs._process
    yield
    logs.speak_as(before)


def record(text: str, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("kvps", logging.WARNING, "f.py", 1, text, (), None)
    made.created = 1_800_000_000.25
    vars(made).update(more)
    return made


@pytest.mark.usefixtures("speaking")
def test_a_line_has_time_level_role_rank_event_and_fields() -> None:
    logs.speak_as(lambda: logs.Speaker("server", 3))
    text = logs.JsonLines().format(record('two\nlines "quoted" \x1b[2J é', fields={"key": "w"}))
    assert "\n" not in text
    assert text.isascii()
    shown = json.loads(text)
    assert shown.pop("fields")["key"] == "w"
    assert shown == {
        "time": "2027-01-15T08:00:00.250000Z",
        "level": "warning",
        "role": "server",
        "rank": 3,
        "event": 'two\nlines "quoted" \x1b[2J é',
    }


def test_an_exception_is_one_field() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        text = logs.JsonLines().format(record("failed", exc_info=sys.exc_info()))
    assert "\n" not in text
    assert "ValueError: no" in json.loads(text)["fields"]["traceback"]


def test_values_unknown_to_json_are_written_as_text() -> None:
    text = logs.JsonLines().format(record("odd", fields={"what": {1, 2}.__class__}))
    assert json.loads(text)["fields"]["what"] == "<class 'set'>"


@pytest.mark.usefixtures("speaking")
def test_a_thread_may_speak_as_another_member() -> None:
    logs.speak_as(lambda: logs.Speaker("worker", 0))
    heard = []

    def loop() -> None:
        logs.speak_in_thread_as(lambda: logs.Speaker("server", 1))
        heard.append(logs.speaker())

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert heard == [("server", 1)]
    assert logs.speaker() == ("worker", 0)


def test_lines_of_others_are_wrapped_unless_they_are_log_lines() -> None:
    who = logs.Speaker("worker", 1)
    mine = logs.line("info", "joined", logs.Speaker("server", 0), {}).encode()
    assert logs.wrapped(mine, who, "stderr") == mine
    for text in (b"epoch 3 \xff", b"{not json", b'{"loss": 1}', b"", b"[1]"):
        shown = json.loads(logs.wrapped(text, who, "stdout"))
        assert shown["event"] == text.decode(errors="replace")
        assert (shown["role"], shown["rank"], shown["level"]) == ("worker", 1, "info")
        assert shown["fields"] == {"stream": "stdout"}


@pytest.mark.parametrize(
    ("words", "variable", "is_json"),
    [
        (["--log-format", "json"], "", True),
        (["--log-format=JSON"], "text", True),
        (["--log-format", "text"], "json", False),
        (["--log-format"], "json", False),
        (["--", "--log-format", "json"], "", False),
        ([], "json", True),
        ([], "", False),
    ],
)
def test_a_complaint_comes_in_the_format_that_was_asked_for(
    words: list[str], variable: str, is_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPS_LOG_FORMAT", variable)
    assert logs.wants_json(words) is is_json


def test_a_complaint_names_the_command() -> None:
    shown = json.loads(logs.complaint("kvps-server", ConfigError("no port")))
    assert (shown["level"], shown["role"], shown["event"]) == ("error", "server", "no port")


def test_a_format_that_is_none_is_refused() -> None:
    assert logs.as_format("--log-format", "JSON") == "json"
    with pytest.raises(ConfigError, match=r"--log-format='xml': use one of text, json"):
        logs.as_format("--log-format", "xml")


@pytest.fixture
def script_log() -> Iterator[logging.Logger]:
    """The log of a script's stores, as it was before."""
    log = logging.getLogger("kvps")
    handlers, level, propagates = list(log.handlers), log.level, log.propagate
    yield log
    log.handlers[:], log.propagate = handlers, propagates
    log.setLevel(level)


def test_a_scripts_log_is_left_alone_without_the_variable(
    script_log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVPS_LOG_FORMAT", raising=False)
    before = list(script_log.handlers), script_log.level, script_log.propagate
    logs.begin_in_script()
    monkeypatch.setenv("KVPS_LOG_FORMAT", "text")
    logs.begin_in_script()
    assert (script_log.handlers, script_log.level, script_log.propagate) == before


def test_a_scripts_log_is_json_if_the_variable_says_so(
    script_log: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPS_LOG_FORMAT", "json")
    monkeypatch.setenv("KVPS_LOG_LEVEL", "info")
    logs.begin_in_script()
    logs.begin_in_script()  # the second store
    script_log.info("joined")
    (text,) = capsys.readouterr().err.splitlines()
    assert json.loads(text)["event"] == "joined"


def test_a_level_that_is_none_is_refused(script_log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_LOG_FORMAT", "json")
    monkeypatch.setenv("KVPS_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="KVPS_LOG_LEVEL='loud'"):
        logs.begin_in_script()
