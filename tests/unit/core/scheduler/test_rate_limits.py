"""When the next view may go to everybody."""

from kvps.core.scheduler.rate_limits import AHEAD_S, ROWS_PER_S, ViewRateLimiter

LARGE = 1_064 * 1_064
"""Rows of the views of 1,000 workers and 64 servers."""


def test_views_of_few_members_need_not_wait_for_each_other() -> None:
    pace = ViewRateLimiter()
    for _ in range(100):
        pace.spend(10 * 10, 5.0)
    assert pace.free_at <= 5.0


def test_views_of_many_members_leave_about_once_a_second() -> None:
    pace = ViewRateLimiter()
    pace.spend(LARGE, 5.0)
    assert pace.free_at == 5.0 + LARGE / ROWS_PER_S - AHEAD_S
    pace.spend(LARGE, pace.free_at)
    assert pace.free_at == 5.0 + 2 * LARGE / ROWS_PER_S - AHEAD_S
