"""The flags of torchrun, and two agents of a scheduler that is a table: joining, closing, and no answer."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Event, Lock

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings, RendezvousTimeout

from kvps.core.scheduler.saved_state import RendezvousTable, RunState
from kvps.errors import ConfigError, Overload, SchedulerLost
from kvps.platforms.torchrun import handler as handlers
from kvps.platforms.torchrun import holder as holders
from kvps.platforms.torchrun.handler import Handler, create, scheduler_of
from kvps.platforms.torchrun.holder import Doing, Holder, decode, encode
from kvps.protocol.membership import Rendezvous, RendezvousIs


class Scheduler:
    """A table of states, and what it fails with."""

    def __init__(self) -> None:
        self.table = RendezvousTable()
        self.failure: Exception | None = None
        self.limits: list[float] = []
        self._lock = Lock()  # a scheduler answers one request after another

    def ask(self, request: Rendezvous, limit_s: float) -> RendezvousIs:
        self.limits.append(limit_s)
        if self.failure is not None:
            raise self.failure
        with self._lock:
            return self.table.answer(1, request)

    def agent(self, least: int = 1, alive_s: float = 600.0) -> Handler:
        """Return an agent that does not wait for more nodes than there must be."""
        timeout = RendezvousTimeout(last_call=timedelta(seconds=0.1))
        alive = timedelta(seconds=alive_s / 3)
        settings = RendezvousSettings("run", least, 2, timeout, alive, keep_alive_max_attempt=3)
        return Handler(settings, "127.0.0.1", Holder(self.ask, settings, 7.0))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch look at the state twenty times in a second."""
    monkeypatch.setattr(holders, "READ_EVERY_S", 0.0)
    monkeypatch.setattr(dynamic_rendezvous, "_delay", lambda seconds: Event().wait(0.05))


def test_two_agents_agree_on_ranks_and_meet_in_one_store() -> None:
    scheduler = Scheduler()
    agents = [scheduler.agent(2) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(Handler.next_rendezvous, agents)
    assert {first.rank, second.rank} == {0, 1}
    assert first.world_size == second.world_size == 2
    assert first.bootstrap_store_info == second.bootstrap_store_info
    first.store.set("key", "value")
    assert second.store.get("key") == b"value"
    assert agents[0].shutdown()
    assert agents[1].shutdown()
    assert agents[1].is_closed()


def test_the_next_round_has_a_store_of_its_own() -> None:
    scheduler = Scheduler()
    agents = [scheduler.agent(2) for _ in range(2)]
    rounds = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            first, second = pool.map(Handler.next_rendezvous, agents)
            assert {first.rank, second.rank} == {0, 1}
            assert first.bootstrap_store_info == second.bootstrap_store_info
            rounds.append(first.bootstrap_store_info)
    assert rounds[0] != rounds[1]
    for agent in agents:
        agent.shutdown()


def test_a_closed_run_is_closed_for_its_agents_and_open_for_the_next_run() -> None:
    scheduler = Scheduler()
    handler = scheduler.agent()
    handler.next_rendezvous()
    handler.shutdown()
    with pytest.raises(RendezvousClosedError):
        scheduler.agent().next_rendezvous()

    for run, (token, lines) in scheduler.table.runs.items():
        state, meeting = decode(lines)
        state.last_heartbeats = dict.fromkeys(state.last_heartbeats, datetime(2026, 1, 1, tzinfo=UTC))
        scheduler.table.runs[run] = RunState(token, encode(state, meeting))
    again = scheduler.agent()
    assert again.next_rendezvous().world_size == 1
    again.shutdown()


def test_an_agent_that_joins_has_patience_and_then_ends() -> None:
    scheduler = Scheduler()
    scheduler.failure = SchedulerLost("no answer from the scheduler")
    with pytest.raises(RendezvousConnectionError, match="no answer from the scheduler"):
        scheduler.agent().next_rendezvous()
    assert scheduler.limits == [7.0]


def test_an_agent_whose_workers_train_goes_on_without_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler()
    agent = scheduler.agent()
    agent.next_rendezvous()
    agent._stop_heartbeats()  # here they are sent by hand
    scheduler.failure = SchedulerLost("no answer")
    monkeypatch.setattr(holders, "TOLD_AFTER_S", 0.0)
    assert agent.num_nodes_waiting() == 0
    agent._holder.mark_dirty()
    assert agent._holder.sync() is False, "nothing was written"
    assert scheduler.limits[-1] == holders.RUNNING_S
    assert caplog.text.count("continues with the ranks that it has: no answer") == 1
    scheduler.failure = None
    before = agent._holder.state.last_heartbeats.copy()
    agent._holder.sync()
    assert not agent.is_closed()
    after = agent._holder.state.last_heartbeats
    assert after.keys() == before.keys()
    assert all(after[node] > before[node] for node in after), "not silent while it was away"


def test_an_agent_that_closes_does_not_need_the_scheduler() -> None:
    scheduler = Scheduler()
    agent = scheduler.agent()
    agent.next_rendezvous()
    scheduler.failure = SchedulerLost("the job is over")
    assert agent.shutdown()
    assert agent._holder.doing is Doing.CLOSING


def test_a_refusal_ends_an_agent() -> None:
    scheduler = Scheduler()
    agent = scheduler.agent()
    agent.next_rendezvous()
    scheduler.failure = Overload("too long")
    with pytest.raises(RendezvousConnectionError, match="too long"):
        agent.num_nodes_waiting()
    assert not agent.shutdown()


def test_a_scheduler_that_has_forgotten_the_run_begins_a_new_one() -> None:
    scheduler = Scheduler()
    agent = scheduler.agent()
    agent.next_rendezvous()
    scheduler.table = RendezvousTable()
    assert agent.num_nodes_waiting() == 0
    assert agent.next_rendezvous().world_size == 1
    agent.shutdown()


def test_the_others_join_another_round_if_the_first_node_is_lost_before_they_meet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler()
    agents = [scheduler.agent(alive_s=3.0), scheduler.agent(alive_s=3.0)]
    truly = Handler._create_tcp_store_server
    ended = []

    def end_once(self: Handler, address: str, port: int) -> object:
        if not ended:
            ended.append(self)
            self._stop_heartbeats()
            raise KeyboardInterrupt  # as if its process had ended
        return truly(self, address, port)

    monkeypatch.setattr(Handler, "_create_tcp_store_server", end_once)
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(agent.next_rendezvous) for agent in agents]
        errors = [result.exception(60) for result in results]
    (lost,) = [item for item, error in zip(agents, errors, strict=True) if error]
    assert lost is ended[0]
    (info,) = [result.result() for result in results if not result.exception()]
    assert (info.rank, info.world_size) == (0, 1)
    assert "joins another round: the first node of round 0 ended" in caplog.text


