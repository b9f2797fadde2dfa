"""Rounding by chance: to a neighbour, unbiased, and the same bits each time."""

import numpy as np
import pytest
import torch

from kvps.core.optim.rounding import Rounding, rounded
from kvps.splitmix import mixed

HALVES = [torch.bfloat16, torch.float16]


def chances(count: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, count, dtype=np.uint16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [1.003, -0.7071, 3e-6, -5.1e-8, 61.3, 2.0**-14 * 0.9999])
def test_the_mean_of_many_is_the_value(dtype: torch.dtype, value: float) -> None:
    count = 1 << 16
    values = torch.full((count,), value)
    found = rounded(values, dtype, np.arange(count).astype(np.uint16)).double()
    low, high = found.min().item(), found.max().item()
    assert low <= values[0].item() <= high
    assert len(found.unique()) <= 2
    if low < high:
        assert torch.tensor(low, dtype=dtype).nextafter(torch.tensor(torch.inf, dtype=dtype)) == high
    assert abs(found.mean().item() - values[0].double().item()) <= (high - low) * 2.0**-13


@pytest.mark.parametrize("dtype", HALVES)
def test_values_of_the_type_stay(dtype: torch.dtype) -> None:
    octets = torch.from_numpy(np.arange(1 << 16).astype(np.uint16)).view(dtype)
    found = rounded(octets.float(), dtype, chances(1 << 16))
    assert torch.equal(found.isnan(), octets.isnan())
    assert torch.equal(found[~found.isnan()], octets[~octets.isnan()])
    wide = torch.tensor([3e38, 3.4e38, -torch.inf, torch.nan]), np.full(4, 0xFFFF, np.uint16)
    assert rounded(*wide[:1], dtype, wide[1])[2:].tolist()[0] == -torch.inf
    payload = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert rounded(payload, dtype, np.full(1, 0xFFFF, np.uint16)).isnan().all()


def test_each_column_and_row_has_chances_of_its_own() -> None:
    rows = mixed(np.arange(1000, dtype=np.uint64))
    like = {"weight": torch.empty(0, 6).half(), "sum": torch.empty(0, 6).bfloat16(), "one": torch.empty(0, 1)}
    columns = {name: torch.full((1000, part.shape[1]), 1 + 2.0**-12) for name, part in like.items()}
    found = Rounding(rows).rounded(columns, like)
    assert found["one"] is columns["one"]
    assert (found["weight"].dtype, found["sum"].dtype) == (torch.float16, torch.bfloat16)
    is_up = torch.cat([found["weight"] > 1, found["sum"] > 1], 1).double()
    assert torch.allclose(is_up.mean(0), torch.tensor([0.25] * 6 + [2.0**-5] * 6).double(), atol=0.06)
    correlations = torch.corrcoef(is_up.T) - torch.eye(12)
    assert correlations.abs().max() < 0.15
    part = Rounding(rows)[200:300].rounded({"weight": columns["weight"][:100]}, like)
    assert torch.equal(part["weight"], found["weight"][200:300])
