"""A small cluster of which hypothesis decides every step: what each rank does, and what befalls whom.

Two workers, two servers, a scheduler. A rank has a program, to which rules append pushes, pulls and
barriers; other rules let time pass, stop and kill processes, and spoil the network. What a seed of
``test_swarm.py`` has drawn before it begins is decided here as it goes, and what fails is made smaller
by hypothesis until a few steps are left.

The model: push ``number`` of a rank adds 1 to an element that nobody else adds to, and to all of ``even``.
So every value says which pushes are in it. After each step all cores are checked; in the end all that
was spoiled is mended, the ranks catch up with each other, and everything must be there once.
"""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.simulation.cluster import Cluster, Script, Store, Values
from tests.simulation.faults import (
    Cut,
    Pause,
    Reset,
    Trouble,
    pause,
    replace_at_once,
    replace_when_lost,
    reset,
    restart,
    see_that_it_was_fenced,
)
from tests.simulation.network import Faults
from tests.simulation.witness import Witness
from tests.support import tiers

WORKERS, SERVERS = 2, 2
PUSHES_MAX = 20
"""Of each rank."""
REST_S = 6.0
"""How long a server that was stopped must be heard before it is stopped again: else it may be lost."""
SIZE = WORKERS * PUSHES_MAX

workers = st.sampled_from([f"worker {rank}" for rank in range(WORKERS)])
servers = st.sampled_from([f"server {rank}" for rank in range(SERVERS)])
ranks = st.integers(0, WORKERS - 1)
moments = st.sampled_from([0.0, 0.0005, 0.002, 0.05, 0.5])
seconds = st.sampled_from([0.5, 4.0, 15.0])


def zeros() -> Values:
    return {"hot": torch.zeros(SIZE), "even": torch.zeros(140)}


def pushed(rank: int, number: int) -> Values:
    """Return what push ``number`` of a rank adds."""
    gradient = {"hot": torch.zeros(SIZE), "even": torch.ones(140)}
    gradient["hot"][rank * PUSHES_MAX + min(number, PUSHES_MAX - 1)] = 1
    return gradient


