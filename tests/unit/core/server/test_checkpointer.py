"""A server's part in cuts: what it answers to each order, and whom it serves while it returns."""

from collections.abc import Sequence

import pytest
import torch

from kvps.core.effects import Note
from kvps.core.server.checkpointer import Checkpointer
from kvps.core.server.snapshot.model import Snapshot
from kvps.core.server.snapshot.storage import (
    Complete,
    Completed,
    FindCuts,
    FoundCuts,
    Loaded,
    Order,
    Read,
    Remove,
    SnapshotWritten,
    Write,
)
from kvps.errors import KvpsError, Overload, StorageError
from kvps.protocol.checkpoint import (
    Commit,
    Committed,
    GiveUp,
    ImageKept,
    ImageSum,
    ImageTaken,
    Recall,
    Restore,
    Restored,
    Shelf,
    StoreSum,
    TakeImage,
)
from kvps.protocol.envelope import Message
from kvps.protocol.membership import Beat, Error
from kvps.protocol.stores import Status
from kvps.protocol.values import Ack, Ask, Pull, Pulled, Push, Run
from tests.support.server_harness import JOB, Said, Seat, ServerStage, acked, heard, pulled

SHA256 = "ab" * 32
FULL = StorageError("checkpoint 5 not written: no space left")


def stage(every_s: float | None = 60.0, **more: object) -> ServerStage:
    """A server with a place for cuts, and a key ``a``."""
    server = ServerStage(every_s=every_s, **more)  # type: ignore[arg-type]
    server.open()
    server.init("a", [1.0, 2.0])
    return server


def order(one: ServerStage, message: Message) -> list[Message]:
    """The scheduler wants something; return what it is told at once."""
    return [each.message for each in one.scheduler(message)]


def done(one: ServerStage, answer: object) -> list[Message]:
    """The disk answers; return what is said."""
    return [each.message for each in one.disk(answer)]  # type: ignore[arg-type]


def values(order: Order) -> list[list[float]]:
    """What the image that is to be written holds."""
    assert isinstance(order, Write)
    return [tensor.tolist() for tensor in order.snapshot.tensors()]


def kept(cut: int = 5, begins: int = 1, versions: tuple[int, int] = (0, 0)) -> ImageKept:
    return ImageKept(cut, 900, SHA256, (StoreSum("kv", begins, *versions),), "")


class TestRecall:
    @pytest.mark.spec("R138")
    def test_without_a_place_there_is_nothing_to_look_for(self) -> None:
        server = stage(every_s=None)
        assert order(server, Recall(0)) == [Shelf(0, False, 0.0, (), 0)]
        assert server.orders() == []

    @pytest.mark.spec("R136")
    def test_with_one_it_says_which_are_complete_there(self) -> None:
        server = stage()
        assert order(server, Recall(2)) == []
        assert server.orders() == [FindCuts(0, 1, JOB)]
        assert done(server, FoundCuts((3, 4), 9)) == [Shelf(2, True, 60.0, (3, 4), 9)]

    def test_a_disk_that_cannot_be_read_has_none(self) -> None:
        server = stage(every_s=0.0)
        order(server, Recall(2))
        assert done(server, FoundCuts(error=StorageError("cannot read /ckpt"))) == [
            Shelf(2, True, 0.0, (), 0)
        ]
        assert Note("warning", "cannot read /ckpt") in server.notes


class TestTakeImage:
    @pytest.mark.spec("R135")
    def test_at_once_if_nothing_waits(self) -> None:
        server = stage()
        assert order(server, TakeImage(5)) == [ImageTaken(5)]
        (write,) = server.orders()
        assert values(write) == [[1.0, 2.0]]
        assert done(server, SnapshotWritten(5, 900, SHA256)) == [kept()]

    @pytest.mark.spec("R135")
    def test_or_as_soon_as_nothing_does(self) -> None:
        server = stage()
        server.push(0, "a", [1.0, 1.0], 0)
        assert order(server, TakeImage(5)) == []
        assert server.orders() == []
        said = server.push(1, "a", [1.0, 1.0], 0)
        assert heard(said, ImageTaken) == [ImageTaken(5)]
        (write,) = server.orders()
        assert values(write) == [[2.0, 2.0]]
        assert done(server, SnapshotWritten(5, 900, SHA256)) == [kept(versions=(1, 1))]

    @pytest.mark.spec("R138")
    def test_repeated_order_gets_the_progress_of_the_image(self) -> None:
        server = stage()
        order(server, TakeImage(5))
        assert order(server, TakeImage(5)) == [ImageTaken(5)]
        done(server, SnapshotWritten(5, 900, SHA256))
        assert order(server, TakeImage(5)) == [kept()]
        assert len(server.orders()) == 1

    @pytest.mark.spec("R137")
    def test_a_full_disk_is_told(self) -> None:
        server = stage()
        order(server, TakeImage(5))
        assert done(server, SnapshotWritten(5, 0, "", FULL)) == [
            ImageKept(5, 0, "", (StoreSum("kv", 1, 0, 0),), str(FULL))
        ]
        assert Note("error", str(FULL)) in server.notes

    def test_the_next_one_takes_the_place_of_one_that_nobody_ended(self) -> None:
        server = stage()
        order(server, TakeImage(5))
        assert order(server, TakeImage(6)) == [ImageTaken(6)]
        first, remove, second = server.orders()
        assert isinstance(first, Write)
        assert remove == Remove(5, 0)
        assert isinstance(second, Write)
        assert done(server, SnapshotWritten(5, 900, SHA256)) == []
        assert order(server, TakeImage(5)) == []
        assert done(server, SnapshotWritten(6, 900, SHA256)) == [kept(6)]


