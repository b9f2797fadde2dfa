"""How a rank stands, in words; and what its beats tell of its script."""

from kvps.core.liveness import Progress


def test_silent_process_of_a_live_supervisor_hangs() -> None:
    script = Progress(0, 0.0)
    script.beat(7, "barrier()", 1.0)
    assert script.words(3.0) == "alive, last call 2 s ago"  # a busy one is in some call, too
    assert script.words(43.0) == "hangs: its kvps-worker is alive, its process has been silent for 42 s"
