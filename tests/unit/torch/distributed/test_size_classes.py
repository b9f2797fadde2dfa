"""Of which size keys are: few, and little wider than what travels."""

import pytest

from kvps.torch.distributed.mailbox import LEAST, KeySizes, class_of


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 71, 72, 73, 128, 129, 1000, 10**6 + 1, 2**40])
def test_a_class_holds_what_it_is_for_with_little_padding(count: int) -> None:
    size = class_of(count)
    assert size >= count
    assert size == LEAST or size <= count * 9 / 8
    assert class_of(size) == size


def test_eight_classes_lie_between_powers_of_two() -> None:
    assert len({class_of(count) for count in range(1025, 2049)}) == 8
    sizes = [class_of(count) for count in range(5000)]
    assert sizes == sorted(sizes)


def test_the_first_shapes_fit_exactly_and_later_ones_share_keys() -> None:
    sizes = KeySizes(exact_max=2)
    assert [sizes.of("f", (count,), count) for count in (1001, 7, 1001, 1002, 1003)] == [
        ("f/1001", 1001),
        ("f/7", 7),
        ("f/1001", 1001),
        ("f/~1024", 1024),
        ("f/~1024", 1024),
    ]
    assert sizes.of("d", (7,), 7) == ("d/7", 7), "another kind has keys of its own"
    assert sizes.of("f", (7,), 7) == ("f/7", 7)
    assert sizes.of("f", (8,), 8) == (f"f/~{LEAST}", LEAST)


def test_shapes_of_one_size_have_keys_of_their_own() -> None:
    sizes = KeySizes()
    shapes = ((), (1,), (1, 1), (4, 5), (5, 4), (20,))
    assert len({sizes.of("f", shape, 20) for shape in shapes}) == len(shapes)


def test_ranks_that_make_the_same_calls_choose_the_same_keys() -> None:
    calls = [(kind, count * 37 % 500) for count in range(200) for kind in ("int8", "float32")]
    one, other = KeySizes(), KeySizes()
    chosen = [[sizes.of(kind, (n,), n) for kind, n in calls] for sizes in (one, other)]
    assert chosen[0] == chosen[1]
