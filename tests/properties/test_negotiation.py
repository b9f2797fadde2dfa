"""The negotiation of collectives against a simple model: random programs, orders and cycles.

Each rank has a program: the operations of all, in an order of its own, some of them with a shape that does not fit.
A rank says some of its next requests in each cycle. In the end every operation that fits has run exactly once, after
its last request, and every other one was refused to each rank exactly once.
"""

import hypothesis.strategies as st
from hypothesis import given

from kvps.compat.horovod.negotiation.coordinator import AllJoined, Coordinator, Execute, Refuse
from kvps.compat.horovod.negotiation.request import ALLREDUCE, CollectiveRequest, Part, Turn, pack, unpack


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[list[CollectiveRequest]], list[int], list[list[int]]]:
    """Programs by rank, how often each name is used, and how much each rank says in each cycle."""
    size = draw(st.integers(1, 4))
    uses = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    strange = draw(st.sets(st.tuples(st.integers(0, size - 1), st.integers(0, 3), st.integers(0, 2))))
    programs = []
    for rank in range(size):
        order = draw(st.permutations([name for name, count in enumerate(uses) for _ in range(count)]))
        seen = [0] * len(uses)
        program = []
        for name in order:
            length = 2 if (rank, name, seen[name]) in strange else 1
            seen[name] += 1
            program.append(
                CollectiveRequest(str(name), ALLREDUCE, parts=(Part("int8", (length,)),), op="sum")
            )
        programs.append(program)
    cycles = draw(st.lists(st.lists(st.integers(0, 3), min_size=size, max_size=size), max_size=12))
    return programs, uses, cycles


@given(jobs())
def test_matching_operations_run_once_and_mismatches_reach_every_rank_once(
    job: tuple[list[list[CollectiveRequest]], list[int], list[list[int]]],
) -> None:
    programs, uses, cycles = job
    size = len(programs)
    coordinator = Coordinator(size)
    asked: list[list[CollectiveRequest]] = [[] for _ in programs]
    under_way: list[set[str]] = [set() for _ in programs]
    ran: dict[str, list[tuple[int, ...]]] = {}
    refused: dict[str, list[int]] = {}
    everything = [[sum(uses)] * size] * 20
    for lengths in [*cycles, *everything]:
        turns = []
        for rank, length in enumerate(lengths):
            said: list[CollectiveRequest] = []
            for request in list(programs[rank]):
                # A rank waits for an operation before it uses the name again, and goes on with other names.
                if len(said) < length and request.name not in under_way[rank]:
                    under_way[rank].add(request.name)
                    programs[rank].remove(request)
                    said.append(request)
            asked[rank] += said
            turns.append((rank, unpack(pack(Turn(tuple(said))))))
        for decision in coordinator.take(turns):
            if isinstance(decision, Execute):
                name = decision.first.name
                assert sorted(decision.requests) == list(range(size))
                lengths_ = {item.parts for item in decision.requests.values()}
                assert len(lengths_) == 1, "what runs fits together"
                ran.setdefault(name, []).append(decision.first.parts[0].shape)
                for of_rank in under_way:
                    of_rank.remove(name)
            else:
                assert isinstance(decision, Refuse)
                for rank in decision.ranks:
                    refused.setdefault(decision.key[1], []).append(rank)
                    under_way[rank].remove(decision.key[1])
        coordinator.check()
    assert not any(programs), "no rank waits for ever"
    assert coordinator.missing() == []
    for number, count in enumerate(uses):
        shapes = [[field.parts for field in asked[rank] if field.name == str(number)] for rank in range(size)]
        fits = [len({of_rank[use] for of_rank in shapes}) == 1 for use in range(count)]
        assert len(ran.get(str(number), [])) == sum(fits)
        told = refused.get(str(number), [])
        assert sorted(told) == sorted(list(range(size)) * (count - sum(fits)))


@given(st.permutations(range(4)), st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_joins_end_with_the_last_rank_and_nothing_waits(order: list[int], counts: list[int]) -> None:
    coordinator = Coordinator(4)
    request = [CollectiveRequest(str(n), ALLREDUCE, parts=(Part("int8", (1,)),), op="sum") for n in range(4)]
    ran, last = 0, None
    for rank in order:
        said = tuple(request[: counts[rank]])
        for decision in coordinator.take([(rank, Turn(said, has_joined=True))]):
            if isinstance(decision, Execute):
                ran += 1
                assert set(decision.requests) == {r for r in range(4) if counts[r] > int(decision.first.name)}
            elif isinstance(decision, AllJoined):
                last = decision.last
        coordinator.check()
    assert last == order[-1]
    assert ran == max(counts)
    assert coordinator.missing() == []
