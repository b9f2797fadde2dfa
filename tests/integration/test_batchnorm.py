"""SyncBatchNorm on several workers is BatchNorm in one process on the whole batch."""

import copy
import pickle
import sys

import pytest
import torch

import kvps
from kvps.torch import SyncBatchNorm


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("kvps.store.create.TIMEOUT_S", 20.0)


def run(work, workers=2):
    """Call ``work(rank)`` as each worker of a cluster; return the results."""
    with kvps.LocalCluster(workers, 2) as cluster:
        return cluster.run(work)


def close(found, expected, rtol=1e-5):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)


PLAIN = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}


def compare(shapes, offset=0.0, steps=2, dtype=torch.float64, rtol=1e-5, kvstore="dist_sync", **options):
    """Compare layers on batches of ``shapes``, one for each worker, with one layer on all of them."""
    torch.manual_seed(0)
    plain = PLAIN[len(shapes[0])](shapes[0][1], **options).to(dtype)
    if plain.affine:
        torch.nn.init.normal_(plain.weight)
        torch.nn.init.normal_(plain.bias)
    layers = [SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), kvstore=kvstore) for _ in shapes]
    batches = [[torch.randn(s, dtype=dtype) * 3 + offset for s in shapes] for _ in range(steps)]
    slopes = [[torch.randn(s, dtype=dtype) for s in shapes] for _ in range(steps)]

    def work(rank):
        layer, seen = layers[rank], []
        for batch, slope in zip(batches, slopes, strict=True):
            x = batch[rank].clone().requires_grad_()
            y = layer(x)
            y.backward(slope[rank])
            seen.append((y.detach(), x.grad))
        return seen

    results = run(work, len(shapes))
    sizes = [shape[0] for shape in shapes]
    for step, (batch, slope) in enumerate(zip(batches, slopes, strict=True)):
        x = torch.cat(batch).requires_grad_()
        y = plain(x)
        y.backward(torch.cat(slope))
        for rank, (part, grad) in enumerate(zip(y.detach().split(sizes), x.grad.split(sizes), strict=True)):
            close(results[rank][step][0], part, rtol)
            close(results[rank][step][1], grad, rtol)
    for layer in layers:
        for name, item in plain.named_buffers():
            close(getattr(layer, name), item, rtol)
    if plain.affine:
        close(sum(layer.weight.grad for layer in layers), plain.weight.grad, rtol)
        close(sum(layer.bias.grad for layer in layers), plain.bias.grad, rtol)


@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 3), (4, 3)],
        [(2, 3, 5), (7, 3, 5)],
        [(2, 3, 4, 5), (1, 3, 4, 5), (3, 3, 4, 5)],
        [(1, 2, 3, 2, 2), (2, 2, 3, 2, 2)],
        [(1, 3), (1, 3)],
        [(0, 3, 2), (4, 3, 2)],
    ],
    ids=str,
)
def test_outputs_gradients_and_statistics_are_those_of_the_whole_batch(shapes):
    compare(shapes)


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.7, "eps": 0.1}],
    ids=str,
)
def test_options(options):
    compare([(3, 4, 2), (5, 4, 2)], steps=3, **options)


def test_a_mean_that_is_large_against_the_deviation():
    compare([(64, 4), (32, 4)], offset=1e4, rtol=1e-6)


def test_over_allreduce():
    compare([(3, 4, 2), (5, 4, 2)], kvstore="allreduce")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_keep_their_type_and_are_computed_in_float32(dtype):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 3) * 5 + 20).to(dtype) for _ in range(2)]

    def work(rank):
        layer = SyncBatchNorm(3)
        x = batches[rank].clone().requires_grad_()
        y = layer(x)
        y.float().square().sum().backward()
        assert x.grad.dtype is y.dtype is dtype
        assert layer.weight.grad.dtype is torch.float32
        return y.detach(), layer.running_var

    results = run(work)
    plain = torch.nn.BatchNorm1d(3)
    whole = plain(torch.cat(batches).float()).detach()
    for (found, var), expected in zip(results, whole.split(8), strict=True):
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=1e-2)
        close(var, plain.running_var)


def test_two_branches_and_several_layers():
    """The same layer runs twice before backward() comes."""
    torch.manual_seed(0)
    plain = torch.nn.ModuleList([torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)]).double()
    batches = [torch.randn(size, 3).double() for size in (4, 6)]

    def result(layers, x):
        return layers[1](layers[0](x) * layers[0](x * x)).pow(3).sum()

    def work(rank):
        layers = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
        x = batches[rank].clone().requires_grad_()
        loss = result(layers, x)
        loss.backward()
        return loss.item(), x.grad, layers[0].running_var

    found = run(work)
    x = torch.cat(batches).requires_grad_()
    loss = result(plain, x)
    loss.backward()
    assert sum(item[0] for item in found) == pytest.approx(loss.item())
    close(torch.cat([item[1] for item in found]), x.grad)
    assert all(torch.allclose(item[2], plain[0].running_var) for item in found)


