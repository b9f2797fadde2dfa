"""The KVStore by MXNet's names, in one process: argument order, outputs in place, and what is refused."""

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import kvps
import kvps.compat.mx as mx
from kvps.errors import ConfigError, KeyNotFound, Mismatch

SHAPE = (4, 2)
SIGNATURES = {
    "init": ["key", "value"],
    "push": ["key", "value", "priority"],
    "pull": ["key", "out", "priority", "ignore_sparse"],
    "pushpull": ["key", "value", "out", "priority"],
    "broadcast": ["key", "value", "out", "priority"],
    "row_sparse_pull": ["key", "out", "priority", "row_ids"],
    "set_optimizer": ["optimizer"],
    "set_gradient_compression": ["compression_params"],
    "save_optimizer_states": ["fname", "dump_optimizer"],
    "load_optimizer_states": ["fname"],
    "_set_updater": ["updater"],
    "_barrier": [],
    "_send_command_to_servers": ["head", "body"],
}
"""The methods of MXNet 1.9.1's KVStore, with their arguments."""


def test_methods_have_mxnets_arguments_in_mxnets_order() -> None:
    for name, arguments in SIGNATURES.items():
        found = list(inspect.signature(getattr(mx.kv.KVStore, name)).parameters)
        assert found == ["self", *arguments], name
    assert mx.kv is mx.kvstore
    assert mx.nd is mx.ndarray


@pytest.fixture
def kv() -> mx.kv.KVStore:
    store: mx.kv.KVStore = mx.kv.create()
    store.init(3, mx.nd.zeros(SHAPE))
    return store


def pulled(kv: mx.kv.KVStore, key: object = 3) -> list[float]:
    out = mx.nd.empty(SHAPE)
    assert kv.pull(key, out=out) is None
    return sorted(set(out.asnumpy().ravel().tolist()))


def test_a_single_key(kv: mx.kv.KVStore) -> None:
    assert (kv.type, kv.rank, kv.num_workers) == ("local", 0, 1)
    kv.push(3, mx.nd.ones(SHAPE))
    assert pulled(kv) == [1]
    kv.push("3", [mx.nd.ones(SHAPE)] * 4)
    assert pulled(kv) == [4]
    with pytest.raises(KeyNotFound):
        kv.push(4, mx.nd.ones(SHAPE))


def test_lists_of_keys_and_devices(kv: mx.kv.KVStore) -> None:
    keys = ["b", "c"]
    kv.init(keys, [mx.nd.zeros(SHAPE)] * 2)
    kv.push(keys, [[mx.nd.ones(SHAPE)] * 3, (mx.nd.ones(SHAPE), mx.nd.ones(SHAPE))], priority=-1)
    outs = [[mx.nd.empty(SHAPE), mx.nd.empty(SHAPE)] for _ in keys]
    kv.pull(keys, out=outs)
    assert [[device[0, 0].item() for device in devices] for devices in outs] == [[3, 3], [2, 2]]


def test_a_repeated_key_is_several_devices(kv: mx.kv.KVStore) -> None:
    kv.init("x", mx.nd.zeros(SHAPE))
    kv.push([3, "x", 3], [mx.nd.ones(SHAPE), mx.nd.full(SHAPE, 5), mx.nd.ones(SHAPE)])
    assert (pulled(kv), pulled(kv, "x")) == ([2], [5])
    outs = [mx.nd.empty(SHAPE) for _ in range(3)]
    kv.pull([3, 3, "x"], out=outs)
    assert [out[0, 0].item() for out in outs] == [2, 2, 5]


def test_outputs_are_written_in_place_also_where_they_need_gradients(kv: mx.kv.KVStore) -> None:
    weight = torch.zeros(SHAPE, requires_grad=True)
    with torch.no_grad():
        weight += 1
    kv.pushpull(3, weight * 2, out=weight)
    assert weight.tolist() == torch.full(SHAPE, 2.0).tolist()
    value = np.ones(SHAPE, dtype=np.float32)
    kv.pushpull(3, [value, value])
    assert value.tolist() == np.full(SHAPE, 2.0).tolist(), "without out, the values are the outputs"


def test_broadcast(kv: mx.kv.KVStore) -> None:
    out = mx.nd.empty(SHAPE)
    kv.broadcast("new", mx.nd.full(SHAPE, 7), out)
    assert out[0, 0].item() == 7
    kv.barrier()
    kv._barrier()
    kv.close()


