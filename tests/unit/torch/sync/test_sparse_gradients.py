"""Sparse gradients made of rows."""

import torch

from kvps.torch.sync.sparse_gradients import sparse_of


def test_a_sparse_gradient_is_on_the_device_of_its_parameter() -> None:
    table = torch.empty(5, 2, device="meta")
    gradient = sparse_of(torch.tensor([1, 3]), torch.ones(2, 2), table)
    assert gradient.is_sparse
    assert gradient.device == table.device
    assert gradient.shape == table.shape