class TestCommit:
    COMMIT = Commit(5, "best", 0, (ImageSum(900, SHA256),), (StoreSum("kv", 1, 0, 0),))

    def written(self) -> ServerStage:
        server = stage()
        order(server, TakeImage(5))
        done(server, SnapshotWritten(5, 900, SHA256))
        server.orders()
        return server

    @pytest.mark.spec("R136", "R138")
    def test_makes_it_complete_once(self) -> None:
        server = self.written()
        assert order(server, self.COMMIT) == []
        assert order(server, self.COMMIT) == []
        assert server.orders() == [Complete(JOB, 0, 2, self.COMMIT, is_resumed=False)]
        assert done(server, Completed(5)) == [Committed(5)]
        assert order(server, self.COMMIT) == [Committed(5)]
        assert server.orders() == []

    @pytest.mark.spec("R138")
    @pytest.mark.parametrize("error", [FULL, Overload("100 are kept", limit="tagged_checkpoints")])
    def test_failed_commit_is_reported(self, error: KvpsError) -> None:
        server = self.written()
        order(server, self.COMMIT)
        assert done(server, Completed(5, error)) == [Committed(5, str(error))]
        counted = server.server.counts.values().get(("kvps_overloads_total", "tagged_checkpoints"), 0)
        assert counted == isinstance(error, Overload)

    def test_of_another_cut_than_the_one_in_hand(self) -> None:
        server = stage()
        assert order(server, self.COMMIT) == [Committed(5, "cut 5 is not the cut in progress")]
        assert done(server, Completed(5)) == []


class TestGiveUp:
    @pytest.mark.spec("R137")
    def test_before_anything_was_taken(self) -> None:
        server = stage()
        server.push(0, "a", [1.0, 1.0], 0)
        order(server, TakeImage(5))
        order(server, GiveUp(5))
        server.push(1, "a", [1.0, 1.0], 0)
        assert server.orders() == []


def image_of(one: ServerStage) -> Snapshot:
    image, release = one.server.control.snapshot()
    release()
    return image


def trained(numbers: Sequence[int] = (0, 1, 2)) -> ServerStage:
    server = stage()
    server.optimizer("sgd", lr=1.0)
    for number in numbers:
        for rank in (0, 1):
            server.push(rank, "a", [1.0, 1.0], number)
    return server


def returned(image: Snapshot | None = None, one: ServerStage | None = None) -> ServerStage:
    """A server that has just returned to cut 5, in epoch 1; the view shows that all have."""
    here = one or stage()
    order(here, Restore(1, 5))
    (read,) = here.orders()
    assert isinstance(read, Read)
    done(here, Loaded(image or image_of(trained()), read.for_whom))
    here.show(epoch=1, since=here.view + 1)
    for rank in (0, 1):
        here.hello(rank)
    return here


