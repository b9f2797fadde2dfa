"""Placement covers every element once, whatever the sizes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvps.core.placement import ALIGN, PAGE, PAGES_MIN, home, parts


@given(
    key=st.text(min_size=1, max_size=20),
    count=st.integers(0, 10**9),
    servers=st.integers(1, 100),
    bound=st.integers(0, 10**6),
)
def test_every_element_lies_on_one_server_and_the_home_knows_the_key(
    key: str, count: int, servers: int, bound: int
) -> None:
    got = parts(key, count, servers, bound)
    assert got == parts(key, count, servers, bound)
    assert got[0].start == 0
    assert all(one.start + one.size == other.start for one, other in pairwise(got))
    assert got[-1].start + got[-1].size == count
    assert home(key, servers) in {one.server for one in got}
    assert len(got) in (1, servers)
    if len(got) > 1:
        assert [one.server for one in got] == list(range(servers))
        assert all(one.size > 0 and one.start % ALIGN == 0 for one in got)
        assert max(one.size for one in got) - min(one.size for one in got) <= 2 * (
            PAGE if got[0].size >= (PAGES_MIN - 1) * PAGE else ALIGN
        )
    if count >= max(bound, servers * ALIGN) and servers > 1:
        assert len(got) == servers
