"""When the next view may go to everybody."""

from kvps.core.scheduler.rate_limits import AHEAD_S, ROWS_OF_A_MESSAGE, ROWS_PER_S, ViewRateLimiter

LARGE = 1_064 * (1_064 + ROWS_OF_A_MESSAGE)
"""The cost of whole views of 1,000 workers and 64 servers, in rows."""


def test_views_of_few_members_need_not_wait_for_each_other() -> None:
    pace = ViewRateLimiter()
    for _ in range(100):
        pace.spend(10, 10, 5.0)
    assert pace.free_at <= 5.0


def test_views_of_many_members_leave_about_once_a_second() -> None:
    pace = ViewRateLimiter()
    pace.spend(1_064, 1_064, 5.0)
    assert pace.free_at == 5.0 + LARGE / ROWS_PER_S - AHEAD_S
    pace.spend(1_064, 1_064, pace.free_at)
    assert pace.free_at == 5.0 + 2 * LARGE / ROWS_PER_S - AHEAD_S


def test_news_of_one_loss_to_many_members_costs_messages_and_few_rows() -> None:
    pace = ViewRateLimiter()
    pace.spend(10_256, 1, 5.0)
    assert 0.5 < pace.free_at + AHEAD_S - 5.0 < 0.6
