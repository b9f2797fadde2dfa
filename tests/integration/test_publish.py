"""publish() and subscribe(): weights for processes that are no members, over real sockets and shared memory."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvps
import kvps.torch
from kvps.core import manifest
from kvps.core.effects import Route
from kvps.core.relay import Relay
from kvps.dtypes import Spec
from kvps.protocol.publications import Read
from kvps.subscriber import digest_of

LIMIT_S = 30


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 3))


@pytest.fixture(params=["auto", "tcp"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvps.LocalCluster]:
    monkeypatch.setenv("KVPS_TRANSPORT", request.param)
    with kvps.LocalCluster(workers=2, servers=2) as local_cluster:
        yield local_cluster


def test_weights_on_the_servers_are_published_and_read(cluster: kvps.LocalCluster) -> None:
    initial, gradient = torch.randn(300_000), torch.randn(300_000)
    ends = threading.Event()

    def train(rank: int) -> list[int]:
        with kvps.create("dist_sync") as kv:
            kv.init(["w", 3], [initial, torch.arange(7)])
            kv.set_optimizer("test")
            numbers = [kv.publish("policy", ["w", 3], dtype="bfloat16", keep=5)]
            for _ in range(3):
                kv.push("w", gradient)
                numbers.append(kv.publish("policy", ["w"]))
            assert ends.wait(LIMIT_S)
            return numbers

    def read() -> list[torch.Tensor]:
        got = []
        with kvps.subscribe("policy", cluster.scheduler, cluster.keys) as policy:
            for number in (1, 2, 3, 4):
                assert policy.wait(newer_than=number - 1, timeout=LIMIT_S) >= number
            assert policy.version == 4
            got = [tensor for _, tensor in policy.tensors()]
            assert policy.digest("w") == digest_of(got[0])
            assert policy.wait() == 4, "none is newer"
            with pytest.raises(kvps.Timeout, match="no version of 'policy' that is newer than 4"):
                policy.wait(newer_than=4, timeout=0.1)
        ends.set()
        return got

    with_reader: list[torch.Tensor] = []
    reader = threading.Thread(target=lambda: with_reader.extend(read()))
    reader.start()
    assert cluster.run(train) == [[1, 2, 3, 4]] * 2
    reader.join(LIMIT_S)
    expected = initial.clone()
    for _ in range(3):
        expected += gradient + gradient
    (weight,) = with_reader
    assert torch.allclose(weight, expected)


def test_module_is_loaded_whole_or_with_all_differences(cluster: kvps.LocalCluster) -> None:
    source, bits = model(1), {}

    def train(rank: int) -> None:
        with kvps.create("dist_async", name="any") as kv:
            if rank == 0:
                assert kv.publish("policy", source, dtype=torch.bfloat16) == 1
                with torch.no_grad():
                    source[0].weight.add_(1)
                assert kv.publish("policy", source.state_dict()) == 2
                bits["w"] = digest_of(source[0].weight)
            kv.barrier()
            if rank == 0:
                return
            with kvps.subscribe("policy", cluster.scheduler, cluster.keys) as policy:
                target = model(2)
                assert policy.load(target) == 2
                for name, tensor in source.state_dict().items():
                    assert torch.equal(target.state_dict()[name], tensor), name
                assert policy.digest("0.weight") == bits["w"]
                wrong = torch.nn.Sequential(torch.nn.Linear(300, 100), torch.nn.BatchNorm1d(200))
                before = {name: tensor.clone() for name, tensor in wrong.state_dict().items()}
                with pytest.raises(kvps.Mismatch) as error:
                    policy.load(wrong)
                for part in (
                    "'0.weight' has shape (100, 300) in the module and (200, 300)",
                    "'2.bias' is missing",
                ):
                    assert part in str(error.value)
                assert all(torch.equal(tensor, before[name]) for name, tensor in wrong.state_dict().items())
                policy.load({"2.bias": torch.zeros(3), "more": torch.zeros(1)}, strict=False)
            parts = []
            for index in range(3):
                with kvps.subscribe("policy", cluster.scheduler, cluster.keys, (index, 3)) as policy:
                    policy.wait(timeout=LIMIT_S)
                    parts.append(dict(policy.tensors()))
            for name, tensor in source.state_dict().items():
                whole = torch.cat([part[name] for part in parts]) if tensor.dim() else parts[1][name]
                assert torch.equal(whole, tensor), name

    cluster.run(train)


def test_given_tensors_stay_and_memory_of_others_is_used_again() -> None:
    with kvps.create("dist_sync") as kv, kvps.subscribe("policy") as policy:
        kv.publish("policy", {"w": torch.ones(50_000)})
        first = dict(policy.tensors())["w"]
        where = []
        for number in (2, 3, 4):
            kv.publish("policy", {"w": torch.full((50_000,), float(number))})
            assert policy.wait(timeout=LIMIT_S) == number
            target = {"w": torch.empty(50_000)}
            policy.load(target)
            assert target["w"].unique().tolist() == [number]
            assert policy._memory is not None
            where.append(policy._memory._octets.ctypes.data)
        assert len(set(where)) == 1
        assert first.unique().tolist() == [1.0]
    kvps.shutdown()


@pytest.mark.parametrize("shard", [None, (0, 2)])
def test_truth_values_and_tensors_without_elements_come_as_they_are(shard: tuple[int, int] | None) -> None:
    with kvps.create("dist_sync") as kv, kvps.subscribe("policy", shard=shard) as policy:
        for source in (
            {"none": torch.empty(1, 0)},
            {"mask": torch.rand(1, 99).t() > 0.5, "w": torch.randn(3)},
        ):
            number = kv.publish("policy", source, dtype="bfloat16")
            assert policy.wait(newer_than=number - 1, timeout=LIMIT_S) == number
            for name, tensor in policy.tensors():
                rows = slice(0, len(source[name]) // 2 if shard else None)
                assert torch.equal(tensor, source[name][rows].to(tensor.dtype))
                assert tensor.dtype == (torch.bool if name == "mask" else torch.bfloat16)
    kvps.shutdown()


@pytest.mark.spec("R506")
def test_changes_are_read_from_afar_and_come_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_TRANSPORT", "tcp")  # as of another host
    weights = torch.randn(3 << 19).bfloat16()
    state = {"w": weights, "n": torch.tensor([0]), "b": torch.randn(100, 10), "rows": torch.randn(500, 64)}
    size = sum(tensor.nbytes for tensor in state.values())
    with (
        kvps.create("dist_sync") as kv,
        kvps.subscribe("p") as policy,
        kvps.subscribe("p", shard=(1, 2)) as half,
    ):
        kv.init(list(state), list(state.values()))
        for number in range(1, 8):
            if number > 1:
                weights[torch.randperm(len(weights))[: len(weights) // 50]] += 1
                state["n"] += 1
                state["rows"][number::100] = number
            kv.publish("p", state, keep=1)
            given = dict(policy.tensors()) if number > 4 else {}
            if number == 5:
                given["w"][7:9] = 3.0  # its owner may write there
            assert policy.wait(timeout=LIMIT_S) == half.wait(timeout=LIMIT_S) == policy.fetch() == number
            share = policy.bytes_read / size
            assert share >= 1 if number == 1 else share < 0.4 if number == 5 else share < 0.04
            found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
            policy.load(found)
            for name, tensor in half.tensors():
                assert torch.equal(tensor, found[name].chunk(2)[1] if name != "n" else found[name])
            for name, tensor in state.items():
                assert torch.equal(found[name], tensor), (number, name)
                assert policy.digest(name) == digest_of(tensor)
        assert half.bytes_read < 0.04 * size
        kv.publish("p", {"w": weights[1:], "n": state["n"]})
        policy.wait(timeout=LIMIT_S)
        assert torch.equal(dict(policy.tensors())["w"], weights[1:]), "another layout is read whole"
    kvps.shutdown()


@pytest.mark.spec("R589", "R590")
def test_readers_of_other_hosts_pass_on_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_TRANSPORT", "tcp")  # as of another host
    given: list[int] = []
    give = Relay._give

    def count(relay: Relay, route: Route, seq: int, place: Read) -> None:
        given.append(place.size)
        give(relay, route, seq, place)

    monkeypatch.setattr(Relay, "_give", count)
    weights = torch.randn(3 << 19).bfloat16()
    with (
        kvps.create("dist_sync") as kv,
        kvps.subscribe("p") as first,
        kvps.subscribe("p", relay=False) as alone,
    ):
        kv.init("w", weights)
        kv.publish("p", ["w"])
        assert first.fetch(LIMIT_S) == alone.fetch(LIMIT_S) == 1
        assert not given
        with kvps.subscribe("p") as second:
            assert second.fetch(LIMIT_S) == 1
            assert sum(given) == weights.nbytes, "all of it came from the first"
            first.close()
            kv.publish("p", {"w": weights + 1})
            with kvps.subscribe("p") as third:
                for policy in (second, third):
                    policy.wait(newer_than=1, timeout=LIMIT_S)
                    assert torch.equal(dict(policy.tensors())["w"], weights + 1), "a relay has ended"
            assert sum(given) == 2 * weights.nbytes
    kvps.shutdown()


@pytest.mark.parametrize("what", ["Door", "own_host"])
def test_reader_that_cannot_listen_reads_from_the_servers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    monkeypatch.setenv("KVPS_TRANSPORT", "tcp")  # as of another host

    def refuse(*_: object) -> None:
        error = kvps.ConfigError if what == "Door" else kvps.SchedulerLost  # by IPv6 there is no way by IPv4
        raise error("there are too few file descriptors")

    monkeypatch.setattr(f"kvps.subscriber.{what}", refuse)
    with kvps.create("dist_sync") as kv, kvps.subscribe("p") as policy:
        kv.publish("p", {"w": torch.ones(9)})
        assert torch.equal(dict(policy.tensors(LIMIT_S))["w"], torch.ones(9))
    assert "reads from the servers alone: there are too few" in caplog.text
    kvps.shutdown()


def test_reader_that_outlives_a_job_reads_the_next_ones_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_TRANSPORT", "tcp")  # as of another host
    monkeypatch.setenv("KVPS_INSECURE", "1")
    state: dict[str, torch.Tensor] = {}

    def train(rank: int) -> None:
        state.update({name: torch.randn(200_000) for name in ("w", "same")})
        with kvps.create("dist_sync") as kv:
            for name, tensor in state.items():  # which are in chunks of their own
                kv.init(name, tensor)
            kv.publish("policy", list(state))
            for _ in range(versions - 1):
                kv.push("w", state["w"])
                kv.publish("policy", list(state))

    versions = 2
    with kvps.LocalCluster() as local_cluster:
        policy = kvps.subscribe("policy", local_cluster.scheduler)
        local_cluster.run(train)
        assert policy.wait(timeout=LIMIT_S) == policy.fetch() == 2
    versions = 3
    with kvps.LocalCluster() as two, policy:
        two.run(train)
        reader = policy._reader  # a job's address would be the same
        reader._me, reader._is_connected = replace(reader._me, scheduler=two.scheduler), False
        assert policy.wait(timeout=LIMIT_S) == policy.fetch() == 3
        assert torch.equal(dict(policy.tensors())["same"], state["same"])


def test_reader_is_told_that_versions_have_begun_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVPS_INSECURE", "1")

    def train(rank: int) -> None:
        with kvps.create("dist_sync") as kv:
            for number in range(versions):
                kv.publish("policy", {"w": torch.tensor([number])})

    versions = 3
    with kvps.LocalCluster() as local_cluster:
        policy = kvps.subscribe("policy", local_cluster.scheduler)
        local_cluster.run(train)
        assert policy.wait(timeout=LIMIT_S) == 3
    versions = 1
    with kvps.LocalCluster() as two, policy:
        two.run(train)
        reader = policy._reader  # after a loss of all servers the address would be the same
        reader._me, reader._is_connected = replace(reader._me, scheduler=two.scheduler), False
        with pytest.raises(kvps.Timeout, match=r"have begun again: the newest is 1, and .* has read 3"):
            policy.wait(newer_than=3, timeout=2.0)
    assert "have begun again" in caplog.text


def test_slow_reader_skips_versions_and_is_told_what_is_gone() -> None:
    with kvps.create("dist_sync") as kv, kvps.subscribe("policy") as policy:
        for number in range(1, 4):
            kv.publish("policy", {"w": torch.full((5,), float(number))}, keep=1)
            if number == 1:
                policy.wait(timeout=LIMIT_S)
        assert dict(policy.tensors())["w"].unique().tolist() == [1.0], "it retained version 1"
        policy.wait(timeout=LIMIT_S)
        assert policy.version == 3
        policy.version = 2
        with pytest.raises(kvps.KeyNotFound, match="version 2 of 'policy' is gone"):
            list(policy.tensors())
        assert policy.wait(newer_than=2) == 3
    with pytest.raises(kvps.ConfigError, match="is closed"):
        policy.wait()
    kvps.shutdown()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", {"w": torch.ones(1)}), "a name has 1 to 256"),
        (("p", {"w": torch.ones(1)}, None, 0), "keep=0"),
        (("p", {"w": torch.ones(1)}, "int8"), "expected None or one of"),
        (("p", {}), "the source has no tensors"),
        (("p", {"w": 3}), "a state dict has tensors by name"),
        (
            ("p", {"v": torch.ones(1), "mask": torch.ones(2, dtype=torch.complex64)}),
            "'mask'.*torch.complex64",
        ),
        (("p", {"w": torch.ones(1, device="meta")}), "'w' is on the meta device"),
        (("p", ["never"]), "never"),
    ],
)
def test_bad_publications_are_refused(arguments: tuple[str, object], text: str) -> None:
    with kvps.create("dist_sync") as kv, pytest.raises(kvps.KvpsError, match=text):
        kv.publish(*arguments)


def test_two_publishers_of_one_name_are_refused() -> None:
    with kvps.create("dist_sync") as first, kvps.create("dist_async") as second:
        first.publish("policy", {"w": torch.ones(1)})
        with pytest.raises(kvps.Mismatch, match="publishes 'policy' already"):
            second.publish("policy", {"w": torch.ones(1)})


@pytest.mark.parametrize("kind", ["local", "device"])
def test_store_without_servers_says_so(kind: str) -> None:
    with kvps.create(kind) as kv, pytest.raises(kvps.ConfigError, match="no servers that other processes"):
        kv.publish("policy", {"w": torch.ones(1)})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "a\n"}, "a name has 1 to 256"),
        ({"name": "p", "shard": 3}, "expected \\(rank, size\\)"),
        ({"name": "p", "shard": ("0", "2")}, "expected \\(rank, size\\)"),
        ({"name": "p", "shard": (2, 2)}, "expected \\(rank, size\\)"),
        ({"name": "p", "scheduler": "nowhere"}, "nowhere"),
        ({"name": "p", "keys": "/no/such/keys"}, "cannot read the key"),
    ],
)
def test_bad_subscriptions_are_refused(arguments: dict[str, str], text: str) -> None:
    with pytest.raises(kvps.ConfigError, match=text):
        kvps.subscribe(**arguments)


def test_no_time_is_time_to_ask_once() -> None:
    with kvps.create("dist_sync") as kv, kvps.subscribe("policy") as policy:
        with pytest.raises(kvps.Timeout, match="nobody has published 'policy'"):
            policy.wait(timeout=0)
        kv.publish("policy", {"w": torch.randn(3)})
        assert policy.wait(timeout=0) == 1
        with pytest.raises(kvps.Timeout, match="no version of 'policy' that is newer than 1"):
            policy.wait(newer_than=1, timeout=0)
        kv.publish("policy", {"w": torch.randn(3)})
        assert policy.wait(newer_than=1, timeout=0) == 2
    kvps.shutdown()


@pytest.mark.parametrize("newer_than", [2**62, 2**70, "1", 1.5])
def test_no_number_of_a_version_is_refused(newer_than: object) -> None:
    with (
        kvps.subscribe("policy", "tcp://127.0.0.1:1") as policy,
        pytest.raises(kvps.ConfigError, match="newer_than"),
    ):
        policy.wait(newer_than=newer_than, timeout=1)  # type: ignore[arg-type]


def test_nothing_is_loaded_into_what_holds_no_values() -> None:
    with kvps.create("dist_sync") as kv, kvps.subscribe("policy") as policy:
        kv.publish("policy", {"weight": torch.randn(2, 3), "bias": torch.randn(2)})
        with torch.device("meta"):
            target = torch.nn.Linear(3, 2)
        with pytest.raises(kvps.Mismatch, match="'weight' is on the meta device"):
            policy.load(target)
        mixed = {"bias": torch.zeros(2), "weight": 3}
        with pytest.raises(kvps.Mismatch, match="'weight' is no tensor but an int"):
            policy.load(mixed)
        assert mixed["bias"].tolist() == [0.0, 0.0]
    kvps.shutdown()


def test_forked_process_is_refused_and_harms_nothing() -> None:
    with kvps.create("dist_sync") as kv, kvps.subscribe("policy") as policy:
        kv.publish("policy", {"w": torch.randn(3)})
        policy.wait(timeout=LIMIT_S)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                policy.close()
                policy.wait(timeout=1)
            except kvps.ConfigError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [name for name, _ in policy.tensors(timeout=LIMIT_S)] == ["w"]
    kvps.shutdown()


def test_forgotten_subscription_in_a_cycle_is_collected() -> None:
    """The collector may end ZeroMQ's context before its sockets; that would wait for ever."""
    with kvps.create("dist_sync") as kv:
        kv.publish("policy", model())
        subscription = kvps.subscribe("policy")
        assert subscription.wait(timeout=LIMIT_S) == 1
        subscription.itself = subscription  # type: ignore[attr-defined]
        forgotten = weakref.ref(subscription)
        del subscription
        gc.collect()
        assert forgotten() is None
    kvps.shutdown()


