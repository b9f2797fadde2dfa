"""The allreduce store: the contract of a KVStore without servers, in threads and in real processes."""

import re
import sys
import threading

import pytest
import torch

import kvps
from kvps.dtypes import DTYPES
from kvps.store.allreduce import queue
from tests.integration import test_kvstore as contract
from tests.integration.processes import Processes, free_port, until

CONTRACT = [
    contract.test_numpy_arrays_and_strided_tensors,
    contract.test_scalars_and_empty_tensors,
    contract.test_lists_of_keys_with_lists_of_devices,
    contract.test_handles,
    contract.test_a_pushed_array_is_written_to_only_if_it_is_the_output,
    contract.test_broadcast_creates_and_replaces,
    contract.test_init_gives_everyone_the_value_of_rank_0,
    contract.test_many_rounds_in_flight,
    contract.test_several_stores_in_one_job,
]


def store(kind: str = "", **options: object) -> kvps.KVStore:
    """Return an allreduce store, whatever store a test of the contract asks for."""
    return kvps.create("allreduce", **{"timeout": 20, **options})


@pytest.fixture
def of_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the tests of the contract use allreduce stores."""
    monkeypatch.setattr(contract, "store", store)


def run(work, workers=2):
    """Call ``work(rank)`` as each worker of a cluster; return the results."""
    with kvps.LocalCluster(workers) as cluster:
        return cluster.run(work)


# --- what every store does --------------------------------------------------------------------------


@pytest.mark.parametrize("test", CONTRACT, ids=lambda item: item.__name__.removeprefix("test_"))
def test_the_contract(of_contract, test):
    test()


def test_a_push_and_a_pull(of_contract):
    contract.test_a_push_and_a_pull("allreduce")


@pytest.mark.parametrize("dtype", [field.name for field in DTYPES])
def test_every_element_type_is_summed(of_contract, dtype):
    contract.test_every_element_type_travels_and_is_summed("allreduce", dtype)


@pytest.mark.parametrize("dtype", [field.name for field in DTYPES])
def test_every_element_type_is_summed_over_workers(dtype):
    kind = getattr(torch, dtype)

    def work(rank):
        kv = store()
        kv.init("w", torch.full((5,), rank + 7).to(kind))
        first = kv.pull("w")
        return first.tolist(), kv.pushpull("w", torch.full((5,), rank + 1).to(kind)).tolist()

    assert run(work, workers=3) == [([7] * 5, [6] * 5)] * 3


def test_a_sum_over_the_range_of_a_small_integer_wraps_as_it_does_on_servers():
    def work(rank):
        value = torch.full((2,), 30_000, dtype=torch.int16)
        sums = []
        for name in ("allreduce", "dist_sync"):
            kv = kvps.create(name, timeout=20)
            kv.init("w", value)
            sums.append(kv.pushpull("w", value).tolist())
        return sums

    assert run(work) == [[[-5536] * 2] * 2] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_summed_in_float32(of_contract, dtype):
    contract.test_half_types_are_summed_in_float32(dtype)


def test_rows_are_summed_as_dense_values_and_pulled_by_their_numbers():
    def work(rank):
        kv = store()
        kv.init(["t", "b"], [torch.zeros(5, 2), torch.zeros(3)])
        kv.push(["t", "b"], [([3, rank, 3], torch.ones(3, 2)), torch.ones(3)])
        full = torch.full((5, 2), -1.0)
        kv.row_sparse_pull("t", out=full, row_ids=[1, 4])
        return kv.row_sparse_pull("t", row_ids=[3, 0, 1, 3]), full, kv.pull("b")

    for rows, full, dense in run(work):
        assert rows[:, 0].tolist() == [4.0, 1.0, 1.0, 4.0]
        assert full[:, 1].tolist() == [-1.0, 1.0, -1.0, -1.0, 0.0]
        assert dense.tolist() == [2.0] * 3


def test_bad_calls_raise_at_the_offender_and_change_nothing():
    contract.test_bad_calls_raise_at_the_offender_and_change_nothing("allreduce")


def test_allreduce_store_names_itself_and_refuses_server_calls(tmp_path):
    path = str(tmp_path / "states")

    def work(rank):
        kv = store(name="mine", on_worker_lost="fail", deterministic=True)
        assert (kv.type, kv.name, kv.rank, kv.num_workers) == ("allreduce", "mine", rank, 2)
        assert not kv.is_capable("optimizer")
        assert not kv.has_optimizer
        kv.init("w", torch.zeros(2))
        for refused in (
            lambda: kv.set_optimizer("sgd", lr=0.1),
            lambda: kv.set_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1)),
            lambda: kv.set_learning_rate(0.1),
            lambda: kv.learning_rate,
            lambda: kv.save_optimizer_states(path),
            lambda: kv.load_optimizer_states(path),
            kv.checkpoint,
            kv.restore,
            kv.join,
            lambda: kv.embedding("t", 2),
        ):
            with pytest.raises(kvps.ConfigError, match="dist_sync"):
                refused()
        assert (kv.placement(), kv.staleness(), kv.stragglers()) == ({}, {"w": 0}, [])
        assert (kv.dropped_rounds(), kv.num_dead_nodes, kv.joins) == ({}, 0, 0)
        assert kv.resume(["w"]) == kv.resume(["w", "not yet"]) == 0
        kv.push("w", torch.ones(2))
        assert kv.resume("w") == kv.version("w") == 1
        assert kv.version(["w"]) == [1]

    run(work)


@pytest.mark.parametrize(
    "options",
    [
        {"staleness": 1},
        {"on_worker_lost": "shrink"},
        {"bigarray_bound": 10},
        {"host_aggregation": True},
        {"on_nonfinite": "skip"},
    ],
)
def test_options_that_need_servers_are_refused(options):
    with pytest.raises(kvps.ConfigError, match=f"{next(iter(options))}=.*needs servers.*dist_sync"):
        kvps.create("allreduce", **options)


def test_values_can_be_read_where_they_are_and_never_change_there():
    def work(rank):
        kv = store()
        kv.init(["a", "b"], [torch.zeros(3), torch.zeros(2)])
        first = kv.pushpull(["a", "b"], [torch.ones(3), torch.ones(2)], copy=False)
        gradient = kv.empty_like("a").fill_(5)
        assert kv.pushpull("a", gradient, copy=False).tolist() == [10] * 3
        copied = kv.pull("b")
        copied.add_(1000)
        assert [item.tolist() for item in first] == [[2] * 3, [2] * 2]
        assert kv.pull("b", copy=False).tolist() == [2, 2]
        with pytest.raises(kvps.ConfigError, match="remove out="):
            kv.pull("a", out=gradient, copy=False)

    run(work)


def test_a_pull_gives_the_version_of_its_call_whatever_is_pushed_later():
    def work(rank):
        kv = store()
        kv.init("w", torch.zeros(1))
        kv.push("w", torch.ones(1))
        first = kv.pull("w", async_op=True)
        second = kv.pushpull("w", torch.full((1,), 5.0), async_op=True)
        assert second.wait().item() == 10
        assert first.done()
        assert first.wait().item() == 2
        with pytest.raises(kvps.ConfigError, match=r"version 2.*min_version=3"):
            kv.pull("w", min_version=3)
        assert kv.pull("w", min_version=2).item() == 10

    run(work)


def test_pushes_go_on_while_the_script_does(monkeypatch):
    """Rank 1 pushes only when rank 0 has pushed all, and got on."""
    gone_on = threading.Event()

    def work(rank):
        kv = store()
        kv.init("w", torch.zeros(1))
        if rank == 0:
            pulled = [kv.pushpull("w", torch.ones(1), async_op=True) for _ in range(10)]
            kv.push("w", torch.ones(1), async_op=True).wait()
            assert not pulled[0].done()
            gone_on.set()
            return [item.wait().item() for item in pulled]
        assert gone_on.wait(20)
        return [kv.pushpull("w", torch.full((1,), float(step))).item() for step in range(10)] + [
            kv.push("w", torch.ones(1))
        ]

    first, second = run(work)
    assert first == second[:10] == [step + 1 for step in range(10)]


def test_a_script_that_runs_ahead_is_held_up(monkeypatch):
    monkeypatch.setattr(queue, "PENDING_MAX", 2)
    tried = threading.Event()

    def work(rank):
        kv = store()
        kv.init("w", torch.zeros(1))
        if rank == 0:

            def run_ahead():
                for _ in range(5):
                    kv.push("w", torch.ones(1), timeout=2.0)

            with pytest.raises(kvps.Timeout, match="2 earlier calls have waited for other ranks"):
                run_ahead()
            tried.set()
            kv.push("w", torch.ones(1))
        else:
            assert tried.wait(20)
            for _ in range(4):
                kv.push("w", torch.ones(1))
        return kv.version("w")

    assert run(work) == [4, 4]  # one under way, two behind it, and the last; the refused one is none


# --- ranks that do not agree --------------------------------------------------------------------------


def test_ranks_that_push_different_keys_are_told_and_nothing_is_summed():
    def work(rank):
        kv = store()
        kv.init(["a", "b"], [torch.zeros(3), torch.zeros(3)])
        kv.pushpull(["a", "b"], [torch.ones(3), torch.ones(3)])
        mine, other = ("a", "b") if rank == 0 else ("b", "a")
        with pytest.raises(kvps.Mismatch) as caught:
            kv.pushpull(mine, torch.ones(3))
        assert "call 3 of rank 0 is push('a' float32[3])" in str(caught.value)
        assert "that of rank 1 is push('b' float32[3])" in str(caught.value)
        assert "same order" in str(caught.value)
        assert kv.pull(other).tolist() == kv.pull(mine).tolist() == [2] * 3
        assert kv.version(["a", "b"]) == [1, 1]
        return kv.pushpull("a", torch.ones(3)).tolist()

    assert run(work) == [[2] * 3] * 2


def test_a_push_that_fails_later_says_so_once_in_the_next_call():
    def work(rank):
        kv = store()
        kv.init(["a", "b"], [torch.zeros(3), torch.zeros(3)])
        kv.push("a" if rank == 0 else "b", torch.ones(3))
        with pytest.raises(kvps.Mismatch):
            kv.version("a" if rank == 0 else "b")
        assert kv.version(["a", "b"]) == [0, 0]
        return kv.pushpull("a", torch.ones(3)).tolist()

    assert run(work) == [[2] * 3] * 2


def test_different_calls_types_and_shapes_are_told():
    def work(rank):
        kv = store()
        with pytest.raises(kvps.Mismatch, match=r"init\('w' float32\[4\]\).*init\('w' float16\[4\]"):
            kv.init("w", torch.zeros(4, dtype=torch.float16 if rank else torch.float32))
        kv.init("w", torch.zeros(4))
        call = kv.barrier if rank < 2 else lambda: kv.pushpull("w", torch.ones(4))
        with pytest.raises(kvps.Mismatch, match=r"rank 0 is barrier\(\).*rank 2 is push"):
            call()
        with pytest.raises(kvps.Mismatch, match=r"barrier 'one'.*barrier 'two'"):
            kv.barrier("one" if rank == 0 else "two")
        kv.barrier("one")
        return kv.version("w")

    assert run(work, workers=3) == [0] * 3


def test_a_timeout_names_who_is_missing_and_the_call_is_waited_for_again():
    timed_out, both = threading.Event(), threading.Barrier(2)

    def work(rank):
        kv = store()
        kv.init("w", torch.zeros(1))
        if rank == 1:
            assert timed_out.wait(30)
        else:
            with pytest.raises(kvps.Timeout, match=r"barrier\(\) is not done.*rank 1 has not made this call"):
                kv.barrier(timeout=1.0)
            assert [straggler.rank for straggler in kv.stragglers()] == [1]
            handle = kv.pushpull("w", torch.ones(1), async_op=True, timeout=0.3)
            with pytest.raises(kvps.Timeout, match="Nothing is cancelled"):
                handle.wait()
            assert handle.done()
            both.wait(30)  # else rank 1 may come before the other one has timed out
            timed_out.set()
        kv.barrier()
        if rank == 1:
            kv.push("w", torch.ones(1))
        return kv.pull("w").item()

    assert run(work, workers=3) == [3.0] * 3


def test_failure_inside_a_with_block_ends_the_other_ranks():
    def fail():
        with store() as kv:
            kv.init("w", torch.ones(1))
            kv.push("w", torch.ones(1))
            raise ZeroDivisionError

    def go_on():
        with store() as kv:
            kv.init("w", torch.ones(1))
            for _ in range(2):  # the first may still be summed
                kv.pushpull("w", torch.ones(1))

    def work(rank):
        with pytest.raises(kvps.WorkerLost if rank else ZeroDivisionError):
            (go_on if rank else fail)()

    run(work)


def test_closing_waits_for_pushes_and_leaves_no_thread():
    before = set(threading.enumerate())

    def work(rank):
        kv = store()
        kv.init("w", torch.ones(1))
        kv.push("w", torch.ones(1))
        kv.close()
        kv.close()
        with pytest.raises(kvps.ConfigError, match="closed"):
            kv.pull("w")
        again = store(name="again")
        with pytest.raises(kvps.ConfigError, match="allreduce store 'again'"):
            store(name="again")
        again.close()
        with store(name="again") as kv:
            kv.init("w", torch.zeros(1))
            return kv.pushpull("w", torch.ones(1)).item()

    assert run(work) == [2, 2]

    def is_none_left() -> bool:
        mine = set(threading.enumerate()) - before
        return not any("allreduce" in field.name for field in mine)

    until(is_none_left, "end of the threads of the stores")


@pytest.mark.cuda
def test_ranks_that_share_a_gpu():
    def work(rank):
        kv = store()
        kv.init(["w", "half"], [torch.zeros(1000), torch.zeros(7, dtype=torch.float16)])
        for step in range(3):
            value = torch.full((1000,), rank + step + 1.0, device="cuda")
            half = torch.full((7,), 1.0, dtype=torch.float16, device="cuda")
            outs = [torch.empty(1000, device="cuda"), torch.empty(7, dtype=torch.float16)]
            kv.pushpull(["w", "half"], [[value, value], half], out=outs)
            assert outs[0].unique().tolist() == [2 * (2 * step + 3.0)]
            assert outs[1].tolist() == [2] * 7
            assert kv.pull("w").unique().tolist() == [2 * (2 * step + 3.0)]
        with pytest.raises(kvps.Mismatch, match="on cuda"):
            kv.pushpull("w", torch.ones(1000, device="cuda" if rank else "cpu"))

    run(work)


# --- training -------------------------------------------------------------------------------------------


def test_the_store_of_a_trainer_cannot_update():
    with pytest.raises(kvps.Mismatch, match="cannot run an optimizer"):
        kvps.Trainer(torch.nn.Linear(1, 1), "sgd", kvstore="allreduce", update_on_kvstore=True)


# --- processes ------------------------------------------------------------------------------------------

ADDS = """
import torch, kvps, os, sys
kv = kvps.create("allreduce", timeout=30)
kv.init(["a", "b"], [torch.full((4,), float(kv.rank)), torch.zeros(300_000)])
kv.push("b", torch.ones(300_000))
total = kv.pushpull("a", torch.full((4,), kv.rank + 1.0)).tolist()
print("sum", total, kv.pull("b").unique().tolist(), kv.rank, kv.num_workers, flush=True)
"""
OWN_GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
kv.push("a", torch.zeros(4))
dist.all_reduce(one)
print("both", one.item(), kv.pull("a").tolist(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("workers", "also"), [(2, ""), (3, "import kvps.torch\n")])
def test_kvps_launch_without_servers(processes: Processes, workers: int, also: str) -> None:
    """torch's own groups, too, where kvps has a backend of its own for them."""
    script = processes.script(also + ADDS + OWN_GROUP)
    launch = processes.kvps("launch", "-n", workers, "-s", 0, "--", sys.executable, script)
    assert launch.wait(60) == 0, launch
    total = float(sum(range(1, workers + 1)))
    for rank in range(workers):
        said = f"[worker {rank}] sum {[total] * 4} {[float(workers)]} {rank} {workers}"
        assert said in launch.out
        assert f"[worker {rank}] both {float(workers**2)} {[0.0] * 4}" in launch.out
    assert "server" not in launch.out + launch.err


