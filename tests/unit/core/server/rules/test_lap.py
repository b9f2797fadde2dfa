"""The steps of an optimizer, told to a timeline."""

import pytest

from tests.support.server_harness import ServerStage


@pytest.mark.parametrize("is_watched", [True, False])
def test_each_step_is_told_at_its_beginning_and_its_end(is_watched: bool) -> None:
    stage = ServerStage(2)
    laps: list[int] = []
    if is_watched:
        stage.server.counts.lap = lambda: laps.append(1)
    stage.open()
    stage.init("w", [1.0, 2.0])
    stage.optimizer("sgd", lr=0.5)
    stage.push(0, "w", [1.0, 1.0], 0)
    assert not laps
    stage.push(1, "w", [1.0, 1.0], 0)
    assert len(laps) == (2 if is_watched else 0)
    assert stage.values("w") == [0.0, 1.0]
