"""How a rank stands, in words; and what its beats tell of its script."""

from kvps.core.liveness import QUIET_AFTER_S, Progress, quiet_in_words


def test_recent_progress_is_told_from_a_possible_hang() -> None:
    assert quiet_in_words(9.0, "request") == "alive, last request 9 s ago"
    assert quiet_in_words(42.0, "request") == "alive, but no progress for 42 s"


def test_a_script_that_calls_makes_progress() -> None:
    script = Progress(0, 100.0)
    assert script.words(101.0) == "alive, has made no call yet"
    script.beat(5, "", 102.0)
    assert script.words(104.0) == "alive, last call 2 s ago"
    script.beat(5, "", 143.5)
    assert script.words(144.0) == "alive, but no progress for 42 s"
    script.beat(6, "", 145.0)
    assert script.words(145.0) == "alive, last call 0 s ago"


def test_script_that_waits_in_a_call_does_not_hang() -> None:
    script = Progress(0, 0.0)
    script.beat(5, "pull()", 10.0)
    script.beat(5, "pull()", 69.0)
    assert script.words(70.0) == "alive, has waited in pull() for 60 s"
    assert script.beat(5, "pull()", 10.0 + 2 * QUIET_AFTER_S) == ""


def test_a_quiet_script_is_worth_a_line_when_that_begins_and_ends() -> None:
    script = Progress(0, 0.0)
    assert script.beat(0, "", QUIET_AFTER_S) == ""  # it may load data before its first call
    script.beat(1, "", 100.0)
    assert script.beat(1, "", 100.0 + QUIET_AFTER_S - 1) == ""
    assert script.beat(1, "", 100.0 + QUIET_AFTER_S) == "alive, but has made no call for 60 s"
    assert script.beat(1, "", 100.0 + QUIET_AFTER_S + 1) == ""
    assert script.beat(2, "", 100.0 + QUIET_AFTER_S + 2) == "calls again"


def test_silent_process_of_a_live_supervisor_hangs() -> None:
    script = Progress(0, 0.0)
    script.beat(7, "barrier()", 1.0)
    assert script.words(3.0) == "alive, last call 2 s ago"  # a busy one is in some call, too
    assert script.words(43.0) == "hangs: its kvps-worker is alive, its process has been silent for 42 s"


def test_a_beat_with_fewer_calls_is_not_the_scripts() -> None:
    script = Progress(0, 0.0)
    script.beat(7, "barrier()", 1.0)
    assert script.is_older(0)
    assert not script.is_older(7)
