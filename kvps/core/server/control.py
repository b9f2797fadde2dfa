"""Control requests of a worker: declare keys, set optimizers, join, probe, status, state, tables.

One method per message; :mod:`kvps.core.server.ingest` has those that carry values, and
:mod:`kvps.core.server.answer` those that ask for them. A request that can be answered at once is. A request
that needs something to exist is *pending* in its session, as a
:class:`~kvps.core.server.sessions.PendingRequest`, until it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from kvps import protocol as p
from kvps.core.limits import remedy
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.placement import JOIN_SERVER
from kvps.core.refusals import Attempt
from kvps.core.server import answer as reads
from kvps.core.server.answer import Answers
from kvps.core.server.chunks.rounds import Span
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.context import RequestContext
from kvps.core.server.ingest import Ingest
from kvps.core.server.memory_budget import MemoryBudget
from kvps.core.server.options import check_quorum
from kvps.core.server.participation import EndedStores, JoinTracker
from kvps.core.server.rebuild import Rebuilds
from kvps.core.server.round_logs import Stall
from kvps.core.server.rules import table
from kvps.core.server.rules.book import RuleBook
from kvps.core.server.sessions import Describe, PendingRead, PendingRequest, Session
from kvps.core.server.snapshot import capture
from kvps.core.server.snapshot.capture_tables import FilledTables
from kvps.core.server.snapshot.model import Snapshot
from kvps.core.server.store import ServerStore, Setting
from kvps.dtypes import BY_ID, BY_NAME
from kvps.errors import ConfigError, KeyNotFound, KvpsError, Mismatch, Overload, ProtocolError, StorageError
from kvps.phrases import and_more, ranks_in_words
from kvps.protocol.envelope import Message
from kvps.tensors import dtype_of, from_frame, to_frame

STATUS_MAX = 1024
COUNTS_MAX = 16 * 1024
"""Maximum keys, and maximum push counts of ranks, in one STATUS answer."""

T = TypeVar("T")


class Control:
    """Answers the requests of one job's workers that carry no gradients and want no values.

    Args:
        context: the job's stores and sessions.
        ingest: closes rounds.
        answers: answers the reads that are woken.
        rules: the rules of the chunks.
        memory_limit: bytes that values may take, with all that belongs to them; None for any number.
        replaces: whether the server has taken another's place.
    """

    def __init__(
        self,
        context: RequestContext,
        ingest: Ingest,
        answers: Answers,
        rules: RuleBook,
        memory_limit: int | None,
        *,
        replaces: bool = False,
    ) -> None:
        self._context = context
        self._chunks = context.chunks
        self._answers = answers
        self._ingest = ingest
        self._rules = rules
        self.budget = MemoryBudget(
            context.chunks, memory_limit, self._rules.workers, context.limits.keys, context.limits.used_memory
        )
        self.ended = EndedStores()
        """The lives of stores."""
        self.rebuilds = Rebuilds(context, self.make_store, memory_limit, is_on=replaces)

    def oldest(self, now: float) -> Iterator[Stall]:
        """Yield the oldest open round of each store that has one."""
        oldest: dict[str, tuple[float, Chunk, Span]] = {}
        for chunk in self._chunks.open():
            for span in chunk.spans:
                if span.rounds:
                    at = span.rounds[0].opened_at
                    if chunk.store not in oldest or at < oldest[chunk.store][0]:
                        oldest[chunk.store] = at, chunk, span
        for store, (at, chunk, span) in oldest.items():
            required = self._context.quorum(self._context.stores[store]).required
            key, _, _ = next(chunk.pieces(span.start, span.stop))
            missing = span.missing(required)
            who = ranks_in_words(missing, self._context.description(now))
            yield Stall(store, key, span.rounds[0].number, now - at, missing, who)

    # --- snapshots ------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether no gradient waits here to be applied."""
        return self._chunks.is_settled

    @property
    def is_resumed(self) -> bool:
        """Whether a store was restored from a cut."""
        return any(store.restored for store in self._context.stores.values())

    def snapshot(self) -> tuple[Snapshot, Callable[[], None]]:
        """Return the contents of all stores, and a function that releases them.

        Raises:
            StorageError: if rows of tables cannot be kept on a disk.
        """
        chunks, releases = self._chunks, ExitStack()
        with releases:
            for chunk in chunks.by_number.values():
                releases.callback(chunk.keep())
            kept = releases.pop_all()
        stores = tuple([capture.snapshot_of(store, chunks) for store in self._context.stores.values()])
        return Snapshot(chunks.server, chunks.servers, stores), kept.close

    def restore(self, snapshot: Snapshot, filled: FilledTables) -> None:
        """Take over the contents of ``snapshot``, whose tables have these rows; there are no stores yet.

        Raises:
            KvpsError: if that cannot be.
        """
        self.rebuilds.is_on = False
        for saved in snapshot.stores:
            self.make_store(saved.opened)
            store = self._context.stores[saved.name]
            capture.revive(store, self._chunks, saved, filled)
            over, last, made = saved.joins
            store.joins = JoinTracker(over, dict(last), dict(made))

    def revive(self, name: str, snapshot: Snapshot, filled: FilledTables) -> None:
        """Give one open store the values that it has in a snapshot, whose tables have these rows.

        Raises:
            KvpsError: if that cannot be; nothing is changed.
        """
        saved = next((store for store in snapshot.stores if store.name == name), None)
        if saved is None:
            names = ", ".join(repr(store.name) for store in snapshot.stores) or "none"
            raise StorageError(
                f"the checkpoint has no store {name!r}; it has {names}. Create the store with that name="
            )
        store = self._context.store(name)
        self._rules.recompose()
        pieces = capture.revive(store, self._chunks, saved, filled)
        self._rules.forget(store, [store.shards[key.name] for key in saved.keys])
        for piece in pieces:
            chunk, stop = self._chunks.at(piece.chunk), piece.start + piece.size
            self._answers.wake(chunk.woken(piece.start, stop))
            for reading in chunk.woken(piece.start, stop):  # for pushes to the values before, which are void
                key, _, _ = next(chunk.pieces(reading.at, reading.at + 1))
                text = f"restore() gave key {key!r} of store {name!r} other values while this call waited"
                void = ConfigError(f"{text} for pushes of other workers; its own pushes are void")
                self._context.refuse(reading.session, reading.seq, void)
        self._context.retry()

    # --- members --------------------------------------------------------------------------------

    def retry_pending(self) -> None:
        """After a new view: close rounds that are complete now, and try all pending requests."""
        for store in list(self._context.stores.values()):
            self._look_at(store)
            self._judge(store)
        self._context.retry()

    def _look_at(self, store: ServerStore, is_all: bool = False) -> None:
        """Close the complete rounds of a store, or all open ones, and try its pending reads."""
        quorum, now = self._context.quorum(store), self._context.meter.now
        for chunk in self._chunks.of_store(store.name):
            rule = self._rules.rule(chunk.number)
            for span in list(chunk.spans):
                if is_all:
                    self._ingest.close_all(rule, span)
                else:
                    self._ingest.close(rule, span, quorum, now)
        self._rules.move_tables()
        for chunk in self._chunks.of_store(store.name):
            self._answers.wake(chunk.woken(0, chunk.used))

    # --- what waits for something to exist --------------------------------------------------------

    def declare(self, session: Session, seq: int, message: p.Declare) -> None:
        """Make keys, or wait for the values that another rank gives them."""
        store, attempt = self._context.store(message.store), Attempt(message.call, message.refused)
        if message.create:
            if session.rank != message.creator:
                raise ProtocolError(
                    f"rank {session.rank} may not create keys of rank {message.creator}; only that rank may"
                )
            life = (session.rank, session.incarnation)
            try:
                places, replaced = store.create(message.entries, message.call, life)
            except KvpsError as error:
                for key in store.wanting(message.entries, message.call):
                    store.refusals.keep(key, attempt, error)
                self._context.retry()
                raise
            for entry in message.entries:
                store.refusals.forget(entry.key)
            for shard in replaced:
                for reading in self._rules.replace(store, shard):
                    if self._context.is_pending(reading):
                        gone = KeyNotFound(f"key {shard.key!r} was replaced by another shape; read it again")
                        self._context.refuse(reading.session, reading.seq, gone)
            self._context.send(session, p.Declared(seq, places))
            self._context.retry()  # a key without elements needs no LOAD
            return
        known: list[p.Place] = []

        def retry() -> Message | None:
            for entry in message.entries:
                store.refusals.check(entry.key, attempt)
            while len(known) < len(message.entries):
                entry = message.entries[len(known)]
                place = store.find(entry, message.call, early=message.early)
                if place is None and self._context.member.has_left(message.creator):
                    raise KeyNotFound(
                        f"rank {message.creator} has left without giving key {entry.key!r} of store "
                        f"{store.name!r} a value. Initialise the same keys on every rank"
                    )
                if place is None:
                    return None
                known.append(place)
            return p.Declared(seq, tuple(known), store.stamp(message.entries))

        def why(describe: Describe) -> str:
            key, left = message.entries[len(known)].key, len(message.entries) - len(known) - 1
            who = ranks_in_words([message.creator], describe)
            return f"key {key[:64]!r}{and_more(left)}: {who} has not loaded a value"

        self._context.attempt(session, seq, PendingRequest(retry, why, len(message.entries), store.name))

    def optimize(self, session: Session, seq: int, message: p.Optimize) -> None:
        """Set the optimizer, or wait until rank 0 has."""
        store = self._context.store(message.store)
        numbers = {**message.numbers, "lr_mult": message.lr_mult, "wd_mult": message.wd_mult}
        read = partial(HyperParams.from_wire, message.name, numbers)
        install = partial(self._rules.optimize, store)
        self._set(session, seq, message, store.sent_optimizer, "optimizer", read, install)

    def rate(self, session: Session, seq: int, message: p.Rate) -> None:
        """Set the learning rate, or wait until rank 0 has."""
        store = self._context.store(message.store)
        if store.hyper is None:
            raise ConfigError(f"store {store.name!r} has no optimizer; call set_optimizer() first")
        install = partial(self._rules.set_rate, store)
        self._set(session, seq, message, store.sent_rate, "learning rate", lambda: message.lr, install)

    def _set(
        self,
        session: Session,
        seq: int,
        message: p.Optimize | p.Rate,
        setting: Setting[T],
        title: str,
        read: Callable[[], T],
        install: Callable[[Any], None],
    ) -> None:
        """Let rank 0 set something, and the others agree; what rank 0 is refused, all are refused.

        While no round waits for rank 0, because it has joined, left or is lost, the lowest of the other ranks
        sets in its place.
        """
        store, attempt = self._context.store(message.store), Attempt(message.call, message.refused)
        if message.create:
            self._context.demand_rank_0(session, f"set the {title}")

        def take() -> Message:
            try:
                value = read()
                if message.call > setting.calls:
                    install(value)
                    setting.value, setting.calls, setting.after = value, message.call, message.after
            except KvpsError as error:
                store.refusals.keep((title,), attempt, error)
                raise
            finally:
                self._context.has_news = True
            return p.Done(seq)

        def retry() -> Message | None:
            is_new = message.call > setting.calls
            if message.create or (is_new and self._setter(store) == session.rank):
                return take()
            value = read()
            if message.resumed:
                # Rank 0's counts, and a round waits for its push, which comes behind its call.
                # Another script that runs again may not have come to the same value, as after a
                # validation of other weights.
                return p.Done(seq) if store.hyper is not None else None
            store.refusals.check((title,), attempt)
            if is_new:
                self._check_order(session, message, f"{title} {value}")
                return None
            is_same_call = (setting.calls, setting.after) == (message.call, message.after)
            if is_same_call and setting.value != value:
                setter = self._setter(store)
                error = Mismatch(
                    f"rank {session.rank} set {title} {_value_in_words(value, setting.value)}, "
                    f"rank {setter} set {_value_in_words(setting.value, value)}; "
                    f"rank {setter}'s counts; give the same on every rank"
                )
                store.refusals.keep((title,), attempt, error)
                raise error
            return p.Done(seq)

        def why(describe: Describe) -> str:
            return f"{ranks_in_words([self._setter(store)], describe)} has not set the {title}"

        self._context.attempt(session, seq, PendingRequest(retry, why, store=store.name))
        if self._context.has_news:
            self._context.retry()

    def _check_order(self, session: Session, message: p.Optimize | p.Rate, what: str) -> None:
        """Check that rank 0 can still make a call that another rank waits for.

        Raises:
            Mismatch: if it has pushed for a round that this rank will push for after the call:
                that round waits for this rank, and rank 0 for the round before it sets anything.
        """
        store = self._context.store(message.store)
        has_rounds = store.ordered and not store.opened.quorum and self._setter(store) == 0
        spans = [span for chunk in self._chunks.of_store(store.name) for span in chunk.spans]
        if has_rounds and any(span.pushed.get(0, 0) > message.after for span in spans):
            raise Mismatch(
                f"rank {session.rank} set {what} after {message.after} rounds of store {store.name!r}, and "
                f"rank 0 has pushed for round {message.after} without setting it. Every rank must make the "
                "same calls in the same order: agree first on what decides it, such as a loss: "
                "kvps.torch.average(loss)"
            )

    def _setter(self, store: ServerStore) -> int:
        """Return the rank that sets the optimizer and its rate: 0, or the lowest that rounds wait for."""
        return min(self._context.quorum(store).required, default=0)

    # --- those who have run out of batches ----------------------------------------------------------

    def join(self, session: Session, seq: int, message: p.Join) -> None:
        """Let rounds close without a rank; answer when all ranks have joined."""
        store = self._context.store(message.store)
        store.joins.join(session.rank, message.call)
        self._look_at(store)
        self._judge(store)
        self._context.retry()  # another rank may set the learning rate now

        def retry() -> Message | None:
            if message.waits and store.joins.over < message.call:
                return None
            return p.Joined(seq, store.joins.last.get(message.call, 0))

        def why(describe: Describe) -> str:
            missing = store.joins.missing(self._context.members(store))
            return f"{ranks_in_words(missing, describe)} has not joined"

        self._context.attempt(session, seq, PendingRequest(retry, why, store=store.name))

    def _judge(self, store: ServerStore) -> None:
        """End a join that is complete, if this server is the judge."""
        if self._chunks.server == JOIN_SERVER:
            self.end_join(store, store.joins.judge(self._context.members(store)))

    def end_join(self, store: ServerStore, call: int) -> None:
        """End a join: open rounds get no more pushes, later ones wait for all ranks, and clocks
        start anew."""
        if not store.joins.end(call):
            return
        self._context.start_clocks(store)
        self._look_at(store, is_all=True)
        self._context.retry()

    # --- answered at once ---------------------------------------------------------------------------

    def open(self, session: Session, seq: int, message: p.Open) -> None:
        """Make a store, or check that it was made alike; wait until its former life has ended."""
        name, rank, incarnation = message.store, session.rank, session.incarnation
        if self.rebuilds.open(session, seq, message):
            return

        def retry() -> Message | None:
            known, store = self.ended.of(name), self._context.stores.get(name)
            if known is not None and message.life > known.life:
                self.ended.close(name, message.life, rank, incarnation)  # its CLOSE may be lost
                if store is not None and not self._has_ended(store):
                    return None
            elif known is not None and store is None:
                raise ConfigError(
                    f"every worker has closed store {name!r}, and its values are gone: worker {rank} takes "
                    "the place of a lost worker, and its script begins with what the others have behind "
                    "them. Begin with the store that the others have open, or start the job again"
                )
            elif store is not None:
                self.ended.open(name, rank, incarnation)
                store.agree(message)
                life = store.opened.life
                return p.Done(seq) if life == message.life else p.Opened(seq, life)
            self.drop_ended()
            self.make_store(message)
            return p.Done(seq)

        def why(describe: Describe) -> str:
            store = self._context.stores[name]
            still = sorted(self._users(store))
            return (
                f"store {name!r} begins anew once every worker has closed it, and "
                f"{ranks_in_words(still, describe)} has it open; give the second store a name of its own, or "
                "close() the first everywhere"
            )

        self._context.attempt(session, seq, PendingRequest(retry, why))

    def close(self, session: Session, message: p.Close) -> None:
        """A worker uses some stores no more."""
        for name, life in message.stores:
            self.ended.close(name, life, session.rank, session.incarnation)
        self.ended.forget(frozenset(self._context.stores))
        self._context.send(session, p.Closed(message.stores))
        self._context.retry()  # another rank may create one of them again now

    def drop_ended(self, now: float | None = None) -> None:
        """Drop the stores that ended a while before ``now``; all that have ended where another is made."""
        for store in [candidate for candidate in self._context.stores.values() if self._has_ended(candidate)]:
            if now is None or self.ended.is_due(store.name, now):
                self.drop(store)

    def _users(self, store: ServerStore) -> frozenset[int]:
        """Return the ranks that have not closed a store."""
        known = self.ended.of(store.name)
        assert known is not None, "it began with the store"
        return self._context.users(store) - known.closed.keys()

    def _has_ended(self, store: ServerStore) -> bool:
        return not self._users(store)

    def drop(self, store: ServerStore) -> None:
        """Drop a store that has ended, with its values."""
        name, context = store.name, self._context
        del context.stores[name]
        context.outside.pop(name, None)
        numbers = self._chunks.drop(name)
        self._ingest.drop(numbers)
        self._rules.drop(name)
        self.budget.drop(name)
        context.meter.drop(name, frozenset(numbers))
        gone = KeyNotFound(f"store {name!r} has ended: every worker has closed it")
        for session in context.sessions.values():
            for seq, pending in list(session.pending.items()):
                if pending.store == name:
                    context.refuse(session, seq, gone)

    def make_store(self, opened: p.Open) -> None:
        """Make a store that has no keys.

        Raises:
            Overload, ConfigError: if it cannot be.
        """
        most = self._context.limits.stores
        if len(self._context.stores) >= most:
            raise Overload(
                f"store {opened.store!r} is refused: there are {most} stores already. Close those that no "
                f"worker uses any more, on every worker, or {remedy('stores')}",
                limit="stores",
            )
        self.budget.pressure.demand_room(f"store {opened.store!r}")
        check_quorum(opened, self._rules.workers)
        self._context.stores[opened.store] = ServerStore(opened, self._chunks, self.budget)
        self.ended.begin(opened.store, opened.life)

    def history(self, session: Session, seq: int, message: p.History) -> Message:
        """Return the settings of a store so far."""
        store = self._context.store(message.store)
        return p.HistoryIs(
            seq,
            store.sent_optimizer.calls,
            store.sent_optimizer.after,
            store.sent_rate.calls,
            store.sent_rate.after,
            store.sent_rate.value,
            store.joins.over,
            session.rank in store.joins.away,
            store.restored,
        )

    def find(self, seq: int, message: p.Find) -> Message:
        """Return the types and shapes of keys."""
        shards = self._context.store(message.store).shards
        answers = []
        for key in message.keys:
            shard = shards.get(key)
            if shard is None or not shard.ready:
                answers.append(p.Found(0, ()))
            else:
                answers.append(p.Found(BY_NAME[shard.spec.dtype].id, shard.spec.shape, shard.call))
        return p.FoundAll(seq, tuple(answers))

    def probe(self, session: Session, message: p.Probe, now: float) -> None:
        """Say which requests were not heard of, and what the others wait for."""
        self._context.retry()  # some wait for a call of rank 0, for which it is too late by now
        words = self._context.description(now)
        named: list[int] = []

        def describe(rank: int) -> str:
            named.append(rank)
            return words(rank)

        missing, pending, for_workers = [], [], []
        for seq in message.seqs:
            request = session.pending.get(seq)
            if request is None:
                missing.append(seq)
            elif isinstance(request, PendingRead):
                store, chunk = self._context.stores[request.store], self._chunks.at(request.chunk)
                why = reads.why(store, chunk, request, self._context.quorum(store), describe)
                pending.append(p.Pending(seq, why))
            else:
                pending.append(p.Pending(seq, request.why(describe)))
            if named:
                for_workers.append(seq)
                named.clear()
        self._context.send(session, p.Probed(tuple(missing), tuple(pending), tuple(for_workers)))

    def status(self, seq: int, message: p.Status, now: float) -> Message:
        """Return the open rounds, clocks and dropped updates of a store."""
        store = self._context.store(message.store)
        required = self._context.quorum(store).required
        rounds: list[p.OpenRound] = []
        clocks: list[p.Clock] = []
        counts = 0
        for key, shard in store.shards.items():
            for piece in shard.pieces[:1]:
                chunk = self._chunks.at(piece.chunk)
                span = next(chunk.spans_in(piece.start, piece.start + piece.size))
                counts += len(span.pushed)
                if len(clocks) < STATUS_MAX and counts <= COUNTS_MAX:
                    clocks.append(p.Clock(key, {str(rank): n for rank, n in span.pushed.items()}))
                if span.rounds and len(rounds) < STATUS_MAX:
                    oldest = span.rounds[0]
                    missing = span.missing(required)
                    age_s = max(0.0, now - oldest.opened_at)
                    rounds.append(p.OpenRound(key, oldest.number, missing, age_s))
        dropped = {} if store.drops is None else store.drops.counts
        shown = dict(islice(dropped.items(), STATUS_MAX))
        late = self._context.meter.latest(store.name, STATUS_MAX)
        return p.StatusIs(seq, tuple(rounds), tuple(clocks), shown, late)

    # --- embedding tables -------------------------------------------------------------------

    def embed(self, seq: int, message: p.Embed) -> Message:
        """Make a table, or find it."""
        store, chunks = self._context.store(message.store), self._chunks
        recipe = table.recipe_of(message)
        piece = table.embed(store, message.key, recipe, chunks.server, chunks.servers)
        return p.Declared(seq, (p.Place(False, (piece,)),))

    def set_table_rate(self, message: p.TableRate) -> None:
        """Set the learning rate of a table."""
        self._chunks.at(message.chunk).table.set_rate(message.lr)

    def export(self, session: Session, seq: int, message: p.Export) -> None:
        """Answer with a block of a table."""
        answer, payload = table.exported(seq, self._chunks.at(message.chunk), message)
        self._context.send(session, answer, payload)

    # --- the optimizer's state ------------------------------------------------------------------------

    def get_state(self, session: Session, seq: int, message: p.GetState) -> None:
        """Answer with a piece of the optimizer's state."""
        chunk = self._chunks.at(message.chunk)
        chunk.validate([p.Run(message.start, message.size, 0)])
        stop = message.start + message.size
        span = next(chunk.spans_in(message.start, stop))
        state = chunk.state or {}
        rows = {name: tensor[message.start : stop].clone() for name, tensor in state.items()}
        answer = p.StateIs(
            seq, span.step, tuple(p.Field(name, dtype_of(row).id, len(row)) for name, row in rows.items())
        )
        payload = tuple(to_frame(row) for row in rows.values())
        self._context.send(session, answer, payload)

    def set_state(self, seq: int, message: p.SetState, payload: Sequence[memoryview]) -> Message:
        """Put a piece of the optimizer's state."""
        store = self._context.store_of(message.chunk)
        chunk = self._chunks.at(message.chunk)
        chunk.validate([p.Run(message.start, message.size, 0)])
        rows = {
            entry.name: from_frame(frame, BY_ID[entry.dtype].name)
            for entry, frame in zip(message.fields, payload, strict=True)
        }
        store.restore(chunk, message.start, message.start + message.size, message.step, rows)
        return p.Done(seq)


def _value_in_words(value: object, other: object) -> str:
    """Return a setting in words; of an optimizer, what is not as in ``other``."""
    return value.beside(other) if isinstance(value, HyperParams) else str(value)
