"""The KVStore contract, as a training script sees it, on clusters within this process."""

import threading

import numpy as np
import pytest
import torch

import kvps
from kvps.core.worker.calls import OpenStore, dense
from kvps.dtypes import DTYPES
from kvps.runtime.worker_session import WorkerSession

DIST = ["dist_sync", "dist_async", "dist_ssp"]
ALL = ["local", "device", *DIST, *(f"{name}_device" for name in DIST)]


def run(work, workers=1, servers=1):
    """Call ``work(rank)`` as each worker of a cluster; return the results."""
    with kvps.LocalCluster(workers, servers) as cluster:
        return cluster.run(work)


def store(kind="dist_sync", **options):
    """Return a store that is ready for pushes, whatever its kind."""
    kv = kvps.create(kind, timeout=20, **options)
    if "async" in kind or "ssp" in kind:
        kv.set_optimizer("test")
    return kv


# --- values, keys, types ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_push_and_a_pull(name):
    def work(rank):
        kv = store(name)
        kv.init("w", torch.zeros(3, 4))
        gradient = torch.randn(3, 4)
        kept = gradient.clone()
        kv.push("w", gradient)
        gradient.add_(1000)  # the caller may reuse it at once
        out = torch.empty(3, 4)
        kv.pull("w", out=out)
        assert torch.equal(out, kept)
        assert kv.version("w") == 1
        assert kv.type == name
        assert kv.keys() == ["w"]

    run(work)


@pytest.mark.parametrize("dtype", [field.name for field in DTYPES])
@pytest.mark.parametrize("name", ["local", "dist_sync"])
def test_every_element_type_travels_and_is_summed(name, dtype):
    def work(rank):
        kv = store(name)
        kind = getattr(torch, dtype)
        kv.init("w", torch.zeros(5, dtype=kind))
        values = [torch.arange(5).to(kind), torch.full((5,), 2).to(kind)]
        out = kv.pushpull("w", values)
        assert out.dtype == kind
        assert torch.equal(out, (torch.arange(5) + 2).to(kind))

    run(work)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_summed_in_float32(dtype):
    # 2048 + 1 + 1 is 2048 in float16 if it is rounded after each addition.
    big = 2048.0 if dtype is torch.float16 else 256.0

    def work(rank):
        kv = store("dist_sync", deterministic=True)
        kv.init("w", torch.zeros(2, dtype=dtype))
        value = torch.full((2,), big if rank == 0 else 1.0, dtype=dtype)
        return kv.pushpull("w", value).tolist()

    assert run(work, workers=3) == [[big + 2] * 2] * 3


def test_numpy_arrays_and_strided_tensors():
    def work(rank):
        kv = store()
        kv.init("a", np.zeros((3, 2), np.float32))
        out = np.empty((3, 2), np.float32)
        kv.pushpull("a", np.arange(6, dtype=np.float32).reshape(2, 3).T, out=out)
        assert out.tolist() == [[0, 3], [1, 4], [2, 5]]
        frozen = np.ones((3, 2), np.float32)
        frozen.flags.writeable = False
        kv.push("a", frozen)
        kv.push("a", np.ones((3, 2), np.float32)[::-1])
        transposed = torch.empty(2, 3).T
        kv.pull("a", out=transposed)
        assert torch.equal(transposed, torch.ones(3, 2))
        with pytest.raises(kvps.Mismatch, match="read-only"):
            kv.pull("a", out=frozen)

    run(work)


def test_scalars_and_empty_tensors():
    def work(rank):
        kv = store()
        kv.init(["s", "e"], [torch.tensor(1.0), torch.empty(0, 3)])
        scalar, empty = kv.pushpull(["s", "e"], [torch.tensor(4.0), torch.empty(0, 3)])
        assert scalar.shape == ()
        assert scalar.item() == 4
        assert empty.shape == (0, 3)

    run(work, servers=2)


