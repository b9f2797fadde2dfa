"""Fragments of a model: balanced by bytes, or as given; each trained parameter in one of them."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from kvps.errors import ConfigError
from kvps.torch.local_steps.fragments import Schedule, fragments_of


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Linear(8, 4), torch.nn.Linear(4, 2), torch.nn.LayerNorm(2)
    )


def trained(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_number_of_fragments_is_balanced_by_bytes(count: int) -> None:
    params = trained(model())
    found = fragments_of(params, count)
    assert len(found) == count
    assert all(found)
    assert sorted(name for names in found for name in names) == sorted(params)
    sizes = [sum(params[name].numel() for name in names) for names in found]
    largest = max(param.numel() for param in params.values())
    assert max(sizes) - min(sizes) <= largest
    assert found == fragments_of(params, count), "all workers cut alike"


def test_equal_parameters_are_dealt_out() -> None:
    params = {f"p{index}": torch.zeros(5) for index in range(6)}
    assert [len(names) for names in fragments_of(params, 3)] == [2, 2, 2]


def test_parameters_without_elements_fill_fragments() -> None:
    params = {"w": torch.zeros(5), "a": torch.zeros(0), "b": torch.zeros(0)}
    assert all(fragments_of(params, 3))


def test_fragments_may_be_given_as_modules_and_parameters() -> None:
    sequential = model()
    found = fragments_of(
        trained(sequential),
        [sequential[0], [sequential[1], sequential[3]], [sequential[2].weight, sequential[2].bias]],
    )
    assert found == (
        ("0.weight", "0.bias"),
        ("1.weight", "1.bias", "3.weight", "3.bias"),
        ("2.weight", "2.bias"),
    )


def test_frozen_parameters_belong_to_no_fragment() -> None:
    sequential = model()
    sequential[0].requires_grad_(False)
    assert len(fragments_of(trained(sequential), [sequential[1:]])) == 1


@pytest.mark.parametrize(
    ("cut", "match"),
    [
        (lambda item: 0, "fragments=0: use 1 to 8"),
        (lambda item: 9, "fragments=9: use 1 to 8, the number of trained parameters"),
        (lambda item: True, "fragments=True: give a number, or a list"),
        (lambda item: "2", "fragments='2'"),
        (lambda item: None, "fragments=None"),
        (lambda item: [item[0], item[1:3]], "no fragment has '3.weight', '3.bias'; add it to a fragment"),
        (lambda item: [item, item[1]], r"parameter '1.weight' is in fragments\[0\] and in fragments\[1\]"),
        (lambda item: [item, torch.nn.ReLU()], r"fragments\[1\] has no trained parameter"),
        (lambda item: [item, model()], r"fragments\[1\] has 8 trained parameter\(s\) that the model"),
        (lambda item: [item, 3], r"fragments\[1\] is a int; give a module, a parameter, or a list"),
        (lambda item: [item, ["0.weight"]], r"fragments\[1\] is a str"),
    ],
)
def test_senseless_fragments_are_refused(cut: Any, match: str) -> None:
    sequential = model()
    with pytest.raises(ConfigError, match=match):
        fragments_of(trained(sequential), cut(sequential))


# --- the schedule of local steps ------------------------------------------------------------------


def events(schedule: Schedule, steps: int) -> list[tuple[int, str, int]]:
    """(step, event, fragment) of so many steps, as DiLoCo goes through them."""
    found = []
    for step in range(1, steps + 1):
        schedule.step()
        if schedule.arriving is not None:
            found.append((step, "take", schedule.arriving))
            schedule.taken()
        if schedule.due is not None:
            found.append((step, "push", schedule.due))
            schedule.left()
            if not schedule.delay:
                assert schedule.arriving is not None
                found.append((step, "take", schedule.arriving))
                schedule.taken()
    return found


def test_without_fragments_all_leave_together() -> None:
    assert events(Schedule.of(3, 1, 0), 7) == [
        *[(3, "push", 0), (3, "take", 0)],
        *[(6, "push", 0), (6, "take", 0)],
    ]


def test_fragments_take_turns() -> None:
    assert [event for event in events(Schedule.of(6, 3, 0), 12) if event[1] == "push"] == [
        *[(2, "push", 0), (4, "push", 1), (6, "push", 2)],
        *[(8, "push", 0), (10, "push", 1), (12, "push", 2)],
    ]


def test_with_a_delay_a_fragment_is_taken_before_the_next_one_leaves() -> None:
    assert events(Schedule.of(6, 2, 2), 9) == [
        *[(3, "push", 0), (5, "take", 0)],
        *[(6, "push", 1), (8, "take", 1)],
        (9, "push", 0),
    ]


@pytest.mark.parametrize(("sync_every", "fragments"), [(1, 1), (6, 1), (6, 2), (6, 6), (12, 4)])
def test_at_most_one_is_in_flight_and_each_leaves_once_in_sync_every_steps(
    sync_every: int, fragments: int
) -> None:
    for delay in range(sync_every // fragments):
        found = events(Schedule.of(sync_every, fragments, delay), 5 * sync_every)
        kinds = [kind for _, kind, _ in found]
        assert kinds[:-1:2] == ["push"] * len(kinds[:-1:2])
        assert "push" not in kinds[1::2]
        for fragment in range(fragments):
            pushes = [step for step, kind, which in found if (kind, which) == ("push", fragment)]
            assert len(pushes) == 5
            assert {later - step for step, later in pairwise(pushes)} == {sync_every}
        delays = {taken[0] - left[0] for left, taken in zip(found[::2], found[1::2], strict=False)}
        assert delays == {delay}


@pytest.mark.parametrize(
    ("rounds", "begins"), [([0, 0, 0], 0), ([5, 4, 4], 1), ([5, 5, 4], 2), ([3, 4, 3], 0), ([9], 0)]
)
def test_late_worker_begins_where_the_others_are(rounds: list[int], begins: int) -> None:
    schedule = Schedule.of(2 * len(rounds), len(rounds), 1)
    schedule.steps, schedule.in_flight = 1, 0
    schedule.begin_at(rounds)
    assert (schedule.next, schedule.steps, schedule.in_flight) == (begins, 1, None)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0, 1, 0), "sync_every=0: use a number of steps, 1 or more"),
        ((2.5, 1, 0), "sync_every=2.5"),
        ((True, 1, 0), "sync_every=True"),
        ((10, 3, 0), "sync_every=10 is not a multiple of the 3 fragments, which take turns; use 9"),
        ((2, 3, 0), "not a multiple of the 3 fragments, which take turns; use 3"),
        ((4, 2, 2), r"delay=2: use 0 to 1 steps. A fragment returns before .* 2 steps later"),
        ((4, 2, -1), "delay=-1"),
        ((4, 2, 0.5), "delay=0.5"),
    ],
)
def test_senseless_schedule_is_refused(arguments: tuple[int, int, int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Schedule.of(*arguments)


def test_fragments_that_left_after_the_last_step_are_fresh() -> None:
    schedule = Schedule.of(6, 3, 0)
    events(schedule, 3)
    assert schedule.fresh == 0, "one left a step before"
    schedule.step()
    schedule.left()
    assert (schedule.fresh, schedule.order()) == (1, [2, 0, 1]), "the fresh one is last"
    schedule.left()
    assert (schedule.fresh, schedule.order()) == (2, [0, 1, 2])
    schedule.begin_at([2, 2, 2])
    assert schedule.fresh == 0, "where a worker begins, others may have made steps"


def test_a_turn_that_has_begun_takes_another_length() -> None:
    schedule = Schedule.of(6, 1, 2)
    assert events(schedule, 6) == [(6, "push", 0)]
    schedule.step()
    schedule.step()
    schedule.taken()
    schedule.set_period(3)
    assert events(schedule, 5) == [(1, "push", 0), (3, "take", 0), (4, "push", 0)]
