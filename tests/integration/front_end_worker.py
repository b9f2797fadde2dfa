"""One rank that trains by a front end with a feature of torch, beside one process with all batches; says whether both agree.

kvps-launch -n 2 -s 2 -- python tests/integration/front_end_worker.py FRONT_END [FEATURE...]

Prints a line for each feature: ``FEATURE equal``, ``FEATURE close`` (the last bits differ), ``FEATURE refused TEXT`` (a named error
of kvps), ``FEATURE differs by N`` or ``FEATURE failed TEXT``.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import kvps
from tests.integration.front_ends import FRONT_ENDS, Alone, MakeOptimizer, Optimizer, Shard, Trainer, Training

warnings.filterwarnings("ignore")

DEVICE = os.environ.get("SWEEP_DEVICE", "cpu")
"""Where models and batches lie."""
STEPS = 6
CLOSE = 2e-6
"""The largest difference of weights near 1 that different kernels of one formula may cause."""

Make = Callable[..., Training]
"""Builds the training of a model by an optimizer: by the front end, or by one process."""
FEATURES: dict[str, Callable[[Make], Sequence[torch.Tensor]]] = {}


def feature(loop: Callable[[Make], Sequence[torch.Tensor]]) -> Callable[[Make], Sequence[torch.Tensor]]:
    FEATURES[loop.__name__] = loop
    return loop


# --- models and batches ------------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int, rank: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 4, generator=seeded).to(DEVICE)


def loss_at(step: int) -> Callable[[nn.Module, int], torch.Tensor]:
    return lambda model, rank: model(batch(step, rank)).square().mean()


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)  # type: ignore[arg-type]


def plain_sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)  # type: ignore[arg-type]


def adam(params: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, 0.01)  # type: ignore[arg-type]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().cpu().clone() for value in model.state_dict().values()]


def ended(training: Training) -> list[torch.Tensor]:
    """End a training; return its weights."""
    found = weights(training.model)
    training.close()
    return found


def run(training: Training, steps: range = range(STEPS)) -> None:
    for step in steps:
        training.zero_grad()
        training.backward(loss_at(step))
        training.step()


def trained(make: Make, optimizer: MakeOptimizer, model: nn.Module | None = None) -> list[torch.Tensor]:
    training = make(model or net(), optimizer)
    run(training)
    return ended(training)


# --- optimizers ---------------------------------------------------------------------------------------


@feature
def sgd_plain(make: Make) -> Sequence[torch.Tensor]:
    return trained(make, plain_sgd)


@feature
def sgd_momentum(make: Make) -> Sequence[torch.Tensor]:
    return trained(make, sgd)


@feature
def adam_default(make: Make) -> Sequence[torch.Tensor]:
    return trained(make, adam)


@feature
def groups_with_rates_of_their_own(make: Make) -> Sequence[torch.Tensor]:
    def grouped(params: object) -> torch.optim.Optimizer:
        every = list(params)  # type: ignore[call-overload]
        groups = [{"params": every[:2], "lr": 0.01, "weight_decay": 0.1}, {"params": every[2:]}]
        return torch.optim.SGD(groups, 0.1)

    return trained(make, grouped)


# --- schedulers ----------------------------------------------------------------------------------------


def scheduled(
    make: Make, scheduler: Callable[[torch.optim.Optimizer], object], optimizer: MakeOptimizer = plain_sgd
) -> list[torch.Tensor]:
    training = make(net(), optimizer)
    schedule = scheduler(training.optimizer)
    for step in range(STEPS):
        run(training, range(step, step + 1))
        plateau = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
        schedule.step(*([1.0] if plateau else []))  # type: ignore[attr-defined]
    return ended(training)


@feature
def step_scheduler(make: Make) -> Sequence[torch.Tensor]:
    return scheduled(make, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))


@feature
def plateau_scheduler(make: Make) -> Sequence[torch.Tensor]:
    return scheduled(
        make, lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    )


@feature
def momentum_cycles(make: Make) -> Sequence[torch.Tensor]:
    return scheduled(
        make,
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=STEPS + 1),
        sgd,
    )


@feature
def rate_by_hand(make: Make) -> Sequence[torch.Tensor]:
    training = make(net(), sgd)
    for step in range(STEPS):
        training.set_rate(0.1 / (1 + step))
        run(training, range(step, step + 1))
    return ended(training)


# --- accumulation, discarded passes, skipped steps ------------------------------------------------------


def two_passes(training: Training) -> list[torch.Tensor]:
    for step in range(STEPS):
        training.zero_grad()
        training.backward(loss_at(2 * step))
        training.backward(loss_at(2 * step + 1))
        training.step()
    return ended(training)


@feature
def accumulation(make: Make) -> Sequence[torch.Tensor]:
    """Two passes per step, as ``backward_passes_per_step`` says, or as the front end just takes them."""
    return two_passes(make(net(), sgd, passes=2))


@feature
def accumulation_without_a_word(make: Make) -> Sequence[torch.Tensor]:
    """Two passes per step, of which the front end was not told."""
    return two_passes(make(net(), sgd))


@feature
def accumulation_in_a_block(make: Make) -> Sequence[torch.Tensor]:
    training = make(net(), sgd)
    for step in range(STEPS):
        training.zero_grad()
        with training.accumulating():
            training.backward(loss_at(2 * step))
        training.backward(loss_at(2 * step + 1))
        training.step()
    return ended(training)


def discarding(make: Make, discard: Callable[[Training], None]) -> list[torch.Tensor]:
    training = make(net(), sgd)
    for step in range(STEPS):
        training.zero_grad()
        if step in (1, 2, 4):
            training.backward(loss_at(50 + step))
            discard(training)
        training.backward(loss_at(step))
        training.step()
    return ended(training)


@feature
def discarded_by_zero_grad(make: Make) -> Sequence[torch.Tensor]:
    return discarding(make, lambda training: training.zero_grad())


@feature
def discarded_by_zeros(make: Make) -> Sequence[torch.Tensor]:
    return discarding(make, lambda training: training.zero_grad(set_to_none=False))


@feature
def discarded_by_the_model(make: Make) -> Sequence[torch.Tensor]:
    def discard(training: Training) -> None:
        training.model.zero_grad()
        if isinstance(training, Alone):
            training.zero_grad()

    return discarding(make, discard)


@feature
def bad_batches_skipped(make: Make) -> Sequence[torch.Tensor]:
    """All ranks see that a batch is bad after backward(), and go on with the next one."""
    training = make(net(), sgd)
    for step in range(STEPS):
        training.zero_grad()
        training.backward(loss_at(step))
        if step in (1, 3):
            continue
        training.step()
    return ended(training)


@feature
def two_players(make: Make) -> Sequence[torch.Tensor]:
    """A GAN: the generator's loss leaves gradients in the discriminator, which are discarded."""
    torch.manual_seed(3)
    maker, judge = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    first, second = make(maker, plain_sgd), make(judge, plain_sgd)
    for step in range(STEPS):
        second.zero_grad()

        def real(net: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            return (net(batch(step, rank)) - 1).square().mean() + net(
                maker(batch(step, rank)).detach()
            ).square().mean()

        second.backward(real)
        second.step()
        first.zero_grad()

        def fake(net: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            return (judge(net(batch(step, rank))) - 1).square().mean()

        first.backward(fake)  # reaches the judge's parameters, too
        first.step()
    found = [*weights(maker), *weights(judge)]
    first.close()
    second.close()
    return found


@feature
def uneven_batches(make: Make) -> Sequence[torch.Tensor]:
    """Rank 0 has two batches fewer; a mean is over the ranks that have a batch."""
    training = make(net(), plain_sgd)
    if not training.joins:
        raise kvps.ConfigError("no join()")
    ends = [STEPS - 2, STEPS]

    def loss(step: int) -> Callable[[nn.Module, int], torch.Tensor | None]:
        return lambda model, rank: loss_at(step)(model, rank) if step < ends[rank] else None

    for step in range(STEPS if isinstance(training, Alone) else ends[training.rank]):
        training.zero_grad()
        training.backward(loss(step))
        training.step()
    training.join()
    return ended(training)


# --- which parameters take part ---------------------------------------------------------------------------


@feature
def frozen_from_the_start(make: Make) -> Sequence[torch.Tensor]:
    model = net()
    model[2].requires_grad_(False)
    return trained(make, lambda params: plain_sgd([p for p in params if p.requires_grad]), model)  # type: ignore[attr-defined]


@feature
def frozen_on_the_way(make: Make) -> Sequence[torch.Tensor]:
    training = make(net(), plain_sgd)
    run(training, range(3))
    training.zero_grad()
    training.model[0].requires_grad_(False)  # type: ignore[index]
    run(training, range(3, STEPS))
    return ended(training)


@feature
def trained_on_the_way(make: Make) -> Sequence[torch.Tensor]:
    """Gradual unfreezing: the optimizer has the parameters from the beginning."""
    model = net()
    model[0].requires_grad_(False)
    training = make(model, plain_sgd)
    run(training, range(3))
    model[0].requires_grad_(True)
    run(training, range(3, STEPS))
    return ended(training)


@feature
def group_added_on_the_way(make: Make) -> Sequence[torch.Tensor]:
    """Gradual unfreezing: the optimizer gets the parameters, with a rate of their own, when they are trained."""
    model = net()
    model[0].requires_grad_(False)
    training = make(model, lambda params: plain_sgd([p for p in params if p.requires_grad]))  # type: ignore[attr-defined]
    run(training, range(3))
    model[0].requires_grad_(True)
    training.optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.03})
    run(training, range(3, STEPS))
    return ended(training)


