"""What no correct peer says is refused where it comes in, and what nobody foresaw is answered."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest
import torch

from kvps import protocol as m
from kvps.checkpoint.directory import CheckpointDirectory
from kvps.core.effects import Disk, Exit, Send
from kvps.core.inquiry import Inquiry
from kvps.core.membership_client import Identity
from kvps.core.optim.base import Terms
from kvps.core.optim.hyperparams import FLOAT_MAX, SCHEMAS, resolve
from kvps.core.optim.torch_rules import PRODUCTS_MAX, create
from kvps.core.scheduler.barriers import Waiter
from kvps.core.scheduler.checkpoint_coordinator import CheckpointCoordinator
from kvps.core.scheduler.cut import CUT_MAX, Rollback
from kvps.core.server import server as module
from kvps.core.server.rules.rule import Optimize
from kvps.core.server.rules.whole_tensor import NO_NUMBER
from kvps.core.server.snapshot import capture, storage
from kvps.core.server.snapshot.model import KeySnapshot, Snapshot, SnapshotPart
from kvps.core.server.snapshot.storage import Complete, Loaded, Read, Remove, Write
from kvps.core.supervisor import Supervisor
from kvps.core.texts import demand_address, demand_printable, shown
from kvps.core.worker.worker import Worker
from kvps.errors import ConfigError, Mismatch, ProtocolError, StorageError
from kvps.protocol.envelope import Envelope, Node, Role
from kvps.runtime import storage_thread
from kvps.torch.serialization import DEPTH_MAX, pack, unpack
from tests.support.effects import taken
from tests.support.scheduler_harness import Stage
from tests.support.server_harness import JOB, ServerStage, heard, optimizing, refusal

FAILURE = ValueError("nobody foresaw this")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


# --- texts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("lost: exit code 1", "lost: exit code 1"), ("a\nb\tc", "a b c"), ("\x1b[2J\0", "?[2J?")],
)
def test_texts_are_shown_without_what_commands_a_terminal(text: str, expected: str) -> None:
    assert shown(text) == expected


@pytest.mark.spec("R202")
@pytest.mark.parametrize(
    "address",
    [
        "",
        "x",
        "tcp://",
        "tcp://h",
        "tcp://h:",
        "tcp://h:0",
        "tcp://h:70000",
        "tcp://h:+1",
        "tcp://:1",
        "udp://h:1",
        "tcp://a b:1",
        "tcp://h/p:1",
        "tcp://h;x:1",
        "tcp://h:¹",
    ],
)
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ProtocolError, match=r"endpoint .* is not an address"):
        demand_address("endpoint", address)


@pytest.mark.spec("R202")
@pytest.mark.parametrize("address", ["tcp://h:1", "tcp://10.0.0.1:65535", "tcp://[::1]:9091"])
def test_valid_address_passes(address: str) -> None:
    demand_address("endpoint", address)
    demand_printable("endpoint", address)


@pytest.mark.spec("R202")
@pytest.mark.parametrize("field", ["host", "endpoint", "master"])
def test_a_hello_with_what_cannot_be_printed_is_refused(field: str) -> None:
    stage = Stage()
    (answer,) = sent(stage.hello("w0", **{field: "tcp://a\0b:1"}))
    assert isinstance(answer, m.Error)
    assert answer.text == f"{field} 'tcp://a\\x00b:1' has characters that cannot be printed"


def test_reasons_are_shown_without_what_commands_a_terminal() -> None:
    recovery = Rollback(4, 1)
    recovery.hear(0, m.Shelf(4, True, 0.0, (3,), 3))
    recovery.hear(0, m.Restored(4, 3, "\x1b[2J"))
    assert recovery.failure == "server 0: ?[2J"


def sent(effects: object) -> list[m.Message]:
    assert isinstance(effects, list)
    return [effect.packet.message for effect in effects if isinstance(effect, Send)]


# --- cuts -------------------------------------------------------------------------------------------


def test_a_server_that_says_it_holds_a_cut_before_it_says_which_it_has() -> None:
    recovery = Rollback(4, 2)
    recovery.hear(0, m.Restored(4, 0, "none"))
    recovery.hear(0, m.Restored(4, 0))
    assert not recovery.restored
    assert len(list(recovery.outgoing())) == 2


def test_cuts_and_tags_that_cannot_be() -> None:
    checkpoints = CheckpointCoordinator(1, 1)
    with pytest.raises(ProtocolError, match=f"server 0 names a cut above {CUT_MAX}"):
        checkpoints.hear(Node(Role.SERVER, 0), m.Shelf(0, True, 0.0, (), 2**63 - 1), 0.0)
    assert checkpoints.begun == 0
    for tag in ("a\nb", "x" * 65):
        with pytest.raises(ConfigError, match="1 to 64 of the characters"):
            checkpoints.ask(0, Waiter(b"w", 1), m.Checkpoint("kv", tag, 0), 0.0)


@pytest.mark.spec("R200")
def test_an_order_that_fails_is_answered_and_the_next_is_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("for an image")

    error = StorageError("it failed")
    image, commit = Snapshot(0, 1, ()), m.Commit(3, "", 0, (), ())
    orders = [
        Write(3, image),
        Complete(JOB, 0, 1, commit),
        Remove(3, 0),
        storage.FindCuts(0, 1, JOB, "", "me"),
        Read(0, 1, 3, "me"),
    ]
    answers = [storage_thread.refusal(item, error) for item in orders]
    assert [getattr(item, "error", None) for item in answers] == [error, error, None, error, error]
    letters: list[object] = []
    monkeypatch.setattr(storage_thread, "carry_out", fail)
    thread = storage_thread.StorageThread(
        str(tmp_path), SimpleNamespace(put=lambda door, answer: letters.append(answer))
    )  # type: ignore[arg-type]
    for order in orders:
        thread.order(Disk(order))
    thread.close()
    assert [type(letter) for letter in letters] == [type(item) for item in answers if item is not None]
    assert "MemoryError('for an image')" in str(letters[0].error)  # type: ignore[attr-defined]


def test_folders_of_numbers_that_no_cut_has_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = CheckpointDirectory(tmp_path)
    for name in ("cut-999999999999999999", f"cut-{CUT_MAX + 1}", "cut-00000007", "cut-٠٠٠٠٠٠٠٩"):
        (shelf.folder / name).mkdir()
    assert shelf.numbers() == [7]
    assert shelf.highest() == 7
    assert len([message for message in caplog.messages if "is passed over" in message]) == 2


def test_rests_of_what_has_none() -> None:
    stage = ServerStage()
    stage.open()
    stage.init("w", torch.ones(4, dtype=torch.float16))
    whole, _ = stage.server.control.snapshot()
    (store,) = whole.stores
    (key,) = store.keys
    (portion,) = key.portions
    rest = {capture.REST: torch.zeros(4)}
    crafted = KeySnapshot(
        key.name, key.spec, key.call, (SnapshotPart(0, portion.history, portion.weight, rest),)
    )
    image = Snapshot(0, 1, (replace(store, keys=(crafted,)),))
    other = ServerStage()
    with pytest.raises(StorageError, match="rests for it"):
        other.restore(image)


# --- optimizers -------------------------------------------------------------------------------------


@pytest.mark.spec("R204")
@pytest.mark.parametrize("name", ["lr", "weight_decay", "clip_gradient", "rescale_grad"])
def test_numbers_beyond_float32(name: str) -> None:
    assert resolve("sgd", {name: FLOAT_MAX})
    with pytest.raises(ConfigError, match=rf"{name}=1e\+39 is not allowed.*3.4e\+38, the largest"):
        resolve("sgd", {name: 1e39})
    with pytest.raises(ConfigError, match="lr_mult"):
        resolve("sgd", {"lr_mult": {"w": 1e39}})


@pytest.mark.spec("R204")
@pytest.mark.parametrize("name", SCHEMAS)
def test_no_update_fails_by_numbers_that_were_let_in(name: str) -> None:
    tried = 0
    for dtype in FLOATS:
        for parameter in SCHEMAS[name].parameters:
            for value in (FLOAT_MAX, 1e30, 1e5, 1e-30):
                try:
                    rule = create(resolve(name, {parameter.name: value}))
                    shape = (1, 3) if rule.is_by_row else (3,)
                    state = rule.new_state(torch.ones(shape, dtype=dtype))
                except ConfigError:
                    continue
                lr, weight_decay = rule.hyper.for_key("w")
                summed = torch.float32 if dtype.itemsize == 2 else dtype
                norms = torch.tensor([1e300, 1e-300], dtype=torch.float64)
                for step in (1, 2, 3, 100, 10_000):
                    rule.apply(
                        torch.full(shape, 3.0, dtype=dtype),
                        torch.full(shape, -2.0, dtype=summed),
                        state,
                        Terms(step=step, lr=lr, weight_decay=weight_decay, norms=norms),
                    )
                tried += 1
    assert tried


@pytest.mark.spec("R204")
def test_a_server_refuses_an_optimizer_that_would_fail() -> None:
    stage = ServerStage()
    stage.open()
    stage.init("w", torch.ones(4, dtype=torch.float16))
    stage.optimizer("sgd", lr=0.1)
    stage.push(0, "w", torch.ones(4, dtype=torch.float16), 0)
    stage.push(1, "w", torch.ones(4, dtype=torch.float16), 0)
    before = stage.snapshot()
    said = stage.say(0, optimizing("sgd", 2, True, lr=1e6))
    assert "cannot update a weight of torch.float16 with these hyper-parameters" in refusal(said)
    assert "lr=1e+06" in refusal(said)
    assert "cannot update" in refusal(stage.say(0, m.Rate("kv", 1, True, 1e6)))
    assert stage.snapshot() == before
    assert heard(stage.say(0, m.Rate("kv", 1, True, 0.01)), m.Done)


def test_error_of_a_plug_in_is_a_refusal() -> None:
    rule = create(resolve("sgd", {"lr": 3.0}))

    def fail(*_: object) -> None:
        raise KeyError("a plug-in's own")

    rule._update = fail  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"KeyError.*none is large"):
        rule.new_state(torch.ones(2))


@pytest.mark.spec("R204")
def test_lars_in_half_precision_where_its_rate_leaves_the_type() -> None:
    rule = create(resolve("lars", {"lr": 1.0, "eta": 1.0}))
    weight, norms = torch.ones(2, dtype=torch.float16), torch.tensor([1e20, 1e-20]).double()
    rule._update(weight, torch.ones_like(weight), {}, Terms(1, 1.0, 0.0, norms))
    assert weight.isinf().all()


@pytest.mark.spec("R204")
def test_very_many_steps_of_nadam() -> None:
    rule = create(resolve("nadam", {"beta1": 0.9999999}))
    before, beyond = rule.product(PRODUCTS_MAX), rule.product(2**53)  # type: ignore[attr-defined]
    assert 0 < rule.product(PRODUCTS_MAX + 1) < before  # type: ignore[attr-defined]
    assert beyond == 0.0
    assert len(rule._products) == PRODUCTS_MAX + 1  # type: ignore[attr-defined]


@pytest.mark.spec("R204")
def test_a_state_of_more_steps_than_anybody_makes() -> None:
    stage = ServerStage()
    stage.open()
    stage.init("w", torch.ones(4))
    stage.optimizer("nadam", beta1=0.9999999)
    piece = stage.pieces["w"][0]
    state = m.SetState(piece.chunk, piece.start, piece.size, 2**62, ())
    assert "the limit is 2^53" in refusal(stage.say(0, state))


# --- norms ------------------------------------------------------------------------------------------


@pytest.mark.spec("R204")
@pytest.mark.parametrize(
    ("on_nonfinite", "sums", "culprits", "says"),
    [
        ("skip", (-1.0,), (), "-1 values cannot be not finite"),
        ("skip", (0.5,), (), "0.5 values"),
        ("skip", (1e300,), (), "1e.300 values"),
        ("skip", (1.0, -2.0), (), "-2 is not a sum of squares"),
        ("apply", (-0.5, 1.0), (), "-0.5 is not a sum of squares"),
        ("skip", (1.0,), (7,), "there is no rank 7"),
    ],
)
def test_norms_that_nobody_can_have_measured(
    on_nonfinite: str, sums: tuple[float, ...], culprits: tuple[int, ...], says: str
) -> None:
    stage = shared(on_nonfinite, "lars")
    before = stage.snapshot()
    said = stage.other(1, m.Norms("kv", "w", None, 0, sums, False, culprits))
    assert says.replace("1e.300", "1e+300") in refusal(said)
    assert stage.snapshot() == before


@pytest.mark.spec("R204")
@pytest.mark.parametrize("sums", [(0.0, 4.0, 4.0), (0.0, 4.0), (0.0,), (0.0, NO_NUMBER, 1.0, 1.0)])
def test_norms_of_another_rule_are_made_up_for(sums: tuple[float, ...]) -> None:
    stage = shared("skip", "lars")
    for rank in (0, 1):
        stage.push(rank, "w", torch.ones(4), 0)
    stage.other(1, m.Norms("kv", "w", None, 0, sums, False))
    assert stage.span("w").version == 1
    assert not stage.server.rules.is_torn


def shared(on_nonfinite: str, rule: str) -> ServerStage:
    """Return a server that holds one half of a key."""
    stage = ServerStage(servers=2)
    stage.open(on_nonfinite=on_nonfinite)
    stage.declare("w", torch.ones(4), shape=(8,))
    stage.load("w", torch.ones(4))
    stage.optimizer(rule, lr=0.1)
    return stage


# --- objects ----------------------------------------------------------------------------------------


def test_objects_that_are_nested_too_deep() -> None:
    def nested(depth: int) -> bytes:
        packed: bytes = msgpack.packb(None)
        for _ in range(depth):
            packed = msgpack.packb(msgpack.ExtType(1, packed[:0] + b"\x91" + packed))
        return packed

    assert unpack(nested(DEPTH_MAX))
    with pytest.raises(ProtocolError, match="nested deeper than 100"):
        unpack(nested(5000))
    value: object = torch.ones(1)
    for _ in range(DEPTH_MAX):
        value = (value,)
    assert unpack(pack(value))


# --- what nobody foresaw ----------------------------------------------------------------------------

ENVELOPE = Envelope(JOB, 1, Role.WORKER, 0, 10, 5)


@pytest.mark.spec("R200")
def test_a_scheduler_tells_the_sender() -> None:
    stage = Stage()
    effects = taken(stage.scheduler, stage.scheduler.on_failure(b"w", ENVELOPE, FAILURE, 0.0))
    (answer,) = sent(effects)
    assert isinstance(answer, m.Error)
    assert answer.seq == 5
    assert "the scheduler could not process this packet (ValueError)" in answer.text


@pytest.mark.spec("R200")
def test_so_does_a_server_whose_values_are_whole() -> None:
    server = ServerStage().server
    (answer,) = sent(taken(server, server.on_failure(b"w", ENVELOPE, FAILURE, 0.0)))
    assert "server 0 could not process this" in str(answer)
    assert not taken(server, server.on_failure("scheduler", ENVELOPE, FAILURE, 0.0))


@pytest.mark.spec("R200")
def test_a_server_that_was_stopped_half_way_through_an_update_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = ServerStage(workers=1)
    stage.open()
    stage.init("w", torch.ones(4))
    stage.optimizer("sgd", lr=0.1)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(Optimize, "write", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        stage.push(0, "w", torch.ones(4), 0)
    (end,) = taken(stage.server, stage.server.on_failure(b"w", ENVELOPE, FAILURE, 0.0))
    assert isinstance(end, Exit)
    assert end.code == 1
    assert "rolls back to the newest checkpoint" in end.reason


@pytest.mark.spec("R200")
def test_an_image_that_cannot_be_held_is_told_and_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a crafted image")

    stage = ServerStage(every_s=0.0)
    stage.scheduler(m.Restore(1, 3))
    (order,) = stage.orders()
    monkeypatch.setattr(module.Control, "restore", fail)
    said = stage.disk(Loaded(Snapshot(0, 1, ()), order.for_whom))
    assert "the snapshot cannot be held" in str(heard(said, m.Restored))


@pytest.mark.spec("R200")
def test_a_worker_tells_a_neighbour_and_ends_by_what_its_calls_wait_for() -> None:
    worker = Worker(Identity(Role.WORKER, "tcp://s:1", "host", 7, "kvps"), 0.0)
    (answer,) = sent(taken(worker, worker.on_failure(b"n", ENVELOPE, FAILURE, 0.0)))
    assert "worker 0 could not process this" in str(answer)
    with pytest.raises(ValueError, match="nobody foresaw"):
        worker.on_failure("server 0", ENVELOPE, FAILURE, 0.0)


@pytest.mark.spec("R200")
def test_a_guardian_and_one_who_looks_go_on() -> None:
    guardian = Supervisor(Identity(Role.WORKER, "tcp://s:1", "host", 7, "kvps"), 0.0)
    assert not taken(guardian, guardian.on_failure("scheduler", ENVELOPE, FAILURE, 0.0))
    inquiry = Inquiry("tcp://s:1", m.Look(), m.Seen, 0.0, 1.0)
    assert not taken(inquiry, inquiry.on_failure("scheduler", ENVELOPE, FAILURE, 0.0))


def test_supervisor_and_worker_admit_the_scheduler_and_asked_servers() -> None:
    envelope = Envelope(JOB, 0, Role.SCHEDULER, 0, 0, 0)
    identity = Identity(Role.WORKER, "tcp://s:1", "host", 7, "kvps")
    assert Supervisor(identity, 0.0).admit("scheduler", envelope, m.View)
    worker = Worker(identity, 0.0)
    assert worker.admit("scheduler", envelope, m.View)
    assert worker.admit("server 0", envelope._replace(role=Role.SERVER), m.Ack)
    with pytest.raises(Mismatch, match="is not a neighbour of worker 0"):
        worker.admit(b"somebody", envelope._replace(role=Role.WORKER), m.Push)
