"""Placement covers every element once, whatever the sizes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvps.core.placement import ALIGN, PAGE, PAGES_MIN, home, parts
from tests.support.tiers import examples


@given(
    key=st.text(min_size=1, max_size=20),
    count=st.integers(0, 10**9),
    servers=st.integers(1, 100),
    bound=st.integers(0, 10**6),
)
@examples(100)
def test_every_element_lies_on_one_server_and_the_home_knows_the_key(
    key: str, count: int, servers: int, bound: int
) -> None:
    got = parts(key, count, servers, bound)
    assert got == parts(key, count, servers, bound)
    assert got[0].start == 0
    assert all(item.start + item.size == other.start for item, other in pairwise(got))
    assert got[-1].start + got[-1].size == count
    assert home(key, servers) in {item.server for item in got}
    held = dict.fromkeys(range(servers), 0) if len(got) > 1 else {got[0].server: 0}
    for part in got:
        held[part.server] += part.size
    if len(got) > 1:
        assert all(part.size > 0 and part.start % ALIGN == 0 for part in got)
        unit = PAGE if count // (servers * max(PAGES_MIN, 8 * servers)) >= PAGE else ALIGN
        slack = count // servers // 16 if servers > 16 else 0
        assert min(held.values()) > 0
        assert max(held.values()) - count / servers <= slack + 2 * unit
    if count >= max(bound, servers * ALIGN) and servers > 1:
        assert len(held) == servers
