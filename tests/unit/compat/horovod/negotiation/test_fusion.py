"""Fusion: buckets of operations that travel together."""

from kvps.compat.horovod.negotiation.coordinator import Execute, fused
from kvps.compat.horovod.negotiation.request import ALLGATHER, ALLREDUCE, BROADCAST, CollectiveRequest, Part


def run(name: str, kind: str = ALLREDUCE, dtypes: tuple[str, ...] = ("float32",), **more: object) -> Execute:
    joined = more.pop("joined", ())
    op = more.pop("op", "sum" if kind == ALLREDUCE else "")
    parts = tuple([Part(one, (1,)) for one in dtypes])
    return Execute({0: CollectiveRequest(name, kind, parts=parts, op=op, **more)}, (0, 1), joined)  # type: ignore[arg-type]


def names(runs: list[tuple[Execute, int]], limit: int) -> list[list[str]]:
    return [[one.first.name for one in bucket] for bucket in fused(runs, limit)]


def test_sums_of_one_type_share_a_bucket_up_to_the_limit() -> None:
    runs = [(run(name), 4) for name in "abcde"]
    assert names(runs, 8) == [["a", "b"], ["c", "d"], ["e"]]
    assert names(runs, 0) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert names([(run("a"), 100), (run("b"), 4)], 8) == [["a"], ["b"]]


def test_other_types_sets_and_joins_are_apart() -> None:
    others = [run("b", dtypes=("float64",)), run("c", process_set=1), run("d", joined=(1,))]
    runs = [(run("a"), 4), *[(one, 4) for one in others], (run("e"), 4)]
    assert names(runs, 99) == [["a", "e"], ["b"], ["c"], ["d"]]


def test_factors_and_means_do_not_matter() -> None:
    runs = [(run("a"), 4), (run("b", op="average"), 4), (run("c", postscale=2.0), 4)]
    assert names(runs, 99) == [["a", "b", "c"]]


def test_broadcasts_of_one_root_share_a_bucket() -> None:
    runs = [(run(name, BROADCAST, root=root), 4) for name, root in (("a", 0), ("b", 1), ("c", 0))]
    assert names(runs, 99) == [["a", "c"], ["b"]]


def test_operations_other_than_sums_travel_alone() -> None:
    alone = [run("a", op="max"), run("b", op="max"), run("c", ALLGATHER), run("d", ALLGATHER)]
    mixed = run("e", dtypes=("int8", "float32"))
    assert names([(one, 4) for one in (*alone, mixed, mixed)], 99) == [[x] for x in "abcdee"]
