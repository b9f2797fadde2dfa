"""KVPS_AUTOTUNE: all ranks try settings together, choose the same, and leave nothing behind."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvps
import kvps.torch
from kvps import config
from kvps.core.autotune import Settings
from kvps.errors import Overload, Timeout
from kvps.observe.recording.format import read
from kvps.observe.recording.replay import replay
from kvps.runtime.local import local_cluster
from kvps.store.autotune import bench, choice
from tests.integration.processes import Processes

MIB = 1 << 20
SHAPES = {"first": (700, 1000), "second": (3,), "third": (600, 1000), "fourth": (11, 5)}
"""5.2 MB: more than a chunk of 4 MiB, and less than the default."""


def model() -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cores of the servers of each LocalCluster; each knows all stores that it has ever held."""
    found: list[Any] = []

    class Stores(dict[str, Any]):
        def __init__(self) -> None:
            super().__init__()
            self.ever: dict[str, Any] = {}

        def __setitem__(self, name: str, store: Any) -> None:
            super().__setitem__(name, store)
            self.ever[name] = store

    class Known(local_cluster.Server):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            found.append(self)

        def _make_parts(self, *args: Any) -> None:
            super()._make_parts(*args)
            self.context.stores = Stores()

    monkeypatch.setattr(local_cluster, "Server", Known)
    return found


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KVPS_AUTOTUNE", "1")
    monkeypatch.setattr(bench, "TURN_LEAST_S", 0.0)
    monkeypatch.setattr(choice, "LIMIT_S", 300.0)  # of true time, which a busy machine uses up
    caplog.set_level(logging.INFO, "kvps")


def times(monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[int, Settings], float]) -> None:
    """Let each rank say these seconds of its rounds, which it makes."""
    exchange = bench.Bench._exchange

    def said(self: bench.Bench, _: float) -> tuple[float, float]:
        assert self._present is not None
        return exchange(self, seconds_of(self._session.rank, self._present))

    monkeypatch.setattr(bench.Bench, "_exchange", said)


def rank_1_likes_4_mib(rank: int, settings: Settings) -> float:
    """Seconds of a round that is faster on the slowest rank alone."""
    return 0.01 if rank == 0 or settings.chunk_bytes == 4 * MIB else 0.02


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "KVPS_AUTOTUNE" in one.getMessage()]


def left_of_trials(server: Any) -> tuple[int, int]:
    """Return the chunks and the elements of stores of trials."""
    counts = server.context.chunks.counts
    trials = [name for name in server.context.stores.ever if name.startswith("kvps.autotune.")]
    assert trials, "there were none"
    chunks = [server.context.chunks.of_store(name) for name in trials]
    return sum(map(len, chunks)), sum(sum(counts.get(name, {}).values()) for name in trials)


def train(rank: int) -> tuple[Settings, int, list[torch.Tensor]]:
    """Make two steps; return what was chosen, and the weights."""
    params = model()
    trainer = kvps.Trainer(params, "sgd", {"lr": 0.5}, kvstore="dist_sync")
    for _ in range(2):
        for param in params.values():
            param.grad = torch.full_like(param, rank + 1.0)
        trainer.step(2)
    store = trainer._kv
    store.barrier()
    return store.session.tuned, store.chunk_bytes, [param.detach() for param in params.values()]


def check_trained(params: list[torch.Tensor]) -> None:
    """Assert the weights after two steps of gradients 1 and 2."""
    assert all(param.eq(1.0 - 2 * 0.5 * 3.0 / 2).all() for param in params)


def test_the_slowest_rank_decides_and_all_choose_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, servers: list[Any]
) -> None:
    times(monkeypatch, rank_1_likes_4_mib)
    with kvps.LocalCluster(2, 2) as cluster:
        results = cluster.run(train)
        for settings, chunk_bytes, params in results:
            assert settings.chunk_bytes == chunk_bytes == 4 * MIB
            check_trained(params)
        assert results[0][0] == results[1][0]
        assert [left_of_trials(server) for server in servers] == [(0, 0), (0, 0)]
        sizes = {one.opened.chunk_bytes for one in servers[0].context.stores.values()}
        assert 4 * MIB in sizes
    (line,) = lines(caplog)
    assert "chosen: chunk size 4 MiB instead of 32 MiB" in line
    assert "4 MiB: 0.50 of the time" in line
    assert "of the whole model" in line


