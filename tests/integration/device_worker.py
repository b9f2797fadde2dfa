"""Front ends on a simulated device that punishes: each trains to the same bits as on the CPU.

    python -m tests.integration.device_worker SCHEDULE [CASE ...]

SCHEDULE is that of :mod:`tests.support.simulated_device`. The program says of each case how it went. It is a program of its own:
torch's type for devices that it does not know gets a name once in a process, and autograd needs that name.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import backend_registration

import kvps
import kvps.compat.byteps as bps
import kvps.torch
from kvps.runtime.device import Staging

backend_registration._setup_privateuseone_for_python_backend(rename="simulated")

from tests.support.simulated_device import KIND, World, simulated  # noqa: E402  # it reads the name

WORLDS: list[World] = []
KERNELS = torch.library.Library("aten", "IMPL")
"""What torch's own C++ makes on a device, where no tensor of the device is given."""


def empty_strided(
    size: list[int], stride: list[int], *, dtype: torch.dtype, device: torch.device, **_: object
) -> torch.Tensor:
    return WORLDS[-1].make(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), device.index or 0)


def empty(size: list[int], *, dtype: torch.dtype, device: torch.device, **_: object) -> torch.Tensor:
    stride = list(torch.empty(size, device="meta").stride())
    return empty_strided(size, stride, dtype=dtype, device=device)


KERNELS.impl("empty_strided", empty_strided, "PrivateUse1")
KERNELS.impl("empty.memory_format", empty, "PrivateUse1")


def autocast_linear(*tensors: torch.Tensor) -> torch.Tensor:
    cast = [tensor.to(torch.get_autocast_dtype(KIND)) for tensor in tensors]
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return nn.functional.linear(*cast)


REST = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
REST.fallback(torch.library.fallthrough_kernel)
KERNELS.impl("linear", autocast_linear, "AutocastPrivateUse1")
MODULE = {"get_amp_supported_dtype": lambda: [torch.bfloat16], "_is_in_bad_fork": lambda: True}
setattr(torch, KIND, SimpleNamespace(**MODULE, manual_seed_all=None))

Case = Callable[[str, int], list[torch.Tensor]]
CASES: dict[str, Case] = {}
STEPS = 3
SEEDED = threading.Lock()


def case(work: Case) -> Case:
    CASES[work.__name__] = work
    return work


def batch(device: str, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 6, generator=generator).to(device)


def perceptron(device: str, *more: nn.Module) -> nn.Module:
    with SEEDED:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), *more, nn.ReLU(), nn.Linear(5, 3))
    return model.to(device)


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(model: nn.Module, step: Callable[[], object], device: str, rank: int) -> list[torch.Tensor]:
    """Return the weights after some steps."""
    for number in range(STEPS):
        model.zero_grad()
        model(batch(device, rank, number)).square().mean().backward()
        step()
    return [value.detach().cpu() for value in model.state_dict().values()]


def by_optimizer(device: str, rank: int, *more: nn.Module, **options: object) -> list[torch.Tensor]:
    model = perceptron(device, *more)
    optimizer = kvps.torch.DistributedOptimizer(sgd_of(model), model, **options)  # type: ignore[arg-type]
    return trained(model, optimizer.step, device, rank)


@case
def distributed_optimizer(device: str, rank: int) -> list[torch.Tensor]:
    return by_optimizer(device, rank)


@case
def distributed_optimizer_that_clips(device: str, rank: int) -> list[torch.Tensor]:
    model = perceptron(device)
    optimizer = kvps.torch.DistributedOptimizer(sgd_of(model), model)

    def step() -> None:
        optimizer.synchronize()
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=False)
        optimizer.step()

    return trained(model, step, device, rank)


@case
def distributed_optimizer_on_servers(device: str, rank: int) -> list[torch.Tensor]:
    return by_optimizer(device, rank, update_on_kvstore=True, overlap_backward=True)


@case
def distributed_optimizer_of_a_device_store(device: str, rank: int) -> list[torch.Tensor]:
    return by_optimizer(device, rank, kvstore="dist_sync_device", bucket_bytes=64)


@case
def compression_fp16(device: str, rank: int) -> list[torch.Tensor]:
    return by_optimizer(device, rank, compression="fp16")


@case
def compression_2bit(device: str, rank: int) -> list[torch.Tensor]:
    return by_optimizer(device, rank, compression={"type": "2bit", "threshold": 0.01})


@case
def sync_batchnorm(device: str, rank: int) -> list[torch.Tensor]:
    """Forwards: a backward pass that waits for another rank on the same device is refused."""
    norm = kvps.torch.SyncBatchNorm(6).to(device)
    with torch.no_grad():
        found = [norm(batch(device, rank, number)).cpu() for number in range(STEPS)]
    found.append(norm.running_var.cpu())
    if device != "cpu":
        with pytest.raises(kvps.ConfigError, match=f"train on {device}, .* Start a process for each worker"):
            norm(batch(device, rank, 0))
    return found


@case
def byteps_data_parallel(device: str, rank: int) -> list[torch.Tensor]:
    bps.init()
    model = nn.Linear(2, 1).to(device)
    with nullcontext() if device == "cpu" else pytest.raises(kvps.ConfigError, match=f"train on {device}, "):
        bps.parallel.DistributedDataParallel(model)
    return []


@case
def trainer(device: str, rank: int) -> list[torch.Tensor]:
    return by_trainer(device, rank, False)