def test_a_worker_whose_input_needs_no_gradient_gives_its_sums_all_the_same():
    def work(rank):
        layer = SyncBatchNorm(2)
        x = torch.tensor([[1.0, 2.0], [rank, 5.0]], requires_grad=rank == 0)
        layer(x).square().sum().backward()
        return x.grad is not None

    assert run(work) == [True, False]


def test_evaluation_is_local():
    def work(rank):
        layer = SyncBatchNorm(2)
        layer(torch.tensor([[1.0, 2.0], [rank, 5.0]]))
        layer.eval()
        kv = layer._exchange.kv
        versions = kv.version(kv.keys())
        if rank == 0:
            layer(torch.ones(3, 2))  # the other does not call
        return versions == kv.version(kv.keys())

    assert run(work) == [True, True]


def test_alone_it_is_torchs_own():
    def work(rank):
        torch.manual_seed(0)
        x = torch.randn(5, 3, 2)
        layer, plain = SyncBatchNorm(3), torch.nn.BatchNorm1d(3)
        assert torch.equal(layer(x), plain(x))
        assert torch.equal(layer.running_var, plain.running_var)

    run(work, 1)


def test_inputs_that_cannot_be():
    def work(rank):
        layer = SyncBatchNorm(3)
        for bad in (torch.ones(3), torch.ones(2, 4)):
            with pytest.raises(kvps.ConfigError, match=r"SyncBatchNorm\(3\) needs an input of shape"):
                layer(bad)
        with pytest.raises(kvps.ConfigError, match=r"more than 1 value per channel.* got 1"):
            layer(torch.ones(1 - rank, 3))

    run(work)


def test_a_layer_can_be_copied_and_pickled_after_use():
    def work(rank):
        layer = SyncBatchNorm(2)
        x = torch.tensor([[1.0, 2.0], [rank, 5.0]])
        y = layer(x)
        twin, other = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        close(twin(x), y)
        close(other(x), y)

    run(work)


def test_converting_keeps_values_and_leaves_the_rest():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.Sequential(torch.nn.BatchNorm2d(2, eps=0.5)), torch.nn.ReLU()
    )
    model[1][0].running_mean.fill_(3)
    old = model[1][0]
    model.eval()
    found = SyncBatchNorm.convert_sync_batchnorm(model)
    new = found[1][0]
    assert found is model
    assert isinstance(new, SyncBatchNorm)
    assert new.weight is old.weight
    assert new.running_mean is old.running_mean
    assert (new.eps, new.training) == (0.5, False)
    assert SyncBatchNorm.convert_sync_batchnorm(new) is new
    bare = torch.nn.BatchNorm1d(2, affine=False, track_running_stats=False)
    assert SyncBatchNorm.convert_sync_batchnorm(bare).weight is None


ON_A_GPU = """
import torch
import kvps
from kvps.torch import SyncBatchNorm

torch.manual_seed(0)
plain = torch.nn.BatchNorm2d(3).double()
batches = [torch.randn(size, 3, 4, 4).double() for size in (2, 5)]
rank = kvps.create("dist_sync").rank
layer = SyncBatchNorm.convert_sync_batchnorm(plain).cuda()
x = batches[rank].cuda().requires_grad_()
y = layer(x)
y.pow(3).sum().backward()
torch.save([y.detach().cpu(), x.grad.cpu(), layer.running_var.cpu()], f"{rank}.pt")
"""


@pytest.mark.cuda
def test_values_on_a_gpu(processes):
    # Processes: the backward passes of threads share one thread for each device, and would wait for each other.
    script = processes.script(ON_A_GPU)
    launched = processes.kvps("launch", "-n", 2, "-s", 2, "--", sys.executable, script)
    assert launched.wait(60) == 0, launched
    found = [torch.load(processes.folder / f"{rank}.pt") for rank in range(2)]
    torch.manual_seed(0)
    plain = torch.nn.BatchNorm2d(3).double()
    x = torch.cat([torch.randn(size, 3, 4, 4).double() for size in (2, 5)]).requires_grad_()
    y = plain(x)
    y.pow(3).sum().backward()
    outputs, slopes, variances = zip(*found, strict=True)
    close(torch.cat(outputs), y.detach())
    close(torch.cat(slopes), x.grad)
    close(variances[1], plain.running_var)
