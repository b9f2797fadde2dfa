"""Every wait, event and guard of the seam is needed: on devices that punish, each program fails without it."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import CodeType, FunctionType

import pytest
import torch

from kvps.runtime import device as seam
from kvps.store.allreduce.latest_values import deliver
from kvps.torch.local_steps.pace import StepTimer
from tests.support.simulated_device import KIND, SCHEDULES, Stream, World, simulated

FIRST, SECOND = torch.device(KIND, 0), torch.device(KIND, 1)


def host_of(world: World) -> tuple[torch.Tensor, seam.Staging]:
    """Return memory as servers read it, and staging that locks its pages."""
    whole = torch.zeros(4096)
    start = whole.data_ptr()
    locks = seam.PageLocks(world.register, world.unregister)
    return whole, seam.Staging((start, whole.nbytes), locks)


@contextmanager
def on(world: World, index: int) -> Iterator[Stream]:
    """Be on a stream of the script's own."""
    before, stream = world.current(index), world.stream(torch.device(KIND, index))
    here = world.here()
    world.set_stream(stream)
    yield stream
    world.set_stream(before)
    world.select(here)


# --- what the seam promises -------------------------------------------------------------------------


def values_come_down_when_their_kernels_are_done(world: World) -> None:
    whole, staging = host_of(world)
    given = [torch.rand(50), torch.rand(4, 5), torch.rand(7)]
    values = [world.put(given[0], 0) * 2, world.put(given[1], 1).t() * 2, given[2] * 2]
    rows = staging.bring(values, lambda found: [whole[:50], whole[50:70].view(5, 4)])
    assert [row.data_ptr() for row in rows[:2]] == [whole.data_ptr(), whole[50:].data_ptr()]
    for row, value in zip(rows, (given[0] * 2, given[1].t() * 2, given[2] * 2), strict=True):
        assert torch.equal(row, value)
    assert +world.copies == {"down": 2}
    staging.close()
    assert not world.is_pinned(whole[:50])


def small_neighbours_come_down_in_one_copy(world: World) -> None:
    whole, staging = host_of(world)
    given = [torch.rand(3, 4), torch.rand(8), torch.rand(5), torch.rand(300)]
    values = [world.put(value) * 2 for value in given[:3]] + [world.put(given[3], 1) * 2]
    places = [whole[20:32].view(3, 4), whole[:8], whole[8:13], whole[32:332]]  # 13 to 20 are another's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "SMALL_BYTES", 100)
        rows = staging.bring(values, lambda found: places)
    for row, value, place in zip(rows, given, places, strict=True):
        assert row.data_ptr() == place.data_ptr()
        assert torch.equal(row, value * 2)
    assert not whole[13:20].any()
    assert (world.copies["down"], world.octets["down"]) == (3, sum(value.nbytes for value in given))


def small_targets_come_up_in_one_copy(world: World) -> None:
    given = [torch.rand(3, 4), torch.rand(40), torch.rand(0), torch.rand(5), torch.rand(7)]
    targets = [world.put(torch.rand(value.shape)) for value in given[:4]] + [world.put(torch.rand(7), 1)]
    before = [target * 2 for target in targets]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "SMALL_BYTES", 100)
        rows = seam.pinned_rows(targets)
        for row, value in zip(rows, given, strict=True):
            row.copy_(value)
        seam.bring_back(zip(targets, rows, strict=True))
    after = [target * 3 for target in targets]
    assert world.octets["up"] == sum(value.nbytes for value in given)
    assert (world.copies["up"], world.copies["pageable"]) == (3, 0)
    for value, target in zip(given, after, strict=True):
        assert torch.equal(target.cpu(), value * 3)
    assert not any(value.cpu().isnan().any() for value in before)


def copies_in_one_piece_are_bounded(world: World) -> None:
    given = [torch.rand(8) for _ in range(6)]
    targets = [world.put(torch.rand(8)) for _ in given]
    rows = seam.pinned_rows(targets)
    for row, value in zip(rows, given, strict=True):
        row.copy_(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "PIECE_BYTES", 2 * rows[0].nbytes)
        seam.bring_back(zip(targets, rows, strict=True))
    assert world.copies["up"] == 3
    for value, target in zip(given, targets, strict=True):
        assert torch.equal(target.cpu(), value)


def rows_elsewhere_are_replaced_by_locked_ones(world: World) -> None:
    (row,) = seam.Staging((0, 0)).bring([world.put(torch.arange(5.0))], lambda found: [torch.empty(5)])
    assert torch.equal(row, torch.arange(5.0))
    assert world.is_pinned(row)
    assert not world.copies["pageable"]


def refused_copy_waits_for_those_before_it(world: World) -> None:
    whole, staging = host_of(world)
    values = [world.put(torch.rand(50)) * 2, world.put(torch.rand(50), 1)]

    def rows(found: list[int]) -> list[torch.Tensor]:
        return [whole[:50], whole[50:90]]  # the second does not fit

    with pytest.raises(RuntimeError, match="size"):
        staging.bring(values, rows)
    whole[:50] = 0.0  # the memory is given to another call
    world.synchronize(0)
    for stream in world.streams:
        stream.synchronize()
    assert not whole[:50].any()


