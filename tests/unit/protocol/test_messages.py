"""The declarations themselves: tags, envelopes, and the payload that each message announces."""

import dataclasses

import pytest

from kvps import protocol as m
from kvps.protocol.envelope import MESSAGES, Envelope, Message, Node, Role

TAGS = {
    **{1: "Hello", 2: "Welcome", 3: "View", 4: "Beat", 5: "Leave", 6: "Left", 7: "Barrier"},
    **{8: "Released", 9: "Stop", 10: "Error", 11: "Done", 12: "Probe", 13: "Probed", 14: "ViewChanges"},
    **{20: "Open", 21: "Declare", 22: "Declared", 23: "Find", 24: "FoundAll"},
    **{25: "Opened", 26: "Close", 27: "Closed", 28: "Tell", 29: "Give"},
    **{30: "Load", 31: "Push", 32: "Ack", 33: "Pull", 34: "Pulled"},
    **{35: "PushRows", 36: "PullRows", 37: "PulledRows", 38: "PullChanged", 39: "Changed"},
    **{40: "Optimize", 41: "Rate", 42: "Norms", 43: "GetState", 44: "StateIs", 45: "SetState"},
    46: "StepNorm",
    **{50: "Status", 51: "StatusIs", 60: "Offer", 61: "Taken", 62: "Release", 63: "StreamAt"},
    **{52: "Follow", 53: "CopyBegin", 54: "CopyStores", 55: "CopyStore", 56: "CopyChunk"},
    **{57: "CopyKeys", 58: "CopyValues", 59: "CopyLevel", 64: "Followed", 65: "CopyRows"},
    **{66: "CopyBlock", 67: "CopyVersion", 68: "CopyPublication"},
    **{70: "Join", 71: "Joined", 72: "Return", 73: "History", 74: "HistoryIs"},
    **{75: "Resume", 76: "Resumed", 78: "Look", 79: "Seen"},
    **{80: "Halt", 81: "Halted", 82: "Proceed", 83: "Proceeding"},
    **{84: "TakeImage", 85: "ImageTaken", 86: "ImageKept", 87: "Commit", 88: "Committed"},
    **{89: "GiveUp", 90: "Recall", 91: "Shelf", 92: "Restore", 93: "Restored"},
    **{94: "Checkpoint", 95: "Checkpointed", 96: "Revive", 97: "Revived"},
    **{100: "Embed", 107: "PushTables", 108: "PullTables", 109: "PulledTables"},
    **{104: "Export", 105: "Exported", 106: "TableRate"},
    **{
        110: "Enrol",
        112: "Evict",
        116: "Drain",
        117: "Scale",
        113: "Challenge",
        114: "Alive",
        115: "Standing",
    },
    **{120: "Measure", 121: "Measured"},
    **{130: "Ping", 131: "Pong"},
    **{140: "Trace", 141: "Tracing", 142: "AskClock", 143: "ClockIs", 144: "Spans"},
    **{145: "Fetch", 146: "Part"},
    **{150: "Rendezvous", 151: "RendezvousIs"},
    **{160: "Freeze", 161: "Put", 162: "Announce", 163: "LastVersion", 164: "VersionIs"},
    **{165: "Where", 166: "ServersAre", 167: "Watch", 168: "Retain", 169: "Retained"},
    **{170: "Read", 171: "Octets", 172: "ReadChanges", 173: "Changes", 174: "Elsewhere"},
}
"""Written down once more: a tag that was given is for ever."""


@pytest.mark.spec("R73")
def test_tags_are_for_ever() -> None:
    assert {tag: cls.__name__ for tag, cls in MESSAGES.items()} == TAGS
    assert all(tag == cls.TAG for tag, cls in MESSAGES.items())


def test_a_tag_is_given_once() -> None:
    with pytest.raises(AssertionError, match="tag 1 is taken"):
        m.tag(1)(Message)


@pytest.mark.parametrize("cls", MESSAGES.values(), ids=lambda cls: cls.__name__)
def test_messages_have_hashes_and_new_fields_come_last(cls: type[Message]) -> None:
    assert cls.__hash__ is not None  # mypy sees to it that no field is set
    assert not hasattr(cls, "__dict__") or "__dict__" not in cls.__slots__
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    missing = dataclasses.MISSING
    has_default = [field.default is not missing or field.default_factory is not missing for field in fields]
    assert has_default == sorted(has_default)


def test_runs_of_a_message_can_be_counted() -> None:
    """A recording counts them, of every message that has a field of this name."""
    fields = [cls.__annotations__["runs"] for cls in MESSAGES.values() if "runs" in cls.__annotations__]
    assert fields
    assert all(kind.startswith("tuple") for kind in fields)


def test_roles_and_nodes_read_well() -> None:
    assert [str(role) for role in Role] == ["scheduler", "server", "worker", "standby", "reader"]
    assert str(Node(Role.SCHEDULER, 0)) == "scheduler"
    assert str(Node(Role.WORKER, 3)) == "worker 3"
    assert Envelope(bytes(16), 1, Role.SERVER, 2, 3, 4).node == Node(Role.SERVER, 2)


RUNS = (m.Run(0, 3, 0), m.Run(10, 4, 0))
STANDS = (m.Stand(0, 3, 0, 0), m.Stand(10, 4, 0, 0))
FIELDS = (m.Field("exp_avg", 2, 3), m.Field("step", 9, 1))


@pytest.mark.spec("R4")
@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        (m.Done(1), ()),
        (m.Pull(0, True, (m.Ask(0, 3, 0, 0),)), ()),
        (m.Load(0, 1, RUNS), (28,)),
        (m.Push(0, 3, (0,), 1.0, False, RUNS), (14,)),
        (m.Push(0, 3, (0,), 1.0, False, ()), (0,)),
        (m.Pulled(1, 0, 8, True, STANDS), (56,)),
        (m.Pulled(1, 0, 8, False, STANDS), ()),
        (m.StateIs(1, 1, FIELDS), (24, 1)),
        (m.StateIs(1, 1, ()), ()),
        (m.SetState(0, 0, 3, 1, FIELDS), (24, 1)),
    ],
)
def test_payload_sizes(message: Message, sizes: tuple[int, ...]) -> None:
    assert message.payload_sizes() == sizes


# --- rows ---------------------------------------------------------------------------------------


def test_rows_follow_their_numbers_in_frames_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def pushed(width: int, count: int) -> tuple[int, ...]:
        return m.PushRows("s", "k", 1, (0,), 0, width, count).payload_sizes()

    assert pushed(3, 0) == ()
    assert pushed(3, 2) == (16, 24)
    monkeypatch.setattr("kvps.protocol.values.ROWS_FRAME_BYTES", 24)
    assert [m.rows_in_frame(1, width) for width in (1, 3, 4, 7)] == [6, 2, 1, 1]
    assert pushed(3, 4) == (32, 24, 24)
    assert pushed(3, 5) == (40, 24, 24, 12)
    assert pushed(7, 2) == (16, 28, 28)


@pytest.mark.spec("R14")
def test_no_list_of_frames_is_made_on_a_peers_word() -> None:
    """It would be as long as the number that is claimed."""
    sizes = m.PulledRows(1, 1, 64, 2**63 - 1, 0, 0, 0).payload_sizes()
    assert sizes == ((2**63 - 1) * 256,)
    assert m.PullRows("s", "k", 0, 0, 2**63 - 1).payload_sizes() == ((2**63 - 1) * 8,)
