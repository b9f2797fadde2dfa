"""The rendezvous of other launchers: compare-and-set of one small state for each run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvps.core.effects import Save
from kvps.core.scheduler.saved_state import LINE_BYTES, RUNS_MAX, STATE_BYTES_MAX, RendezvousTable
from kvps.errors import Overload
from kvps.protocol.envelope import Role
from kvps.protocol.membership import Error, Rendezvous, RendezvousIs
from kvps.protocol.permissions import HEAD_BYTES
from kvps.protocol.wire import decode, encode
from tests.support.scheduler_harness import Peer, Stage, sent
from tests.vectors.packets import PACKETS


def ask(table: RendezvousTable, token: int | None, *lines: str, run: str = "run") -> RendezvousIs:
    return table.answer(1, Rendezvous(run, token, lines))


@pytest.mark.spec("R282")
def test_a_state_that_is_too_long_is_refused() -> None:
    table = RendezvousTable()
    token = ask(table, 0, "a").token
    fits = "é" * ((STATE_BYTES_MAX - LINE_BYTES) // 2)
    with pytest.raises(Overload, match=r"'run' takes 60001 bytes.*at most 60000") as caught:
        ask(table, token, fits + "aa")
    assert caught.value.reason == "rendezvous"
    assert ask(table, None) == RendezvousIs(1, token, ("a",), False)
    assert ask(table, token, fits).is_set


@pytest.mark.spec("R282")
@pytest.mark.parametrize("count", [1, 15, 8192])
def test_the_longest_state_fits_into_the_head_of_its_answer(count: int) -> None:
    lines = ("x" * min(4096, STATE_BYTES_MAX // count - LINE_BYTES),) * count
    answer = RendezvousTable().answer(1, Rendezvous("run", 0, lines))
    packet = PACKETS["RENDEZVOUS-IS"]
    frames = encode(type(packet)(packet.envelope, answer))
    assert len(frames[0]) <= HEAD_BYTES
    assert decode(frames).message == answer


@pytest.mark.spec("R282")
def test_the_state_that_was_set_longest_ago_is_forgotten() -> None:
    table = RendezvousTable()
    for number in range(RUNS_MAX):
        ask(table, 0, "a", run=f"run {number}")
    ask(table, 1, "b", run="run 0")
    ask(table, 0, "a", run="one more")
    assert len(table.runs) == RUNS_MAX
    assert ask(table, None, run="run 0").state == ("b",)
    assert ask(table, None, run="run 1").token == 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("xy"), st.integers(0, 6) | st.none(), st.sampled_from("abc")), max_size=30
    )
)
@pytest.mark.spec("R280", "R281")
def test_rendezvous_table_equals_a_dictionary_of_states(steps: list[tuple[str, int | None, str]]) -> None:
    table, model, newest = RendezvousTable(), {"x": (0, ()), "y": (0, ())}, 0
    for run, token, line in steps:
        before = model[run]
        if token == before[0] and before[1] != (line,):
            newest += 1
            model[run] = newest, (line,)
        answer = ask(table, token, line, run=run)
        assert (answer.token, answer.state) == model[run]
        assert answer.is_set == (token is not None and model[run][1] == (line,))


# --- at the scheduler's door --------------------------------------------------------------------------


def agent(stage: Stage) -> str:
    stage.peers["agent"] = Peer(Role.WORKER)
    return "agent"


@pytest.mark.spec("R280", "R281")
def test_any_process_may_ask_and_the_job_is_as_before() -> None:
    stage = Stage(1, 0, persist=True)
    route = agent(stage)
    assert stage.scheduler.admit(route, stage.peers[route].envelope(1), Rendezvous)
    states, number = stage.states(), stage.scheduler.job.number
    effects = stage.say(route, Rendezvous("run", 0, ("a",)), 7)
    assert isinstance(effects[0], Save), "before the answer"
    assert sent(effects, RendezvousIs, route) == [RendezvousIs(7, 1, ("a",), True)]
    assert (stage.states(), stage.scheduler.job.number) == (states, number)
    read = stage.say(route, Rendezvous("run", None), 8)
    assert sent(read, RendezvousIs, route) == [RendezvousIs(8, 1, ("a",), False)]
    assert len(read) == 1, "nothing is saved"


def test_the_next_job_has_them_too() -> None:
    stage = Stage(1, 0, keep_alive=True)
    route = agent(stage)
    stage.say(route, Rendezvous("run", 0, ("a",)), 1)
    stage.form()
    stage.leave("w0")
    (found,) = sent(stage.say(route, Rendezvous("run", None), 2), RendezvousIs)
    assert found.state == ("a",)


@pytest.mark.spec("R282")
def test_a_refusal_is_told() -> None:
    stage = Stage(1, 0)
    route = agent(stage)
    effects = stage.say(route, Rendezvous("run", 0, ("x" * 4096,) * 20), 5)
    (error,) = sent(effects, Error, route)
    assert (error.seq, error.code) == (5, Overload.code)
