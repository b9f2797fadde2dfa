"""Objects to bytes and back: all data, and nothing else."""

import collections
import pickle

import msgpack
import numpy as np
import pytest
import torch

from kvps.errors import ConfigError, ProtocolError
from kvps.torch import serialization
from kvps.torch.serialization import pack, unpack

VALUES = [
    None,
    True,
    0,
    -1,
    2**63,
    -(2**63) - 1,
    2**300,
    -(2**300),
    0.1,
    float("inf"),
    1 - 2j,
    "tëxt",
    b"\x00\xff",
    [],
    [1, [2, [3]]],
    (1, (2, ())),
    {1, "a"},
    frozenset({(1, 2)}),
    {"a": 1, 2: [None], 3.5: {}},
    {(1, 2): "pair", None: 0},
    {True: 1},
    [{"deep": ({"x": [(1,)]},)}],
]


@pytest.mark.parametrize("value", VALUES, ids=map(str, range(len(VALUES))))
def test_values_come_back_with_their_types(value):
    back = unpack(pack(value))
    assert back == value
    assert type(back) is type(value)


def test_types_inside_containers_are_kept():
    back = unpack(pack({"a": (1, [2.0], {3})}))
    assert [type(item) for item in back["a"]] == [int, list, set]
    ordered = collections.OrderedDict([("b", 1), ("a", torch.Size([2, 3]))])
    assert unpack(pack(ordered)) == collections.OrderedDict([("b", 1), ("a", (2, 3))])
    assert type(unpack(pack(ordered))) is collections.OrderedDict


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64, torch.float8_e5m2]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    back = unpack(pack({"w": [tensor]}))["w"][0]
    assert back.dtype is dtype
    assert back.shape == shape
    assert torch.equal(back.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    back.view(-1).view(torch.uint8).zero_()  # it is its own memory


def test_tensors_of_any_strides_and_with_a_gradient():
    tensor = torch.arange(6.0).view(2, 3).T.requires_grad_()
    assert torch.equal(unpack(pack(tensor)), tensor)
    conj = torch.tensor([1 + 2j]).conj()
    assert unpack(pack(conj)).item() == 1 - 2j


@pytest.mark.parametrize("dtype", ["float64", "int8", "bool", "<U3", "S2", "datetime64[s]", ">f4"])
def test_arrays(dtype):
    array = np.array([[1, 0], [1, 1]]).astype(dtype)
    back = unpack(pack((array,)))[0]
    assert back.dtype == array.dtype
    assert (back == array).all()
    assert isinstance(unpack(pack(np.float32(1.5))), np.float32)


class Code:
    def __reduce__(self):
        return (print, ("boo",))


@pytest.mark.parametrize(
    ("obj", "says"),
    [
        ({"a": [0, 1, 2, Code()]}, r"obj\['a'\]\[3\] is a .*Code"),
        (print, "obj is a builtins.builtin_function_or_method"),
        ([collections.Counter("aa")], r"obj\[0\] is a collections.Counter"),
        ({Code(): 1}, "key .*is a .*Code"),
        ({object}, r"obj\{...\} is a builtins.type"),
        (np.array([None]), "array of object"),
        (torch.ones(2).to_sparse(), "dense"),
        (torch.float32, "torch.dtype"),
    ],
)
def test_anything_else_is_named_with_its_place(obj, says):
    with pytest.raises(ConfigError, match=says):
        pack(obj)


def test_an_object_within_itself():
    item: list[object] = []
    item.append(item)
    with pytest.raises(ConfigError, match="that contains itself"):
        pack(item)


def test_put_aside_tensors_are_made_blank_and_filled_in_place():
    tensors, blanks = [], []
    packed = pack({"state": {0: {"step": torch.tensor(3.0), "m": torch.ones(2, 3)}}}, tensors)
    assert [tuple(array.shape) for array in tensors] == [(), (2, 3)]
    back = unpack(packed, blanks)
    for blank, tensor in zip(blanks, tensors, strict=True):
        blank.copy_(tensor)
    assert back["state"][0]["m"].tolist() == [[1] * 3] * 2
    assert back["state"][0]["step"].item() == 3


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        pickle.dumps([1]),
        msgpack.packb(msgpack.ExtType(99, b"")),
        msgpack.packb(msgpack.ExtType(serialization.TENSOR, msgpack.packb(["float32", [3], b"1234"]))),
        msgpack.packb(msgpack.ExtType(serialization.TENSOR, msgpack.packb(["nn", [1], b"1234"]))),
        msgpack.packb(msgpack.ExtType(serialization.TENSOR, msgpack.packb(["nowhere", [1], b""]))),
        msgpack.packb(msgpack.ExtType(serialization.ARRAY, msgpack.packb(["O", [1], b"12345678"]))),
        msgpack.packb(msgpack.ExtType(serialization.ARRAY, msgpack.packb(["f4", [9], b"1234"]))),
        msgpack.packb(msgpack.ExtType(serialization.ASIDE, msgpack.packb(["float32", [1]]))),
        msgpack.packb(msgpack.ExtType(serialization.SET, msgpack.packb([[1]]))),
    ],
)
def test_bytes_that_no_worker_makes(packed):
    with pytest.raises(ProtocolError, match="cannot be read"):
        unpack(packed)


def test_blank_tensors_fit_the_memory_of_this_machine(monkeypatch):
    """All of them together, and before the first of them is made."""
    monkeypatch.setattr(serialization, "memory_bytes", lambda: 100)
    blanks = []
    unpack(pack([torch.ones(12), torch.ones(12)], []), blanks)
    assert [blank.numel() for blank in blanks] == [12, 12]
    with pytest.raises(ProtocolError, match="more bytes than this machine has"):
        unpack(pack([torch.ones(12), torch.ones(14)], []), [])


@pytest.mark.parametrize("shape", [[-1], [2**50], ["x"]])
def test_shapes_of_blank_tensors_are_checked(shape):
    bad = msgpack.packb(msgpack.ExtType(serialization.ASIDE, msgpack.packb(["float32", shape])))
    with pytest.raises(ProtocolError, match="shape"):
        unpack(bad, [])
