"""Local steps over a cluster: DiLoCo and LocalSGD against one process that trains all replicas in turn."""

import copy
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import kvps
import kvps.torch
from kvps.compat import torchft
from kvps.store.options import StoreOptions
from kvps.torch import DiLoCo, LocalSGD
from kvps.torch.local_steps import pace
from kvps.torch.local_steps.gate import Gate
from tests.integration.processes import Processes, has_checkpoint, until
from tests.integration.training_loops import Weights, weights

WORKERS, STEPS = 2, 24
DATA = torch.Generator().manual_seed(1)
INPUTS = torch.randn(WORKERS, STEPS, 8, 6, generator=DATA)
LABELS = torch.randint(3, (WORKERS, STEPS, 8), generator=DATA)


def net(seed: int = 0) -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(generator=generator)
    return model


def inner(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, index: int) -> None:
    optimizer.zero_grad()
    cross_entropy(model(INPUTS[rank, index]), LABELS[rank, index]).backward()
    optimizer.step()


def begun(seed: int = 0) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    model = net(seed)
    return model, inner(model)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int) -> None:
    for index in range(count):
        step(model, optimizer, rank, index)


def run(work: Callable[..., Any], workers: int = WORKERS, servers: int = 2) -> list[Any]:
    with kvps.LocalCluster(workers, servers) as cluster:
        return cluster.run(work)


def reference(
    outer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    sync_every: int,
    shares: tuple[float, ...] = (0.5, 0.5),
    fragments: int = 1,
    delay: int = 0,
    alpha: float = 0.0,
) -> list[Weights]:
    """DiLoCo in one process: all replicas, and the global weights with their optimizer."""
    world = [torch.nn.Parameter(weight) for weight in weights(net())]
    replicas = [net() for _ in range(WORKERS)]
    inners = [inner(model) for model in replicas]
    parts = [[0, 1], [2, 3]] if fragments == 2 else [[0, 1, 2, 3]]
    outers = [outer([world[index] for index in part]) for part in parts]
    period, merged = sync_every // fragments, {}
    for index in range(STEPS):
        for rank in range(WORKERS):
            step(replicas[rank], inners[rank], rank, index)
        turn, since = divmod(index + 1, period)
        if turn and not since:
            part = parts[(turn - 1) % fragments]
            for place in part:
                pseudo = [
                    share * (world[place].detach() - list(model.parameters())[place].detach())
                    for share, model in zip(shares, replicas, strict=True)
                ]
                world[place].grad = torch.stack(pseudo).sum(0)
            outers[(turn - 1) % fragments].step()
            merged = {place: world[place].detach().clone() for place in part}
        is_last = index + 1 == STEPS  # what is in flight then is taken at the end of the context
        if turn and (since == delay or (is_last and since < delay)):
            with torch.no_grad():
                for model in replicas:
                    params = list(model.parameters())
                    for place, weight in merged.items():
                        params[place].copy_(torch.lerp(weight, params[place], alpha))
    return [weights(model) for model in replicas]