def test_lists_of_keys_with_lists_of_devices():
    def work(rank):
        kv = store("dist_sync_device")
        kv.init(["a", "b"], [torch.zeros(2), torch.zeros(3)])
        kv.push(["a", "b"], [[torch.ones(2), torch.ones(2)], torch.ones(3)])
        tensor, two = torch.empty(2), torch.empty(2)
        three = torch.empty(3)
        kv.pull(["a", "b"], out=[[tensor, two], three])
        assert tensor.tolist() == two.tolist() == [2, 2]
        assert three.tolist() == [1, 1, 1]

    run(work)


def test_handles():
    def work(rank):
        kv = store()
        kv.init("w", torch.zeros(4))
        value = torch.randn(4)
        pushed = kv.push("w", value, async_op=True)
        assert pushed.wait() is None
        assert pushed.done()
        pulled = kv.pull("w", async_op=True)
        assert torch.equal(pulled.wait(), value)
        assert pulled.wait() is pulled.wait()
        assert torch.equal(kv.pushpull("w", value, async_op=True).wait(), value)

    run(work)


def test_a_pushed_array_is_written_to_only_if_it_is_the_output():
    def work(rank):
        kv = store()
        kv.init("w", torch.zeros(1000))
        value = torch.full((1000,), rank + 1.0)
        kv.pushpull("w", value)
        assert value[0] == rank + 1
        kv.pushpull("w", value, out=value)
        return value[0].item()

    assert run(work, workers=2) == [3, 3]


def test_broadcast_creates_and_replaces():
    def work(rank):
        kv = store()
        for count in range(3):
            out = torch.empty(5)
            kv.broadcast("w", torch.full((5,), 10.0 * count + rank), out)
            assert out.tolist() == [10.0 * count] * 5
        small = torch.empty(2, 2, dtype=torch.float64)
        kv.broadcast("w", torch.full((2, 2), rank + 7.0, dtype=torch.float64), small)
        assert small.tolist() == [[7, 7], [7, 7]]
        assert kv.pushpull("w", torch.ones(2, 2, dtype=torch.float64))[0, 0] == 2

    run(work, workers=2, servers=2)


def test_init_gives_everyone_the_value_of_rank_0():
    def work(rank):
        kv = store()
        kv.init("w", torch.full((200_000,), float(rank)))
        kv.init("w", torch.full((200_000,), 5.0))  # again: nothing
        return kv.pull("w").unique().tolist()

    assert run(work, workers=3, servers=2) == [[0.0]] * 3


# --- rounds -----------------------------------------------------------------------------------


def test_many_rounds_in_flight():
    def work(rank):
        kv = store()
        kv.init("w", torch.zeros(1))
        if rank == 0:
            for step in range(200):
                kv.push("w", torch.full((1,), float(step)))
        else:
            for step in range(200):
                assert kv.pushpull("w", torch.zeros(1)).item() == step
        return kv.pull("w").item()

    assert run(work, workers=2) == [199.0, 199.0]


def test_ssp_waits_for_the_slowest():
    def work(rank):
        kv = store("dist_ssp", staleness=2)
        kv.init("w", torch.zeros(1))
        kv.push("w", torch.ones(1))
        kv.barrier()
        if rank == 0:
            kv.push("w", torch.ones(1))
            kv.push("w", torch.ones(1))
            kv.pull("w")  # two ahead
            kv.push("w", torch.ones(1))
            assert kv.staleness() == {"w": 3}
            with pytest.raises(kvps.Timeout, match=r"3 pushes ahead of rank 1.*staleness allows 2"):
                kv.pull("w", timeout=3.0)
            kv.barrier("go on")
            assert kv.pull("w").item() >= 6
        else:
            kv.barrier("go on")
            kv.push("w", torch.ones(1))

    run(work, workers=2)


