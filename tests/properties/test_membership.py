"""Whatever members do, in any order: the scheduler's invariants hold after each step.

Beside ``check()``, which :class:`~tests.support.scheduler_harness.Stage` calls, a plain model is kept of what nobody
may ever see: an incarnation issued twice, a view that goes back, a seat that is given again, and a
newcomer that is refused because of one that has not proved, since it came, that it lives.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvps.core.effects import Effect, Exit, Send
from kvps.protocol.membership import Beat, Error, View, Welcome
from tests.support.scheduler_harness import Stage
from tests.support.tiers import examples

ROUTES = [f"w{k}" for k in range(6)] + ["s0", "s1", "s2"]
routes = st.sampled_from(ROUTES)
WAITS = "asked whether it is alive", "moment to reconnect", "scheduler was started again"
ranks = st.none() | st.integers(0, 3)


class Cluster(RuleBasedStateMachine):
    """Three worker seats, one server seat, and nine processes that want them."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(3, 1, keep_alive=True, persist=True, replace_max_s=30.0)
        self.incarnations: dict[int, tuple[str, int]] = {}
        self.number = 0
        self.job = b""
        self.final: dict[str, str] = {}
        self.waiting: dict[str, int] = {}
        """How many answers to challenges had been given when this one was first told to wait."""
        self.answers = 0

    @property
    def known(self) -> list[str]:
        return sorted(self.stage.peers)

    def seen(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert not isinstance(effect, Exit), "keep_alive ends no scheduler"
            if not isinstance(effect, Send):
                continue
            message = effect.packet.message
            if isinstance(message, Error) and "is alive" in message.text:
                since = self.waiting.pop(str(effect.to), None)
                assert since is not None, "refused at once"
                assert since < self.answers, "refused, and nobody had proved anything since it came"
            if isinstance(message, Beat) and message.reason.endswith(WAITS):
                self.waiting.setdefault(str(effect.to), self.answers)
            if isinstance(message, Welcome):
                self.waiting.pop(str(effect.to), None)
                role = self.stage.peers[str(effect.to)].role
                seat = (str(role), message.rank)
                assert self.incarnations.setdefault(message.incarnation, seat) == seat
            if isinstance(message, View):
                assert message.number >= self.number
                self.number = message.number

    @rule(route=routes, rank=ranks, guardian=st.booleans())
    def hello(self, route: str, rank: int | None, guardian: bool) -> None:
        self.seen(self.stage.hello(route, rank=rank, guardian=guardian))

    @precondition(lambda self: self.stage.peers)
    @rule(of=st.data(), pid=st.integers(7, 8))
    def attach(self, of: st.DataObject, pid: int) -> None:
        to = of.draw(st.sampled_from(self.known))
        route = of.draw(st.sampled_from([item for item in ROUTES if item[0] == to[0]]))
        self.seen(self.stage.attach(route, to, pid=pid))

    @precondition(lambda self: self.stage.peers)
    @rule(of=st.data())
    def beat(self, of: st.DataObject) -> None:
        self.seen(self.stage.beat(of.draw(st.sampled_from(self.known))))

    @precondition(lambda self: self.stage.peers)
    @rule(of=st.data(), guardian=st.booleans())
    def alive(self, of: st.DataObject, guardian: bool) -> None:
        self.answers += 1
        self.seen(self.stage.alive(of.draw(st.sampled_from(self.known)), guardian))

    @precondition(lambda self: self.stage.peers)
    @rule(of=st.data(), done=st.booleans(), replaceable=st.booleans())
    def leave(self, of: st.DataObject, done: bool, replaceable: bool) -> None:
        route = of.draw(st.sampled_from(self.known))
        self.seen(self.stage.leave(route, done, 0, replaceable))

    @precondition(lambda self: self.stage.peers)
    @rule(of=st.data(), number=st.integers(0, 3))
    def barrier(self, of: st.DataObject, number: int) -> None:
        self.seen(self.stage.barrier(of.draw(st.sampled_from(self.known)), number))

    @rule(route=routes)
    def drop(self, route: str) -> None:
        self.waiting.pop(route, None)
        self.seen(self.stage.drop(route))

    @rule(seconds=st.sampled_from([0.4, 1.0, 5.0, 12.0, 40.0]), beating=st.booleans())
    def wait(self, seconds: float, beating: bool) -> None:
        self.seen(self.stage.wait(seconds, self.known if beating else ()))

    @precondition(lambda self: self.stage.saved)
    @rule()
    def restart(self) -> None:
        self.waiting.clear()
        self.seen(self.stage.restart())

    @invariant()
    def left_and_gone_are_final_within_a_job(self) -> None:
        if self.stage.scheduler.job.name != self.job:
            self.job, self.final = self.stage.scheduler.job.name, {}
        states = self.stage.states()
        for seat, state in self.final.items():
            assert states[seat] == state
        self.final |= {seat: state for seat, state in states.items() if state in ("left", "gone")}


Cluster.TestCase.settings = examples(120, stateful_step_count=40)
TestCluster = Cluster.TestCase