def nesterov(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def train(rank: int, make: Callable[..., DiLoCo], seed: int | None = None) -> Weights:
    """Train a worker under what ``make`` returns for (model, optimizer); each begins with other weights."""
    model, optimizer = begun(rank if seed is None else seed)
    with make(model, optimizer) as outer:
        steps(model, optimizer, rank, STEPS)
        assert outer.syncs > 0
        assert outer.wait_s > 0
    return weights(model)


def assert_like(found: list[Weights], expected: list[Weights]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# --- against one process ------------------------------------------------------------------------------


def test_diloco_is_what_one_process_computes() -> None:
    found = run(lambda rank: train(rank, lambda *args: DiLoCo(*args, sync_every=6)))
    assert_like(found, reference(nesterov, 6))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), "to the bit"


def test_local_sgd_averages_weights() -> None:
    found = run(lambda rank: train(rank, lambda *args: LocalSGD(*args, sync_every=4)))
    assert_like(found, reference(lambda params: torch.optim.SGD(params, lr=1.0), 4))


def test_fragments_take_turns_and_training_goes_on_meanwhile() -> None:
    def make(model: Any, optimizer: Any) -> DiLoCo:
        parts = [model[0], model[2]]
        return DiLoCo(model, optimizer, sync_every=8, fragments=parts, delay=2, alpha=0.5)

    found = run(lambda rank: train(rank, make))
    assert_like(found, reference(nesterov, 8, fragments=2, delay=2, alpha=0.5))


def test_workers_count_by_their_tokens() -> None:
    def work(rank: int) -> Weights:
        model, optimizer = begun()
        with DiLoCo(model, optimizer, sync_every=6, weight="tokens") as outer:
            for index in range(STEPS):
                step(model, optimizer, rank, index)
                outer.add_tokens(1000 * (1 + 2 * rank))
        return weights(model)

    assert_like(run(work), reference(nesterov, 6, shares=(0.25, 0.75)))


@pytest.mark.parametrize("code", ["e3m0", "topk2bit", "int8"])
def test_compressed_both_ways_workers_agree_to_the_bit(code: str) -> None:
    compression = {"type": code, "min_bytes": 0, "pull": True, "decay": 0.95}
    found = run(lambda rank: train(rank, lambda *args: DiLoCo(*args, sync_every=6, compression=compression)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    if code != "topk2bit":  # of so small a model it keeps a single element each time
        exact = reference(nesterov, 6)[0]
        start = weights(net())
        for ours, theirs, begun in zip(found[0], exact, start, strict=True):
            assert (ours - theirs).norm() < 0.5 * (theirs - begun).norm()


def test_async_applies_each_push_and_nobody_waits() -> None:
    """One worker alone gives what the synchronous mode gives; of two, one makes steps while the other sleeps."""
    alone = run(lambda rank: train(rank, lambda *a: DiLoCo(*a, sync_every=6, mode="async")), 1)
    both = run(lambda rank: train(rank, lambda *a: DiLoCo(*a, sync_every=6)), 1)
    assert_like(alone, both)

    def work(rank: int) -> float:
        model, optimizer = begun()
        with DiLoCo(model, optimizer, sync_every=6, mode="async") as outer:
            if rank == 0:
                steps(model, optimizer, rank, STEPS)
            outer.stores[0].barrier()
            outer.pull()
        return float(
            sum((item - two).norm() for item, two in zip(weights(model), weights(net()), strict=True))
        )

    moved = run(work)
    assert moved[0] == moved[1] > 0


def test_delayed_nesterov_is_sgd_whose_momentum_waits_for_all_workers() -> None:
    """Two workers in turn, each from the weights that the other has left."""

    def work(rank: int) -> Weights:
        model, optimizer = begun()
        with DiLoCo(
            model, optimizer, "delayed_nesterov", sync_every=3, mode="async", lr=0.8, momentum=0.5
        ) as outer:
            for turn in range(4):
                if turn % 2 == rank:
                    outer.pull()
                    steps(model, optimizer, rank, 3)
                outer.stores[0].barrier()
            outer.pull()
        return weights(model)

    found = run(work)
    world, momentum = weights(net()), [torch.zeros_like(weight) for weight in weights(net())]
    pending = [torch.zeros_like(weight) for weight in world]
    models = [net(), net()]
    inners = [inner(model) for model in models]
    for turn in range(4):
        model = models[turn % 2]
        with torch.no_grad():
            for param, weight in zip(model.parameters(), world, strict=True):
                param.copy_(weight)
        for index in range(3):
            step(model, inners[turn % 2], turn % 2, index)
        for place, local in enumerate(weights(model)):
            pseudo = (world[place] - local) / 2
            world[place] = world[place] - 0.8 * pseudo
            pending[place] = pending[place] + pseudo
            if turn % 2:
                momentum[place] = 0.5 * momentum[place] + pending[place]
                world[place] = world[place] - 0.8 * 0.5 * momentum[place]
                pending[place] = torch.zeros_like(world[place])
    assert_like(found, [world, world])


def test_a_worker_knows_how_old_its_last_push_was() -> None:
    """Rank 0 merges three times while rank 1 sleeps, so the next push of rank 1 starts from weights three pushes old."""

    def work(rank: int) -> tuple[int, int]:
        model, optimizer = begun()
        with DiLoCo(model, optimizer, sync_every=2, mode="async") as outer:
            outer.stores[0].barrier()  # both have read the weights
            if rank == 0:
                steps(model, optimizer, rank, 6)
            outer.stores[0].barrier()
            if rank == 1:
                for index in range(4):
                    step(model, optimizer, rank, index)
                    if index == 1:
                        first = outer.age
                return first, outer.age
            return outer.age, 0

    assert run(work) == [(0, 0), (3, 0)]


class Clock(threading.local):
    """The time of a worker's thread, in seconds, which its steps move on."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(pace, "perf_counter", lambda: found.now)
    return found


def delayed_diloco(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> DiLoCo:
    return DiLoCo(model, optimizer, "delayed_nesterov", **options)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("make", [delayed_diloco, LocalSGD])
def test_dynamic_steps_follow_the_speed_of_a_worker(
    clock: Clock, delay: int, make: Callable[..., DiLoCo]
) -> None:
    """Rank 1 is three times slower, and later twice as fast. Turns are in step, so each push is one push old."""
    slow_s = [0.3] * 5 + [0.05] * 6

    def work(rank: int) -> list[tuple[int, int]]:
        model, optimizer = begun()
        found = []
        options: dict[str, Any] = {"mode": "async", "dynamic_sync_every": True}
        with make(model, optimizer, sync_every=12, delay=delay, **options) as outer:
            assert outer.sync_every == 12
            for turn, other_s in enumerate(slow_s):
                syncs, steps = outer.syncs, 0
                while outer.syncs == syncs:
                    step(model, optimizer, rank, steps % STEPS)
                    steps += 1
                    clock.now += other_s if rank else 0.1
                outer.stores[0].barrier()
                found.append((outer.sync_every, outer.age if turn else 0))
        return found

    zero, item = run(work)
    assert item[1][0] == 4, "a third of 12"
    assert [steps for steps, _ in zero[:5]] == [12] * 5
    assert item[-1][0] == 12
    assert zero[-1][0] == 6, "rank 1 is the fastest now"
    assert {age for _, age in [*zero, *item]} <= {0, 1, 2}
    assert all(item[turn][0] == 4 for turn in range(1, 5))


# --- between steps -------------------------------------------------------------------------------------


def test_sync_and_pull_give_all_workers_the_same_weights() -> None:
    def work(rank: int) -> list[Any]:
        model = net(rank)
        model.register_buffer("scale", torch.full((2,), rank, dtype=torch.bool))
        model[0].bias.requires_grad_(False)
        optimizer = inner(model)
        found: list[Any] = []
        with DiLoCo(model, optimizer, sync_every=40, fragments=2, delay=7, alpha=0.5) as outer:
            found.append(copy.deepcopy(model.state_dict()))
            steps(model, optimizer, rank, 22)
            outer.sync()
            found.append(copy.deepcopy(model.state_dict()))
            step(model, optimizer, rank, 23)
            outer.pull()
            found.append(copy.deepcopy(model.state_dict()))
        return found

    zero, item = run(work)
    for ours, theirs in zip(zero, item, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(zero[0]["0.weight"], zero[1]["0.weight"])
    assert torch.equal(zero[1]["0.weight"], zero[2]["0.weight"]), "the last step is dropped"
    assert torch.equal(zero[0]["0.bias"], net()[0].bias), "what is frozen is rank 0's"


def test_average_gives_all_workers_the_mean_and_leaves_the_servers_alone() -> None:
    """Training goes on after it as if it had not been called."""

    def work(rank: int) -> list[Any]:
        model, optimizer = begun()
        found: list[Any] = []
        with DiLoCo(model, optimizer, sync_every=6) as outer:
            for index in range(STEPS):
                step(model, optimizer, rank, index)
                if index in (7, 9):
                    own = weights(model)
                    outer.average()
                    found.append((own, weights(model)))
                    with torch.no_grad():
                        for param, weight in zip(model.parameters(), own, strict=True):
                            param.copy_(weight)
        return [*found, weights(model)]

    zero, item = run(work)
    for (ours, mean), (theirs, same) in zip(zero[:2], item[:2], strict=True):
        assert all(torch.equal(*pair) for pair in zip(mean, same, strict=True)), "to the bit"
        middle = [(a + b) / 2 for a, b in zip(ours, theirs, strict=True)]
        torch.testing.assert_close(mean, middle, rtol=1e-4, atol=1e-5)
    assert_like([zero[2], item[2]], reference(nesterov, 6))


@pytest.mark.parametrize("options", [{"mode": "async"}, {"quorum": 1, "grace": 0.0}])
def test_average_where_workers_began_from_different_weights(options: dict[str, Any]) -> None:
    compression = {"type": "e3m0", "min_bytes": 0}

    def work(rank: int) -> Weights:
        model, optimizer = begun()
        with DiLoCo(model, optimizer, sync_every=2, compression=compression, **options) as outer:
            steps(model, optimizer, rank, 3 + 4 * rank)
            own = weights(model)
            outer.average()
            return [*own, *weights(model)]

    zero, item = run(work)
    half = len(zero) // 2
    assert all(torch.equal(*pair) for pair in zip(zero[half:], item[half:], strict=True))
    middle = [(a + b) / 2 for a, b in zip(zero[:half], item[:half], strict=True)]
    torch.testing.assert_close(zero[half:], middle, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("late", "shares"), [("drop", (1.0, 0.0)), ("next", (0.5, 0.5))])
def test_late_steps_are_dropped_merged_or_pushed_in_turns(late: str, shares: tuple[float, float]) -> None:
    """A late push is dropped, or moves the weights by its part; pushes in turns move them no further than a mean."""
    is_first_merged = threading.Event()

    def work(rank: int) -> tuple[Weights, Weights]:
        model, optimizer = begun()
        options: dict[str, Any] = {"sync_every": 1, "quorum": 1, "grace": 0.0, "late": late}
        with DiLoCo(model, optimizer, "sgd", 1.0, 0.0, **options) as outer:
            outer.stores[0].barrier()  # both begin from the same weights
            if rank == 1:
                assert is_first_merged.wait(30)
            before = net()
            step(before, inner(before), rank, 0)
            step(model, optimizer, rank, 0)
            if rank == 0:
                is_first_merged.set()
            outer.join()
        return weights(before), weights(model)

    (first, merged), (second, same) = run(work)
    assert all(torch.equal(*pair) for pair in zip(merged, same, strict=True))
    wanted = [
        weight - shares[0] * (weight - item) - shares[1] * (weight - two)
        for weight, item, two in zip(weights(net()), first, second, strict=True)
    ]
    torch.testing.assert_close(merged, wanted)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_sync_does_not_merge_again_what_was_merged_after_this_step(alpha: float) -> None:
    """A second merge would be a step of the outer momentum alone."""

    def work(rank: int) -> tuple[Weights, Weights, int]:
        model, optimizer = begun()
        with DiLoCo(model, optimizer, sync_every=6, alpha=alpha) as outer:
            steps(model, optimizer, rank, 12)
            outer.sync()
            outer.sync()
            synced, syncs = weights(model), outer.syncs
            outer.pull()
        return synced, weights(model), syncs

    for synced, pulled, syncs in run(work):
        assert all(torch.equal(*pair) for pair in zip(synced, pulled, strict=True))
        assert syncs == 2


def test_outside_the_context_steps_do_not_count() -> None:
    model, optimizer = begun()
    outer = DiLoCo(model, optimizer, sync_every=1)
    with pytest.warns(UserWarning, match="stepped outside the DiLoCo"):
        step(model, optimizer, 0, 0)
    assert outer.syncs == 0
    with outer:
        step(model, optimizer, 0, 1)
        with pytest.raises(kvps.ConfigError, match="this DiLoCo is entered already"):
            outer.__enter__()
    step(model, optimizer, 0, 2)
    assert outer.syncs == 1


# --- torchft's names -----------------------------------------------------------------------------------


def test_a_script_for_torchft_changes_its_import() -> None:
    def make(model: Any, optimizer: Any) -> DiLoCo:
        outers = [nesterov(list(model[0].parameters())), nesterov(list(model[2].parameters()))]
        return torchft.DiLoCo(
            None,
            [model[0], model[2]],
            optimizer,
            outers,
            sync_every=8,
            backup_device=torch.device("cpu"),
            use_bucketization=True,
            fragment_sync_delay=2,
            fragment_update_alpha=0.5,
        )

    found = run(lambda rank: train(rank, make))
    assert_like(found, reference(nesterov, 8, fragments=2, delay=2, alpha=0.5))
    averaged = run(lambda rank: train(rank, lambda *args: torchft.LocalSGD(None, *args, 4)))
    assert_like(averaged, reference(lambda params: torch.optim.SGD(params, lr=1.0), 4))


def test_torchft_arguments_that_servers_cannot_use_are_refused() -> None:
    model, optimizer = begun()
    parts, other = [model[0], model[2]], torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(kvps.ConfigError, match="manager: got a str, but kvps has no manager"):
        torchft.DiLoCo("manager", parts, optimizer, other, 2)  # type: ignore[arg-type]
    with pytest.raises(kvps.ConfigError, match=r"outer_optimizer\[1\] is .*set of hyper-parameters"):
        torchft.DiLoCo(None, parts, optimizer, [nesterov(list(model.parameters())), other], 2)
    with pytest.raises(kvps.ConfigError, match="outer_optimizer: the list is empty"):
        torchft.DiLoCo(None, parts, optimizer, [], 2)
    with torchft.DiLoCo(None, parts, optimizer, other, 2, should_quantize=True) as outer:
        step(model, optimizer, 0, 0)
        assert len(outer.stores) == 2


# --- bad input -----------------------------------------------------------------------------------------


def test_a_foreign_optimizer_is_refused() -> None:
    model = net()
    with pytest.raises(kvps.ConfigError, match="inner_optimizer: give a torch optimizer, got str"):
        DiLoCo(model, "adam")  # type: ignore[arg-type]
    with pytest.raises(kvps.ConfigError, match="is not in the optimizer's groups"):
        DiLoCo(model, inner(model[0]))
    with pytest.raises(kvps.ConfigError, match="LocalSGD averages weights and takes no lr="):
        LocalSGD(model, inner(model), lr=0.1)


def test_weights_that_are_not_finite_are_not_pushed() -> None:
    """The script may take the global weights and go on; the other worker has waited for it."""

    def work(rank: int) -> Weights:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with DiLoCo(model, optimizer, sync_every=2, timeout=30) as outer:
            step(model, optimizer, rank, 0)
            if rank == 1:
                before = outer.stores[0].pull("0.bias")
                with torch.no_grad():
                    model[0].weight[0, 0] = torch.nan
                with pytest.raises(kvps.NonFinite, match=r"weights of '0.weight', .*of rank 1\. Nothing"):
                    step(model, optimizer, rank, 1)
                assert torch.equal(outer.stores[0].pull("0.bias"), before)
                outer.pull()
            step(model, optimizer, rank, 2)
        return weights(model)

    zero, item = run(work)
    assert all(weight.isfinite().all() for weight in zero)
    assert all(torch.equal(*pair) for pair in zip(zero, item, strict=True))


POISONED = torch.randn(3 + 1, 12, 32, 6, generator=torch.Generator().manual_seed(5))
"""Workers, steps, a batch, and features; the label is the largest of the first three."""


@pytest.mark.parametrize(
    ("guard", "poison", "fragments"),
    [({"gate": 4.0}, -1000.0, 1), ({"gate": 4.0}, -1000.0, 2), ({"penalty": True}, -100.0, 1)],
)
def test_poisoned_worker_of_four_ruins_nothing(guard: dict[str, Any], poison: float, fragments: int) -> None:
    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(x), x[..., :3].argmax(-1))

    def trained(rank: int, guard: dict[str, Any], poison: float) -> tuple[float, int, Weights]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"sync_every": 2, "fragments": fragments, "alpha": 0.5}
        with DiLoCo(model, optimizer, "sgd", 1.0, 0.0, **guard, **options) as outer:
            for x in POISONED[rank]:
                optimizer.zero_grad()
                (loss(model, x) * (poison if rank == 3 else 1.0)).backward()
                optimizer.step()
            outer.pull()
        with torch.no_grad():
            return float(loss(model, POISONED[:3].flatten(0, 2))), outer.gated, weights(model)

    def all_of(guard: dict[str, Any], poison: float) -> list[Any]:
        return run(lambda rank: trained(rank, guard, poison), workers=4)

    is_gated = "gate" in guard
    well, guarded = all_of({}, 1.0), all_of(guard, 1.0)
    assert [closed for _, closed, _ in guarded] == [0, 0, 0, 0]
    for (_, _, plain), (_, _, same) in zip(well, guarded, strict=True):
        near = 1e-5 if is_gated else 0.1  # a penalty prefers the shorter
        assert all(torch.allclose(*pair, atol=near) for pair in zip(plain, same, strict=True))
    ruined, kept = all_of({}, poison), all_of(guard, poison)
    assert ruined[0][0] > 5 * well[0][0]
    assert kept[0][0] < 1.1 * well[0][0]
    closed_last = (12 if fragments == 2 else 6) if is_gated else 0
    assert [closed for _, closed, _ in kept] == [0, 0, 0, closed_last]


def test_penalty_is_the_square_of_the_median_over_the_norm() -> None:
    def work(rank: int) -> tuple[float, float]:
        gate = Gate("penal", StoreOptions(30.0), 4.0, 1, is_penal=True)
        shares = gate.share_of(0, [torch.full((1,), [1.0, 1.0, 2.0][rank])])
        gate.left(0)
        last = gate.share_of(0, [torch.full((1,), [1.0, 1.0, 8.0][rank])])
        gate._reports._kv.barrier(timeout=30)
        gate.close()
        return shares, last

    assert run(work, workers=3) == [(1, 1), (1, 1), (0.25, 0)]


def test_gate_that_cannot_be_is_refused() -> None:
    def work(rank: int) -> None:
        model, optimizer = begun()
        for options, says in (
            ({"gate": 1.0}, "number above 1"),
            ({"gate": True}, "number above 1"),
            ({"gate": 4, "mode": "async"}, "needs mode='sync'"),
            ({"gate": 4, "quorum": 1}, "without quorum="),
            ({"penalty": True, "mode": "async"}, "penalty= needs mode='sync'"),
        ):
            with pytest.raises(kvps.ConfigError, match=says):
                DiLoCo(model, optimizer, **options)  # type: ignore[arg-type]  # of several types

    run(work, workers=1, servers=1)


def test_gate_waits_for_the_norms_of_most_workers_that_are_left() -> None:
    def work(rank: int) -> None:
        gate = Gate("gated", StoreOptions(30.0), 4.0, 1)
        gate._timeout_s = 0.5
        if rank == 0:
            with pytest.raises(kvps.Timeout, match=r"1 of 2 workers came to merge 1 of fragment 0 in 0.5 s"):
                gate.share_of(0, [torch.ones(3)])
        gate._reports._kv.barrier(timeout=30)
        if rank == 1:
            gate.leave()
        else:
            assert gate.share_of(0, [torch.ones(3)]) == 1
        gate.close()

    run(work)


def test_after_a_timeout_the_merge_is_waited_for_again() -> None:
    """The push counts once: what a worker has learned is not pushed again, and not dropped."""
    both_pushed = threading.Barrier(2)

    def work(rank: int) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        with LocalSGD({"w": weight}, optimizer, sync_every=1, timeout=30) as outer:
            (kv,) = outer.stores
            kv._timeout_s = 0.2 if rank == 0 else 30.0
            weight.grad = torch.tensor([-1.0 - rank])
            if rank == 0:
                with pytest.raises(kvps.Timeout):
                    optimizer.step()
                with pytest.raises(kvps.Timeout):
                    outer.pull()
                kv._timeout_s = 30.0
                both_pushed.wait(30)
                outer.sync()
            else:
                both_pushed.wait(30)
                optimizer.step()
            merged = weight.tolist()
            optimizer.step()
            assert kv.version("w") == 2
        return [*merged, *weight.tolist()]

    assert run(work) == [[1.5, 3.0]] * 2


def test_a_double_keeps_its_digits_where_a_part_of_it_is_local() -> None:
    fine = 1 + 2**-40
    weight = torch.nn.Parameter(torch.full((2,), fine, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with LocalSGD({"w": weight}, optimizer, sync_every=1, alpha=0.5):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert weight.tolist() == [fine] * 2


def test_tokens_that_were_forgotten() -> None:
    model, optimizer = begun()
    with DiLoCo(model, optimizer, sync_every=1, weight="tokens") as outer:
        with pytest.raises(kvps.ConfigError, match=r"add_tokens\(\) was not called"):
            step(model, optimizer, 0, 0)
        outer.add_tokens(5)
        step(model, optimizer, 0, 1)
        assert outer.syncs == 1


# --- faults --------------------------------------------------------------------------------------------

SCRIPT = """
import os, pathlib, sys, time
import torch, kvps.torch
torch.manual_seed(3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(7 * int(os.environ["RANK"]))
inputs = torch.randn(64, 4, generator=generator)
labels = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]) + 0.25
enough, crash, steps = pathlib.Path(sys.argv[1]), sys.argv[2] == "crash", 0
last = None
with kvps.torch.DiLoCo(model, optimizer, sync_every=10, fragments=2, delay=2) as outer:
    first = max(kv.version(kv.keys()[0]) for kv in outer.stores)
    print("begins at round", first, flush=True)
    while last is None or steps < last:
        if last is None and enough.exists():
            last = max(steps + 40, 300)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        steps += 1
        time.sleep(0.002)
        if crash and not first and outer.stores[0].rank == 1 and steps == 73:
            os._exit(1)
        if steps % 100 == 0:
            print("steps", steps, flush=True)
    outer.join()
    loss = torch.nn.functional.mse_loss(model(inputs), labels)
    print("loss", round(loss.item(), 3), flush=True)
    print("weights", [one.tolist() for one in model.state_dict().values()], flush=True)
"""


def ends_alike(launched: Any) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", launched.out)]
    assert len(losses) == 2
    assert max(losses) < 3.0, "of 14 at the beginning"
    ends = [line.partition("weights")[2] for line in launched.out.splitlines() if "weights" in line]
    assert len(ends) == 2
    assert ends[0] == ends[1]


@pytest.mark.thorough
def test_a_worker_that_is_lost_and_its_replacement(processes: Processes, tmp_path: Path) -> None:
    """The other one goes on without it; the replacement pulls the weights and begins a turn."""
    script, enough = processes.script(SCRIPT), tmp_path / "enough"
    flags = ("-n", 2, "-s", 2, "--max-restarts", 1, "--", sys.executable, script, enough, "crash")
    launched = processes.kvps("launch", *flags)

    def starts() -> list[int]:
        return [int(number) for number in re.findall(r"begins at round (\d+)", launched.out)]

    until(lambda: len(starts()) == 3, "replacement", 60.0)
    enough.touch()
    assert launched.wait(60.0) == 0, launched
    assert starts()[:2] == [0, 0]
    assert starts()[2] >= 7, "of the 73 steps that it lost, 70 or more were merged"
    ends_alike(launched)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    ["fragments=2, delay=2", "delay=2, mode='async', outer='delayed_nesterov', dynamic_sync_every=True"],
)
def test_a_server_that_is_lost(processes: Processes, tmp_path: Path, options: str) -> None:
    """The weights, the outer momentum, the rounds and the speeds come from the checkpoint."""
    script = processes.script(SCRIPT.replace("fragments=2, delay=2", options))
    enough = tmp_path / "enough"
    flags = (
        *("-n", 2, "-s", 2, "--max-restarts", 3),
        *("--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 0.3),
    )
    launched = processes.kvps("launch", *flags, "--", sys.executable, script, enough, "not")
    launched.expect("steps 100")
    until(lambda: has_checkpoint(tmp_path / "checkpoints"), "checkpoint")
    os.kill(processes.pids(r"kvps\.cli\.server.*--rank 1")[0], signal.SIGKILL)
    launched.expect("all servers rolled back to the last checkpoint")
    enough.touch()
    assert launched.wait(60.0) == 0, launched
    assert launched.err.count("starting it again") == 1, "no worker fails"
    ends_alike(launched)


CHECKPOINT = """
import torch, kvps.torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.randn(24, 8, 4)

def train(indices):
    for index in indices:
        optimizer.zero_grad()
        (model(inputs[index]) - 1).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]

with kvps.torch.DiLoCo(model, optimizer, sync_every=4) as outer:
    train(range(12))
    outer.checkpoint()
    once = train(range(12, 24))
    outer.restore()
    again = train(range(12, 24))
print("equal" if all(map(torch.equal, once, again)) else (once, again), flush=True)
"""


def test_the_outer_momentum_is_in_checkpoints(processes: Processes, tmp_path: Path) -> None:
    """The same 12 steps after a checkpoint, twice, give the same bits."""
    script = processes.script(CHECKPOINT)
    flags = ("-n", 1, "-s", 2, "--checkpoint-dir", tmp_path, "--", sys.executable, script)
    launched = processes.kvps("launch", *flags)
    assert launched.wait(60.0) == 0, launched
    assert "equal" in launched.out