def test_rows(kv: mx.kv.KVStore) -> None:
    kv.push(3, mx.nd.sparse.row_sparse_array((mx.nd.ones((2, 2)), [0, 3]), shape=SHAPE))
    out, other = mx.nd.full(SHAPE, 9), mx.nd.full(SHAPE, 9)
    kv.row_sparse_pull(3, out, row_ids=mx.nd.array([[3.0, 1.0], [3.0, 3.0]]))
    assert out.asnumpy()[:, 0].tolist() == [9, 0, 9, 1]
    kv.row_sparse_pull(3, [out, other], 0, [mx.nd.array([0]), mx.nd.array([2])])
    assert out.asnumpy()[:, 0].tolist() == [1, 0, 9, 1]
    assert other.asnumpy()[:, 0].tolist() == [9, 9, 0, 9]
    kv.row_sparse_pull(3, out=[out, other], row_ids=[mx.nd.array([1])])
    assert other.asnumpy()[:, 0].tolist() == [9, 0, 0, 9]


def test_rows_of_several_keys(kv: mx.kv.KVStore) -> None:
    kv.init("x", mx.nd.ones(SHAPE))
    outs = [mx.nd.full(SHAPE, 9) for _ in range(3)]
    ids = [mx.nd.array([0]), mx.nd.array([1])]
    kv.row_sparse_pull([3, "x"], out=[outs[0], outs[1]], row_ids=ids)
    assert [out.asnumpy()[:, 0].tolist() for out in outs[:2]] == [[0, 9, 9, 9], [9, 1, 9, 9]]
    kv.row_sparse_pull([3, "x"], out=[[outs[0]], [outs[1], outs[2]]], row_ids=[ids[1], [ids[0]] * 2])
    assert outs[2].asnumpy()[:, 0].tolist() == [1, 9, 9, 9]
    with pytest.raises(ConfigError, match="1 row_ids for 2 keys"):
        kv.row_sparse_pull([3, "x"], out=outs[:2], row_ids=ids[:1])
    with pytest.raises(ConfigError, match="2 row_ids for 3 outputs"):
        kv.row_sparse_pull(3, out=outs, row_ids=ids)


def test_an_optimizer_and_its_states(kv: mx.kv.KVStore, tmp_path: Path) -> None:
    path = str(tmp_path / "states")
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, momentum=0.5))
    kv.push(3, mx.nd.ones(SHAPE))
    kv.save_optimizer_states(path, dump_optimizer=True)
    kv.push(3, mx.nd.ones(SHAPE))
    assert pulled(kv) == [-2.5]
    kv.load_optimizer_states(path)
    kv.push(3, mx.nd.ones(SHAPE))
    assert pulled(kv) == [-4.0]
    assert kv.is_capable("optimizer")
    with pytest.raises(ValueError, match="unknown capability 'x'"):
        kv.is_capable("x")


@pytest.mark.parametrize("key", [3, "w"])
def test_an_updater_of_the_script(key: int | str) -> None:
    kv, seen = mx.kv.create("device"), []
    kv.init(key, mx.nd.ones(SHAPE))

    def update(name: int | str, received: torch.Tensor, stored: torch.Tensor) -> None:
        seen.append(name)
        stored += received * 2

    kv._set_updater(update)
    kv.push(key, [mx.nd.ones(SHAPE)] * 2)
    kv.push([key], [mx.nd.ones(SHAPE)])
    out = mx.nd.empty(SHAPE)
    kv.pushpull(key, mx.nd.ones(SHAPE), out=out)
    assert set(out.asnumpy().ravel().tolist()) == {9}
    assert seen == [key] * 3
    kv.set_updater(mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=1.0)))
    kv.push(key, mx.nd.ones(SHAPE))
    assert pulled(kv, key) == [8]
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
    kv.push(key, mx.nd.ones(SHAPE))
    assert pulled(kv, key) == [7.5], "an optimizer takes the place of an updater"


def test_compression_is_of_keys_of_any_size() -> None:
    kv, out = mx.kv.create("device"), mx.nd.empty((3,))
    kv.init("w", mx.nd.zeros((3,)))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.pushpull("w", mx.nd.array([0.4, 0.6, -3.0]), out=out)
    np.testing.assert_array_equal(out.asnumpy(), np.array([0.0, 0.5, -0.5], dtype=np.float32))
    kv.pushpull("w", mx.nd.array([0.4, 0.0, 0.0]), out=out)
    np.testing.assert_array_equal(out.asnumpy(), np.array([0.5, 0.0, -0.5], dtype=np.float32))