@pytest.mark.parametrize("name", ALL)
def test_workers_with_different_numbers_of_batches_join(name):
    def work(rank):
        kv = store(name)
        kv.init("w", torch.zeros(3))
        for _ in range(1 + 2 * rank):
            kv.push("w", torch.ones(3))
        last = kv.join(timeout=20)
        found = kv.pull("w").tolist()
        if "_sync" in name:
            assert kv.pushpull("w", torch.ones(3)).tolist() == [2.0] * 3  # of both again
        return last, found, kv.joins

    if name in ("local", "device"):
        assert run(work) == [(0, [1.0] * 3, 1)]
        return
    (first, second) = run(work, workers=2)
    assert first == second
    assert first[0] in (0, 1)
    assert first[1:] == (([1.0] if "_sync" in name else [4.0]) * 3, 1)


def test_several_stores_in_one_job():
    def work(rank):
        first, two = store(), store()
        asy = store("dist_async", name="extra")
        for factor, kv in enumerate((first, two, asy), start=1):
            kv.init("w", torch.zeros(2))
            kv.push("w", torch.full((2,), float(factor)))
            kv.barrier()
        return [kv.pull("w")[0].item() for kv in (first, two, asy)]

    assert run(work, workers=2) == [[2.0, 4.0, 6.0]] * 2


# --- the optimizer on the servers -------------------------------------------------------------


def test_seven_workers_and_seven_servers():
    shapes = [(3, 4), (1200, 1200), (1211, 1211)]
    n, pushes = 7, 3

    def work(rank):
        kv = kvps.create("dist_sync", timeout=60)
        kv.set_optimizer("test", rescale_grad=2)
        kinds = [(s, d) for s in shapes for d in (torch.float32, torch.float16)]
        names = [f"{shape}-{dtype}" for shape, dtype in kinds]
        kv.init(names, [torch.ones(shape, dtype=dtype) for shape, dtype in kinds])
        for _ in range(pushes):
            kv.push(names, [torch.full(s, rank + 1.0, dtype=d) for s, d in kinds])
        for out in kv.pull(names):
            assert out.unique().tolist() == [n * (n + 1) * pushes + 1]

    run(work, workers=n, servers=n)


# --- names, options, bad input ------------------------------------------------------------------


BAD_CREATE = [
    (("dist_synk",), {}, "dist_synk.*dist_sync"),
    ((7,), {}, "is a str"),
    (("dist_sync",), {"staleness": 3}, "option of dist_ssp"),
    (("dist_ssp",), {"staleness": -1}, "staleness=-1"),
    (("dist_sync",), {"timeout": float("nan")}, "timeout"),
    (("dist_sync",), {"worker_grace": 0}, "worker_grace"),
    (("dist_sync",), {"on_worker_lost": "cry"}, "wait, shrink, fail"),
    (("dist_sync",), {"bigarray_bound": 0}, "bigarray_bound"),
    (("dist_sync",), {"host_aggregation": "yes"}, "host_aggregation='yes': use True or False"),
    (("dist_sync",), {"compresion": 1}, "compresion"),
    (("dist_sync",), {"name": ""}, "name"),
]


@pytest.mark.parametrize(("args", "options", "says"), BAD_CREATE)
def test_a_store_that_cannot_be(args, options, says):
    def work(rank):
        with pytest.raises(kvps.ConfigError, match=says):
            kvps.create(*args, **options)
        kvps.create("dist_sync").close()

    run(work)


@pytest.mark.parametrize(
    ("kind", "options", "variable", "bundles"),
    [
        ("dist_sync", {}, None, True),
        ("dist_sync_device", {}, "1", True),
        ("dist_sync", {}, "0", False),
        ("dist_sync", {"host_aggregation": True}, "0", True),
        ("dist_sync", {"host_aggregation": False}, None, False),
        ("dist_sync", {"deterministic": True, "host_aggregation": True}, None, False),
        ("dist_async", {"host_aggregation": True}, None, False),
        ("dist_ssp", {"host_aggregation": True}, None, False),
    ],
)
def test_host_aggregation_is_on_by_store_and_variable(monkeypatch, kind, options, variable, bundles):
    opened = []
    call = WorkerSession.call
    if variable is not None:
        monkeypatch.setenv("KVPS_HOST_AGGREGATION", variable)

    def note(session, item, *more):
        opened.append(item)
        return call(session, item, *more)

    monkeypatch.setattr(WorkerSession, "call", note)
    run(lambda rank: kvps.create(kind, **options).close())
    assert [item.opened.bundles for item in opened if isinstance(item, OpenStore)] == [bundles]