@feature
def unknown_parameter_added(make: Make) -> Sequence[torch.Tensor]:
    """A parameter that no front end has seen, and of which each rank has gradients of its own."""
    unknown = nn.Parameter(torch.ones(4, device=DEVICE))
    training = make(net(), plain_sgd)
    run(training, range(3))
    training.optimizer.add_param_group({"params": [unknown]})
    for step in range(3, STEPS):
        training.zero_grad()
        training.backward(lambda model, rank, step=step: model(batch(step, rank) * unknown).square().mean())  # type: ignore[misc]
        training.step()
    return [*ended(training), unknown.detach()]


class Branches(nn.Module):
    """Two layers, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.even, self.odd = nn.Linear(4, 2), nn.Linear(4, 2)
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(x) if self.turn else self.even(x)  # type: ignore[no-any-return]


@feature
def unused_in_some_steps(make: Make) -> Sequence[torch.Tensor]:
    training = make(Branches(), plain_sgd)
    for step in range(STEPS):
        training.model.turn = step % 2  # type: ignore[assignment]
        run(training, range(step, step + 1))
    return ended(training)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


@feature
def tied_weights(make: Make) -> Sequence[torch.Tensor]:
    return trained(make, sgd, Tied())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = net(), reentrant
        torch.manual_seed(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, self.head(x), use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@feature
def checkpointing(make: Make) -> Sequence[torch.Tensor]:
    return trained(make, sgd, Checkpointed(False))


@feature
def reentrant_checkpointing(make: Make) -> Sequence[torch.Tensor]:
    return trained(make, sgd, Checkpointed(True))


@feature
def weights_that_are_strided(make: Make) -> Sequence[torch.Tensor]:
    model = net()
    model[2].weight = nn.Parameter(model[2].weight.detach().t().clone().t())
    return trained(make, sgd, model)


# --- sparse gradients ------------------------------------------------------------------------------------------


def bag() -> nn.Module:
    torch.manual_seed(5)
    return nn.Embedding(20, 3, sparse=True)


def ids_at(step: int, rank: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(20, (5,), generator=seeded).to(DEVICE)


def sparse_loss(step: int) -> Callable[[nn.Module, int], torch.Tensor]:
    return lambda model, rank: model(ids_at(step, rank)).square().mean()


def sparse_run(make: Make, optimizer: MakeOptimizer, passes: int = 1) -> list[torch.Tensor]:
    training = make(bag(), optimizer)
    for step in range(STEPS):
        training.zero_grad()
        for turn in range(passes):
            training.backward(sparse_loss(step * passes + turn))
        training.step()
    return ended(training)


@feature
def sparse_sgd(make: Make) -> Sequence[torch.Tensor]:
    return sparse_run(make, plain_sgd)


def sparse_adam(params: object) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(params), 0.05)  # type: ignore[call-overload]


@feature
def sparse_adam_steps(make: Make) -> Sequence[torch.Tensor]:
    return sparse_run(make, sparse_adam)


@feature
def sparse_rows_whose_gradients_cancel(make: Make) -> Sequence[torch.Tensor]:
    """Row 0 is used by both ranks; in odd steps the ranks' gradients of the row add up to zero."""
    training = make(bag(), sparse_adam)
    for step in range(STEPS):
        training.zero_grad()

        def loss(model: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            sign = -1.0 if step % 2 and rank else 1.0
            return sign * model(torch.tensor([0, 1 + rank], device=DEVICE)).sum()

        training.backward(loss)
        training.step()
    return ended(training)


@feature
def sparse_passes_without_a_word(make: Make) -> Sequence[torch.Tensor]:
    return sparse_run(make, plain_sgd, passes=2)


# --- gradients between backward and step --------------------------------------------------------------------------


@feature
def clipped_by_norm(make: Make) -> Sequence[torch.Tensor]:
    training = make(net(), sgd)
    for step in range(STEPS):
        training.zero_grad()
        training.backward(loss_at(step))
        if hasattr(training.optimizer, "synchronize") and not isinstance(training, Alone):
            training.optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
            with training.optimizer.skip_synchronize():  # type: ignore[attr-defined]
                training.step()
            continue
        if hasattr(training, "trainer"):
            training.trainer.allreduce_grads()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.05 * training.size)
            training.trainer.update(training.size)
            continue
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
        training.step()
    return ended(training)


