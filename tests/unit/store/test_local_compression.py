"""Compression in a store without servers: gradients become what servers would read of them."""

import pytest
import torch

import kvps
from kvps.errors import ConfigError, Mismatch, NonFinite

TWO = {"type": "2bit", "threshold": 0.5, "min_bytes": 0}


def two_bits(rest: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """MXNet's rule, element by element."""
    rest += gradient
    sent = torch.where(rest >= 0.5, 0.5, torch.where(rest <= -0.5, -0.5, 0.0))
    rest -= sent
    return sent


@pytest.mark.parametrize("kind", ["local", "device"])
def test_each_value_of_a_key_has_a_rest_of_its_own(kind: str) -> None:
    with kvps.create(kind) as kv:
        kv.init("w", torch.zeros(3, 5))
        kv.set_gradient_compression(TWO)
        rests = [torch.zeros(3, 5) for _ in range(2)]
        for _ in range(5):
            gradients = [torch.randn(3, 5) for _ in range(2)]
            expected = sum(two_bits(rest, item) for rest, item in zip(rests, gradients, strict=True))
            assert torch.equal(kv.pushpull("w", gradients), expected)
        state = kv.compression_state()
        assert torch.equal(state["w"], rests[0])
        assert torch.equal(state["w@1"].view(3, 5), rests[1])


def test_store_that_loads_the_state_goes_on_alike() -> None:
    with kvps.create("local") as kv, kvps.create("local") as other:
        for item in (kv, other):
            item.set_gradient_compression(TWO)
            item.init("w", torch.zeros(40))
        for _ in range(3):
            kv.push("w", torch.randn(40))
        other.load_compression_state(kv.compression_state())
        gradient = torch.randn(40)
        assert torch.equal(kv.pushpull("w", gradient), other.pushpull("w", gradient))


def test_a_state_of_another_shape_is_refused() -> None:
    with kvps.create("local") as kv:
        kv.init("w", torch.zeros(4))
        with pytest.raises(Mismatch, match=r"key 'w' is float32\[4\], but .* has shape \(5,\)"):
            kv.load_compression_state({"w": torch.zeros(5)})


def test_the_optimizer_sees_what_was_written() -> None:
    with kvps.create("local") as kv:
        kv.set_optimizer("sgd", lr=1.0)
        kv.set_gradient_compression(TWO)
        kv.init("w", torch.zeros(2))
        assert kv.pushpull("w", torch.tensor([0.7, 0.2])).tolist() == [-0.5, 0.0]


def test_keys_that_are_small_or_no_float32_stay_as_they_are() -> None:
    with kvps.create("local") as kv:
        kv.set_gradient_compression("1bit")
        kv.init(["a", "b"], [torch.zeros(5), torch.zeros(100_000, dtype=torch.float64)])
        a, b = torch.randn(5), torch.randn(100_000, dtype=torch.float64)
        found = kv.pushpull(["a", "b"], [a, b])
        assert torch.equal(found[0], a)
        assert torch.equal(found[1], b)
        assert kv.compression_state() == {}


def test_randomk_draws_others_each_time() -> None:
    with kvps.create("local") as kv:
        kv.set_gradient_compression({"type": "randomk", "ratio": 0.1, "min_bytes": 0})
        kv.init("w", torch.zeros(100))
        first, second = (kv.pushpull("w", torch.ones(100)) for _ in range(2))
        assert (first != 0).sum() == (second != 0).sum() == 10
        assert not torch.equal(first != 0, second != 0)


def test_nonfinite_values_stay_out_of_the_residual() -> None:
    with kvps.create("local", on_nonfinite="error") as kv:
        kv.set_gradient_compression(TWO)
        kv.init("w", torch.zeros(2))
        kv.push("w", torch.tensor([0.2, 0.3]))
        with pytest.raises(NonFinite):
            kv.pushpull("w", torch.tensor([float("inf"), 1.0]))
        assert kv.compression_state()["w"].tolist() == pytest.approx([0.2, 0.3])


def test_switched_off_gradients_are_whole_again() -> None:
    with kvps.create("local") as kv:
        kv.set_gradient_compression(TWO)
        kv.init("w", torch.zeros(2))
        kv.push("w", torch.tensor([0.2, 0.3]))
        kv.set_gradient_compression("none")
        assert kv.pushpull("w", torch.tensor([0.1, 0.1])).tolist() == pytest.approx([0.1, 0.1])


def test_a_key_that_gets_another_shape_owes_nothing() -> None:
    with kvps.create("local") as kv:
        kv.set_gradient_compression(TWO)
        kv.init("w", torch.zeros(4))
        kv.push("w", torch.full((4,), 0.3))
        kv.broadcast("w", torch.zeros(8), torch.zeros(8))
        assert kv.pushpull("w", torch.full((8,), 0.4)).tolist() == [0.0] * 8


def test_unknown_type_changes_nothing() -> None:
    with kvps.create("local") as kv:
        kv.set_gradient_compression(TWO)
        with pytest.raises(ConfigError, match="type='3bit'"):
            kv.set_gradient_compression("3bit")
        kv.init("w", torch.zeros(1))
        assert kv.pushpull("w", torch.tensor([0.7])).tolist() == [0.5]