@case
def trainer_on_servers(device: str, rank: int) -> list[torch.Tensor]:
    return by_trainer(device, rank, True)


def by_trainer(device: str, rank: int, on_servers: bool) -> list[torch.Tensor]:
    model = perceptron(device)
    stepper = kvps.Trainer(model, sgd_of(model), kvstore="dist_sync_device", update_on_kvstore=on_servers)
    return trained(model, lambda: stepper.step(4), device, rank)


@case
def diloco(device: str, rank: int) -> list[torch.Tensor]:
    model = perceptron(device)
    inner = sgd_of(model)
    with kvps.torch.DiLoCo(model, inner, sync_every=2):
        return trained(model, inner.step, device, rank)


@case
def local_sgd(device: str, rank: int) -> list[torch.Tensor]:
    model = perceptron(device)
    inner = sgd_of(model)
    with kvps.torch.LocalSGD(model, inner, sync_every=2):
        return trained(model, inner.step, device, rank)


@case
def gradient_scaler(device: str, rank: int) -> list[torch.Tensor]:
    model = perceptron(device)
    optimizer = kvps.torch.DistributedOptimizer(sgd_of(model), model)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=8.0)
    for number in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(batch(device, rank, number)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return [param.detach().cpu() for param in model.parameters()]


@case
def autocast(device: str, rank: int) -> list[torch.Tensor]:
    model = perceptron(device)
    optimizer = kvps.torch.DistributedOptimizer(sgd_of(model), model)
    forward = torch.autocast(torch.device(device).type, torch.bfloat16)(model.forward)
    assert forward(batch(device, rank, 0)).dtype is torch.bfloat16
    model.forward = forward  # type: ignore[method-assign]
    return trained(model, optimizer.step, device, rank)


@case
def embedding_modules(device: str, rank: int) -> list[torch.Tensor]:
    kv = kvps.create("dist_sync_device")
    tables = [kv.embedding(name, 2, init="zeros", optimizer="sgd", lr=0.5) for name in ("a", "b", "c")]
    words, bags = kvps.torch.Embedding(tables[0]), kvps.torch.EmbeddingBag(tables[1])
    rows = kvps.torch.EmbeddingCollection({"c": tables[2]})
    found = []
    for _ in range(STEPS):
        ids = torch.tensor([[5, 7], [7, 8 + rank]]).to(device)
        outs = [words(ids).sum(1), bags(ids), rows({"c": ids})["c"]]
        torch.cat(outs).square().add(torch.cat(outs)).sum().backward()
        found += [out.detach().cpu() for out in outs]
    return found


@case
def lost_device(device: str, rank: int) -> list[torch.Tensor]:
    """A step whose gradients cannot come down from a device is not made, and can be made again."""

    def lost(*_: object) -> None:
        raise torch.AcceleratorError("the device has fallen off the bus")

    found = []
    for by in ("optimizer", "optimizer on servers", "trainer", "copy"):
        model = perceptron(device)
        if by == "trainer":
            trainer = kvps.Trainer(model, sgd_of(model), kvstore="dist_sync_device")
            step: Callable[[], object] = partial(trainer.step, 1)
        else:
            on_servers = by == "optimizer on servers"
            step = kvps.torch.DistributedOptimizer(sgd_of(model), model, update_on_kvstore=on_servers).step
        for number in range(STEPS):
            for param in model.parameters():
                param.grad = torch.full(param.shape, 0.5 + number).to(device)
            if number == 1 and device != "cpu":
                with pytest.MonkeyPatch.context() as patch:
                    if by == "copy":  # by another thread, behind step()
                        patch.setattr(Staging, "bring", lost)
                    else:
                        WORLDS[-1].gone.add(0)
                    with pytest.raises(torch.AcceleratorError, match="fallen off the bus"):
                        step()
                    WORLDS[-1].gone.clear()
                if by == "copy":
                    model.zero_grad()
                    for param in model.parameters():
                        param.grad = torch.full(param.shape, 0.5 + number).to(device)
            step()
        found += [param.detach().cpu() for param in model.parameters()]
    return found


@case
def process_group(device: str, rank: int) -> list[torch.Tensor]:
    values = batch(device, rank, 0)
    dist.all_reduce(values)
    dist.broadcast(values, 0)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [values.cpu()]


@case
def distributed_data_parallel(device: str, rank: int) -> list[torch.Tensor]:
    model = perceptron(device)
    ddp = nn.parallel.DistributedDataParallel(model)
    return trained(ddp, sgd_of(model).step, device, rank)


def outcome(name: str, device: str) -> list[list[torch.Tensor]]:
    """Return what each rank has of a case; a process group has a rank per process, and so one here."""
    if name in ("process_group", "distributed_data_parallel"):
        dist.init_process_group("kvps")
        try:
            return [CASES[name](device, 0)]
        finally:
            dist.destroy_process_group()
    with kvps.LocalCluster(workers=1 if name == "lost_device" else 2, servers=2) as cluster:
        found: list[list[torch.Tensor]] = cluster.run(lambda rank: CASES[name](device, rank))
    return found


def main(schedule: str, *names: str) -> int:
    for name in names or CASES:
        try:
            expected = outcome(name, "cpu")
            with simulated(schedule) as world:
                WORLDS.append(world)
                found = outcome(name, f"{KIND}:0")
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            sys.stdout.write(f"{name} passed\n")
        except Exception:
            traceback.print_exc()
            sys.stdout.write(f"{name} FAILED\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
