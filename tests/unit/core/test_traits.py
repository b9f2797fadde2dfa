"""Traits: what travels of a model, and the text that says where two models differ."""

from kvps.core.traits import NAME_MAX, TRAITS_MAX, differences, traits_of
from kvps.protocol.membership import Trait


def test_a_name_on_one_worker_only_is_told_with_its_value() -> None:
    found = differences(0, {}, 1, {"parameter 'w'": "float32[2]"})
    assert found == "worker 1 has parameter 'w' (float32[2]), and worker 0 does not"
    found = differences(0, {"parameter 'w'": "float32[2]"}, 3, {})
    assert found == "worker 0 has parameter 'w' (float32[2]), and worker 3 does not"


def test_a_large_model_ends_with_a_digest_of_the_whole() -> None:
    model = {f"w{index:05}": "float32[2]" for index in range(TRAITS_MAX + 5)}
    traits = traits_of(model)
    assert len(traits) == TRAITS_MAX + 1
    assert traits[-1].name == "the whole"
    other = traits_of(model | {f"w{TRAITS_MAX + 4:05}": "float32[3]"})
    assert other[:-1] == traits[:-1]
    assert other[-1] != traits[-1]


def test_long_names_are_cut_and_still_compared() -> None:
    first, second = (traits_of({"w" * NAME_MAX + end: "float32[2]"}) for end in ("a", "b"))
    assert first[0] == second[0] == Trait("w" * NAME_MAX, "float32[2]")
    assert first[1] != second[1]


def test_a_small_model_travels_whole_and_in_order() -> None:
    assert traits_of({"b": "1", "a": "2"}) == (Trait("a", "2"), Trait("b", "1"))


def test_both_values_of_a_difference_are_told() -> None:
    found = differences(0, {"w": "float32[2]", "same": "x"}, 1, {"w": "float32[3]", "same": "x"})
    assert found == "w is float32[2] on worker 0, and float32[3] on worker 1"
