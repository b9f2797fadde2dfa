"""A server against a model that knows one key at a time and keeps every gradient.

Up to three ranks push random sets of keys, some of them again, some too early, by later lives,
with pulls in between, while keys lie in chunks and spans are cut and joined.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvps.protocol.envelope import WINDOW
from kvps.protocol.membership import Error
from kvps.protocol.values import Ask, Pull, Pulled, Push, Run
from tests.support.server_harness import ServerStage, acked, as_row, heard
from tests.support.tiers import examples

SIZES = {"a": 2, "b": 1, "c": 3, "d": 1, "e": 2}
RANKS = 3


@dataclass
class Key:
    """One key as the contract describes it."""

    size: int
    values: list[float]
    gradients: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """(rank, number) -> the gradient, for ever."""
    version: int = 0
    history: list[list[float]] = field(default_factory=list)
    """The values of each version."""

    def owed(self, rank: int, ordered: bool) -> int:
        numbers = [number for item, number in self.gradients if item == rank]
        return max(len(numbers), self.version if ordered else 0)


class Model(RuleBasedStateMachine):
    @initialize(
        mode=st.sampled_from(["sync", "async"]),
        rule=st.sampled_from(["", "test", "sgd"]),
        deterministic=st.booleans(),
        policy=st.sampled_from(["wait", "shrink"]),
    )
    def begin(self, mode: str, rule: str, deterministic: bool, policy: str) -> None:
        self.ordered = mode == "sync"
        self.rule = rule if self.ordered else rule or "test"
        self.policy = policy
        self.stage = ServerStage(RANKS)
        self.stage.open(mode, deterministic=deterministic, on_worker_lost=policy)
        self.keys = {}
        for name, size in SIZES.items():
            values = [0.0] * size
            self.stage.init(name, values)
            self.keys[name] = Key(size, values, history=[values])
        if self.rule:
            self.stage.optimizer(self.rule, **({"lr": 1.0} if self.rule == "sgd" else {}))
        self.states = ["held"] * RANKS
        self.outside: set[int] = set()
        """Ranks that replace lost ones, and have not pushed yet: no round waits for them."""
        self.waiting: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        self.worth = 0

    # --- steps ------------------------------------------------------------------------------

    @rule(
        rank=st.integers(0, RANKS - 1),
        names=st.sets(st.sampled_from(sorted(SIZES)), min_size=1),
        relative=st.sampled_from([0, 0, 0, 0, -1, -2, 1]),
        together=st.booleans(),
        pull=st.booleans(),
    )
    def push(self, rank: int, names: set[str], relative: int, together: bool, pull: bool) -> None:
        """Numbers are what each key owes, or what the first owes; all of them off by a bit."""
        order = sorted(names)
        owed = [self.keys[name].owed(rank, self.ordered) for name in order]
        numbers = [max(0, (owed[0] if together else item) + relative) for item in owed]
        self.worth += 1
        enters = rank in self.outside
        if enters:
            self.outside.discard(rank)
            for key in self.keys.values():
                self.settle(key, rank)
        row, runs = [], []
        for name, number in zip(order, numbers, strict=True):
            (piece,) = self.stage.pieces[name]
            runs.append(Run(piece.start, piece.size, number))
            row += [float(self.worth * 10 + index) for index in range(piece.size)]
        message = Push(1, 1, (rank,), 1.0, pull, tuple(joined(runs)))
        said = self.stage.say(rank, message, as_row(row))
        seq = self.stage.seqs[rank]
        if any(number > item for number, item in zip(numbers, owed, strict=True)) or any(
            self.ordered and number == item and number - self.keys[name].version >= WINDOW
            for name, number, item in zip(order, numbers, owed, strict=True)
        ):
            event("early")
            assert seq not in acked(said)
            assert enters or said == []
            self.hear(said)  # rounds that it completed by entering
            return
        before = {name: self.keys[name].version for name in order}
        taken = 0
        for name, number, item in zip(order, numbers, owed, strict=True):
            key = self.keys[name]
            part, taken = row[taken : taken + key.size], taken + key.size
            if number == item:
                key.gradients[rank, number] = part
                self.settle(key, rank)
        event("counted" if numbers == owed else "partly again")
        conditions = [(name, number + 1, 0) for name, number in zip(order, numbers, strict=True)]
        if pull:
            self.waiting[rank, seq] = conditions
        assert before
        self.hear(said)
        assert (seq in acked(said)) or (rank, seq) not in self.waiting

    @rule(
        rank=st.integers(0, RANKS - 1),
        names=st.sets(st.sampled_from(sorted(SIZES)), min_size=1),
        ahead=st.integers(-2, 1),
    )
    def pull(self, rank: int, names: set[str], ahead: int) -> None:
        """Ask for what follows the own pushes, or for a version that is near."""
        asks, conditions = [], []
        for name in sorted(names):
            key, (piece,) = self.keys[name], self.stage.pieces[name]
            pushed = sum(item == rank for item, _ in key.gradients)
            least = max(0, key.version + ahead)
            asks.append(Ask(piece.start, piece.size, pushed, least))
            conditions.append((name, pushed, least))
        said = self.stage.say(rank, Pull(1, True, tuple(asks)))
        self.waiting[rank, self.stage.seqs[rank]] = conditions
        self.hear(said)

    @rule(rank=st.integers(0, RANKS - 1))
    def lose_or_find(self, rank: int) -> None:
        found = self.states[rank] == "lost"
        self.states[rank] = "held" if found else "lost"
        if found:
            if self.policy == "shrink":
                self.outside.add(rank)
            self.stage.seats[rank].incarnation += 1
            self.waiting = {at: item for at, item in self.waiting.items() if at[0] != rank}
        said = self.stage.show(**{f"w{rank}": self.states[rank]})
        if found:
            self.stage.hello(rank)
        for key in self.keys.values():
            self.settle(key, rank)
        self.hear(said)

    # --- the model --------------------------------------------------------------------------

    def settle(self, key: Key, rank: int) -> None:
        """Apply what can be applied now."""
        if not self.ordered:
            applied = len(key.gradients)
            if applied > key.version:
                self.move(key, list(key.gradients.values())[-1])
            return
        while True:
            ranks = {item for item, number in key.gradients if number == key.version}
            held = {item for item in range(RANKS) if self.policy == "wait" or self.states[item] == "held"}
            required = held - self.outside
            if not ranks or not required or not required <= ranks:
                return
            gradients = [key.gradients[item, key.version] for item in sorted(ranks)]
            self.move(key, [sum(column) for column in zip(*gradients, strict=True)])

    def move(self, key: Key, total: list[float]) -> None:
        sign = {"": 0.0, "test": 1.0, "sgd": -1.0}[self.rule]
        old = key.values
        new = [o + sign * t for o, t in zip(old, total, strict=True)] if sign else total
        key.values, key.version = new, key.version + 1
        key.history.append(new)
        if self.ordered:
            # A rank that missed the round owes the next.
            for item in range(RANKS):
                key.gradients.setdefault((item, key.version - 1), [])

    def hear(self, said: list) -> None:
        """Check all answers, and that nobody is left waiting who need not wait."""
        assert not heard(said, Error)
        for effect in said:
            if not isinstance(effect.message, Pulled):
                continue
            rank = int(effect.to[1:])
            conditions = self.waiting.pop((rank, effect.message.seq))
            stands = {
                element: (stand.version, stand.owed)
                for stand in effect.message.runs
                for element in range(stand.start, stand.start + stand.size)
            }
            values = effect.values()
            for name, after, least in conditions:
                key, (piece,) = self.keys[name], self.stage.pieces[name]
                version, _ = stands[piece.start]
                got, values = values[: key.size], values[key.size :]
                assert got == key.history[version]  # of one version, and of this one
                assert version >= least
                if self.ordered:
                    assert version >= after
        for (rank, seq), conditions in self.waiting.items():
            assert any(self.lacks(rank, *condition) for condition in conditions), (rank, seq)

    def lacks(self, rank: int, name: str, after: int, least: int) -> bool:
        key = self.keys[name]
        if self.ordered:
            return key.version < max(after, least)
        return key.version < least or sum(item == rank for item, _ in key.gradients) < after

    @invariant()
    def the_server_is_right(self) -> None:
        if not hasattr(self, "stage"):
            return
        for name, key in self.keys.items():
            span = self.stage.span(name)
            assert self.stage.values(name) == key.values
            assert span.version == key.version
            for rank in range(RANKS):
                assert span.owed(rank) == key.owed(rank, self.ordered)


def joined(runs: list[Run]) -> list[Run]:
    """Join runs that a plan would join."""
    out = [runs[0]]
    for run in runs[1:]:
        last = out[-1]
        if (last.start + last.size, last.number) == (run.start, run.number):
            out[-1] = last._replace(size=last.size + run.size)
        else:
            out.append(run)
    return out


TestModel = pytest.mark.spec("R50", "R51", "R52", "R53", "R59", "R62")(Model.TestCase)
TestModel.settings = examples(150, stateful_step_count=40)