def rows_come_up_between_what_is_queued_before_and_after(world: World) -> None:
    rows = [seam.pinned((6,), torch.float32) for _ in range(2)]
    given = [torch.rand(6), torch.rand(6)]
    for row, value in zip(rows, given, strict=True):
        row.copy_(value)
    old = [torch.rand(6), torch.rand(6)]
    targets: list[torch.Tensor] = [world.put(value, index) for index, value in enumerate(old)]
    before = [target * 2 for target in targets]
    here = torch.zeros(6)
    seam.bring_back([*zip(targets, rows, strict=True), (here, rows[0])])
    assert {stream.done for stream in world.scripts} <= {0} or world.is_early(world.scripts[0]), (
        "nobody waits"
    )
    after = [target * 3 for target in targets]
    assert torch.equal(here, given[0])
    for index in range(2):
        assert torch.equal(after[index].cpu(), given[index] * 3)
        assert torch.equal(before[index].cpu(), old[index] * 2)
    assert (world.copies["up"], world.copies["pageable"] - world.copies["down"]) == (2, 0)
    assert world.copies["in the script's stream"] == world.copies["down"], (
        "copies up have a stream of their own"
    )


def rows_come_up_beside_kernels_that_are_queued_later(world: World) -> None:
    row, value = seam.pinned((6,), torch.float32), torch.rand(6)
    row.copy_(value)
    target = world.put(torch.rand(6))
    before = target * 2
    event = seam.reached([target, row])
    later = world.put(torch.rand(6)) * 2
    done = world.scripts[0].queued
    seam.bring_back([(target, row)], event)
    for stream in world.streams[2:]:
        stream.synchronize()
    assert torch.equal(target.elements, value)
    assert not before.elements.isnan().any()
    assert world.scripts[0].done < done or world.is_early(world.scripts[0])
    assert not torch.equal(before.cpu(), value * 2)
    assert not later.cpu().isnan().any()


def targets_let_go_are_not_used_again_too_early(world: World) -> None:
    row = seam.pinned((6,), torch.float32).fill_(3.0)
    with on(world, 0) as own:
        target = world.put(torch.rand(6))
        own.synchronize()
    seam.bring_back([(target, row)])
    del target
    own.synchronize()  # what is queued there may use the memory
    world.synchronize(0)


def rows_of_a_device_are_written_to_targets_anywhere(world: World) -> None:
    with on(world, 0) as own:
        row = world.put(torch.arange(6.0)) * 2
        own.synchronize()
    targets = [world.put(torch.rand(6), 0), world.put(torch.rand(6), 1), torch.rand(6)]
    deliver(targets[:2], [row, row])
    deliver(targets[2:], [row])
    deliver(targets[:1], [row])
    del row
    own.synchronize()
    for target in targets:
        assert torch.equal(target.cpu(), torch.arange(6.0) * 2)


def blocks_beside_the_script_end_when_their_work_is_done(world: World) -> None:
    value = world.put(torch.arange(4.0), 1)
    world.current(1).synchronize()
    world.put(torch.zeros(1), 1)
    with seam.beside(SECOND, "sums"):
        value += 1
        world.current(1).queue_up(lambda: None)
        assert world.current(1) is not world.scripts[1]
    assert torch.equal(value.elements, torch.arange(4.0) + 1)
    with suppress(ZeroDivisionError), seam.beside(SECOND, "sums"):
        value += 1
        raise ZeroDivisionError
    assert torch.equal(value.elements, torch.arange(4.0) + 2)


def streams_and_devices_come_back_after_a_stream(world: World) -> None:
    with on(world, 1) as theirs, on(world, 0) as mine:
        for other in (world.stream(SECOND), world.stream(FIRST)):
            with seam.on(other):
                assert world.current() is other
            assert (world.here(), world.current(0), world.current(1)) == (0, mine, theirs)


def waits_end_when_the_work_before_them_is_done(world: World) -> None:
    for wait in (seam.settle, lambda device: seam.queued(device)(), lambda device: seam.settle_all()):
        seam.select(SECOND)
        value = world.put(torch.arange(4.0), 1) * 2
        wait(SECOND)
        assert torch.equal(value.elements, torch.arange(4.0) * 2)
        wait(torch.device("cpu"))
    seam.select(FIRST)
    assert world.here() == 0


def waits_for_what_is_queued_leave_what_comes_later(world: World) -> None:
    wait = seam.queued(FIRST)
    later = world.put(torch.arange(4.0))
    wait()
    assert later.elements.isnan().all() or world.is_early(world.scripts[0])


def values_handed_to_another_thread_are_ready(world: World) -> None:
    value = world.put(torch.arange(6.0).view(2, 3)).t() * 2
    row = seam.ready_on_device(value)
    found: list[torch.Tensor] = []

    def read() -> None:
        with on(world, 0):
            found.append(row.cpu())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert torch.equal(found[0], torch.arange(6.0).view(2, 3).t() * 2)


