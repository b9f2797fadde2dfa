"""Jobs whose server is lost and made again, as the worker's rules see them; tests/simulation has every moment of them."""

import pytest

from kvps.core.server import options
from tests.simulation.cluster import Cluster
from tests.simulation.test_rebuild import (
    MIDDLE_S,
    REBUILT,
    blind,
    job_of,
    lose,
    optimized,
    relayed,
)
from tests.simulation.test_rebuild import (
    test_a_store_that_cannot_be_made_again_is_lost_to_all as is_lost_to_all,
)
from tests.simulation.test_rebuild import (
    test_stores_beside_it_are_lost as stores_beside_it_are_lost,
)
from tests.simulation.test_rebuild import (
    test_without_another_server_calls_end_when_the_grace_is_over as calls_end,
)
from tests.simulation.training import ON_TIME, play_with


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "CHUNK_BYTES_MIN", 1)


@pytest.mark.parametrize("at_s", [0.089, 0.091, 0.096, 0.1, 0.104, MIDDLE_S, 0.125])
@pytest.mark.parametrize("again_s", [None, 3.01])
def test_a_job_goes_on(at_s: float, again_s: float | None) -> None:
    def prepare(cluster: Cluster) -> None:
        cluster.network.at(at_s, lambda: lose(cluster))
        if again_s is not None:
            cluster.network.at(at_s + again_s, lambda: lose(cluster))

    play_with(job_of(), lambda *_: ON_TIME, REBUILT, prepare)


def test_a_job_that_cannot_go_on_ends() -> None:
    is_lost_to_all(blind, "does not hold what came of it")
    is_lost_to_all(optimized, "its servers have an optimizer")
    is_lost_to_all(relayed, r"worker 0 was in broadcast\(\)")
    calls_end()


def test_other_stores_end_their_calls() -> None:
    stores_beside_it_are_lost()
