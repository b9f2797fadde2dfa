"""The coordinator: what runs, what is refused and to whom it is told, turn by turn."""

from kvps.compat.horovod.negotiation.coordinator import (
    AllJoined,
    Coordinator,
    Decision,
    Execute,
    Over,
    Refuse,
    fused,
)
from kvps.compat.horovod.negotiation.request import (
    ADD_SET,
    ALLGATHER,
    ALLREDUCE,
    BROADCAST,
    REMOVE_SET,
    CollectiveRequest,
    Part,
    Turn,
)


class Job:
    """A coordinator, and what it has decided."""

    def __init__(self, size: int) -> None:
        self.coordinator = Coordinator(size)

    def say(self, **turns: Turn | list[CollectiveRequest]) -> list[Decision]:
        """Take a cycle in which rank N says ``rN=``."""
        said = []
        for name, turn in sorted(turns.items()):
            given = Turn(tuple(turn)) if isinstance(turn, list) else turn
            said.append((int(name[1:]), given))
        found = self.coordinator.take(said)
        self.coordinator.check()
        return found


def sum_of(name: str, size: int = 2, process_set: int = 0) -> CollectiveRequest:
    return CollectiveRequest(name, ALLREDUCE, process_set, (Part("float32", (size,)),), "sum")


JOINED, OVER = Turn(has_joined=True), Turn(over="bye")


def names(decisions: list[Decision]) -> list[str]:
    return [decision.first.name for decision in decisions if isinstance(decision, Execute)]


def test_missing_operation_names_the_ranks() -> None:
    job = Job(3)
    job.say(r1=[sum_of("a")])
    assert job.coordinator.missing() == [(sum_of("a"), (0, 2))]


# --- refusals -----------------------------------------------------------------------------------


def test_a_mismatch_is_told_at_once_and_to_late_ranks_when_they_come() -> None:
    job = Job(3)
    assert job.say(r0=[sum_of("a")]) == []
    (told,) = job.say(r1=[sum_of("a", 3)])
    assert isinstance(told, Refuse)
    assert told.ranks == (0, 1)
    assert "allreduce 'a': shapes differ: rank 0 has float32[2], rank 1 has float32[3]" in told.reason
    assert job.coordinator.missing() == []
    assert job.say(r2=[sum_of("a")]) == [Refuse((0, "a"), (2,), told.reason)]
    assert names(job.say(r0=[sum_of("a")], r1=[sum_of("a")], r2=[sum_of("a")])) == ["a"]


def test_a_mismatch_names_the_lower_rank_first_whichever_requested_first() -> None:
    job = Job(3)
    assert job.say(r2=[sum_of("a", 3)]) == []
    (told,) = job.say(r1=[sum_of("a")])
    assert isinstance(told, Refuse)
    assert "rank 1 has float32[2], rank 2 has float32[3]" in told.reason


def test_the_next_operation_of_a_name_waits_for_ranks_that_have_not_heard_of_the_refusal() -> None:
    job = Job(3)
    job.say(r0=[sum_of("a")], r1=[sum_of("a", 3)])
    assert job.say(r0=[sum_of("a")], r1=[sum_of("a")]) == []  # the second time
    (told,) = job.say(r2=[sum_of("a")])  # the first time
    assert isinstance(told, Refuse)
    assert names(job.say(r2=[sum_of("a")])) == ["a"]


# --- joins --------------------------------------------------------------------------------------


def test_other_operations_need_every_rank() -> None:
    job = Job(2)
    job.say(r0=JOINED)
    (told,) = job.say(r1=[CollectiveRequest("a", ALLGATHER, parts=(Part("int8", (1,)),))])
    assert isinstance(told, Refuse)
    assert "rank 0 called join(), and allgather needs every rank" in told.reason


def test_the_last_rank_that_joins_is_told_and_joins_begin_anew() -> None:
    job = Job(3)
    assert job.say(r1=JOINED) == []
    assert job.say(r0=JOINED, r2=JOINED) == [AllJoined(2)]
    assert job.say(r0=[sum_of("a")], r1=[sum_of("a")]) == []
    assert names(job.say(r2=[sum_of("a")])) == ["a"]


def test_request_made_before_a_join_runs_with_its_values() -> None:
    job = Job(2)
    (run, last) = job.say(r0=Turn((sum_of("a"),), has_joined=True), r1=JOINED)
    assert isinstance(run, Execute)
    assert (list(run.requests), run.joined) == ([0], (1,))
    assert last == AllJoined(1)


# --- process sets -------------------------------------------------------------------------------


def add(*ranks: int) -> CollectiveRequest:
    return CollectiveRequest("add", ADD_SET, ranks=ranks)


def test_an_operation_of_a_set_waits_for_its_ranks_only() -> None:
    job = Job(3)
    (run,) = job.say(r0=[add(0, 2)], r1=[add(0, 2)], r2=[add(0, 2)])
    assert isinstance(run, Execute)
    assert run.process_set == 1
    assert job.coordinator.sets == {0: (0, 1, 2), 1: (0, 2)}
    collective_request = sum_of("a", process_set=1)
    assert names(job.say(r0=[collective_request], r2=[collective_request])) == ["a"]
    (told,) = job.say(r1=[collective_request])
    assert isinstance(told, Refuse)
    assert "rank 1 is not in the process set [0, 2]" in told.reason


def test_equal_names_in_two_sets_are_two_operations() -> None:
    job = Job(2)
    job.say(r0=[add(0)], r1=[add(0)])
    assert names(job.say(r0=[sum_of("a"), sum_of("a", process_set=1)])) == ["a"]
    assert len(job.coordinator.missing()) == 1