BAD_CALLS = [
    (lambda kv: kv.push("x", torch.ones(2)), kvps.KeyNotFound, "'x' was never initialised"),
    (lambda kv: kv.pull("x"), kvps.KeyNotFound, "'x'"),
    (lambda kv: kv.version("x"), kvps.KeyNotFound, "'x'"),
    (lambda kv: kv.push("w", torch.ones(3)), kvps.Mismatch, r"float32\[2\].*float32\[3\]"),
    (lambda kv: kv.push("w", torch.ones(2).double()), kvps.Mismatch, "float64"),
    (lambda kv: kv.push("w", np.ones(2)), kvps.Mismatch, "float64"),
    (lambda kv: kv.push("w", np.ones(2, np.complex64)), kvps.Mismatch, "complex64"),
    (lambda kv: kv.push("w", torch.ones(2, dtype=torch.cfloat)), kvps.Mismatch, "complex64"),
    (lambda kv: kv.push("w", torch.ones(2).to_sparse()), kvps.Mismatch, "two or more dimensions"),
    (lambda kv: kv.push("w", 1.0), kvps.Mismatch, "float"),
    (lambda kv: kv.push("w", [1.0, 2.0]), kvps.Mismatch, "torch.Tensor"),
    (lambda kv: kv.push("w", []), kvps.ConfigError, "empty"),
    (lambda kv: kv.push(["w"], torch.ones(2)), kvps.ConfigError, "list of values"),
    (lambda kv: kv.push(["w"], []), kvps.ConfigError, "as many values"),
    (lambda kv: kv.push(["w", "w"], [torch.ones(2)] * 2), kvps.ConfigError, "given twice"),
    (lambda kv: kv.push(1.5, torch.ones(2)), kvps.ConfigError, "str or an int"),
    (lambda kv: kv.push("", torch.ones(2)), kvps.ConfigError, "1 to 256"),
    (lambda kv: kv.push("a\nb", torch.ones(2)), kvps.ConfigError, "printable"),
    (lambda kv: kv.pull("w", out=torch.ones(3)), kvps.Mismatch, r"float32\[3\]"),
    (lambda kv: kv.pull("w", min_version=-1), kvps.ConfigError, "min_version"),
    (lambda kv: kv.pull("w", min_version=2**70), kvps.ConfigError, "min_version"),
    (lambda kv: kvps.create("dist_ssp", staleness=2**70), kvps.ConfigError, "staleness"),
    (lambda kv: kvps.create("dist_sync", bigarray_bound=2**70), kvps.ConfigError, "bigarray_bound"),
    (lambda kv: kvps.create("dist_sync", quorum=2**70), kvps.ConfigError, "quorum"),
    (lambda kv: kv.pull("w", timeout=-1), kvps.ConfigError, "timeout"),
    (lambda kv: kv.init("w", torch.ones(3)), kvps.Mismatch, r"float32\[2\].*float32\[3\]"),
    (lambda kv: kv.set_optimizer("sdg"), kvps.ConfigError, "sdg.*sgd"),
    (lambda kv: kv.set_optimizer("sgd", lr=float("nan")), kvps.ConfigError, "lr"),
    (lambda kv: kv.set_optimizer("sgd", momentun=1), kvps.ConfigError, "momentun.*momentum"),
    (lambda kv: kv.set_learning_rate(0.1), kvps.ConfigError, "no optimizer"),
    (lambda kv: kv.learning_rate, kvps.ConfigError, "no optimizer"),
    (lambda kv: kv.is_capable("fly"), kvps.ConfigError, "fly"),
]