class TestRestore:
    @pytest.mark.spec("R141", "R145")
    def test_restored_server_holds_the_cut_and_nothing_else(self) -> None:
        server = stage()
        server.init("later", [9.0])
        returned(one=server)
        assert server.values("a") == [-5.0, -4.0]
        assert set(server.server.context.stores["kv"].shards) == {"a"}
        assert server.span("a").pushed == {0: 3, 1: 3}

    @pytest.mark.spec("R145")
    def test_pushes_that_are_in_the_cut_are_not_applied_again_and_others_are(self) -> None:
        server = returned()
        assert len(acked(server.push(0, "a", [1.0, 1.0], 2))) == 1
        assert server.values("a") == [-5.0, -4.0]
        for rank in (0, 1):
            server.push(rank, "a", [1.0, 1.0], 3)
        assert server.values("a") == [-7.0, -6.0]

    @pytest.mark.spec("R138")
    def test_repeated_restore_is_answered_again(self) -> None:
        server = stage()
        order(server, Restore(1, 5))
        assert order(server, Restore(1, 5)) == []
        (read,) = server.orders()
        assert read == Read(0, 1, 5, Restore(1, 5))
        said = done(server, Loaded(image_of(trained()), read.for_whom))  # type: ignore[union-attr]
        assert said == [Restored(1, 5)]
        assert order(server, Restore(1, 5)) == [Restored(1, 5)]
        assert server.orders() == []

    @pytest.mark.spec("R140")
    def test_a_file_that_cannot_be_read_is_told_and_another_cut_may_be_tried(self) -> None:
        server = stage()
        order(server, Restore(1, 5))
        (first,) = server.orders()
        bad = StorageError("a bit is flipped")
        assert done(server, Loaded(None, first.for_whom, bad)) == [Restored(1, 5, str(bad))]  # type: ignore[union-attr]
        assert Note("error", "a bit is flipped") in server.notes
        order(server, Restore(1, 4))
        (second,) = server.orders()
        assert done(server, Loaded(image_of(trained()), first.for_whom)) == [], "it is late"  # type: ignore[union-attr]
        assert done(server, Loaded(image_of(trained()), second.for_whom)) == [Restored(1, 4)]  # type: ignore[union-attr]

    def test_restore_without_room_is_reported(self) -> None:
        server = stage(memory_limit=100)
        order(server, Restore(1, 5))
        (read,) = server.orders()
        whole = ServerStage(every_s=0.0)
        whole.open()
        whole.init("large", torch.zeros(100))
        (said,) = done(server, Loaded(image_of(whole), read.for_whom))  # type: ignore[union-attr]
        assert isinstance(said, Restored)
        assert "no room for key 'large' of store 'kv': weights 400 B + second" in said.error

    def test_the_next_life_of_the_process_begins_with_nothing(self) -> None:
        server = returned()
        server.job, server.view = bytes(reversed(JOB)), 0
        server.seats = [Seat("held", 1), Seat("held", 2)]
        server.show()
        server.hello(0)
        assert isinstance(server.say(0, Status("kv"))[0].message, Error)
        assert server.server.checkpointer.epoch == 0
        assert order(server, TakeImage(1)) == [ImageTaken(1)], "numbers may begin anew"


class TestServing:
    def silent(self, one: ServerStage) -> bool:
        """Whether nobody is answered."""
        said: list[Said] = one.hello(0) + one.pull(0, "a") + one.push(1, "a", [1.0, 1.0], 9)
        said += one.other(1, Beat(0, ""), 2) if one.servers > 1 else []
        return said == []

    @pytest.mark.spec("R141")
    def test_nobody_is_served_from_the_order_on_until_all_have_returned(self) -> None:
        server = stage()
        order(server, Restore(1, 5))
        assert self.silent(server)
        server.show(phase="returning", epoch=1, since=server.view + 1)
        assert self.silent(server)
        (read,) = server.orders()
        done(server, Loaded(image_of(trained()), read.for_whom))  # type: ignore[union-attr]
        assert self.silent(server), "others may not be able to read that cut"
        server.show(epoch=1, since=server.view)
        server.hello(0)
        assert pulled(server.pull(0, "a", seq=50)) == {50: [-5.0, -4.0]}

    @pytest.mark.spec("R141")
    def test_nor_by_one_that_does_not_know_of_the_return(self) -> None:
        """It was replaced, or the view came first."""
        server = stage()
        server.show(epoch=1, since=server.view + 1)
        assert self.silent(server)
        server = returned(one=stage())
        server.show(epoch=2, since=server.view + 1)
        assert self.silent(server)

    @pytest.mark.spec("R141")
    def test_request_from_before_the_epoch_is_not_answered(self) -> None:
        server = returned()
        assert server.pull(0, "a", seq=50) != [], "the new one is"
        row = torch.ones(2)
        old = server.view - 1
        piece = server.places("a")[0]
        pull = Pull(piece.chunk, True, (Ask(piece.start, 2, 0, 0),))
        push = Push(piece.chunk, 1, (0,), 1.0, False, (Run(piece.start, 2, 3),))
        assert server.say(0, pull, view=old) == []
        assert server.say(0, push, row, view=old) == []
        assert server.span("a").pushed[0] == 3
        assert heard(server.say(0, push, row), Ack)

    def test_a_fence_holds_across_a_return(self) -> None:
        server = stage()
        server.replace(1)
        returned(one=server)
        said = server.pull(1, "a") + server.hello(1, incarnation=11)
        assert isinstance(said[0].message, Pulled)
        assert "was replaced by incarnation" in said[1].message.text  # type: ignore[union-attr]

    def test_an_order_of_another_job_is_none(self) -> None:
        server = stage()
        server.job = bytes(reversed(JOB))
        assert order(server, TakeImage(5)) == []
        assert server.orders() == []


def test_message_that_is_no_order_is_a_bug() -> None:
    server = stage()
    checkpointer: Checkpointer = server.server.checkpointer
    with pytest.raises(AssertionError, match="Beat is no order"):
        checkpointer.on_order(Beat(0, ""), server.server.control)
    with pytest.raises(AssertionError, match="it is the server's"):
        checkpointer.on_disk(Loaded(None, None, Overload("x")))