def test_a_set_is_removed_when_nothing_is_under_way_in_it() -> None:
    job = Job(2)
    job.say(r0=[add(0, 1)], r1=[add(0, 1)])
    remove = CollectiveRequest("remove", REMOVE_SET, root=1)
    collective_request = sum_of("a", process_set=1)
    (told,) = job.say(r0=[collective_request, remove], r1=[remove])
    assert isinstance(told, Refuse)
    assert "'a' is not done in process set 1" in told.reason
    job.say(r1=[collective_request])
    job.say(r0=[remove], r1=[remove])
    assert job.coordinator.sets == {0: (0, 1)}
    job.say(r0=[add(1)], r1=[add(1)])
    assert job.coordinator.sets == {0: (0, 1), 2: (1,)}, "no number is given twice"


# --- ranks that wait for each other -------------------------------------------------------------


def test_ranks_that_wait_for_different_operations_are_told() -> None:
    job = Job(2)
    job.say(r0=[sum_of("a")], r1=[sum_of("b")])
    assert job.say(r0=Turn(waits_for=(0, "a"))) == []
    told = job.say(r1=Turn(waits_for=(0, "b")))
    assert [effect.key for effect in told if isinstance(effect, Refuse)] == [(0, "a"), (0, "b")]
    assert all("rank 0 waits for allreduce 'a'; rank 1 waits for" in str(effect) for effect in told)


def test_a_rank_that_goes_on_does_not_wait() -> None:
    job = Job(2)
    job.say(r0=[sum_of("a")], r1=[sum_of("b")])
    job.say(r0=Turn(waits_for=(0, "a")))
    job.say(r0=[sum_of("c")])
    assert job.say(r1=Turn(waits_for=(0, "b"))) == []


def test_a_rank_does_not_wait_for_what_is_decided() -> None:
    job = Job(2)
    job.say(r0=[sum_of("a")], r1=[sum_of("b")])
    assert names(job.say(r0=Turn(waits_for=(0, "a")), r1=[sum_of("a")])) == ["a"]
    assert job.say(r1=Turn(waits_for=(0, "b"))) == []


def test_ranks_that_have_joined_do_not_count_as_waiting() -> None:
    job = Job(3)
    job.say(r0=[sum_of("a")], r1=[sum_of("b")], r2=JOINED)
    told = job.say(r0=Turn(waits_for=(0, "a")), r1=Turn(waits_for=(0, "b")))
    assert len(told) == 2


# --- the end ------------------------------------------------------------------------------------


def test_nothing_is_decided_after_a_rank_has_left() -> None:
    job = Job(2)
    last = Turn((sum_of("a"),), over="bye")
    run, over = job.say(r0=[sum_of("a"), sum_of("b")], r1=last)
    assert names([run]) == ["a"], "what all have requested still runs"
    assert over == Over(1, "bye")
    assert job.say(r0=[sum_of("c")], r1=[sum_of("c")]) == []


def test_the_lowest_rank_that_leaves_gives_the_reason() -> None:
    assert Job(2).say(r0=Turn(over="a"), r1=Turn(over="b")) == [Over(0, "a")]


# --- fusion ---------------------------------------------------------------------------------------


def run(name: str, kind: str = ALLREDUCE, dtypes: tuple[str, ...] = ("float32",), **more: object) -> Execute:
    joined = more.pop("joined", ())
    op = more.pop("op", "sum" if kind == ALLREDUCE else "")
    parts = tuple([Part(dtype, (1,)) for dtype in dtypes])
    return Execute({0: CollectiveRequest(name, kind, parts=parts, op=op, **more)}, (0, 1), joined)  # type: ignore[arg-type]


def names_of_fusion(runs: list[tuple[Execute, int]], limit: int) -> list[list[str]]:
    return [[item.first.name for item in bucket] for bucket in fused(runs, limit)]


def test_sums_of_one_type_share_a_bucket_up_to_the_limit() -> None:
    runs = [(run(name), 4) for name in "abcde"]
    assert names_of_fusion(runs, 8) == [["a", "b"], ["c", "d"], ["e"]]
    assert names_of_fusion(runs, 0) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert names_of_fusion([(run("a"), 100), (run("b"), 4)], 8) == [["a"], ["b"]]


def test_other_types_sets_and_joins_are_apart() -> None:
    others = [run("b", dtypes=("float64",)), run("c", process_set=1), run("d", joined=(1,))]
    runs = [(run("a"), 4), *[(other, 4) for other in others], (run("e"), 4)]
    assert names_of_fusion(runs, 99) == [["a", "e"], ["b"], ["c"], ["d"]]


def test_factors_and_means_do_not_matter() -> None:
    runs = [(run("a"), 4), (run("b", op="average"), 4), (run("c", postscale=2.0), 4)]
    assert names_of_fusion(runs, 99) == [["a", "b", "c"]]


def test_broadcasts_of_one_root_share_a_bucket() -> None:
    runs = [(run(name, BROADCAST, root=root), 4) for name, root in (("a", 0), ("b", 1), ("c", 0))]
    assert names_of_fusion(runs, 99) == [["a", "c"], ["b"]]


def test_operations_other_than_sums_travel_alone() -> None:
    alone = [run("a", op="max"), run("b", op="max"), run("c", ALLGATHER), run("d", ALLGATHER)]
    mixed = run("e", dtypes=("int8", "float32"))
    assert names_of_fusion([(item, 4) for item in (*alone, mixed, mixed)], 99) == [[x] for x in "abcdee"]