def test_where_nothing_is_better_the_defaults_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times(monkeypatch, lambda rank, settings: 0.01)
    monkeypatch.setenv("KVPS_TRANSPORT", "tcp")
    with kvps.LocalCluster(2, 1) as cluster:
        for settings, chunk_bytes, params in cluster.run(train):
            assert settings == Settings(8 * MIB, 3 * MIB, 0, True)
            assert chunk_bytes == 8 * MIB
            check_trained(params)
    (line,) = lines(caplog)
    assert "the defaults are kept: chunk size 8 MiB (tried " in line
    assert (
        "bytes under way 3 MiB (tried 12 MiB: 1.00 of the time, 1.5 MiB: 1.00 of the time)" in line
    )
    assert "priorities on (tried off: 1.00 of the time)" in line


def test_what_may_change_at_any_time_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds_of(rank: int, settings: Settings) -> float:
        fast = settings.uplink_bytes == 12 * MIB
        return 0.01 * (0.5 if fast else 1.0) * (1.0 if settings.priorities else 0.5)

    times(monkeypatch, seconds_of)
    monkeypatch.setenv("KVPS_TRANSPORT", "tcp")
    monkeypatch.setenv("KVPS_CHUNK_BYTES", "2M")
    with kvps.LocalCluster(1, 1):
        params = model()
        trainer = kvps.Trainer(params, "sgd", {"lr": 0.5}, kvstore="dist_sync")
        session = trainer._kv.session
        assert session.tuned == Settings(2 * MIB, 12 * MIB, 0, False)
        assert session._core.table.uplink.limit_bytes == 12 * MIB
        assert trainer._levels == 1
        assert trainer._kv.chunk_bytes == 2 * MIB, "the operator's"


def test_copying_takes_its_own_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's number stays, in this thread and in those that begin later."""

    def in_loop(session: Any) -> int:
        seen: list[int] = []
        done = threading.Event()

        def look(core: object, now: float) -> Any:
            seen.append(torch.get_num_threads())
            done.set()
            return iter(())

        session._inbox.put(look)
        assert done.wait(20.0)
        return seen[0]

    own = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        times(monkeypatch, lambda rank, settings: 0.005 if settings.threads == 1 else 0.01)
        with kvps.LocalCluster(1, 1):
            optimizer = torch.optim.SGD(model().values(), lr=0.1)
            session = kvps.torch.DistributedOptimizer(optimizer).kvstore.session
            assert session.tuned.threads == 1
            assert (in_loop(session), torch.get_num_threads()) == (1, 3)
            later: list[int] = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert later == [3]
            session.set_copy_threads(0)
            assert in_loop(session) == 3
    finally:
        torch.set_num_threads(own)


def test_a_second_front_end_takes_the_choice_of_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times(monkeypatch, rank_1_likes_4_mib)

    def work(rank: int) -> tuple[int, int]:
        train(rank)
        optimizer = torch.optim.SGD(model().values(), lr=0.1)
        second = kvps.torch.DistributedOptimizer(optimizer, kvstore="dist_sync")
        plain = kvps.create("dist_sync")
        return second.kvstore.chunk_bytes, plain.chunk_bytes

    with kvps.LocalCluster(2, 1) as cluster:
        assert cluster.run(work) == [(4 * MIB, 32 * MIB)] * 2, "a plain store knows no model"
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize(
    ("compression", "update_on_kvstore"),
    [("fp16", True), ({"type": "2bit", "threshold": 0.5}, False), (None, False)],
)
def test_trials_are_made_as_the_front_end_trains(
    monkeypatch: pytest.MonkeyPatch, compression: Any, update_on_kvstore: bool, servers: list[Any]
) -> None:
    times(monkeypatch, rank_1_likes_4_mib)

    def work(rank: int) -> int:
        params = model()
        trainer = kvps.Trainer(
            params,
            torch.optim.Adam(params.values(), lr=0.1),
            kvstore="dist_sync_device",
            compression_params=compression,
            update_on_kvstore=update_on_kvstore,
            overlap=True,
        )
        return int(trainer._kv.chunk_bytes)

    with kvps.LocalCluster(2, 2) as cluster:
        assert cluster.run(work) == [4 * MIB, 4 * MIB]
        stores = servers[0].context.stores.ever
        trials = [one for name, one in stores.items() if "autotune.0" in name]
        assert [one.updater is not None for one in trials] == [update_on_kvstore]
        assert [left_of_trials(server) for server in servers] == [(0, 0), (0, 0)]