def test_manifest_with_places_that_there_are_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec("float32", (1,))
    with kvps.create("dist_sync") as kv, kvps.subscribe("policy") as policy:
        kv.publish("policy", {"w": torch.randn(1)})
        for extent in ((1, 0, 0, 4, 0), (2**40, 0, 0, 4, 0)):
            hostile = manifest.Published("w", spec, (manifest.Extent(*extent),))
            with monkeypatch.context() as patch:
                patch.setattr(manifest, "decode", lambda octets, hostile=hostile: [hostile])
                with pytest.raises(kvps.ProtocolError, match="a server that there is not"):
                    policy.wait(timeout=LIMIT_S)
        assert policy.wait(timeout=LIMIT_S) == 1
    kvps.shutdown()


def with_optimizer(net: torch.nn.Module) -> Callable[[], object]:
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    return kvps.torch.DistributedOptimizer(sgd, net.named_parameters()).step


def with_trainer_on_servers(net: torch.nn.Module) -> Callable[[], object]:
    trainer = kvps.Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
    return lambda: trainer.step(2)


def with_trainer_on_workers(net: torch.nn.Module) -> Callable[[], object]:
    trainer = kvps.Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore="dist_sync", update_on_kvstore=False)
    return lambda: trainer.step(2)


@pytest.mark.parametrize("begin", [with_optimizer, with_trainer_on_servers, with_trainer_on_workers])
def test_a_model_is_published_beside_each_front_end(begin: Callable[[Any], Callable[[], object]]) -> None:
    def train(rank: int) -> list[torch.Tensor]:
        net = model()
        step = begin(net)
        with kvps.create("dist_sync", name="readers") as kv:
            for number in (1, 2):
                net.zero_grad()
                net(torch.randn(8, 300)).square().mean().backward()
                step()
                assert kv.publish("policy", net) == number
            kv.barrier()
            if rank == 0:
                return [tensor.clone() for tensor in net.state_dict().values()]
            with kvps.subscribe("policy") as policy:
                assert policy.wait(timeout=LIMIT_S) == 2
                return [tensor for _, tensor in policy.tensors()]

    with kvps.LocalCluster(workers=2, servers=2) as cluster:
        of_trainer, of_reader = cluster.run(train)
    assert len(of_trainer) == len(of_reader)
    assert all(map(torch.equal, of_trainer, of_reader))


