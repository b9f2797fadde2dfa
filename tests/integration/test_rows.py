"""Rows of tables through the stores, as a training script pushes and pulls them."""

import numpy as np
import pytest
import torch

import kvps
from kvps.core.optim.hyperparams import resolve
from kvps.core.optim.sparse_update import update_rows
from kvps.core.optim.torch_rules import Terms, create
from kvps.errors import ConfigError, KeyNotFound, Mismatch

COUNT, WIDTH = 40, 12


def run(work, workers=2, servers=2):
    """Call ``work(rank)`` as each worker of a cluster; return the results."""
    with kvps.LocalCluster(workers, servers) as cluster:
        return cluster.run(work)


def store(kind="dist_sync", **options):
    """A store that cuts a table of COUNT rows over both servers."""
    more = {} if kind in ("local", "device") else {"bigarray_bound": 64}
    return kvps.create(kind, timeout=30, **more, **options)


def table(seed=0, count=COUNT):
    dice = torch.Generator().manual_seed(seed)  # ranks are threads here, and share the global one
    return torch.randn(count, WIDTH, generator=dice)


def coo(ids, rows, count=COUNT):
    return torch.sparse_coo_tensor(
        torch.as_tensor(ids)[None], rows, (count, *rows.shape[1:]), check_invariants=False
    )


def summed(*pushes, count=COUNT):
    """The dense sum of (ids, rows) pairs."""
    out = torch.zeros(count, WIDTH)
    for ids, rows in pushes:
        out.index_add_(0, torch.as_tensor(ids).long(), rows)
    return out


# --- what is pushed ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "device", "dist_sync"])
@pytest.mark.parametrize(
    "form",
    [
        lambda ids, rows: coo(ids, rows),
        lambda ids, rows: (ids, rows),
        lambda ids, rows: (np.array(ids, dtype=np.int32), rows.numpy()),
        lambda ids, rows: (torch.tensor(ids), rows.numpy()),
        lambda ids, rows: [(ids[:2], rows[:2]), (ids[2:], rows[2:])],
        lambda ids, rows: [coo(ids[:2], rows[:2]), coo(ids[2:], rows[2:])],
        lambda ids, rows: summed((ids, rows)).to_sparse(),
    ],
    ids=["coo", "tuple", "arrays", "mixed", "tuples", "coos", "elements"],
)
def test_the_sum_of_a_round_is_assigned(kind, form):
    ids, rows = [7, 39, 0, 7], torch.randn(4, WIDTH)

    def work(rank):
        kv = store(kind)
        kv.init("t", table())
        value = form(ids, rows)
        kv.push("t", value)
        got = kv.pull("t")
        kv.push("t", ([], torch.empty(0, WIDTH)))
        return got, kv.pull("t"), kv.version("t")

    workers = 1 if kind in ("local", "device") else 2
    for got, later, version in run(work, workers):
        torch.testing.assert_close(got, workers * summed((ids, rows)))
        assert not later.any(), "what nobody pushed is 0"
        assert version == 2


def test_dense_keys_and_rows_in_one_call():
    def work(rank):
        kv = store()
        kv.init(["t", "b"], [table(), torch.zeros(5)])
        values = [([1], torch.ones(1, WIDTH)), torch.ones(5)]
        kv.push(["t", "b"], values, priority=[1, 2])
        found = kv.pull(["t", "b"])
        again = kv.pushpull(["t", "b"], values)
        out = torch.empty(COUNT, WIDTH)
        kv.pushpull("t", coo([2], torch.ones(1, WIDTH)), out=out)
        return found, again, out

    for found, again, out in run(work):
        for item in (found, again):
            torch.testing.assert_close(item[0], summed(([1], 2 * torch.ones(1, WIDTH))))
            assert item[1].tolist() == [2.0] * 5
        assert out.sum() == 2 * WIDTH


# --- updates -----------------------------------------------------------------------------------


RULES = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adagrad": {"lr": 0.1},
    "adam": {"lr": 0.1, "weight_decay": 0.1},
    "ftrl": {"lr": 0.1, "lamda1": 0.01},
}


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
@pytest.mark.parametrize("rule", RULES)
def test_only_rows_that_were_pushed_are_updated(kind, rule):
    workers = 1 if kind == "local" else 2
    steps = [[(torch.randperm(COUNT)[:4], torch.randn(4, WIDTH)) for _ in range(workers)] for _ in range(4)]

    def work(rank):
        kv = store(kind)
        kv.set_optimizer(rule, **RULES[rule])
        kv.init("t", table())
        for pushes in steps:
            kv.push("t", pushes[rank])
        return kv.pull("t")

    weights, updater = table(), create(resolve(rule, RULES[rule]))
    state = updater.new_state(weights.view(-1))
    state = {name: item.view(COUNT, WIDTH) for name, item in state.items()}
    for number, pushes in enumerate(steps, start=1):
        ids = torch.cat([ids for ids, _ in pushes]).unique()
        terms = Terms(number, *updater.hyper.for_key("t"))
        update_rows(weights, state, ids, summed(*pushes)[ids], updater, terms)
    for got in run(work, workers):
        torch.testing.assert_close(got, weights)


