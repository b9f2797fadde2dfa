"""Scripts in MXNet's names in a cluster: what MXNet's own nightly tests of its dist stores look at."""

import sys
from pathlib import Path

import pytest

import kvps
import kvps.compat.mx as mx
from tests.integration.processes import Processes, free_port
from tests.integration.test_dmlc import variables

WORKERS = 2
SCRIPT = """
import sys
import kvps.compat.mx as mx

shape, big, rounds = (2, 3), (1200, 100), 4
kv = mx.kv.create(sys.argv[1])
rank, workers = kv.rank, kv.num_workers
kv.init(["3", "9"], [mx.nd.ones(shape)] * 2)
kv.init("big", mx.nd.ones(big))
kv.init("table", mx.nd.zeros((8, 2)))
optimizer = mx.optimizer.create("test", rescale_grad=2.0)
kv.set_optimizer(optimizer)

def total(rounds):
    return 1 + 2.0 * rounds * workers * (workers + 1) / 2

for step in range(rounds):
    for key, size in (("3", shape), ("big", big)):
        kv.push(key, [mx.nd.ones(size, ctx=mx.cpu(i)) * (rank + 1) / 2 for i in range(2)], priority=-step)
        out = [mx.nd.zeros(size, ctx=mx.cpu(i)) for i in range(2)]
        kv.pull(key, out=out)
        if "async" not in kv.type:
            for one in out:
                assert (one.asnumpy() == total(step + 1)).all(), (key, step, one)
    gradient = mx.nd.full(shape, rank + 1)
    kv.pushpull("9", gradient)
    if "async" not in kv.type:
        assert (gradient.asnumpy() == total(step + 1)).all(), gradient
rows = mx.nd.sparse.row_sparse_array((mx.nd.ones((2, 2)), [rank, 7]), shape=(8, 2))
kv.push("table", rows)
kv._barrier()
out = mx.nd.zeros((8, 2))
kv.row_sparse_pull("table", out=out, row_ids=mx.nd.array([0, 7, 7]))
assert out[:, 0].tolist() == [2, 0, 0, 0, 0, 0, 0, 2.0 * workers], out
out = mx.nd.empty(big)
kv.pull("big", out=out)
kv._barrier()
assert (out.asnumpy() <= total(rounds)).all()
kv._barrier()
kv.pull("big", out=out)
assert (out.asnumpy() == total(rounds)).all(), out
optimizer.set_learning_rate(0.5)
print("rank", rank, "of", workers, kv.type, "right", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dist_device_sync", "dist_async"])
def test_a_script_of_mxnet_runs_with_one_import_changed(processes: Processes, kind: str) -> None:
    script = processes.script(SCRIPT)
    launched = processes.kvps(
        "launch", "-n", WORKERS, "-s", 2, "--launcher", "local", sys.executable, script, kind
    )
    assert launched.wait(120.0) == 0, launched
    for rank in range(WORKERS):
        assert f"rank {rank} of {WORKERS} {kind} right" in launched.out


@pytest.mark.thorough
def test_a_single_script_takes_its_role_from_mxnets_variables(processes: Processes) -> None:
    script, port = processes.script(SCRIPT), str(free_port())
    roles = ("server", "worker", "scheduler", "worker", "server")
    started = [
        processes.python(script, "dist_sync", **variables(role), DMLC_PS_ROOT_PORT=port) for role in roles
    ]
    assert [process.wait(120.0) for process in started] == [0] * 5, started
    for role, item in zip(roles, started, strict=True):
        assert ("dist_sync right" in item.out) is (role == "worker")


def test_workers_of_a_cluster_and_their_optimizer(tmp_path: Path) -> None:
    def work(rank: int) -> list[float]:
        kv = mx.kv.create("dist_sync")
        optimizer = mx.optimizer.SGD(learning_rate=1.0, momentum=0.5, rescale_grad=0.5)
        kv.set_optimizer(optimizer)
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        kv.init(0, mx.nd.full((3,), rank))
        out = mx.nd.empty((3,))
        kv.pushpull(0, mx.nd.array([1.0, 0.5, -7.0]), out=out)
        values = out.tolist()
        path = str(tmp_path / "states")
        kv.save_optimizer_states(path)
        kv.load_optimizer_states(path)
        optimizer.lr = 0.5
        kv.pushpull(0, mx.nd.array([0.0, 0.5, 0.0]), out=out)
        with pytest.raises(kvps.ConfigError, match="run no code of scripts"):
            kv._set_updater(lambda key, received, stored: None)
        return values + out.tolist()

    with kvps.LocalCluster(WORKERS, servers=2) as cluster:
        first, second = cluster.run(work)
    # Velocities -1, 0 and 1; then -0.5, 1 and -0.5 + 1 (a residual of 6) at half the rate.
    assert first == second == [-1.0, 0.0, 1.0, -1.25, -0.5, 1.75]