@pytest.mark.parametrize("name", ["local", "dist_sync"])
def test_bad_calls_raise_at_the_offender_and_change_nothing(name):
    def work(rank):
        kv = kvps.create(name, timeout=10)
        kv.init("w", torch.tensor([1.0, 2.0]))
        for call, error, says in BAD_CALLS:
            with pytest.raises(error, match=says) as caught:
                call(kv)
            assert isinstance(caught.value, kvps.KvpsError)
        assert kv.pull("w").tolist() == [1, 2]
        assert kv.version("w") == 0
        kv.close()
        with pytest.raises(kvps.ConfigError, match="closed"):
            kv.pull("w")

    run(work)


def test_same_name_with_two_types_is_refused():
    def work(rank):
        kv = kvps.create("dist_sync", name="mine", timeout=10)
        with pytest.raises(kvps.Mismatch, match=r"'mine'.*dist_sync.*dist_async"):
            kvps.create("dist_async", name="mine", timeout=10)
        kv.barrier()

    run(work, workers=2)


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssp", "dist_async_device"])
def test_a_push_that_needs_an_optimizer_is_refused_by_the_call_itself(kind):
    def work(rank):
        kv = kvps.create(kind, timeout=30)
        mode = "ssp" if "ssp" in kind else "async"
        says = rf"store 'store-0' of type dist_{mode} has no optimizer.*set_optimizer\(...\) before"
        names, item = [3, "t"], torch.ones(40, 3)
        kv.init(names, [torch.zeros(1), torch.zeros(40, 3)])
        for _ in range(2):
            with pytest.raises(kvps.ConfigError, match=says):
                kv.push(3, torch.ones(1))
            with pytest.raises(kvps.ConfigError, match=says):
                kv.push("3", torch.ones(1), async_op=True).wait()
            with pytest.raises(kvps.ConfigError, match=says):
                kv.push(names, [torch.ones(1), item])
            with pytest.raises(kvps.ConfigError, match=says):
                kv.push("t", ([1, 2], item[:2]))
            with pytest.raises(kvps.ConfigError, match=says):
                kv.pushpull(3, torch.ones(1))
        assert kv.version(names) == [0, 0]
        table = kv.embedding("e", 2, init="zeros", optimizer="sgd", lr=1.0)
        table.push([5], torch.ones(1, 2))  # it has an optimizer of its own
        kv.broadcast("b", torch.full((1,), rank + 1.0), out=torch.empty(1))
        kv.barrier()
        kv.set_optimizer("test")
        assert kv.pull(3).item() == 0
        kv.barrier()  # the other has looked, too
        kv.push(3, torch.ones(1))
        kv.push("t", ([1, 2], item[:2]))
        kv.barrier()
        assert kv.pull(3).item() == 2
        assert table.pull(5)[0].item() == -2
        assert kv.pull("b").item() == 1

    run(work, workers=2)


def test_a_timeout_names_who_is_missing():
    def work(rank):
        kv = kvps.create("dist_sync", timeout=20)
        kv.init("w", torch.zeros(1))
        if rank == 0:
            kv.push("w", torch.ones(1))
            with pytest.raises(TimeoutError, match="rank 1"):
                kv.pull("w", timeout=3.0)
            assert [straggler.rank for straggler in kv.stragglers()] == [1]
            assert kv.stragglers()[0].key == "w"
            kv.barrier()
        else:
            kv.barrier()
            kv.push("w", torch.ones(1))
        return kv.pull("w").item()

    assert run(work, workers=2) == [2, 2]