# --- what is pulled ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "device", "dist_sync"])
def test_rows_come_in_the_order_of_their_numbers_repeats_allowed(kind):
    def work(rank):
        kv = store(kind)
        whole = table()
        kv.init("t", whole)
        ids = [39, 0, 7, 7, 20]
        assert torch.equal(kv.row_sparse_pull("t", row_ids=ids), whole[ids])
        batch = np.array([[1, 2], [2, 1]])
        assert torch.equal(kv.row_sparse_pull("t", row_ids=batch), whole[torch.tensor(batch)])
        full = torch.zeros(COUNT, WIDTH)
        assert kv.row_sparse_pull("t", out=full, row_ids=torch.tensor(ids)) is full
        assert torch.equal(full, summed((sorted(set(ids)), whole[sorted(set(ids))])))
        some = np.zeros((5, WIDTH), dtype=np.float32)
        kv.row_sparse_pull("t", out=some, row_ids=ids)
        assert torch.equal(torch.from_numpy(some), whole[ids])
        devices = [torch.zeros(5, WIDTH), torch.zeros(COUNT, WIDTH)]
        kv.row_sparse_pull("t", out=devices, row_ids=ids)
        assert torch.equal(devices[0], whole[ids])
        assert torch.equal(devices[1], full)
        assert kv.row_sparse_pull("t", row_ids=[]).shape == (0, WIDTH)
        handle = kv.row_sparse_pull(["t"], row_ids=[[4, 3]], async_op=True)
        assert torch.equal(handle.wait()[0], whole[[4, 3]])

    run(work, 1 if kind != "dist_sync" else 2)


# --- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_mistakes_are_named_and_change_nothing(kind):
    def work(rank):
        kv = store(kind)
        kv.init(["t", "v"], [table(), torch.zeros(3)])
        item = torch.ones(1, WIDTH)
        for wrong, says in [
            (([COUNT], item), "has rows 0 to 39; row_ids go from 40 to 40"),
            (([-1], item), "row_ids go from -1 to -1"),
            (([1, 2], item), r"2 of its rows are float32\[2,12\], got float32\[1,12\]"),
            (([1], item.double()), r"1 of its rows are float32\[1,12\], got float64"),
            ((torch.tensor([1.0]), item), "row_ids are whole numbers"),
            (coo([1], item, count=COUNT + 1), "cannot push a sparse"),
            (coo([1], item.double()), "cannot push a sparse"),
        ]:
            with pytest.raises(Mismatch, match=says):
                kv.push("t", wrong)
        with pytest.raises(Mismatch, match="only keys of two or more dimensions have rows"):
            kv.push("v", torch.ones(3).to_sparse())
        with pytest.raises(Mismatch, match="only keys of two or more dimensions have rows"):
            kv.row_sparse_pull("v", row_ids=[0])
        with pytest.raises(Mismatch, match="row_ids go from 0 to 40"):
            kv.row_sparse_pull("t", row_ids=[0, 40])
        with pytest.raises(Mismatch, match="row_ids are whole numbers"):
            kv.row_sparse_pull("t", row_ids="all")
        with pytest.raises(ConfigError, match="needs row_ids="):
            kv.row_sparse_pull("t")
        with pytest.raises(ConfigError, match="2 keys need a list of as many row_ids"):
            kv.row_sparse_pull(["t", "v"], row_ids=[1])
        with pytest.raises(ConfigError, match="2 keys need as many values"):
            kv.push(["t", "v"], [([1], item)])
        with pytest.raises(Mismatch, match="the output must have that shape, or be"):
            kv.row_sparse_pull("t", out=torch.zeros(3, WIDTH), row_ids=[1])
        with pytest.raises(Mismatch, match="an output is a tensor or an array, got int"):
            kv.row_sparse_pull("t", out=3, row_ids=[1])
        with pytest.raises(KeyNotFound, match="was never initialised"):
            kv.row_sparse_pull("nobody", row_ids=[1])
        with pytest.raises(KeyNotFound, match="was never initialised"):
            kv.push("nobody", coo([1], item))
        assert torch.equal(kv.pull("t"), table())
        assert kv.version("t") == 0

    run(work, 1)


@pytest.mark.parametrize("kind", ["local", "dist_sync", "allreduce"])
def test_rows_without_elements(kind):
    def work(rank):
        kv = kvps.create(kind, timeout=20)
        kv.init("t", torch.zeros(3, 0))
        for call in (
            lambda: kv.row_sparse_pull("t", row_ids=[0, 2]),
            lambda: kv.pull_changed("t"),
            lambda: kv.push("t", ([1], torch.ones(1, 0))),
            lambda: kv.push("t", torch.sparse_coo_tensor(size=(3, 0), check_invariants=True)),
        ):
            with pytest.raises(Mismatch, match=r"'t' is float32\[3,0\], and its rows have no elem"):
                call()
        assert kv.pushpull("t", torch.zeros(3, 0)).shape == (3, 0)

    run(work, 1)
