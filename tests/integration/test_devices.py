"""Stores whose values lie on several devices of a worker: two simulated ones, which punish."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch

import kvps
from kvps.runtime.device import pinned
from tests.integration.processes import Processes
from tests.support.simulated_device import KIND, SCHEDULES, World, simulated

FRONT_ENDS = [
    *("distributed_optimizer", "distributed_optimizer_that_clips", "distributed_optimizer_on_servers"),
    "distributed_optimizer_of_a_device_store",
    *(
        "compression_fp16",
        "compression_2bit",
        "sync_batchnorm",
        "byteps_data_parallel",
        "trainer",
        "trainer_on_servers",
    ),
    *("diloco", "local_sgd", "gradient_scaler", "autocast", "embedding_modules"),
    *("lost_device", "process_group"),
    "distributed_data_parallel",
]
"""The cases of device_worker.py, in its order."""
DEVICES = [f"{KIND}:0", f"{KIND}:1"]


@pytest.fixture(params=SCHEDULES)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with simulated(request.param) as devices:
        yield devices


def run(work: Callable[[int], object], workers: int = 1) -> None:
    with kvps.LocalCluster(workers=workers, servers=2) as cluster:
        cluster.run(work)


@pytest.mark.parametrize(
    "store", ["dist_sync", "dist_sync_device", "dist_async_device", "allreduce", "device"]
)
def test_uneven_batches_of_two_devices_are_one_gradient(world: World, store: str) -> None:
    """A value of each key for each device goes in, and the new one comes back to every device."""

    def work(rank: int) -> None:
        kv = kvps.create(store)
        shapes = {"w": (3, 3), "b": (3,)}
        kv.init(list(shapes), [torch.zeros(shape) for shape in shapes.values()])
        if store == "dist_async_device":
            kv.set_optimizer("sgd", learning_rate=1.0)
        expected = [torch.zeros(shape) for shape in shapes.values()]
        for _ in range(3):
            batch = torch.rand(5, 3)
            parts = kvps.split_and_load(batch, DEVICES, even_split=False)
            assert [len(part) for part in parts] == [3, 2]
            values = [[part.t() @ part for part in parts], [part.sum(0) for part in parts]]
            out = [[world.put(torch.rand(shape), index) for index in range(2)] for shape in shapes.values()]
            kv.pushpull(list(shapes), values, out=out)
            sums = [batch.t() @ batch, batch.sum(0)]
            is_async = store == "dist_async_device"  # its optimizer descends from where it was
            expected = [old - new for old, new in zip(expected, sums, strict=True)] if is_async else sums
            for targets, wanted in zip(out, expected, strict=True):
                for target in targets:
                    torch.testing.assert_close(target.cpu(), wanted)

    run(work)


def test_model_goes_down_and_up_once_in_each_step(world: World) -> None:
    def work(rank: int) -> None:
        kv = kvps.create("dist_sync_device")
        kv.init(["w", "b"], [torch.zeros(3, 4), torch.zeros(4)])
        grads = [world.put(torch.rand(3, 4)) * 2, world.put(torch.rand(4)) * 2]
        for _ in range(3):
            world.octets.clear()
            kv.pushpull(["w", "b"], grads, out=grads)
            assert world.octets == {"down": 64, "up": 64}

    run(work)


def test_script_may_write_to_a_host_tensor_whose_value_went_to_a_device_too(world: World) -> None:
    """The call is over before the copy to the device is."""

    def work(rank: int) -> None:
        kv = kvps.create("dist_sync")
        kv.init("w", torch.zeros(6))
        value = torch.rand(6)
        here, there = pinned((6,), torch.float32), world.put(torch.rand(6))
        kv.pushpull("w", value, out=[here, there])
        assert torch.equal(here, value)
        here.fill_(7.0)
        assert torch.equal(there.cpu(), value)

    run(work)


@pytest.mark.parametrize("is_plain", [True, False])
def test_many_small_keys_cross_the_bus_in_few_copies(world: World, is_plain: bool) -> None:
    """One in each direction for each server; a turned value, or a second one of a key, is no reason for more."""

    def work(rank: int) -> None:
        kv = kvps.create("dist_sync_device")
        keys = [f"k{number}" for number in range(60)]
        kv.init(keys, [torch.zeros(2, number % 7) for number in range(60)])
        for _ in range(3):
            given = [torch.rand(2, number % 7) for number in range(60)]
            values: list[object] = [world.put(value) for value in given]
            if not is_plain:
                values[5], values[6] = world.put(given[5].t().contiguous()).t(), [values[6], values[6]]
            out = [world.put(torch.rand(value.shape)) for value in given]
            world.copies.clear()
            kv.pushpull(keys, values, out=out)
            assert world.copies["down"] <= 4
            assert world.copies["up"] == 1
            assert not world.copies["pageable"]
            for number, (target, value) in enumerate(zip(out, given, strict=True)):
                factor = 2 if number == 6 and not is_plain else 1
                torch.testing.assert_close(target.cpu(), value * factor)

    run(work)


@pytest.mark.parametrize("store", ["dist_sync_device", "allreduce"])
def test_mistakes_with_devices_leave_the_store_as_it_was(world: World, store: str) -> None:
    def work(rank: int) -> None:
        kv = kvps.create(store)
        kv.init(["v", "w"], [torch.zeros(6), torch.zeros(6)])
        good = [world.put(torch.rand(6), index) for index in range(2)]
        out = world.put(torch.rand(6))

        def still_works() -> None:
            kv.pushpull(["v", "w"], [good[0], good], out=[out, torch.empty(6)])
            torch.testing.assert_close(kv.pull("w"), good[0].cpu() + good[1].cpu())

        still_works()
        with pytest.raises(kvps.Mismatch, match=f"'w'.*cpu and {KIND}"):
            kv.push(["v", "w"], [good[0], [good[0], torch.rand(6)]])
        with pytest.raises(kvps.Mismatch, match=r"'w' is float32.*float16"):
            kv.push(["v", "w"], [good[0], [good[0], good[1].half()]])
        still_works()
        if store != "allreduce":  # whose collective takes memory
            world.room = 24  # for a value, and not for both as one
            kv.pushpull(["v", "w"], [good[0], good[0]], out=[out, out])
            torch.testing.assert_close(out.cpu(), good[0].cpu())
        world.room = 8
        with pytest.raises(torch.OutOfMemoryError, match="out of memory") as found:
            kv.pushpull(["v", "w"], [good[0], good], out=[out, out])
        world.room = None
        assert "'v', 'w'" in found.value.__notes__[0]
        still_works()
        world.gone.add(1)
        with pytest.raises(torch.AcceleratorError, match="fallen off the bus") as found:
            kv.pushpull(["v", "w"], [good[0], good], out=[out, out])
        assert "'v', 'w'" in found.value.__notes__[0]
        kv.pushpull("w", good[0], out=out)
        torch.testing.assert_close(out.cpu(), good[0].cpu())
        world.gone.clear()
        still_works()

    run(work)


@pytest.mark.in_turn
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_front_end_trains_as_on_the_host(processes: Processes, schedule: str) -> None:
    ran = processes.python("-m", "tests.integration.device_worker", schedule)
    assert ran.wait(280.0) == 0, ran
    assert re.findall(r"^(\w+) passed", ran.out, re.MULTILINE) == FRONT_ENDS, ran
