"""What logs of calls say, and where two of them differ."""

import torch

from kvps.torch.distributed.call_log import (
    EXCHANGED_MAX,
    KEPT,
    CallLog,
    described,
    exchange_difference,
    first_difference,
    from_page,
    in_words,
    to_page,
)


def log(*texts: str) -> CallLog:
    made = CallLog()
    for text in texts:
        made.add(text)
    return made


def difference(first: CallLog, other: CallLog) -> int | None:
    found = first_difference(first.calls(), other.calls())
    assert found == first_difference(other.calls(), first.calls())
    return found


def test_logs_differ_at_the_first_call_that_is_another() -> None:
    assert difference(log("a", "b"), log("a", "b")) is None
    assert difference(log("a", "b"), log("a")) is None, "the other may make it yet"
    assert difference(log("a", "b"), log("b", "a")) == 1
    assert difference(log("a", "b", "c"), log("a", "c", "c")) == 2
    assert difference(log(), log("a")) is None


def test_a_difference_is_seen_when_its_calls_are_forgotten() -> None:
    call_log, other = log("a"), log("b")
    for _ in range(KEPT + 5):
        call_log.add("c")
        other.add("c")
    assert difference(call_log, other) == 7
    assert "They differed before number 7" in in_words("T", 7, {0: call_log.calls(), 1: other.calls()})


def test_logs_far_apart_are_not_compared() -> None:
    ahead = log(*["a"] * (KEPT + 10))
    assert difference(ahead, log("b")) is None


def test_calls_that_all_ranks_are_refused_are_alike_whatever_the_reasons() -> None:
    call_log, other, third = log("a"), log("a"), log("a", "b")
    call_log.add_refused(ValueError("3 is too large"))
    other.add_refused(ValueError("4 is too large"))
    assert difference(call_log, other) is None
    assert (call_log.last_refused, call_log.count) == (2, 2)
    assert difference(call_log, third) == 2
    text = in_words("T", 2, {5: call_log.calls(), 6: third.calls(), 7: third.calls()})
    assert text.startswith(
        "T. Number 2 is a call that was refused (3 is too large) on rank 5; b on ranks 6, 7. "
    )


def test_an_exchange_differs_where_one_rank_sends_what_the_other_does_not_receive() -> None:
    logs = [log() for _ in range(3)]
    for rank, sends, receives in ((0, [1, 2], [1, 3]), (1, [3, 1], [2, 1]), (2, [3, 1], [1, 1])):
        logs[rank].add_exchange("all_to_all", sends, receives)
    first, other, third = (each.calls() for each in logs)
    assert first_difference(first, third) is None
    assert exchange_difference(first, other, 0, 1) is exchange_difference(other, first, 1, 0) is None
    assert exchange_difference(first, third, 0, 1) == exchange_difference(third, first, 1, 0) == 1
    assert exchange_difference(first, log("all_to_all").calls(), 0, 1) is None
    assert exchange_difference(first, [], 0, 1) is None
    text = in_words("T", 1, {0: first, 1: third})
    assert "all_to_all that sends [3, 1] and receives [1, 1] values on rank 1" in text


def test_the_parts_of_an_exchange_of_many_ranks_are_not_kept() -> None:
    call_log = log()
    call_log.add_exchange("all_to_all", [1] * (EXCHANGED_MAX + 1), [1] * (EXCHANGED_MAX + 1))
    (call,) = call_log.calls()
    assert (call.text, call.sends) == ("all_to_all", [])


def test_a_page_says_what_the_log_says() -> None:
    call_log = log("a", "b")
    assert from_page(to_page(call_log.calls())) == call_log.calls()


def test_tensors_are_described_by_type_and_shape() -> None:
    assert described([torch.zeros(())]) == "float32[]"
    assert described([torch.zeros(2, 3, dtype=torch.bool)]) == "bool[2, 3]"
    assert described([torch.zeros(2)] * 3) == "3 x float32[2]"
    assert described([torch.zeros(2), torch.zeros(3)]) == "float32[2], float32[3]"
    many = [torch.zeros(count) for count in range(20)]
    assert described(many).startswith("float32[0], float32[1], ")
    assert "and 12 more [" in described(many)
    assert described(many) != described([*many[:-1], torch.zeros(1, 1)])
    assert described([torch.zeros(1, dtype=torch.complex64)]) == "complex64[1]"