def nothing(*args: object) -> None:
    """Update nothing."""


def with_optimizer() -> mx.kv.KVStore:
    kv: mx.kv.KVStore = mx.kv.create("local")
    kv.set_optimizer(mx.optimizer.SGD())
    return kv


def with_updater() -> mx.kv.KVStore:
    kv: mx.kv.KVStore = mx.kv.create("device")
    kv._set_updater(nothing)
    return kv


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda kv: kv.pull(3), ConfigError, r"pull\(\) needs out=.*kv.store.pull"),
        (lambda kv: kv.row_sparse_pull(3, row_ids=[1]), ConfigError, "needs out="),
        (lambda kv: kv.row_sparse_pull(3, mx.nd.ones(SHAPE)), ConfigError, "needs row_ids="),
        (lambda kv: kv.push([3, 4], mx.nd.ones(SHAPE)), ConfigError, "2 keys and 1 values"),
        (lambda kv: kv.push([3], []), ConfigError, "1 keys and 0 values"),
        (lambda kv: kv.init(3, mx.nd.ones((1,))), Mismatch, "3"),
        (lambda kv: kv.set_optimizer("sgd"), ConfigError, "such as mx.optimizer.SGD.*not str"),
        (lambda kv: kv._send_command_to_servers(0, ""), ConfigError, "take no commands"),
        (lambda kv: kv.set_gradient_compression({"type": "2bit"}), ConfigError, "does not compress"),
        (lambda kv: with_optimizer()._set_updater(nothing), ConfigError, "without optimizer"),
        (
            lambda kv: with_updater().set_gradient_compression({"type": "2bit"}),
            ConfigError,
            "not available with an updater",
        ),
        (lambda kv: mx.kv.create(3), TypeError, "must be a string, got int"),
        (lambda kv: mx.kv.create("foo"), ConfigError, "no store type 'foo'"),
    ],
)
def test_unsupported_calls_are_refused(
    kv: mx.kv.KVStore, call: Callable[[mx.kv.KVStore], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        call(kv)


@pytest.mark.parametrize(
    ("name", "of_kvps"),
    [
        ("LOCAL", "local"),
        ("nccl", "device"),
        ("local_allreduce_device", "device"),
        ("horovod", "allreduce"),
        ("byteps", "allreduce"),
    ],
)
def test_names_of_stores(name: str, of_kvps: str) -> None:
    kv = mx.kv.create(name)
    assert (kv.type, kv.store.type) == (name.lower(), of_kvps)
    kv.close()


def test_a_plug_in_is_returned_as_it_is() -> None:
    @kvps.KVStoreBase.register
    class Mine(kvps.KVStoreBase):
        """A store of somebody else."""

    try:
        assert type(mx.kv.create("mine")) is Mine
    finally:
        del kvps.KVStoreBase.registry["mine"]


def test_a_trainer_has_mxnets_optimizers_and_defaults() -> None:
    def trained(**given: object) -> torch.Tensor:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 1)
        trainer = mx.gluon.Trainer(model, **given)  # type: ignore[arg-type]  # of the right types, as below
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            trainer.step(2)
        assert trainer.learning_rate == 0.01
        return model.weight.detach()

    named = trained(optimizer="sgd", optimizer_params={"momentum": 0.9}, kvstore="nccl")
    made = trained(optimizer=mx.optimizer.SGD(momentum=0.9), kvstore=mx.kv.create("device"))
    none = trained(optimizer=mx.optimizer.SGD(momentum=0.9), kvstore=None)
    assert torch.equal(named, made)
    assert torch.equal(named, none)
    with pytest.raises(ConfigError, match="give them to the optimizer itself"):
        mx.gluon.Trainer(torch.nn.Linear(3, 1), mx.optimizer.SGD(), {"wd": 0.1})


def test_a_trainer_compresses_keys_of_any_size() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    params = {"learning_rate": 1.0}
    trainer = mx.gluon.Trainer(model, "sgd", params, "device", {"type": "2bit", "threshold": 0.5}, True)
    model(torch.full((1, 3), 3.0)).sum().backward()
    trainer.step(1)
    assert model.weight.tolist() == [[-0.5, -0.5, -0.5]]


def test_batches_are_split_as_gluon_does() -> None:
    parts = mx.gluon.utils.split_and_load(mx.nd.arange(4), [mx.cpu(0), mx.cpu(1)])
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3]]