def test_a_world_made_by_torchruns_variables(processes: Processes) -> None:
    script = processes.script(ADDS)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = [processes.python("-W", "error", script, RANK=str(rank), **place) for rank in range(2)]
    assert [item.wait() for item in both] == [0, 0], both
    assert all("sum [3.0, 3.0, 3.0, 3.0] [2.0]" in item.out for item in both)
    assert all(item.err == "" for item in both)


@pytest.mark.parametrize("first", ["kvps", "torch"])
def test_ranks_meet_at_one_address_that_torch_shares(processes: Processes, first: str) -> None:
    """torch's own rendezvous, if it comes first, listens on all of them."""
    meets = """
import os, pathlib, torch, kvps
import torch.distributed as dist
def of_kvps():
    global kv
    kv = kvps.create("allreduce", timeout=30)
    kv.init("a", torch.zeros(4))
def of_torch():
    dist.init_process_group("gloo")
for meet in (of_kvps, of_torch)[::ORDER]:
    meet()
assert kv.pushpull("a", torch.ones(4)).tolist() == [2.0] * 4
one = torch.ones(1)
dist.all_reduce(one)
port = "%04X" % int(os.environ["MASTER_PORT"])
for name in ("tcp", "tcp6"):
    for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[1].endswith(":" + port):
            print("listens", words[1], flush=True)
print("both", one.item(), flush=True)
dist.destroy_process_group()
"""
    script = processes.script(meets.replace("ORDER", "1" if first == "kvps" else "-1"))
    port = free_port()
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    both = [processes.python(script, RANK=str(rank), **place) for rank in range(2)]
    assert [item.wait() for item in both] == [0, 0], both
    assert all("both 2.0" in item.out for item in both)
    if first == "kvps":
        listens = {line for line in both[1].out.splitlines() if line.startswith("listens")}
        assert listens == {f"listens 0100007F:{port:04X}"}