def test_weights_of_local_steps_and_of_shards_are_published() -> None:
    def train(rank: int) -> list[bool]:
        net = model()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        with kvps.create("dist_sync", name="readers") as kv, kvps.torch.DiLoCo(net, sgd, sync_every=2):
            for _ in range(4):
                sgd.zero_grad()
                net(torch.randn(8, 300)).square().mean().backward()
                sgd.step()
            kv.publish("steps", net)
            kv.barrier()
            with kvps.subscribe("steps") as steps:
                steps.wait(timeout=LIMIT_S)
                own = dict(net.named_parameters())
                agree = [torch.equal(tensor, own[name]) for name, tensor in steps.tensors() if name in own]
            kv.barrier()
        layer = torch.nn.Linear(300, 200)
        sharded = kvps.torch.shard(layer, optimizer="sgd", lr=0.1)
        store = sharded.kvstore
        layer(torch.randn(8, 300)).square().mean().backward()
        sharded.step()
        store.publish("shard", store.keys())
        store.barrier()
        with kvps.subscribe("shard") as shard:
            shard.wait(timeout=LIMIT_S)
            sizes = sorted(tensor.numel() for _, tensor in shard.tensors())
        store.barrier()
        return [*agree, sum(sizes) >= 300 * 200 + 200]

    with kvps.LocalCluster(workers=2, servers=2) as cluster:
        for found in cluster.run(train):
            assert len(found) > 4
            assert all(found)


