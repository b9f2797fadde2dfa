"""The rules of all chunks of a server: how they are composed, and what changes them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvps import protocol as p
from kvps.core.effects import Send
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.context import RequestContext
from kvps.core.server.rules.clipped import Clipped, StepNorms
from kvps.core.server.rules.finite import Finite
from kvps.core.server.rules.published import PublishedAssign, PublishedOptimize
from kvps.core.server.rules.rule import (
    BLOCK_COUNT,
    Assign,
    Gate,
    Optimize,
    Refused,
    Reply,
    Rule,
    Take,
    Watched,
    Workshop,
)
from kvps.core.server.rules.table import Table, move_tables
from kvps.core.server.rules.whole_tensor import GlobalNorms, WholeTensor
from kvps.core.server.sessions import PendingRead
from kvps.core.server.store import ServerStore, Shard
from kvps.dtypes import BY_NAME
from kvps.errors import ConfigError, ProtocolError
from kvps.protocol.envelope import Message


class Composed(dict[int, Rule]):
    """Chunk -> its rule, composed when first asked for; dropped when an option of the rule changes."""

    def __init__(self, compose: Callable[[int], Rule]) -> None:
        super().__init__()
        self._compose = compose

    def __missing__(self, number: int) -> Rule:
        rule = self[number] = self._compose(number)
        return rule


class RuleBook:
    """The rules of one server's chunks, and the updates that wait for other servers.

    Args:
        context: the job's stores and sessions.
        wake: called with the reads that waited for values that have just moved, before they move again.
        workers: how many ranks may push.
        threads: how many compute.
    """

    def __init__(
        self,
        context: RequestContext,
        wake: Callable[[list[PendingRead]], None],
        workers: int,
        threads: int = 1,
    ) -> None:
        self._context = context
        self._chunks = context.chunks
        self.workers = workers
        self.is_torn = False
        """An update failed half-way: some values are of no version."""
        self.watch: Callable[[Chunk, int, int], None] | None = None
        """Called with the elements of a chunk that are about to move, where a standby is told of them; rules
        have to be composed anew after it is set."""
        self.takes: tuple[Take, Take]
        """How pushes are taken in: each by itself, and by rounds."""
        self.replies: tuple[Reply, Reply]
        """How reads of whole values are answered: by values alone, and where something depends on reads."""
        self._rules = Composed(self._compose)
        self.rule: Callable[[int], Rule] = self._rules.__getitem__
        """Returns the rule of a chunk, by its number; raises ProtocolError if there is no such chunk."""
        self._shop = Workshop(
            workers, BLOCK_COUNT * threads, context.meter, wake, self._say, self.rule, context.chunks.tables
        )
        self.norms = GlobalNorms(context.stores, context.chunks, self._shop)
        self.steps = StepNorms(context.chunks, self._shop)

    def move_tables(self) -> None:
        """Move the embedding tables whose updates wait for those of other tables."""
        if self._shop.tables:
            self.is_torn = True
            move_tables(self._shop)
            self.is_torn = False

    def _say(self, server: int, message: Message) -> None:
        """Tell another server; before the first view, which names the servers, it is told later."""
        member = self._context.member
        if member.view is not None:
            self._context.outbox.append(Send(f"server {server}", member.packet(message)))

    def _compose(self, number: int) -> Rule:
        chunk = self._chunks.at(number)
        mover = self._mover(self._context.stores[chunk.store], chunk)
        rule = self._gated(mover if self.watch is None else Watched(mover, self.watch))
        store = rule.store
        rule.take, rule.reply = self.takes[store.ordered], self.replies[store.watches_reads]
        if store.drops is not None and self.report not in self._context.at_ends:
            self._context.at_ends.insert(0, self.report)
        return rule

    def _mover(self, store: ServerStore, chunk: Chunk) -> Rule:
        """Return what changes the values of a chunk."""
        shop, updater = self._shop, store.updater
        if chunk.embedding is not None:
            return Table(store, chunk, shop)
        if updater is None:
            return (Assign if chunk.back is None else PublishedAssign)(store, chunk, shop)
        return (Optimize if chunk.back is None else PublishedOptimize)(store, chunk, shop, updater)

    def _gated(self, rule: Rule) -> Rule:
        """Return a mover behind the rules that delay, drop or refuse updates."""
        store, chunk, updater = rule.store, rule.chunk, rule.store.updater
        if chunk.embedding is not None:  # it has an optimizer of its own
            return rule
        if updater is not None and updater.needs_norms:
            rule = WholeTensor(rule, self.norms)
        elif updater is not None and updater.max_norm is not None:
            rule = Clipped(rule, self.steps)
        elif store.may_drop(chunk.dtype):
            rule = Finite(rule, self.norms)
        if store.opened.average and BY_NAME[chunk.dtype].kind == "int":
            text = "computes means, which integers do not have; push floating point, or use a store without"
            return Refused(rule, f"store {store.name!r} {text} average")
        if updater is None and not store.ordered:
            text = "has no optimizer, and needs one to apply a push; this push was not applied: call "
            name = f"store {store.name!r} of type dist_{store.opened.mode}"
            return Refused(rule, f"{name} {text}set_optimizer(...) before push")
        return rule

    def recompose(self) -> None:
        """Compose all rules anew when they are needed next: something that they depend on has changed."""
        self._rules.clear()

    def optimize(self, store: ServerStore, hyper: HyperParams) -> None:
        """Install an optimizer.

        What waits for norms of the old rule is applied without, if the new one needs none; what has
        to be known to be finite waits on.

        Raises:
            ConfigError: if it cannot update a key of the store, or does not clip and rounds wait to be
                clipped; nothing is changed.
        """
        clips = hyper.optional("clip_global_norm") is not None
        if not clips and any(number[0] == store.name for number in self.steps.open):
            raise ConfigError(
                f"store {store.name!r} has rounds that wait for the norm of their step; set an optimizer "
                "without clip_global_norm when they are applied"
            )
        store.optimize(hyper)
        self.recompose()
        assert store.updater is not None
        needs_norms = store.updater.needs_norms
        for chunk in self._chunks.of_store(store.name):
            rule = self.rule(chunk.number)
            for span in list(chunk.spans) if chunk.embedding is None else ():
                if needs_norms:
                    chunk.cut_by_piece(span.start, span.stop)
                elif not store.may_drop(chunk.dtype):
                    while span.due and span.due[0].step is None:
                        rule.move(span, span.due.popleft())
        if not needs_norms and store.drops is None:
            self.norms.forget(store.name)

    def set_rate(self, store: ServerStore, lr: float) -> None:
        """Install another learning rate.

        Raises:
            ConfigError: if there is no optimizer, or the rate is out of its range.
        """
        store.set_rate(lr)
        for rule in self._rules.values():
            mover = rule
            while isinstance(mover, Gate):
                mover = mover.inner
            if isinstance(mover, Optimize) and mover.store.updater is not None:
                mover.install(mover.store.updater)

    def replace(self, store: ServerStore, shard: Shard) -> list[PendingRead]:
        """Free the old place of a key that was placed anew; return the reads that waited there."""
        self.forget(store, [shard])
        self.recompose()
        return self._chunks.retire(shard.pieces)

    def forget(self, store: ServerStore, shards: Collection[Shard]) -> None:
        """Forget the updates of these keys that other servers told: their numbers will occur again."""
        self.norms.forget(store.name, {shard.key for shard in shards})
        self.steps.forget(store.name)
        if store.drops is not None:
            store.drops.forget([piece for shard in shards for piece in shard.pieces])

    def drop(self, store: str) -> None:
        """Forget a store that has ended."""
        self.norms.forget(store)
        self.steps.forget(store)
        self.recompose()

    # --- other servers ------------------------------------------------------------------------

    def hear_norms(self, message: p.Norms, server: int) -> None:
        """Take in another server's sums of squares, and tell ours if it asks for them.

        Raises:
            KvpsError: if there is no such update; nothing was changed.
        """
        store = self._context.store(message.store)
        norm = self.norms.on_norms(store, message, server)
        if norm is not None:
            self.is_torn = True
            self.norms.settle(store, norm)
            self.is_torn = False

    def hear_step(self, message: p.StepNorm, server: int) -> None:
        """Take in another server's part of a step, and apply the step if that completes it.

        Raises:
            KvpsError: if there is no such store or step; nothing was changed.
        """
        store = self._context.store(message.store)
        self.is_torn = True
        try:
            self.steps.hear(store, message, server)
        except ProtocolError:
            self.is_torn = False
            raise
        self.is_torn = False

    def repeat(self) -> None:
        """Repeat the parts that other servers may have missed, and ask for those missing here."""
        self.norms.repeat()
        self.steps.repeat()

    def report(self, *, is_due: bool = False) -> None:
        """Log updates that were dropped, if none was logged a short while ago or it ``is_due``."""
        for store in self._context.stores.values():
            if store.drops is not None:
                for note in store.drops.look() if is_due else store.drops.report():
                    self._context.outbox.append(note)