def test_a_plugin_is_created_by_its_name():
    @kvps.KVStoreBase.register
    class EchoStore(kvps.KVStoreBase):
        type = "echostore"
        rank = 0
        num_workers = 1

    try:
        assert isinstance(kvps.create("EchoStore"), EchoStore)
        with pytest.warns(UserWarning, match="replaces"):

            @kvps.KVStoreBase.register
            class EchoStore(kvps.KVStoreBase):
                pass

        with pytest.raises(kvps.ConfigError, match="subclasses"):
            kvps.KVStoreBase.register(int)
        with pytest.raises(kvps.ConfigError, match="echostore"):
            kvps.create("nothing")
    finally:
        del kvps.KVStoreBase.registry["echostore"]


def test_a_process_of_torchrun_starts_no_cluster_of_its_own(monkeypatch):
    monkeypatch.delenv("KVPS_SCHEDULER", raising=False)
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kvps.ConfigError, match="each of them would train alone"):
        kvps.create("dist_sync", timeout=20)


def test_a_store_without_a_cluster_starts_an_embedded_one(monkeypatch, caplog):
    for name in ("KVPS_SCHEDULER", "KVPS_RANK", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    kv = kvps.create("dist_sync", timeout=20)
    assert (kv.rank, kv.num_workers) == (0, 1)
    kv.init("w", torch.zeros(2))
    assert kv.pushpull("w", torch.ones(2)).tolist() == [1, 1]
    assert [record.message for record in caplog.records if "cluster of one" in record.message]
    kvps.shutdown()
    kvps.shutdown()


@pytest.mark.cuda
def test_values_on_a_gpu():
    def work(rank):
        kv = store("dist_sync_device")
        kv.init("w", torch.zeros(1000, device="cuda"))
        values = [torch.randn(1000, device="cuda") for _ in range(3)]
        out = torch.empty(1000, device="cuda")
        kv.pushpull("w", values, out=out)
        torch.testing.assert_close(out, torch.stack(values).sum(0))

    run(work)


def test_when_a_worker_raises_the_others_do_not_wait_for_another():
    def work(rank):
        kv = kvps.create("dist_sync")  # would wait minutes for a replacement
        kv.init("w", torch.zeros(3))
        both_began.wait(10)
        if rank:
            raise ZeroDivisionError("in worker 1")
        with pytest.raises(kvps.WorkerLost, match=r"raised ZeroDivisionError.*no replacement can"):
            kv.pushpull("w", torch.ones(3))
        ended.append(rank)

    ended = []
    both_began = threading.Barrier(2)
    with pytest.raises(ZeroDivisionError, match="in worker 1"):
        run(work, workers=2)
    assert ended == [0]


# --- mistakes, and memory, that must not end the worker ---------------------------------------------


@pytest.mark.parametrize("name", ["dist_sync", "allreduce"])
def test_a_broadcast_that_fails_leaves_each_key_as_it_was(name):
    def work(rank):
        kv = store(name)
        kv.init("w", torch.zeros(2))
        with pytest.raises(kvps.Mismatch):
            kv.broadcast("w", torch.ones(3 + rank), out=torch.empty(3 + rank))
        assert kv.pull("w").tolist() == [0, 0]
        return kv.pushpull("w", torch.ones(2)).tolist(), kv.keys()

    assert run(work, workers=2) == [([2, 2], ["w"])] * 2


@pytest.mark.parametrize("name", ["local", "dist_sync"])
def test_outputs_may_share_memory_with_the_values_of_other_keys(name):
    """Each key has a chunk of its own, whose answer may come before the next is sent."""
    count = 3_000_000

    def work(rank):
        kv = store(name)
        kv.init(["a", "b"], [torch.zeros(count)] * 2)
        for _ in range(3):
            number, two = torch.full((count,), 1.0), torch.full((count,), 2.0)
            kv.pushpull(["a", "b"], [number, two], out=[two, number])
            assert two.eq(1).all(), "the sum of a"
            assert number.eq(2).all(), "the sum of b"
            tied = torch.full((count,), 3.0)
            kv.pushpull(["a", "b"], [tied, tied], out=[tied, torch.empty(count)])
            assert kv.pull("b").eq(3).all()

    run(work)


def test_overlaps_are_looked_for_where_keys_of_a_chunk_travel_in_two_forms(monkeypatch):
    """One share, and two requests: the answer to the first may be written before the second is made."""
    seen, unshare = [], dense.unshare
    monkeypatch.setattr(dense, "unshare", lambda *call: [seen.append(call), unshare(*call)])

    def work(rank):
        kv = store("dist_sync")
        kv.set_gradient_compression(
            {"type": "none", "min_bytes": 0, "rules": [{"pattern": "a*", "type": "fp16"}]}
        )
        kv.init(["a", "b"], [torch.zeros(4)] * 2)
        number, two = torch.full((4,), 1.0), torch.full((4,), 2.0)
        kv.pushpull(["a", "b"], [number, two], out=[two, number])
        assert (two.tolist(), number.tolist()) == ([1] * 4, [2] * 4)

    run(work)
    assert len(seen) == 1


def test_integers_have_no_weight():
    def work(rank):
        kv = store("dist_sync", average=True)
        ones = torch.ones(2, dtype=torch.int64)
        kv.init(["a", "b"], [ones, ones])
        for call in (kv.push, kv.pushpull):
            with pytest.raises(kvps.ConfigError, match=r"values of torch\.int64: integers have no"):
                call(["a", "b"], [ones, ones], weight=2.0)
        assert kv.pull("a").tolist() == [1, 1]

    run(work)


@pytest.mark.parametrize("name", ["local", "dist_sync", "allreduce"])
def test_tensors_that_show_their_memory_negated(name):
    def work(rank):
        kv = store(name)
        kv.init(["a", "b"], [torch.zeros(3)] * 2)
        values = [torch._neg_view(torch.ones(3)), torch._neg_view(torch.full((3,), 2.0))]
        outs = [torch._neg_view(torch.empty(3)) for _ in range(2)]
        kv.pushpull(["a", "b"], values, out=outs)
        assert [out.tolist() for out in outs] == [[-1] * 3, [-2] * 3]
        kv.pull("b", out=outs[0])
        assert outs[0].tolist() == [-2] * 3

    run(work)


@pytest.mark.parametrize("name", ["local", "dist_sync"])
def test_optimizer_states_that_a_script_gives(name):
    def work(rank):
        kv = store(name)
        kv.init("w", torch.ones(4))
        kv.set_optimizer("sgd", lr=1.0, momentum=0.5)
        kv.pushpull("w", torch.ones(4))
        step, rows = kv.optimizer_states()["w"]
        (title,) = rows
        for wrong, says in [
            ({"w": (step, {title: torch.ones(3)})}, "state of key 'w', which the store does not"),
            ({"w": (step, {title: torch.ones(4, dtype=torch.bool)})}, r"torch\.bool is not"),
            ({"w": (step, {title: [1.0] * 4})}, r"expected a torch\.Tensor"),
            ({"w": (-1, rows)}, r"has \(-1, .* for key 'w'; give the number of its updates"),
            ({"w": (2**70, rows)}, r"for key 'w'; give the number of its updates"),
            ({"w": (step, {3: torch.ones(4)})}, r"for key 'w'; give the number of its updates"),
            ({"w": (step, rows, 1)}, r"for key 'w'; give the number of its updates"),
            (None, r"the given dict has None"),
        ]:
            with pytest.raises(kvps.Mismatch, match=says):
                kv.set_optimizer_states(wrong)
        with pytest.raises(kvps.Mismatch, match="key 'v', which the store does not have"):
            kv.set_optimizer_states({"v": (step, rows)})
        momentum = torch.arange(8.0).requires_grad_()[::2]
        kv.set_optimizer_states({"w": (step, {title: momentum})})
        assert kv.optimizer_states()["w"][1][title].tolist() == [0, 2, 4, 6]
        kv.set_optimizer_states({"w": (step, {title: torch._neg_view(torch.ones(4))})})
        assert kv.optimizer_states()["w"][1][title].tolist() == [-1] * 4

    run(work)
