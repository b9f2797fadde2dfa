"""The primary's end of a copy: what has changed, what the standby has, and the answers that wait for it.

Theory of operation
-------------------
Nothing is copied by commands: what changes is noted as *dirty*, and after each packet the present state of
what is dirty goes to the standby. The first copy is the same, with all dirty. A change needs no order among
others, and one that follows before the last has left costs nothing more.

Once the standby has all, the copy is *level*. From then on an answer to a worker leaves when the standby
has acknowledged all that was dirty before it. So nobody has seen what the standby lacks, and a worker that
has no answer sends its request again to the standby, which has become the primary. Pushes of open rounds
are not copied: their counts go along as if they had not come.

Only a view can end that wait: one that names this server for the seat, and not that standby. A server that is
cut off sees none, and so shows nothing new. That is the fence.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from itertools import starmap
from typing import NamedTuple

import torch

from kvps import protocol as p
from kvps.core.effects import Effect, Hold, Route, Send
from kvps.core.embedding.spec import message_of
from kvps.core.embedding.table import EmbeddingRows
from kvps.core.membership_client import MembershipClient
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.context import RequestContext
from kvps.core.server.control import Control
from kvps.core.server.publications import Publications
from kvps.core.server.replicas.published import PublishedChanges
from kvps.core.server.replicas.state import by_text, copied_key, settings_of, told
from kvps.core.server.replicas.tables import TableChanges
from kvps.core.server.rules.book import RuleBook
from kvps.core.server.snapshot.elements import history_of, states_of
from kvps.core.server.store import ServerStore
from kvps.dtypes import BY_NAME
from kvps.errors import StorageError
from kvps.protocol.envelope import Message, Packet
from kvps.tensors import dtype_of, to_frame

WINDOW_BYTES = 16 << 20
"""Bytes of payload that are under way to the standby before more is copied."""
AGAIN_S = 1.0
"""Seconds after which the standby is sent again what it has not acknowledged."""
DISMISS_S = 3.0
"""Seconds after which a standby is given up that acknowledges nothing."""
BLOCK = 1 << 19
"""Elements in one message, or those of one key, while the copy is not level: what is under way may be old by
the time it arrives."""
KEYS_MAX = 256
"""Keys in one message."""


class Unacknowledged(NamedTuple):
    """A packet that the standby has not acknowledged."""

    number: int
    packet: Packet
    hold: Hold | None
    size: int


class Replicator:
    """Copies what a server holds to its standby, and holds answers back until that has it.

    Args:
        member: this server's place in the job.
        outbox: of the server's doors.
        publications: the versions that are published here.
    """

    def __init__(self, member: MembershipClient, outbox: list[Effect], publications: Publications) -> None:
        self._member = member
        self._outbox = outbox
        self._publications = publications
        self._is_published = True
        """Publications may have changed."""
        self._standby = 0
        """The incarnation of the standby that the view names; 0 for none."""
        self._route: Route | None = None
        """Where the standby speaks from; None before its FOLLOW."""
        self.is_level = False
        """The standby has been sent all, and answers wait for it."""
        self.reason = ""
        """Why the copy cannot become level; empty if it can."""
        self.dismissed = 0
        """The incarnation of a standby that must go; 0 for none."""
        self._number = self._acknowledged = 0
        """The number of the last packet, and of the last that the standby has."""
        self._unacknowledged: deque[Unacknowledged] = deque()
        self.behind_bytes = 0
        """Bytes of payload that are under way to the standby."""
        self._heard_at = 0.0
        self._again_at = 0.0
        self._fresh: list[Effect] = []
        """Answers of which it is not known yet for which packet they wait."""
        self._held: deque[tuple[int, Effect]] = deque()
        """(number of the packet that must be acknowledged, answer)."""
        self._tables: dict[int, TableChanges] = {}
        """Chunk -> what has changed in the table that it stands for."""

    def attach(self, context: RequestContext, control: Control, rules: RuleBook) -> None:
        """Copy these parts from now on; those before are no more, and neither are the answers that wait."""
        self._context, self._control, self._rules = context, control, rules
        self._chunks = context.chunks
        context.outbox = self
        context.at_ends.append(self.seal)
        rules.watch = self._watch
        self._replacements: set[int] = set()
        """The ranks whose process has taken another's place, and has pushed nothing yet."""
        self._drop_answers()
        self._forget_copy()
        if self._route is not None:
            self._begin()

    def detach(self) -> None:
        """Copy nothing any more, and hold nothing back."""
        self.learn(0)
        self.seal()
        self._context.outbox = self._outbox
        self._context.at_ends.remove(self.seal)
        self._rules.watch = None

    def append(self, effect: Effect) -> None:
        """Take an effect of a part: an answer to a worker may have to wait."""
        if type(effect) is Send and type(effect.to) is bytes:
            self._fresh.append(self._owing(effect) if self._replacements else effect)
        else:
            self._outbox.append(effect)

    def leaves(self, message: Message, now: float) -> bool:
        """Whether a worker's request is left unanswered."""
        return False

    # --- the standby --------------------------------------------------------------------------

    def learn(self, standby: int) -> None:
        """A view names this server for the seat, and the standby of this incarnation; 0 for none."""
        if standby == self._standby:
            return
        self._standby, self._route, self.is_level, self.dismissed = standby, None, False, 0
        why = "" if standby else self.reason  # which is said until another copy begins
        self._forget_copy()
        self.reason = why
        self._fresh[:0] = [effect for _, effect in self._held]
        self._held.clear()

    def follow(self, route: Route, incarnation: int, now: float) -> None:
        """The standby wants to be sent all."""
        if incarnation != self._standby:
            return
        is_new, self._route, self._heard_at = self._route is None, route, now
        if is_new:
            self._begin()

    def hear(self, route: Route, incarnation: int, number: int, now: float) -> None:
        """The standby has all up to ``number``."""
        if incarnation != self._standby or self._route is None or number > self._number:
            return
        self._route = route
        if number > self._acknowledged:
            self._acknowledged, self._heard_at = number, now
            self._again_at = now + AGAIN_S
            self._let_go(number)

    def on_timer(self, now: float) -> None:
        """Send again what is not acknowledged, and give a standby up that acknowledges nothing."""
        if not self._unacknowledged or now < self._again_at:
            return
        self._again_at = now + AGAIN_S
        if now >= self._heard_at + DISMISS_S:
            self._dismiss()
        for sent in self._unacknowledged:
            self._send(sent.packet)

    def deadline(self) -> float:
        """When something is to be sent again; infinite for never."""
        return self._again_at if self._unacknowledged else math.inf

    def standing(self) -> p.Standing:
        """Return what the scheduler is told."""
        silent = f"it has acknowledged nothing for {DISMISS_S:g} s" if self.dismissed else ""
        return p.Standing(False, 0, self.behind_bytes, self.dismissed, self.reason or silent)

    def _dismiss(self) -> None:
        if self.dismissed != self._standby:
            self.dismissed = self._standby
            self._member.stand()

    # --- what has changed ---------------------------------------------------------------------

    def note(self, message: Message) -> None:
        """A worker's request was carried out."""
        if self._replacements and isinstance(message, p.Push | p.PushRows | p.PushTables):
            self._replacements.difference_update(message.ranks)
        if self._route is None:
            return
        match message:
            case p.Push() | p.Pull() | p.PullRows() | p.PullChanged():
                self._note_read(message)
            case p.Load():
                chunk = self._chunks.by_number[message.chunk]
                for run in message.runs:
                    for key, start, stop in chunk.pieces(run.start, run.start + run.size):
                        self._mark(message.chunk, start, stop)
                        self._keys.setdefault(chunk.store, {})[key] = None
                self._layouts.add(chunk.store)
            case p.Declare():
                if message.create:
                    keys = [entry.key for entry in message.entries]
                    self._keys.setdefault(message.store, {}).update(dict.fromkeys(keys))
                    self._layouts.add(message.store)
                self._is_set = True
            case p.SetState():
                self._mark(message.chunk, message.start, message.start + message.size)
            case p.Embed():
                (piece,) = self._context.stores[message.store].shards[message.key].pieces
                self._mark(piece.chunk, 0, 1)
                self._keys.setdefault(message.store, {})[message.key] = None
                self._layouts.add(message.store)
            case p.Freeze() | p.Put() | p.Announce():
                self._is_published = True
            case p.TableRate():
                self._mark(message.chunk, 0, 1)
            case p.Open() | p.Close() | p.Optimize() | p.Rate() | p.Join() | p.Return() | p.Revive():
                self.note_all(values=isinstance(message, p.Revive))
            case _:
                pass

    def _note_read(self, message: p.Push | p.Pull | p.PullRows | p.PullChanged) -> None:
        """An optimizer that tracks pulls may have noted what a worker has read."""
        context = self._context
        if isinstance(message, p.Push | p.Pull):
            numbers = {message.chunk}
        else:
            numbers = {piece.chunk for piece in context.store(message.store).shards[message.key].pieces}
        for number in numbers:
            updater = context.store_of(number).updater
            if updater is not None and updater.tracks_pulls:
                self._mark(number, 0, self._chunks.by_number[number].used)

    def note_all(self, *, values: bool = False) -> None:
        """Settings of any store may have changed; or its ``values``, too."""
        self._is_set = self._is_published = True
        if values and self._route is not None:
            for store in self._context.stores.values():
                self._note_store(store)

    def replaced(self, rank: int) -> None:
        """Another process has a rank. Nobody holds the bytes of what the former one pushed to open rounds."""
        self._replacements.add(rank)

    def _owing(self, effect: Send) -> Send:
        """Return an answer that has a replacement push again what is in open rounds only.

        Here such a push is a repetition. At a standby it counts.
        """
        pulled = effect.packet.message
        routes = {session.route: rank for rank, session in self._context.sessions.items()}
        rank = routes.get(effect.to, -1)
        if rank not in self._replacements or not isinstance(pulled, p.Pulled):
            return effect
        chunk = self._chunks.by_number[pulled.chunk]
        if not self._context.stores[chunk.store].ordered:
            return effect
        stands = []
        for stand in pulled.runs:
            pushed = history_of(next(chunk.spans_in(stand.start, stand.start + 1))).pushed.get(rank, 0)
            stands.append(stand._replace(owed=max(pushed, stand.version)))
        return effect._replace(packet=effect.packet._replace(message=replace(pulled, runs=tuple(stands))))

    def _note_store(self, store: ServerStore) -> None:
        """All of a store is to be copied."""
        self._keys[store.name] = dict.fromkeys(store.shards)
        self._layouts.add(store.name)
        for chunk in self._chunks.of_store(store.name):
            self._mark(chunk.number, 0, chunk.used)

    def _mark(self, chunk: int, start: int, stop: int) -> None:
        self._ranges.setdefault(chunk, {})[start, stop] = False

    def _watch(self, chunk: Chunk, start: int, stop: int) -> None:
        """Note the values that a rule moves before the door ends."""
        if self._route is not None:
            self._mark(chunk.number, start, stop)

    # --- sending ------------------------------------------------------------------------------

    def _forget_copy(self) -> None:
        self._acknowledged = self._number  # and they are never given again
        self._let_go(None)
        self._stores: dict[str, ServerStore] = {}
        """Those that the standby was sent."""
        self._gathers = False
        """Some store has no rounds."""
        self._settings: dict[str, p.CopyStore] = {}
        self._over: list[tuple[str, int]] = []
        """The last life of each store that has ended, as the standby was told."""
        self._lives: dict[int, int] = {}
        """The incarnations of workers that it was told of."""
        self._sent_layouts: dict[int, tuple[str, int, tuple[int, ...], tuple[int, ...]]] = {}
        """Chunk -> its store, how many keys it has, and which are retired or have no values."""
        self._keys: dict[str, dict[str, None]] = {}
        self._layouts: set[str] = set()
        self._ranges: dict[int, dict[tuple[int, int], bool]] = {}
        """Chunk -> (start, stop) of what has changed -> whether a part before it was sent already."""
        for changes in self._tables.values():
            changes.end()
        self._tables.clear()
        self._published = PublishedChanges()
        self._is_set = self._is_published = True
        self.reason = ""

    def _begin(self) -> None:
        self._forget_copy()
        self.is_level = False
        self._say(p.CopyBegin())

    def _let_go(self, number: int | None) -> None:
        """Hold packets no more, up to ``number`` or all."""
        sent = self._unacknowledged
        while sent and (number is None or sent[0].number <= number):
            _, _, hold, size = sent.popleft()
            self.behind_bytes -= size
            if hold is not None:
                hold.release()

    def _drop_answers(self) -> None:
        for effect in [*self._fresh, *[answer for _, answer in self._held]]:
            assert isinstance(effect, Send)
            if effect.hold is not None:
                effect.hold.release()
        self._fresh.clear()
        self._held.clear()

    def seal(self) -> None:
        """End a door: send what has changed, and let those answers leave whose news are copied."""
        if self._route is not None:
            self._pump()
        if not self.is_level:
            self._outbox += self._fresh
            self._fresh.clear()
            return
        if self._fresh and not self._is_dirty and not self.reason:
            self._held.extend([(self._number, effect) for effect in self._fresh])
            self._fresh.clear()
        while self._held and self._held[0][0] <= self._acknowledged:
            self._outbox.append(self._held.popleft()[1])

    @property
    def _is_dirty(self) -> bool:
        return bool(self._ranges or self._keys or self._layouts or self._is_set or self._is_published)

    def _pump(self) -> None:
        """Send what has changed, as far as there is room; nothing once a copy cannot become level."""
        if not self.reason and self._is_dirty and self._is_free:
            self._copy_settings()
            self._copy_layouts()
            while self._ranges and self._has_room():
                self._copy_range(*next(iter(self._ranges.items())))
            self._copy_keys()
            if self._is_published and not self._ranges:
                self._copy_published()
        if self.reason:  # until another copy begins
            if self.is_level:
                self._dismiss()
        elif not self.is_level and not self._is_dirty and self._is_calm():
            self._say(p.CopyLevel())
            self.is_level = True

    @property
    def _is_free(self) -> bool:
        """Whether changes may leave. Those of stores without rounds gather while others are on their way, so
        that several pushes to the same values are copied as one."""
        waits = self.is_level and bool(self._unacknowledged) and self._gathers
        return not waits and self.behind_bytes < WINDOW_BYTES

    def _is_calm(self) -> bool:
        """Whether the copy may become level now."""
        return True

    def _copy_settings(self) -> None:
        """Send which stores there are, and their settings."""
        if not self._is_set:
            return
        self._is_set = False
        stores, ended = self._context.stores, self._control.ended
        kept = tuple([name for name, store in self._stores.items() if stores.get(name) is store])
        over = [(name, known.life) for name, known in ended.all().items() if name not in stores]
        lives = self._context.lives
        if len(kept) < len(self._stores) or over != self._over or lives != self._lives:
            self._over, self._lives = over, dict(lives)
            self._say(p.CopyStores(kept, tuple(starmap(p.StoreLife, over)), by_text(lives)))
        for name in self._stores.keys() - {*kept}:
            del self._stores[name]
            self._settings.pop(name, None)
            self._keys.pop(name, None)
            self._sent_layouts = {
                number: sent for number, sent in self._sent_layouts.items() if sent[0] != name
            }
            self._tables = {
                number: known for number, known in self._tables.items() if number in self._chunks.by_number
            }
        self._gathers = not all(store.ordered for store in stores.values())
        for name, store in stores.items():
            if name not in self._stores:
                self._stores[name] = store
                self._say(store.opened)
                self._note_store(store)
            settings = settings_of(store, ended.of(name), self._context.outside.get(name, frozenset()))
            before = self._settings.get(name)
            if settings != before:
                self._settings[name] = settings
                self._say(settings)
                if before is None or before.calls != settings.calls:
                    self._note_store(store)  # another optimizer has other states

    def _copy_layouts(self) -> None:
        for name in sorted(self._layouts):
            held = {chunk.number: chunk for chunk in self._chunks.of_store(name)}
            for number in [number for number, sent in self._sent_layouts.items() if sent[0] == name]:
                if number not in held:
                    del self._sent_layouts[number]
                    self._say(p.CopyChunk(name, number, 1, 0, (), (), (), ()))
            for number, chunk in held.items():
                layout = name, len(chunk.keys), *chunk.unused()
                if self._sent_layouts.get(number) != layout:
                    self._sent_layouts[number] = layout
                    dtype = BY_NAME[chunk.dtype].id
                    names, bounds = tuple(chunk.keys), tuple(chunk.bounds)
                    self._say(p.CopyChunk(name, number, dtype, chunk.capacity, names, bounds, *layout[2:]))
        self._layouts.clear()

    def _copy_keys(self) -> None:
        for name, keys in self._keys.items():
            store = self._context.stores.get(name)
            if store is None:
                continue
            copied = [copied_key(store, key) for key in keys if key in store.shards]
            gone = [key for key in keys if key not in store.shards]
            for at in range(0, max(len(copied), len(gone)), KEYS_MAX):
                end = at + KEYS_MAX
                self._say(p.CopyKeys(name, tuple(copied[at:end]), tuple(gone[at:end])))
        self._keys.clear()

    def _copy_range(self, number: int, ranges: dict[tuple[int, int], bool]) -> None:
        """Send the first of the ranges of a chunk that have changed, or a block of it."""
        start, stop = next(iter(ranges))
        is_rest = ranges.pop((start, stop))
        chunk = self._chunks.by_number.get(number)
        if is_rest and any(low <= start and stop <= high for low, high in ranges):
            return  # all of it has changed since
        end = stop
        if chunk is not None and chunk.embedding is None and not self.is_level:
            end = min(stop, chunk.edge(start, BLOCK))
        if end < stop:
            ranges[end, stop] = True
        if not ranges:
            del self._ranges[number]
        if chunk is None:
            return
        if chunk.embedding is not None:
            self._copy_table(chunk, chunk.embedding)
        else:
            self._copy_values(chunk, start, end)

    def _copy_values(self, chunk: Chunk, start: int, stop: int) -> None:
        """Send elements of a chunk, by spans."""
        width, drops = BY_NAME[chunk.dtype].itemsize, self._stores[chunk.store].drops
        for span in list(chunk.spans_in(start, stop)):
            low, high = max(span.start, start), min(span.stop, stop)
            rows = {name: self._own(row) for name, row in states_of(chunk, low, high).items()}
            fields = tuple([p.Field(name, dtype_of(row).id, len(row)) for name, row in rows.items()])
            message = p.CopyValues(
                chunk.number,
                BY_NAME[chunk.dtype].id,
                low,
                high - low,
                *told(span),
                fields,
                () if drops is None else drops.within(chunk.number, low, high),
            )
            payload = (chunk.buffer.octets[low * width : high * width], *map(to_frame, rows.values()))
            self._say(message, payload, chunk.buffer.hold())

    def _own(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of values that are changed in place, where a standby on this host can read it."""
        copy = self._chunks.memory.empty(len(values), dtype_of(values).name)
        return copy.copy_(values)

    def _copy_table(self, chunk: Chunk, table: EmbeddingRows) -> None:
        """Send the rows of a table that have changed; a block of them while the copy is not level."""
        changes = self._tables.get(chunk.number)
        if changes is None or changes.table is not table:
            changes = self._tables[chunk.number] = TableChanges(table)
            self._say(message_of(chunk.store, chunk.keys[0], table.recipe))
        try:
            for message, payload in changes.messages(chunk, is_whole=self.is_level):
                self._say(message, payload)
        except StorageError as error:
            self.reason = str(error)
            return
        if changes.are_left:
            self._mark(chunk.number, 0, 1)

    def _copy_published(self) -> None:
        """Send what has changed in publications, as far as there is room; chunks are as here by then."""
        for sent in self._published.messages(self._publications, self._chunks, self._has_room):
            if sent is None:
                return
            self._say(*sent)
        self._is_published = False

    def _has_room(self) -> bool:
        return self.is_level or self.behind_bytes < WINDOW_BYTES

    def _say(self, message: Message, payload: tuple[memoryview, ...] = (), hold: Hold | None = None) -> None:
        self._number += 1
        packet = Packet(self._member.envelope(self._number), message, payload)
        size = sum([frame.nbytes for frame in payload])
        if not self._unacknowledged:
            self._heard_at = max(self._heard_at, self._context.meter.now)
            self._again_at = self._context.meter.now + AGAIN_S
        self._unacknowledged.append(Unacknowledged(self._number, packet, hold, size))
        self.behind_bytes += size
        self._send(packet)

    def _send(self, packet: Packet) -> None:
        assert self._route is not None
        self._outbox.append(Send(self._route, packet))
