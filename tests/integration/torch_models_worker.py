"""One rank that trains models with torch's own distributed features over gloo and over kvps: both give the same.

kvps-launch -n 2 -s 1 -- python tests/integration/torch_models_worker.py CASE...
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import kvps.torch  # noqa: F401  # it registers the backend
from tests.support import torch_cases
from tests.support.torch_cases import LIMIT

warnings.filterwarnings("ignore")  # torch 2.13 renames some calls

CASES: dict[str, Callable[[str], object]] = {}
"""Name -> what a case computes over a backend."""


def case(work: Callable[[str], object]) -> Callable[[str], object]:
    CASES[work.__name__] = work
    return work


def group_of(backend: str) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend, timeout=LIMIT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def mesh_of(backend: str) -> DeviceMesh:
    names = {"mesh_dim_names": ("one",), "backend_override": {"one": backend}}
    return init_device_mesh("cpu", (SIZE,), **names)  # type: ignore[arg-type]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 0.01)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + RANK)
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module) -> list[torch.Tensor]:
    """Return the weights of a model of DTensors, whole."""
    return [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]


@case
def communication_hooks(backend: str) -> object:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    found = []
    group = group_of(backend)
    squeeze = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    for state, hook in (
        (group, default_hooks.allreduce_hook),
        (group, default_hooks.fp16_compress_hook),
        (squeeze, powerSGD_hook.powerSGD_hook),
    ):
        model = DistributedDataParallel(net(), process_group=group)
        model.register_comm_hook(state, hook)
        train(model)
        found += [*model.parameters()]
    return found


@case
def optimizers_that_share_their_state(backend: str) -> object:
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    group = group_of(backend)
    model = DistributedDataParallel(net(), process_group=group)
    adam = torch.optim.Adam
    optimizer = ZeroRedundancyOptimizer(model.parameters(), adam, process_group=group, lr=0.01)
    train(model, optimizer)
    with Join([model, optimizer]):
        for _ in range(1 + RANK):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    optimizer.consolidate_state_dict(0)
    return [*model.parameters()]


@case
def local_steps_and_averages(backend: str) -> object:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    group = group_of(backend)
    alone, _ = dist.new_subgroups_by_enumeration([[item] for item in range(SIZE)], backend=backend)
    model = DistributedDataParallel(net(), process_group=group)
    state = local.PostLocalSGDState(group, alone, 2)
    model.register_comm_hook(state, local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2, process_group=group)
    train(model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), averager))
    return [*model.parameters()]


@case
def fsdp_and_its_states(backend: str) -> object:
    from torch.distributed.fsdp import FullyShardedDataParallel as Sharded
    from torch.distributed.fsdp import ShardingStrategy, StateDictType

    found = []
    group = group_of(backend)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        cpu = torch.device("cpu")
        kind = ShardingStrategy[strategy]
        model = Sharded(net(), process_group=group, device_id=cpu, sharding_strategy=kind)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        train(model, optimizer)
        found.append(model.clip_grad_norm_(0.1))
        for form in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            with Sharded.state_dict_type(model, form):
                model.load_state_dict(model.state_dict())
        state = Sharded.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(Sharded.optim_state_dict_to_load(model, optimizer, state))
        with Sharded.summon_full_params(model):
            found += [param.clone() for param in model.parameters()]
    return found


@case
def fully_shard_and_its_states(backend: str) -> object:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    found = []
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for more in ({}, {"mp_policy": half}, {"reshard_after_forward": False}):
        model = net()
        fully_shard(model[0], mesh=mesh_of(backend), **more)  # type: ignore[call-overload,index]
        fully_shard(model, mesh=mesh_of(backend), **more)  # type: ignore[call-overload]
        train(model)
        found += whole(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, net().state_dict() if RANK == 0 else {}, options=options)
    return found + whole(model)


@case
def checkpoints(backend: str) -> object:
    import torch.distributed.checkpoint as checkpoint

    group = group_of(backend)
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder, 0)
    here = {"process_group": group, "checkpoint_id": f"{folder[0]}/now"}
    later = {"process_group": group, "checkpoint_id": f"{folder[0]}/later"}
    state = {"weight": torch.arange(4.0), f"of rank {RANK}": torch.full((2,), float(RANK))}
    checkpoint.save(state, **here)
    checkpoint.async_save(state, **later).result()  # type: ignore[union-attr]
    found = []
    for saved in (here, later):
        empty = {name: torch.zeros_like(item) for name, item in state.items()}
        checkpoint.load(empty, **saved)
        found += [*empty.values()]
    dist.barrier()
    if folder[0] is not None and RANK == 0:
        shutil.rmtree(folder[0])
    return found


@case
def tensor_parallel(backend: str) -> object:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = mesh_of(backend)
    plans = (
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
        {
            "0": ColwiseParallel(input_layouts=Shard(0)),
            "2": RowwiseParallel(output_layouts=Shard(0)),
            "3": SequenceParallel(sequence_dim=0),
        },
    )
    found = []
    for number, plan in enumerate(plans):
        torch.manual_seed(0)
        model = nn.Sequential(*net(), nn.LayerNorm(2)) if number else net()
        model = parallelize_module(model, mesh, plan)  # type: ignore[arg-type]
        given = torch.randn(2 * SIZE, 4, generator=torch.Generator().manual_seed(1))
        result = model(given.chunk(SIZE)[RANK] if number else given)
        result.square().sum().backward()
        found.append(result.full_tensor() if number else result)
        found += [param.grad.full_tensor() for param in model[0].parameters()]  # type: ignore[union-attr]
    return found


@case
def pipelines(backend: str) -> object:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    group = group_of(backend)
    generator = torch.Generator().manual_seed(5)
    given, wanted = torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)

    def stage(number: int, count: int) -> PipelineStage:
        torch.manual_seed(number)
        return PipelineStage(nn.Linear(4, 4), number, count, torch.device("cpu"), group=group)

    found = []
    for schedule in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        is_many = schedule is ScheduleInterleaved1F1B
        stages = [stage(RANK + SIZE * item, SIZE * (1 + is_many)) for item in range(1 + is_many)]
        run = schedule(stages if is_many else stages[0], 4, loss_fn=nn.MSELoss())  # type: ignore[arg-type]
        losses: list[torch.Tensor] = []
        ends = {"target": wanted, "losses": losses} if RANK == SIZE - 1 else {}
        run.step(*([given] if RANK == 0 else []), **ends)
        found += losses
        found += [param.grad for it in stages for param in it.submod.parameters()]
    return found


def compared(name: str) -> None:
    found = {backend: CASES[name](backend) for backend in ("gloo", "kvps")}
    assert found["gloo"]
    torch.testing.assert_close(found["kvps"], found["gloo"])


if __name__ == "__main__":
    RANK, SIZE = torch_cases.start()
    sys.exit(torch_cases.run(sys.argv[1:], compared))
