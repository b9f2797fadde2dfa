"""torchrun's state as lines, and back; what is not such a state is refused."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from kvps.platforms.torchrun import holder as states
from kvps.platforms.torchrun.holder import Meeting, decode, encode, new_state
from kvps.protocol.envelope import TEXT_MAX
from tests.support.tiers import examples

T0 = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
NODES = st.builds(_NodeDesc, st.text(max_size=9), st.integers(0, 2**31), st.integers(0, 9))
TIMES = st.integers(0, 10**9).map(lambda us: T0 + timedelta(microseconds=us))


@st.composite
def made(draw: st.DrawFn) -> _RendezvousState:
    state = new_state()
    state.round, state.complete = draw(st.integers(0, 9)), draw(st.booleans())
    state.closed, state.deadline = draw(st.booleans()), draw(st.none() | TIMES)
    state.participants = draw(st.dictionaries(NODES, st.integers(0, 9), max_size=4))
    state.wait_list = draw(st.sets(NODES, max_size=3))
    state.redundancy_list = draw(st.sets(NODES, max_size=3))
    state.last_heartbeats = draw(st.dictionaries(NODES, TIMES, max_size=5))
    return state


@examples(30)
@given(made(), st.none() | st.builds(Meeting, st.integers(0, 9), st.text(), st.integers(1, 65535)))
def test_round_trip(state: _RendezvousState, meeting: Meeting | None) -> None:
    again, met = decode(encode(state, meeting))
    assert vars(again) == vars(state)
    assert met == meeting


def test_a_node_takes_less_than_a_hundred_bytes() -> None:
    state = new_state()
    node = _NodeDesc("node0123.cluster.example.com", 4_194_304, 0)
    state.participants[node], state.last_heartbeats[node] = 511, T0
    line = encode(state, None)[1]
    assert len(line) < 100 < TEXT_MAX


def test_no_node_is_silent_for_the_time_before() -> None:
    state = new_state()
    early, late = _NodeDesc("a", 1, 0), _NodeDesc("b", 1, 0)
    state.last_heartbeats = {early: T0, late: T0 + timedelta(seconds=9)}
    at = T0 + timedelta(seconds=5)
    again, _ = decode(encode(state, None), at)
    assert again.last_heartbeats == {early: at, late: T0 + timedelta(seconds=9)}


HEAD = {"round": 0, "complete": False, "deadline": None, "closed": False, "meeting": None}


@pytest.mark.parametrize(
    "lines",
    [
        ["{"],
        ["[]"],
        [],
        [json.dumps({**HEAD, "round": "0"})],
        [json.dumps({**HEAD, "complete": 1})],
        [json.dumps({**HEAD, "deadline": "soon"})],
        [json.dumps({**HEAD, "deadline": 1e300})],
        [json.dumps({**HEAD, "meeting": [1, 2, 3]})],
        [json.dumps({**HEAD, "meeting": [1, "host"]})],
        [json.dumps(HEAD), '["host", 1]'],
        [json.dumps(HEAD), '[7, 1, 0, ["participant"], 0, null]'],
        [json.dumps(HEAD), '["host", 1, 0, ["participant"], null, null]'],
    ],
)
def test_another_text_is_refused(lines: list[str]) -> None:
    with pytest.raises(RendezvousStateError, match="choose another --rdzv-id"):
        decode(lines)


def test_a_torch_with_other_fields_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "FIELDS", states.FIELDS - {"closed"} | {"open"})
    with pytest.raises(RendezvousStateError, match=r"other fields .*\(closed, open\)"):
        new_state()