def test_a_long_model_is_tried_by_a_sample(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVPS_TRANSPORT", "tcp")
    seconds = iter([0.5] + [0.25] * 1000)
    times(monkeypatch, lambda rank, settings: next(seconds))
    with kvps.LocalCluster(1, 1):
        kvps.Trainer(model(), "sgd", {"lr": 0.5}, kvstore="dist_sync")
    (line,) = lines(caplog)
    assert "of a model of 4.96 MiB" in line
    assert "2 MiB" in line
    assert "tried 16 MiB" not in line, "neither size cuts the sample"
    assert "tried 4 MiB" not in line, "a sample says nothing for smaller chunks"


def test_rounds_that_are_too_long_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, servers: list[Any]
) -> None:
    times(monkeypatch, lambda rank, settings: 1.5)
    with kvps.LocalCluster(2, 2) as cluster:
        for settings, chunk_bytes, params in cluster.run(train):
            assert (settings.chunk_bytes, chunk_bytes) == (32 * MIB, 32 * MIB)
            check_trained(params)
        assert [left_of_trials(server) for server in servers] == [(0, 0), (0, 0)]
    (line,) = lines(caplog)
    assert "the defaults are kept, as nothing could be tried: a round of 2 MiB takes 1.5 s" in line


def test_a_model_near_the_memory_of_the_servers_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, servers: list[Any]
) -> None:
    """It fits once, not twice."""
    monkeypatch.setattr(local_cluster, "share_bytes", lambda servers: 20_000_000)
    times(monkeypatch, lambda rank, settings: 0.01)
    with kvps.LocalCluster(2, 1) as cluster:
        for settings, chunk_bytes, params in cluster.run(train):
            assert (settings.chunk_bytes, chunk_bytes) == (32 * MIB, 32 * MIB)
            check_trained(params)
        assert [left_of_trials(server) for server in servers] == [(0, 0)]
    (line,) = lines(caplog)
    assert "nothing could be tried: no room for key 'first'" in line


def test_an_error_of_one_rank_leaves_the_defaults_on_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bench, "CALL_MAX_S", 0.5)

    def seconds_of(rank: int, settings: Settings) -> float:
        if rank == 1 and settings.chunk_bytes == 4 * MIB:
            raise Overload("rank 1 has no room", limit="memory")
        return rank_1_likes_4_mib(rank, settings)

    times(monkeypatch, seconds_of)
    with kvps.LocalCluster(2, 1) as cluster:
        for settings, chunk_bytes, params in cluster.run(train):
            assert (settings.chunk_bytes, chunk_bytes) == (32 * MIB, 32 * MIB)
            check_trained(params)
    (line,) = lines(caplog)
    assert "nothing could be tried" in line


@pytest.mark.parametrize("which", [0, 1])
def test_set_on_one_rank_alone_it_has_no_effect(
    which: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = threading.local()
    monkeypatch.setattr(config, "autotune", lambda alias=None: mine.rank == which)
    monkeypatch.setattr(choice, "MEET_MAX_S", 0.5)

    def work(rank: int) -> int:
        mine.rank = rank
        _, chunk_bytes, params = train(rank)
        check_trained(params)
        return chunk_bytes

    with kvps.LocalCluster(2, 2) as cluster:
        assert cluster.run(work) == [32 * MIB, 32 * MIB]
    (line,) = lines(caplog)
    assert "Set KVPS_AUTOTUNE on every rank" in line
    assert "the defaults are kept" in line


def test_a_rank_that_comes_late_takes_what_rank_0_decided(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "MEET_MAX_S", 0.2)
    gave_up, knows = threading.Event(), threading.Event()
    meet = choice._meet

    def watched(control: Any) -> None:
        try:
            meet(control)
        except Timeout:
            if control.rank == 0:
                gave_up.set()
                assert knows.wait(60.0), "rank 1 finds it before rank 0 has written its choice"
            else:
                knows.set()
            raise

    monkeypatch.setattr(choice, "_meet", watched)

    def work(rank: int) -> Settings:
        kvps.create("dist_sync")  # the cluster is complete
        if rank == 1:
            assert gave_up.wait(60.0)
        settings, _, params = train(rank)
        check_trained(params)
        return settings

    with kvps.LocalCluster(2, 1) as cluster:
        first, second = cluster.run(work)
    assert first == second == Settings(32 * MIB, 3 * MIB, 0, True)
    assert "not all ranks have come within 0.2 s" in lines(caplog)[0]


@pytest.mark.parametrize("kind", ["local", "device", "dist_async", "dist_ssp"])
def test_other_stores_are_as_without_it(
    kind: str, caplog: pytest.LogCaptureFixture, servers: list[Any]
) -> None:
    with kvps.LocalCluster(1, 1):
        params = model()
        kvps.Trainer(params, "sgd", {"lr": 0.1}, kvstore=kind)
        assert not [name for name in servers[0].context.stores.ever if "autotune" in name]
    assert all(f"KVPS_AUTOTUNE has no effect on {kind}" in line for line in lines(caplog))


def test_without_the_variable_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, servers: list[Any]
) -> None:
    monkeypatch.delenv("KVPS_AUTOTUNE")
    with kvps.LocalCluster(1, 1):
        kvps.Trainer(model(), "sgd", {"lr": 0.1}, kvstore="dist_sync")
        assert not [name for name in servers[0].context.stores.ever if "autotune" in name]
    assert lines(caplog) == []


