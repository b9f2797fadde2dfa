"""The arithmetic of reductions."""

import pytest
import torch

from kvps.compat.horovod.engine.execution import adasum, even_rows, finish, scale


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
)
def test_factors_and_means(dtype: torch.dtype) -> None:
    tensor = torch.tensor([-6, 3, 4], dtype=dtype)
    scale(tensor, 1.0)
    assert tensor.tolist() == [-6, 3, 4]
    scale(tensor, 0.5)
    assert tensor.tolist() == ([-3, 1.5, 2] if dtype.is_floating_point else [-3, 1, 2])
    total = torch.tensor([-9, 3, 12], dtype=dtype)
    finish(total, "average", 2, 2.0)
    assert total.tolist() == ([-9, 3, 12] if dtype.is_floating_point else [-8, 2, 12])
    finish(total, "sum", 2, 1.0)
    assert total.tolist() == ([-9, 3, 12] if dtype.is_floating_point else [-8, 2, 12])


def test_adasum_adds_what_is_orthogonal_and_averages_what_agrees() -> None:
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    assert adasum([a]).tolist() == [1.0, 0.0]
    assert adasum([a, b]).tolist() == [1.0, 2.0]
    assert adasum([b, b, b, b]).tolist() == [0.0, 2.0]
    assert adasum([a, torch.zeros(2)]).tolist() == [1.0, 0.0]
    assert adasum([torch.zeros(2), torch.zeros(2)]).tolist() == [0.0, 0.0]
    odd = adasum([a, b, a])  # a and b first: (1, 2), which agrees with a in the first place
    dot, ab, aa = 1.0, 5.0, 1.0
    expected = [(1 - dot / (2 * ab)) * 1.0 + (1 - dot / (2 * aa)) * 1.0, (1 - dot / (2 * ab)) * 2.0]
    torch.testing.assert_close(odd, torch.tensor(expected))


def test_rows_are_dealt_out_as_evenly_as_can_be() -> None:
    assert even_rows(7, 3) == [3, 2, 2]
    assert even_rows(2, 3) == [1, 1, 0]
    assert even_rows(0, 2) == [0, 0]