def clipped_by_the_front_end(make: Make, optimizer: MakeOptimizer) -> list[torch.Tensor]:
    """Some steps are within the limit, and most are not."""
    training = make(net(), optimizer, clip_global_norm=0.3)
    for step in range(STEPS):
        training.zero_grad()
        training.backward(loss_at(step))
        if isinstance(training, Alone):
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.3)
        elif not isinstance(training, Optimizer | Trainer | Shard):
            raise kvps.ConfigError("no clip_global_norm=")
        training.step()
    return ended(training)


@feature
def clip_global_norm_with_sgd(make: Make) -> Sequence[torch.Tensor]:
    return clipped_by_the_front_end(make, sgd)


@feature
def clip_global_norm_with_adamw(make: Make) -> Sequence[torch.Tensor]:
    return clipped_by_the_front_end(
        make,
        lambda params: torch.optim.AdamW(params, 0.01),  # type: ignore[arg-type]
    )


@feature
def grad_scaler(make: Make) -> Sequence[torch.Tensor]:
    """Rank 1 has an infinite gradient in the third step, which no rank makes."""
    training = make(net(), plain_sgd)
    if not training.scales:
        raise kvps.ConfigError("each rank skips steps of its own")
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0, growth_interval=100)
    for step in range(STEPS):
        training.zero_grad()

        def loss(model: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            bad = float("inf") if step == 2 and rank == 1 else 1.0
            return scaler.scale(loss_at(step)(model, rank) * bad)  # type: ignore[no-any-return]

        training.backward(loss)
        if hasattr(training, "trainer"):
            raise kvps.ConfigError("a GradScaler takes a torch optimizer, not a Trainer")
        scaler.step(training.optimizer)
        scaler.update()
    return ended(training)  # with updates on servers, each rank has a scale of its own


# --- readers of the weights, and hooks ---------------------------------------------------------------------------------


@feature
def moving_averages(make: Make) -> Sequence[torch.Tensor]:
    training = make(net(), sgd)
    averaged = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        run(training, range(step, step + 1))
        averaged.update_parameters(training.model)
    found = weights(averaged.module)
    training.close()
    return found


@feature
def copies_after_each_step(make: Make) -> Sequence[torch.Tensor]:
    training, found = make(net(), sgd), []
    for step in range(STEPS):
        run(training, range(step, step + 1))
        found += weights(copy.deepcopy(training.model))
        found += weights(training.model[2])  # type: ignore[index]
        found += [param.detach().clone() for param in training.model.parameters()]
    training.close()
    return found


@feature
def hooks_before_forward(make: Make) -> Sequence[torch.Tensor]:
    """A pre-hook that clamps weights, as WGAN does: it has to see the weights of the last step."""
    model = net()

    def clamp(module: nn.Module, args: object) -> None:
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(1.0).clamp_(-10.0, 10.0)
        seen.append(module.weight.detach().clone())  # type: ignore[operator]

    seen: list[torch.Tensor] = []
    handle = model[0].register_forward_pre_hook(clamp)
    training = make(model, sgd)
    run(training)
    handle.remove()
    return [*ended(training), *(seen[-1:])]


@feature
def weight_normalisation(make: Make) -> Sequence[torch.Tensor]:
    model = net()
    nn.utils.parametrizations.weight_norm(model[2])
    return trained(make, sgd, model)


@feature
def evaluation_between_steps(make: Make) -> Sequence[torch.Tensor]:
    training, found = make(net(), sgd), []
    for step in range(STEPS):
        run(training, range(step, step + 1))
        training.model.eval()
        with torch.no_grad():
            found.append(training.model(batch(step, 0)))
        training.model.train()
    training.close()
    return found


# --- from one run to the next ------------------------------------------------------------------------------------------


def half_trained(make: Make) -> tuple[nn.Module, dict[str, Any]]:
    """Make half of the steps; return a model with the weights after them, and the state of the optimizer."""
    first = make(net(), sgd)
    run(first, range(3))
    model = net()
    model.load_state_dict(first.model.state_dict())
    state = copy.deepcopy(first.optimizer.state_dict())
    first.close()
    return model, state


@feature
def resumed_from_state_dicts(make: Make) -> Sequence[torch.Tensor]:
    model, state = half_trained(make)
    second = make(model, plain_sgd)  # its momentum comes with the state
    second.optimizer.load_state_dict(state)
    run(second, range(3, STEPS))
    return ended(second)


@feature
def resumed_before_it_is_wrapped(make: Make) -> Sequence[torch.Tensor]:
    """The optimizer has loaded its state when the front end gets it."""
    model, state = half_trained(make)

    def loaded(params: object) -> torch.optim.Optimizer:
        optimizer = sgd(params)
        optimizer.load_state_dict(state)
        return optimizer

    second = make(model, loaded)
    run(second, range(3, STEPS))
    return ended(second)


@feature
def a_second_trial(make: Make) -> Sequence[torch.Tensor]:
    trained(make, sgd)
    return trained(make, sgd)


class Doubles(nn.Module):
    """Parameters of two types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)).double())  # type: ignore[no-any-return]


@feature
def parameters_of_two_types(make: Make) -> Sequence[torch.Tensor]:
    return trained(make, sgd, Doubles())


# --- the run -------------------------------------------------------------------------------------------------------------


def judge(name: str, make: Make, alone: Make, limit: float) -> str:
    """Run a feature by a front end and by one process; return what to print."""
    try:
        torch.manual_seed(0)
        found = FEATURES[name](make)
    except kvps.KvpsError as error:
        return f"refused {' '.join(str(error).split())}"
    except Exception:
        return f"failed {' | '.join(traceback.format_exc().splitlines()[-6:])}"
    torch.manual_seed(0)
    wanted = FEATURES[name](alone)
    assert len(found) == len(wanted), name
    if all(torch.equal(item, other) for item, other in zip(found, wanted, strict=True)):
        return "equal"
    far = max(
        float((item.double() - other.double()).abs().max()) for item, other in zip(found, wanted, strict=True)
    )
    return "close" if far <= limit else f"differs by {far:.3g}"


def main(front_end: str, names: list[str]) -> int:
    faulthandler.dump_traceback_later(100, exit=True)
    torch.set_num_threads(1)
    kv = kvps.create("dist_sync", name="seat")
    rank, size = kv.rank, kv.num_workers
    kind = FRONT_ENDS[front_end]

    def make(model: nn.Module, optimizer: MakeOptimizer, passes: int = 1, **more: object) -> Training:
        return kind(model.to(DEVICE), optimizer, rank, size, passes, **more)

    def alone(model: nn.Module, optimizer: MakeOptimizer, passes: int = 1, **more: object) -> Training:
        return Alone(model.to(DEVICE), optimizer, rank, size, passes, **more)

    for name in names or list(FEATURES):
        verdict = judge(name, make, alone, CLOSE)
        sys.stdout.write(f"{name} {verdict}\n")
        sys.stdout.flush()
        kv.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
