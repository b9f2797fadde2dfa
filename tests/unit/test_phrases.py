"""Phrases of texts: lists cut short, ranks, keys that do not exist."""

import pytest

from kvps.phrases import and_more, bytes_in_words, names_in_words, never_initialised, ranks_in_words, some_of


def test_a_list_says_how_many_entries_it_leaves_out() -> None:
    assert [and_more(count) for count in (-1, 0, 3)] == ["", "", " and 3 more"]
    assert and_more(1, "keys") == " and 1 more keys"
    assert some_of(["a", "b"], 2) == "a, b"
    assert some_of(["a", "b", "c"], 2, "keys") == "a, b and 1 more keys"
    assert names_in_words(["w"] * 7) == "'w', 'w', 'w', 'w', 'w' and 2 more"


def test_ranks_are_named_with_their_states() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([1, 3]) == "ranks 1, 3"
    words = ranks_in_words([1, 3], lambda rank: "lost" if rank == 3 else "")
    assert words == "ranks 1, 3 (lost)"
    assert ranks_in_words(range(25)).endswith("18, 19 and 5 more")


def test_a_key_that_is_not_there() -> None:
    assert never_initialised("w") == (
        "key 'w' was never initialised; call init('w', value) on every worker first"
    )
    assert never_initialised("w", "kv").startswith("key 'w' of store 'kv' was never initialised;")


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1 << 20, "1 MiB"),
        (5 << 28, "1.25 GiB"),
        (7 << 40, "7 TiB"),
    ],
)
def test_sizes_for_people(size: int, says: str) -> None:
    assert bytes_in_words(size) == says
