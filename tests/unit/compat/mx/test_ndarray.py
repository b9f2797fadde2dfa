"""Arrays by MXNet's names: tensors with a few methods more, and with MXNet's defaults."""

import copy
import doctest
import importlib
import pickle

import numpy as np
import pytest
import torch

import kvps.compat.mx as mx
from kvps.errors import ConfigError


@pytest.mark.parametrize("name", ["", ".elsewhere", ".gluon", ".kvstore", ".ndarray", ".optimizer", ".rule"])
def test_examples_of_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"kvps.compat.mx{name}")).failed == 0


def test_types_are_mxnets() -> None:
    assert mx.nd.array([1, 2]).dtype is torch.float32
    assert mx.nd.array(np.arange(2)).dtype is torch.float32
    assert mx.nd.array(torch.arange(2)).dtype is torch.int64
    assert mx.nd.array(mx.nd.zeros((2,), dtype="int8")).dtype is torch.int8
    for dtype in ("float16", np.float16, np.dtype("float16"), torch.float16):
        assert mx.nd.ones((2,), dtype=dtype).dtype is torch.float16
    with pytest.raises(ConfigError, match="dtype='float7': torch has no such"):
        mx.nd.ones((2,), dtype="float7")


def test_shapes_and_values() -> None:
    assert mx.nd.ones(3).tolist() == [1, 1, 1]
    assert mx.nd.full((1, 2), 7).tolist() == [[7, 7]]
    assert mx.nd.empty([2, 3]).shape == (2, 3)
    assert mx.nd.arange(3).tolist() == [0, 1, 2]
    assert mx.nd.arange(1, 3, repeat=2).tolist() == [1, 1, 2, 2]
    assert mx.nd.zeros_like(mx.nd.ones(2)).tolist() == [0, 0]
    assert mx.nd.ones_like(torch.zeros(2, dtype=torch.int8)).dtype is torch.int8


def test_an_array_is_a_copy() -> None:
    source = np.zeros(2, dtype=np.float32)
    array = mx.nd.array(source)
    array += 1
    assert source.tolist() == [0, 0]
    found = array.asnumpy()
    found += 1
    assert array.tolist() == [1, 1]


def test_methods() -> None:
    array = mx.nd.array([1.5, 2.5])
    assert array.context == array.ctx == mx.cpu() == mx.cpu_pinned() == mx.current_context()
    assert array.as_in_context(mx.cpu(3)) is array
    assert array.astype("int32").tolist() == [1, 2]
    assert isinstance(array[:1] * 2, type(array))
    other = mx.nd.zeros((2,))
    assert array.copyto(other) is other
    assert other.tolist() == array.copy().tolist() == array.copyto(mx.cpu()).tolist() == [1.5, 2.5]
    array.wait_to_read()
    array.wait_to_write()
    mx.nd.waitall()
    with pytest.raises(ValueError, match="is no scalar"):
        array.asscalar()
    assert mx.gpu(1) == torch.device("cuda", 1)
    assert mx.num_gpus() == torch.cuda.device_count()


def test_arrays_are_copied_and_sent_to_other_processes_as_arrays() -> None:
    array = mx.nd.array([[1, 2]]).requires_grad_()
    for other in (copy.deepcopy(array), pickle.loads(pickle.dumps(array)), array.new_empty((1, 2))):
        assert type(other) is mx.nd.NDArray
        assert other.shape == (1, 2)
    assert copy.deepcopy(array).tolist() == [[1, 2]]
    assert torch.nn.Linear(2, 1)(array).shape == (1, 1)


def test_torch_differentiates_through_arrays() -> None:
    weight = mx.nd.ones((2,)).requires_grad_()
    (mx.nd.array([1, 2]) * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 2]


def test_rows_to_push() -> None:
    rows = mx.nd.sparse.row_sparse_array((np.ones((2, 1)), [2, 0]), shape=(3, 1))
    assert rows.is_sparse
    assert rows.to_dense().flatten().tolist() == [1, 0, 1]
    with pytest.raises(RuntimeError, match="inconsistent"):
        mx.nd.sparse.row_sparse_array((np.ones((1, 1)), [3]), shape=(3, 1))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mx.autograd", "loss.backward"),
        ("mx.mod", "kvps.Trainer"),
        ("mx.nonsense", "docs/migrating/mxnet-names.md"),
        ("mx.nd.dot", "torch.matmul"),
        ("mx.nd.nonsense", "docs/migrating"),
        ("mx.gluon.nn", "torch.nn"),
        ("mx.nd.ones(1).attach_grad", "requires_grad_"),
        ("mx.kv.create('local').num_dead_node", "num_dead_nodes"),
    ],
)
def test_a_name_that_is_not_there_names_the_way_out(name: str, says: str) -> None:
    with pytest.raises(AttributeError, match=says):
        eval(name, {"mx": mx})


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match=r"neither has torch\.Tensor"):
        _ = mx.nd.ones(1).nonsense
    with pytest.raises(ConfigError, match="leave stype out"):
        mx.nd.zeros((2,), stype="row_sparse")