def test_horovods_variable_means_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import kvps.horovod as hvd

    monkeypatch.delenv("KVPS_AUTOTUNE")
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    times(monkeypatch, lambda rank, settings: rank_1_likes_4_mib(rank, settings) / 100)

    def work(rank: int) -> int:
        hvd.init()
        try:
            mean = hvd.allreduce(torch.full((700_000,), rank + 1.0))
            assert mean.eq(1.5).all()
            from kvps.horovod.engine.context import current

            board = current().running()._board
            return int(board._sums.chunk_bytes)
        finally:
            hvd.shutdown()

    with kvps.LocalCluster(2, 1) as cluster:
        assert cluster.run(work) == [4 * MIB, 4 * MIB]
    assert len(lines(caplog)) == 1


RESTARTED = """
import os, pathlib, sys, torch, kvps
from kvps.store.autotune import bench, choice

mark = pathlib.Path(sys.argv[1])
is_again = mark.exists()
exchange = bench.Bench._exchange
def said(self, seconds):
    if self._session.rank == 1 and is_again:
        print("tried again", flush=True)
    return exchange(self, 0.01 if self._present.chunk_bytes == 4 << 20 else 0.02)
bench.Bench._exchange = said
bench.TURN_LEAST_S = 0.0
choice.LIMIT_S = 300.0

params = {"w": torch.nn.Parameter(torch.zeros(1_300_000))}
trainer = kvps.Trainer(params, "sgd", {"lr": 1.0}, kvstore="dist_sync")
kv = trainer._kv
step = trainer.resume()
print("rank", kv.rank, "begins at", step, "with", kv.chunk_bytes, kv.session.tuned.chunk_bytes, flush=True)
for at in range(step, 6):
    if kv.rank == 1 and at == 3 and step == 0:
        mark.touch()
        os.kill(os.getpid(), 9)
    params["w"].grad = torch.full_like(params["w"], 0.5)
    trainer.step(1)
assert params["w"].eq(-6.0).all()
print("done", flush=True)
"""


def test_a_worker_that_is_started_again_takes_the_choice(
    processes: Processes, tmp_path: Path
) -> None:
    script = processes.script(RESTARTED)
    flags = ("-n", 2, "-s", 1, "--max-restarts", 1, "--")
    process = processes.kvps(
        "launch", *flags, sys.executable, script, tmp_path / "mark", KVPS_AUTOTUNE="1"
    )
    assert process.wait(120.0) == 0, process
    assert process.out.count("done") == 2
    assert f"rank 1 begins at 3 with {4 * MIB} {4 * MIB}" in process.out
    assert "tried again" not in process.out
    assert (process.out + process.err).count("KVPS_AUTOTUNE: chosen") == 1


def test_a_record_of_a_job_that_tried_settings_can_be_replayed(processes: Processes) -> None:
    script = processes.script(RESTARTED.replace("os.kill(os.getpid(), 9)", "pass"))
    folder = processes.folder / "records"
    process = processes.kvps(
        *("launch", "-n", 2, "-s", 1, "--", sys.executable, script, processes.folder / "mark"),
        KVPS_AUTOTUNE="1",
        KVPS_TRANSPORT="tcp",
        KVPS_RECORD="full",
        KVPS_RECORD_DIR=str(folder),
    )
    assert process.wait(120.0) == 0, process
    paths = list(folder.glob("worker-*.record"))
    assert len(paths) == 2
    for path in paths:
        with path.open("rb") as file:
            record = read(file)
        limits = [event for event in record.events if event.parts[:1] == [b"on_uplink"]]
        assert limits, "the limit of bytes under way was tried"
        outcome = replay(record)
        assert not outcome.difference, outcome.difference
        assert not outcome.stopped, outcome.stopped
        assert outcome.inputs > len(limits)
