"""LocalCluster as its users see it: one job after another, threads as workers, failures."""

import sys
import threading

import pytest
import torch

import kvps
from kvps.cli import drain


def test_workers_keep_rank_thread_and_stores_from_run_to_run() -> None:
    stores: dict[int, kvps.KVStoreBase] = {}

    def begin(rank: int) -> int:
        stores[rank] = kvps.create("dist_sync", name="model")
        stores[rank].init("w", torch.zeros(1))
        assert stores[rank].rank == rank
        return threading.get_ident()

    def go_on(rank: int) -> tuple[int, float]:
        return threading.get_ident(), stores[rank].pushpull("w", torch.tensor([rank + 1.0])).item()

    with kvps.LocalCluster(2, 2) as cluster:
        threads = cluster.run(begin)
        assert cluster.run(go_on) == [(thread, 3.0) for thread in threads]


def test_a_store_may_be_created_again() -> None:
    def work(rank: int) -> float:
        kv = kvps.create("dist_sync")
        kv.init("w", torch.zeros(1))
        return kv.pushpull("w", torch.tensor([rank + 1.0])).item()

    with kvps.LocalCluster(2, 1) as cluster:
        assert cluster.run(work) == cluster.run(work) == [3.0, 3.0]


def test_servers_of_a_cluster_of_threads_are_not_drained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with kvps.LocalCluster(1, 2) as cluster:
        cluster.run(lambda rank: kvps.create("dist_sync"))
        monkeypatch.setenv("KVPS_KEYS", cluster.keys)
        assert drain.main(["server-1", "--scheduler", cluster.scheduler]) == 78
    assert "as in a LocalCluster: its seat is not moved. Start a job" in " ".join(
        capsys.readouterr().err.split()
    )


def test_nothing_runs_after_a_failure() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise ValueError("no")

    with kvps.LocalCluster(2, 1) as cluster:
        with pytest.raises(ValueError, match="no"):
            cluster.run(fail)
        with pytest.raises(kvps.ConfigError, match="has failed; create another LocalCluster"):
            cluster.run(fail)


def test_store_of_another_thread_finds_all_workers_taken() -> None:
    with kvps.LocalCluster(1, 1) as cluster:
        cluster.run(lambda rank: kvps.create("dist_sync"))
        with pytest.raises(kvps.ConfigError, match="all 1 workers of this LocalCluster are taken"):
            kvps.create("dist_sync")


def test_the_interpreter_takes_short_turns_while_a_call_is_in_flight() -> None:
    usual = sys.getswitchinterval()

    def work(rank: int) -> float:
        seen = 0.0
        with kvps.create("dist_sync") as kv:
            kv.init("w", torch.zeros(3))
            if rank == 0:
                handle = kv.pushpull("w", torch.ones(3), async_op=True)  # it waits for rank 1
                seen = sys.getswitchinterval()
            kv.barrier()
            if rank == 1:
                kv.push("w", torch.ones(3))
            else:
                assert torch.equal(handle.wait(), torch.full((3,), 2.0))
        return seen

    with kvps.LocalCluster(2, 1) as cluster:
        assert 0 < cluster.run(work)[0] < usual
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_a_rank_that_was_refused_may_make_the_right_call_and_the_round_closes() -> None:
    def work(rank: int) -> list[float]:
        kv = kvps.create("dist_sync")
        if rank:
            with pytest.raises(kvps.Mismatch, match="w"):
                kv.init("w", torch.zeros(3))
        kv.init("w", torch.zeros(2))
        if rank:
            for wrong in (torch.ones(3), torch.ones(2, dtype=torch.int64)):
                with pytest.raises(kvps.Mismatch, match="w"):
                    kv.push("w", wrong)
        found: list[float] = kv.pushpull("w", torch.tensor([rank, 1.0])).tolist()
        return found

    with kvps.LocalCluster(2, 1) as cluster:
        assert cluster.run(work) == [[1.0, 2.0]] * 2


@pytest.mark.parametrize("kind", ["dist_sync", "allreduce"])
@pytest.mark.parametrize("ends", ["raises", "returns", "times out"])
def test_nobody_waits_for_a_worker_that_ended_before_it_had_a_store(kind: str, ends: str) -> None:
    told: list[str] = []
    first = threading.Event()

    def work(rank: int) -> None:
        if rank == 1 and ends == "raises":
            raise ValueError("no")
        if rank == 1 and ends == "returns":
            return
        if rank == 2:  # it comes late
            first.wait(60)
        try:
            kvps.create(kind, timeout=0.5 if rank == 1 else 300)
        except kvps.WorkerLost as error:
            told.append(str(error))
            first.set()

    with kvps.LocalCluster(3, 1) as cluster:
        if ends == "returns":
            cluster.run(work)
        else:
            with pytest.raises(ValueError if ends == "raises" else kvps.Timeout):
                cluster.run(work)
    assert len(told) == 2
    for text in told:  # the scheduler may be faster
        if ends == "times out":
            assert "raised Timeout" in text
        else:
            reason = "raised ValueError" if ends == "raises" else "returned"
            assert f"worker 1 of this LocalCluster {reason} before the job began" in text


def test_a_run_without_stores_may_precede_a_run_with_stores() -> None:
    with kvps.LocalCluster(2, 1) as cluster:
        assert cluster.run(lambda rank: rank) == [0, 1]
        cluster.run(lambda rank: kvps.create("dist_sync").barrier())


def test_of_clusters_that_start_at_once_all_but_the_first_are_refused() -> None:
    begin, entered = threading.Barrier(8), threading.Event()
    told: list[str] = []

    def one() -> None:
        begin.wait()
        try:
            with kvps.LocalCluster(1, 1) as cluster:
                cluster.run(lambda rank: kvps.create("dist_sync").barrier())
                entered.wait(60)
        except kvps.KvpsError as error:
            told.append(str(error))
            if len(told) == 7:
                entered.set()

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == ["a LocalCluster is already active in this process; leave it first"] * 7
