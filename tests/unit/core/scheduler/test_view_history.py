"""What is said of a view: the seats that changed, to those who have a view that is known."""

import random

import pytest

from kvps.core.scheduler.view_history import ViewHistory
from kvps.protocol.envelope import Role
from kvps.protocol.membership import Member, View, ViewChanges

KEYS = tuple([f"key {rank}" for rank in range(9)])


def view(number: int, states: list[str], lost_for_s: float = 0.0, keys: tuple[str, ...] = ()) -> View:
    members = [
        Member(Role.WORKER, rank, 1 + rank, state, "", "host", lost_for_s * (state == "lost"), "")
        for rank, state in enumerate(states)
    ]
    return View(number, "running", f"view {number}", tuple(members), 1, 2, 3, keys)


@pytest.mark.spec("R483")
def test_only_seats_that_changed_are_said() -> None:
    history, states = ViewHistory(), ["held"] * 9
    history.note(view(1, states))
    states[4] = "lost"
    second = view(2, states)
    history.note(second)
    assert history.since(1, second) == ViewChanges(2, 1, "running", "view 2", (second.members[4],), 1, 2, 3)
    states[5] = "left"
    third = view(3, states, lost_for_s=7.0)
    history.note(third)
    news = history.since(2, third)
    assert isinstance(news, ViewChanges)
    assert news.members == (third.members[5],), "a loss of before is not said again as time passes"
    news = history.since(1, third)
    assert news.members == third.members[4:6]


@pytest.mark.spec("R483")
def test_a_new_key_is_a_change() -> None:
    history = ViewHistory()
    history.note(view(1, ["held"] * 9, keys=KEYS))
    second = view(2, ["held"] * 9, keys=(*KEYS[:8], "another"))
    history.note(second)
    news = history.since(1, second)
    assert isinstance(news, ViewChanges)
    assert (news.members, news.keys) == (second.members[8:], ("another",))
    assert news.applied(view(1, ["held"] * 9, keys=KEYS)) == second


@pytest.mark.parametrize("base", [0, 4])
def test_view_from_before_the_history_is_answered_as_a_whole(base: int) -> None:
    """As after a restart of the scheduler."""
    history, fifth = ViewHistory(), view(5, ["held"] * 9)
    assert history.since(base, fifth) is fifth
    history.note(fifth)
    sixth = view(6, ["held"] * 8 + ["lost"])
    history.note(sixth)
    assert history.since(base, sixth) is sixth
    assert isinstance(history.since(5, sixth), ViewChanges)


def test_news_of_most_seats_are_a_whole_view() -> None:
    history = ViewHistory()
    history.note(view(1, ["held"] * 9))
    for number, lost in ((2, 4), (3, 5)):
        newer = view(number, ["lost"] * lost + ["held"] * (9 - lost))
        history.note(newer)
        assert isinstance(history.since(1, newer), ViewChanges if lost == 4 else View)


@pytest.mark.spec("R484")
@pytest.mark.parametrize("seed", range(20))
def test_members_that_miss_news_have_the_view_after_the_next_that_fit(seed: int) -> None:
    """Views of 9 seats; of the news some are lost, some come twice, and some late."""
    dice, history, states = random.Random(seed), ViewHistory(), ["held"] * 9
    mine = newest = view(1, states)
    history.note(mine)
    news: list[ViewChanges] = []
    for number in range(2, 40):
        states[dice.randrange(9)] = dice.choice(["held", "lost", "left", "gone"])
        newest = view(number, states, lost_for_s=float(number))
        history.note(newest)
        said = history.since(dice.choice([number - 1, mine.number]), newest)
        news += [said] * dice.randint(0, 2) if isinstance(said, ViewChanges) else []
        dice.shuffle(news)
        while news and dice.random() < 0.6:
            told = news.pop()
            if told.base <= mine.number < told.number:
                mine = told.applied(mine)
                assert mine.number == told.number
    said = history.since(mine.number, newest)
    mine = said.applied(mine) if isinstance(said, ViewChanges) else said
    assert [member[:4] for member in mine.members] == [member[:4] for member in newest.members]
    assert mine.reason == newest.reason