# --- the flags ----------------------------------------------------------------------------------------


def params(endpoint: str = "", run_id: str = "run", **more: str) -> RendezvousParameters:
    return RendezvousParameters("kvps", endpoint, run_id, 1, 2, **more)


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("node1", "tcp://node1:9091"),
        ("node1:9000", "tcp://node1:9000"),
        ("tcp://node1:9000", "tcp://node1:9000"),
        ("[::1]", "tcp://[::1]:9091"),
        ("", "tcp://elsewhere:1"),
    ],
)
def test_the_endpoint_names_the_scheduler(
    endpoint: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPS_SCHEDULER", "tcp://elsewhere:1")
    assert scheduler_of(endpoint) == address


def test_without_a_scheduler_it_says_what_to_give() -> None:
    with pytest.raises(RendezvousConnectionError, match="give --rdzv-endpoint=HOST:PORT"):
        create(params())
    with pytest.raises(ConfigError, match="--rdzv-endpoint='http://a:1'"):
        scheduler_of("http://a:1")
    with pytest.raises(RendezvousConnectionError, match="1 to 256 printable"):
        create(params("node1", "a\nb"))


def test_the_flags_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler()
    monkeypatch.setattr(handlers, "_ask", lambda address, keys, *asked: scheduler.ask(*asked))
    monkeypatch.setenv(
        "KVPS_SCHEDULER", ""
    )  # to be as it was afterwards: delenv() alone would leave what is set here
    monkeypatch.delenv("KVPS_SCHEDULER")
    plain = create(params("127.0.0.1:9"))
    assert (plain.get_backend(), plain.get_run_id()) == ("kvps", "run")
    assert os.environ["KVPS_SCHEDULER"] == "tcp://127.0.0.1:9"
    assert plain._this_node.addr == "127.0.0.1"
    assert plain.settings.timeout.join == timedelta(seconds=600)
    assert plain.settings.keep_alive_interval == timedelta(seconds=5)
    assert scheduler.limits == [20.0]
    other = create(
        params("127.0.0.1:9", join_timeout="3", keep_alive_interval="2", read_timeout="4", local_addr="me")
    )
    assert other.settings.timeout.join == timedelta(seconds=3)
    assert other.settings.keep_alive_interval == timedelta(seconds=2)
    assert other._this_node.addr == "me"
    assert scheduler.limits[-1] == 4.0