def calls_wait_for_kernels_before_them_alone(world: World) -> None:
    calls = seam.CallsBehindKernels([FIRST, SECOND])
    gate = threading.Event()
    first = calls.begin(gate.wait)
    values = [world.put(torch.arange(4.0), index) * 2 for index in range(2)]
    found = [calls.begin(value.cpu) for value in values]
    later = [value * 2 for value in values]
    gate.set()
    first.result()
    for row in found:
        assert torch.equal(row.result(), torch.arange(4.0) * 2)
    if not world.is_early(world.scripts[0]):
        assert all(value.elements.isnan().all() for value in later)


def steps_are_timed_on_the_device(world: World) -> None:
    timer = StepTimer(FIRST)
    timer.begin()
    value = world.put(torch.rand(3))
    for _ in range(6):
        value = value * 2
        world.current(0).queue_up(lambda: None)
        timer.end()
    assert timer.median_s(6) >= 2e-3
    assert not seam.is_accelerator(torch.device("meta"))


PROGRAMS: list[Callable[[World], None]] = [
    values_come_down_when_their_kernels_are_done,
    small_neighbours_come_down_in_one_copy,
    small_targets_come_up_in_one_copy,
    copies_in_one_piece_are_bounded,
    rows_elsewhere_are_replaced_by_locked_ones,
    refused_copy_waits_for_those_before_it,
    rows_come_up_between_what_is_queued_before_and_after,
    rows_come_up_beside_kernels_that_are_queued_later,
    targets_let_go_are_not_used_again_too_early,
    rows_of_a_device_are_written_to_targets_anywhere,
    blocks_beside_the_script_end_when_their_work_is_done,
    streams_and_devices_come_back_after_a_stream,
    waits_end_when_the_work_before_them_is_done,
    waits_for_what_is_queued_leave_what_comes_later,
    values_handed_to_another_thread_are_ready,
    calls_wait_for_kernels_before_them_alone,
    steps_are_timed_on_the_device,
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_on_devices_that_punish(program: Callable[[World], None], schedule: str) -> None:
    with simulated(schedule) as world:
        program(world)


# --- mutants ----------------------------------------------------------------------------------------

ORDERS = {
    *("wait_stream", "wait_event", "synchronize", "record_stream", "record_event", "record"),
    *("set_stream", "set_device_index", "release"),
}
"""Methods that order work, or say where it is done."""
GUARDS = {"on": "nullcontext", "pinned": "unpinned", "settle": "no_order"}
FUNCTIONS = [
    found
    for holder in (seam, seam.Staging, seam.CallsBehindKernels)
    for _, found in inspect.getmembers(holder, inspect.isfunction)
    if found.__module__ == seam.__name__ and not found.__name__.startswith("__")
]


class _Never:
    """An event that orders nothing, and a method that does nothing."""

    def __call__(self, *args: object, **options: object) -> _Never:
        return self

    stream = None
    place = 0
    at = None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Mutation(ast.NodeTransformer):
    """Takes out the order or the guard of one number; counts them."""

    def __init__(self, number: int = -1) -> None:
        self.number, self.found = number, list[str]()

    def _is_it(self, node: ast.expr) -> bool:
        self.found.append(f"{ast.unparse(node)}, line {node.lineno}")
        return len(self.found) - 1 == self.number

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        is_it = node.attr in ORDERS and self._is_it(node)
        return ast.copy_location(ast.Name("no_order", ast.Load()), node) if is_it else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in GUARDS and self._is_it(node.func):
            node.func = ast.copy_location(ast.Name(GUARDS[node.func.id], ast.Load()), node.func)
        return node


def inner(function: FunctionType) -> FunctionType:
    found = inspect.unwrap(function)
    assert isinstance(found, FunctionType)
    return found


def mutants() -> Iterator[tuple[FunctionType, str, CodeType]]:
    for function in map(inner, [*FUNCTIONS, seam._stream]):
        source = textwrap.dedent(inspect.getsource(function))
        counted = Mutation()
        counted.visit(ast.parse(source))
        for number, name in enumerate(counted.found):
            tree = Mutation(number).visit(ast.parse("from __future__ import annotations\n" + source))
            tree.body[1].decorator_list = []
            module = compile(ast.fix_missing_locations(tree), "<mutant>", "exec")
            (code,) = [code for code in module.co_consts if isinstance(code, CodeType)]
            yield function, f"{function.__name__}: {name}", code


MUTANTS = {name: (function, code) for function, name, code in mutants()}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_any_order_or_guard_a_program_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, code = MUTANTS[name]
    monkeypatch.setattr(seam, "no_order", _Never(), raising=False)
    monkeypatch.setattr(seam, "nullcontext", nullcontext, raising=False)
    monkeypatch.setattr(seam, "unpinned", lambda shape, dtype: torch.zeros(shape, dtype=dtype), raising=False)
    monkeypatch.setattr(function, "__code__", code)
    for schedule in SCHEDULES:
        for program in PROGRAMS:
            try:
                with simulated(schedule) as world:
                    program(world)
            except (AssertionError, RuntimeError):
                return
    pytest.fail("no program has noticed that it is missing")