def test_a_reader_imports_no_code_of_servers_and_trainers() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import sys, kvps; kvps.subscribe; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = set(found.stdout.split())
    assert "kvps.subscriber" in modules
    others = (
        "kvps.core.server",
        "kvps.core.worker",
        "kvps.core.scheduler",
        "kvps.store",
        "kvps.torch",
        "kvps.trainer",
    )
    assert not [name for name in modules if name.startswith(others)]


def test_several_readers_read_the_version_that_they_are_told() -> None:
    with (
        kvps.create("dist_sync") as kv,
        kvps.subscribe("policy") as policy,
        kvps.subscribe("policy") as other,
    ):
        values = torch.randn(3, 50)
        for number in (0, 1, 2):
            kv.publish("policy", {"w": values[number]})
        assert policy.wait(version=2, timeout=LIMIT_S) == 2 == policy.load({"w": (got := torch.zeros(50))})
        assert torch.equal(got, values[1])
        with pytest.raises(kvps.KeyNotFound, match="version 1 of 'policy' is gone"):
            other.wait(version=1, timeout=LIMIT_S)
        assert other.wait(timeout=LIMIT_S) == 3
        with pytest.raises(kvps.ConfigError, match="reads version 3, and never an older one"):
            other.wait(version=2)
        with pytest.raises(kvps.Timeout, match="no version of 'policy' that is newer than 3"):
            other.wait(version=4, timeout=0.1)


def test_tasks_await_versions_and_a_cancelled_wait_harms_nothing() -> None:
    with kvps.create("dist_sync") as kv:
        values = torch.randn(4, 50)

        async def read() -> None:
            async with kvps.subscribe("policy") as policy:
                waits = asyncio.create_task(policy.wait_async())
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(waits, 0.2)
                got = torch.zeros(50)
                await asyncio.to_thread(kv.publish, "policy", {"w": values[0]})
                async for version in policy:
                    assert await policy.load_async({"w": got}) == version
                    assert torch.equal(got, values[version - 1])
                    if version == len(values):
                        break
                    await asyncio.to_thread(kv.publish, "policy", {"w": values[version]})
                with pytest.raises(kvps.Timeout, match="newer than 4"):
                    await policy.wait_async(newer_than=4, timeout=0.1)
            with pytest.raises(kvps.ConfigError, match="is closed"):
                await policy.wait_async()

        asyncio.run(asyncio.wait_for(read(), LIMIT_S))