class Machine(RuleBasedStateMachine):
    @initialize(
        mode=st.sampled_from(["sync", "async"]),
        bound=st.sampled_from([1, 100_000]),
        machines=st.sampled_from([(), (2, 2), (1, 2)]),
        in_order=st.booleans(),
    )
    def begin(self, mode: str, bound: int, machines: tuple[int, ...], in_order: bool) -> None:
        self.kv = Store(mode=mode, bigarray_bound=bound, bundles=mode == "sync")
        self.programs: list[list[str]] = [[] for _ in range(WORKERS)]
        self.begun = [0] * WORKERS
        """How many pushes each rank has begun, in any of its lives."""
        self.rested: dict[str, float] = {}
        self.is_hurt = False
        """Somebody may have been taken for lost; nobody waits for the rest of that one's push."""
        self.cluster = Cluster(WORKERS, SERVERS, self.script, 0, Faults(in_order=in_order), machines)
        self.network = self.cluster.network
        self.network.overhears = Witness()
        # The scheduler may be away for longer than that. It would give seats to those who had gone.
        self.cluster.join_max_s = 10_000.0
        self.trouble = Trouble()
        self.usurped = self.trouble.befall(self.cluster)

    # --- what a rank does -----------------------------------------------------------------------

    def script(self, rank: int) -> Script:
        """Follow the program of this rank; a replacement passes over what its predecessor pushed."""
        kv = self.kv
        yield from kv.open()
        yield from kv.init(zeros())
        yield from kv.set_optimizer("test", rescale_grad=1.0)
        begin = yield from kv.resume(list(zeros()))
        program, at, number = self.programs[rank], 0, 0
        while True:
            while at == len(program):
                yield None
            step, at = program[at], at + 1
            if step == "end":
                break
            if step == "barrier":
                yield from kv.barrier()
                continue
            gradient = pushed(rank, number)
            if step != "pull":
                number += 1
            if number < begin or (number == begin and step != "pull"):
                continue
            self.begun[rank] = max(self.begun[rank], number)
            if step == "push":
                yield from kv.push(gradient)
                continue
            pulled = yield from kv.pushpull(gradient) if step == "pushpull" else kv.pull(zeros())
            self.judge(rank, number, pulled)
        # A barrier does not wait for what a lost worker has still to push; in sync a pull does.
        pushes = self.pushes(rank) * (1 if kv.mode == "sync" else WORKERS)
        return (yield from kv.pull(zeros(), min_version=pushes))

    def judge(self, rank: int, number: int, pulled: Values) -> None:
        """See that what a rank pulls after ``number`` pushes has the right pushes in it, each once."""
        hot, even = pulled["hot"].view(WORKERS, PUSHES_MAX), pulled["even"]
        assert hot.max() <= 1, "I1: a push was applied twice"
        assert hot[rank, :number].sum() == number, "a pull does not show what this rank pushed"
        if self.kv.mode == "sync":
            # What a predecessor got in stands, if only for some keys or parts: those are ahead.
            newest = max(number, self.begun[rank])
            assert torch.all(closed(number) <= hot), f"I3: less than version {number}: {hot}"
            assert torch.all(hot <= closed(newest)), f"I3: more than version {newest}: {hot}"
            versions = {WORKERS * item for item in range(number, newest + 1)}
            assert versions.issuperset(even.unique().tolist()), f"I3: no version of these: {even}"
        elif not self.is_hurt:
            assert len(even.unique()) == 1, "torn"

    def pushes(self, rank: int) -> int:
        """How many pushes the program of a rank has."""
        return sum(step.startswith("push") for step in self.programs[rank])

    def append(self, rank: int, *steps: str) -> None:
        self.programs[rank] += steps
        if rank in self.cluster.clients:
            self.cluster.clients[rank].wake()

    def meet(self, step: str) -> None:
        """Have all ranks catch up with the one that pushes most, and then take a step together."""
        pushes = max(map(self.pushes, range(WORKERS)))
        for rank in range(WORKERS):
            self.append(rank, *["push"] * (pushes - self.pushes(rank)), step)

    @rule(rank=ranks, step=st.sampled_from(["push", "pushpull", "pull"]), s=moments)
    def do(self, rank: int, step: str, s: float) -> None:
        if step == "pull" or self.pushes(rank) < PUSHES_MAX:
            self.append(rank, step)
        self.cluster.run_for(s)

    @rule(step=st.sampled_from(["push", "pushpull"]), s=moments)
    def do_together(self, step: str, s: float) -> None:
        if max(map(self.pushes, range(WORKERS))) < PUSHES_MAX:
            self.meet(step)
        self.cluster.run_for(s)

    # Where there are no rounds, nobody can know which barriers a replacement has behind it.
    @precondition(lambda self: self.kv.mode == "sync")
    @rule()
    def barrier(self) -> None:
        self.meet("barrier")

    # --- what befalls whom ----------------------------------------------------------------------

    @rule(s=st.sampled_from([0.5, 2.0, 15.0]))
    def tick(self, s: float) -> None:
        self.cluster.run_for(s)

    @rule(rank=ranks, is_noticed=st.booleans(), is_early=st.booleans())
    def kill(self, rank: int, is_noticed: bool, is_early: bool) -> None:
        self.is_hurt = True
        self.cluster.kill(rank, is_noticed)
        if is_early:
            replace_at_once(self.cluster, rank)
        else:
            self.network.at(self.network.now + 1, lambda: replace_when_lost(self.cluster, rank))

    @rule(name=workers, s=seconds)
    def stop_a_worker(self, name: str, s: float) -> None:
        self.is_hurt = True
        pause(self.cluster, Pause(name, 0.0, s), self.usurped)

    @rule(name=workers)
    def usurp(self, name: str) -> None:
        self.is_hurt = True
        pause(self.cluster, Pause(name, 0.0, 40.0, is_usurped=True), self.usurped)

    @rule(name=servers)
    def stop_a_server(self, name: str) -> None:
        if self.rested.get(name, 0.0) <= self.network.now:
            self.rested[name] = self.network.now + 4 + REST_S
            pause(self.cluster, Pause(name, 0.0, 4.0), self.usurped)

    @rule(s=seconds)
    def stop_the_scheduler(self, s: float) -> None:
        self.is_hurt = True
        pause(self.cluster, Pause("scheduler", 0.0, s), self.usurped)

    @rule(after_s=st.sampled_from([0.05, 4.0]), is_torn=st.booleans())
    def restart(self, after_s: float, is_torn: bool) -> None:
        self.is_hurt = True
        restart(self.cluster, after_s, is_torn)

    @rule(is_full=st.booleans())
    def fill_the_disk(self, is_full: bool) -> None:
        self.is_hurt = True
        self.cluster.disk.is_full = is_full

    @rule(
        worker=workers,
        other=servers | st.just("scheduler"),
        is_back=st.booleans(),
        both_ways=st.booleans(),
        s=seconds,
        is_held=st.booleans(),
    )
    def cut(self, worker: str, other: str, is_back: bool, both_ways: bool, s: float, is_held: bool) -> None:
        source, target = (other, worker) if is_back else (worker, other)
        self.is_hurt = True
        now = self.network.now
        self.trouble.cuts.append(Cut(source, target, both_ways, now, now + s, is_held))

    @rule(one=workers, other=workers | servers | st.just("scheduler"))
    def reset(self, one: str, other: str) -> None:
        self.is_hurt = True
        reset(self.cluster, Reset(0.0, (one, other)))

    @rule(lose=st.sampled_from([0.0, 0.1]), double=st.sampled_from([0.0, 0.3]), lent=st.booleans())
    def spoil(self, lose: float, double: float, lent: bool) -> None:
        faults = self.network.faults
        self.network.faults = replace(faults, lose=lose, double=double, lent=lent)

    # --- what must hold -------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        for process in self.cluster.processes:
            if process.alive:
                process.core.check()  # type: ignore[attr-defined]
        self.cluster.ended_well()

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        self.cluster.disk.is_full = False
        self.meet("end")
        pushes = self.pushes(0)
        self.cluster.run(self.network.now + 1_000)
        self.check()
        for client in self.cluster.clients.values():
            assert torch.equal(client.result["hot"].view(WORKERS, -1), closed(pushes)), "I2, I14"
            assert client.result["even"].unique().tolist() == [WORKERS * pushes], "I2, I14"
        for old in self.usurped:
            see_that_it_was_fenced(self.cluster, old)
        self.cluster.part(400)
        assert not self.cluster.is_anyone_alive


def closed(number: int) -> torch.Tensor:
    """Return ``hot`` with the first ``number`` pushes of every rank in it."""
    return (torch.arange(PUSHES_MAX) < number).float().repeat(WORKERS, 1)


# Shrinking takes minutes, so without KVPS_EXAMPLES a run prints the steps as they were drawn, the same in each run. With it
# hypothesis draws others each time, and makes what fails smaller.
EXAMPLES = os.environ.get("KVPS_EXAMPLES")
Machine.TestCase.settings = settings(
    max_examples=int(EXAMPLES or (250 if tiers.plays_all() else 250 // tiers.DAYS)),
    stateful_step_count=40,
    deadline=None,
    derandomize=EXAMPLES is None,
    phases=[Phase.generate] if EXAMPLES is None else [Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(0 if EXAMPLES else 400)
class TestMachine(Machine.TestCase):
    pass