@pytest.mark.usefixtures("fresh_interpreters")
def test_a_script_alone_is_a_world_of_one(processes: Processes) -> None:
    alone = processes.python("-W", "error", processes.script(ADDS))
    assert alone.wait() == 0, alone
    assert "sum [1.0, 1.0, 1.0, 1.0] [1.0] 0 1" in alone.out
    assert alone.err.count("world of one worker") == 1


def test_a_process_that_is_killed_ends_the_calls_of_the_others(processes: Processes) -> None:
    fails = """
import signal
if kv.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
kv.pushpull("a", torch.zeros(4))
"""
    script = processes.script(ADDS + fails)
    launch = processes.kvps("launch", "-n", 3, "-s", 0, "--", sys.executable, script)
    assert launch.wait(60) == 128 + 9, launch
    same = r"the same traceback as that of worker \d above$"
    assert len(re.findall(f"WorkerLost: |{same}", launch.err, re.MULTILINE)) == 2, launch
    assert "another rank has ended" in launch.err


def test_a_push_that_is_under_way_at_the_end_counts(processes: Processes) -> None:
    ends = """
if kv.rank == 0:
    kv.push("a", torch.ones(4))
    sys.exit()
import threading
threading.Event().wait(0.5)
print("late", kv.pushpull("a", torch.ones(4)).tolist())
"""
    script = processes.script(ADDS + ends)
    launch = processes.kvps("launch", "-n", 2, "-s", 0, "--", sys.executable, script)
    assert launch.wait(60) == 0, launch
    assert "late [2.0, 2.0, 2.0, 2.0]" in launch.out


def test_half_a_description_of_a_world(processes: Processes) -> None:
    alone = processes.python(processes.script(ADDS), RANK="0", WORLD_SIZE="2")
    assert alone.wait() == 1, alone
    assert "RANK, WORLD_SIZE is set but MASTER_ADDR, MASTER_PORT is not" in alone.err


def test_a_rank_that_does_not_come(processes: Processes) -> None:
    script = processes.script(ADDS.replace("timeout=30", "timeout=2"))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first = processes.python(script, RANK="0", **place)
    assert first.wait() == 1, first
    assert "Timeout: " in first.err
