"""Reading published weights, from any process: :func:`subscribe`.

A subscription is a connection to the servers of a job, without a rank or a seat: the job neither waits for it
nor notices its end. It imports no code of servers or trainers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kvps import config
from kvps import protocol as p
from kvps.core import manifest
from kvps.core.embedding.published import ServedTable, names_of
from kvps.core.manifest import Published
from kvps.core.reader import Ask, Reader
from kvps.errors import ConfigError, KeyNotFound, KvpsError, Mismatch, ProtocolError, Timeout
from kvps.net.driver import Inbox, drive
from kvps.net.transport import Refused, Transport, Unserved
from kvps.phrases import some_of
from kvps.protocol.envelope import KEY_MAX, Packet, Role
from kvps.runtime.key_files import load_if_any
from kvps.runtime.member_process import own_host, own_identity
from kvps.runtime.relay import Door
from kvps.runtime.transport import open_transport
from kvps.tensors import ids_of
from kvps.version_memory import VersionMemory, rows_of

if TYPE_CHECKING:
    from os import PathLike

log = logging.getLogger("kvps")
FETCH_MAX_S = 300.0
"""Seconds that reading a version may take, unless the call gives a limit."""
DIFFERENCES_MAX = 20
NUMBER_MAX = 2**62
ONCE_S = 1.0
"""Seconds for an answer to a wait() that asks once."""
CANCEL_EVERY_S = 0.05

T = TypeVar("T")


def subscribe(
    name: str,
    scheduler: str | None = None,
    keys: str | PathLike[str] | None = None,
    shard: tuple[int, int] | None = None,
    relay: bool = True,
) -> Subscription:
    """Read what a trainer publishes by ``kv.publish(name, ...)``, from any process.

    Connects when it is first used. The publication need not exist yet.

    Args:
        name: of the publication.
        scheduler: the scheduler's address; by default KVPS_SCHEDULER, or the cluster in this process.
        keys: the directory of keys with ``reader.key`` and ``public/scheduler.pub``, from ``kvps keygen``;
            by default KVPS_KEYS. None in a job without keys.
        shard: ``(rank, size)`` to read only this reader's rows of each tensor: part ``rank`` of ``size``
            near-equal parts by dimension 0.
        relay: on another host than the servers, take bytes from other readers, and give them bytes, so
            that the servers send them once. This process then listens on a free port: for readers by their
            key, or, without keys, on loopback or with KVPS_INSECURE=1 only.

    Raises:
        ConfigError: for a bad argument, or keys that cannot be used.

    Example:
        >>> with kvps.subscribe("policy", scheduler="tcp://10.0.0.1:9091") as policy:  # doctest: +SKIP
        ...     version = policy.wait()
        ...     policy.load(model)
        ...     version = policy.wait(newer_than=version, timeout=60)
    """
    return Subscription(name, scheduler, keys, shard, relay)


class Subscription:
    """The versions of one publication, one at a time; :func:`subscribe` makes it.

    One version is seen whole or not at all, never changes, and is followed by newer ones only. Threads take
    turns.
    """

    def __init__(
        self,
        name: str,
        scheduler: str | None = None,
        keys: str | PathLike[str] | None = None,
        shard: tuple[int, int] | None = None,
        relay: bool = True,
    ) -> None:
        given: Any = name
        if not isinstance(given, str) or not 1 <= len(given) <= KEY_MAX or not given.isprintable():
            raise ConfigError(f"subscribe({name!r:.80}): a name has 1 to {KEY_MAX} printable characters")
        if shard is not None:
            pair: Any = shard
            is_pair = isinstance(pair, tuple | list) and len(pair) == 2
            if not is_pair or not all(isinstance(part, int) for part in pair) or not 0 <= pair[0] < pair[1]:
                raise ConfigError(f"subscribe(shard={shard!r}): expected (rank, size) with 0 <= rank < size")
        cluster = _cluster_here() if scheduler is None else None
        if cluster is not None:
            scheduler, keys = cluster.scheduler, keys or cluster.keys or None
        elif scheduler is None:
            found = config.cluster()
            scheduler = config.DEFAULT_SCHEDULER if found is None else found.scheduler
        self.scheduler = address = config.as_address("scheduler", scheduler)
        self.keys = os.fspath(keys) if keys is not None else config.keys_path()
        self._loaded = loaded = load_if_any(self.keys, "reader")
        self.name = name
        self.version: int | None = None
        """The number of the version that is read; None before the first."""
        self._shard, self._may_relay = shard, relay
        self._door: Door | None = None
        """Where other readers get what this one has read."""
        self._transport, _, _ = open_transport(keys=loaded)
        # The collector could end ZeroMQ's context before its sockets, and wait for ever.
        self._forgotten = weakref.finalize(self, _forget, self._transport, os.getpid())
        self._forgotten.atexit = False
        me = own_identity(Role.READER, address, loaded)
        me = replace(me, rank=secrets.randbits(32), incarnation=secrets.randbits(62) + 1)
        self._reader = Reader(me)
        self._inbox: Inbox[Reader] = Inbox(self._transport)
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, "kvps-subscription")
        """Runs what tasks of asyncio await."""
        self._pid = os.getpid()
        self._is_closed = False
        self._published: list[Published] = []
        self._tensors: dict[str, torch.Tensor] | None = None
        """Those of the version, once they are read."""
        self._served: dict[str, ServedTable] = {}
        """Its tables, once rows were looked up in them."""
        self._memory: VersionMemory | None = None
        """Where they lie; for the next version, too, if nobody was given one of them."""
        self._is_given = False
        self._holds = 0
        """The version that is there; 0 if none is as a whole."""
        self._job = bytes(16)
        """The job that published it: numbers are the same in another one, and bits are not."""
        self.bytes_read = 0
        """Bytes that it took to read the version: less than its size where an older one was here."""
        self.age_s = 0.0
        """Seconds for which the version had been there when :meth:`wait` returned."""

    # --- versions -----------------------------------------------------------------------------------

    def wait(
        self, newer_than: int | None = None, timeout: float | None = None, *, version: int | None = None
    ) -> int:
        """Wait for a version, and read that from now on; return its number.

        Args:
            newer_than: wait for a version with a higher number; None takes the newest there is.
            timeout: seconds; None waits as long as the servers answer, and 0 asks once.
            version: wait for this version, and read no newer one: so several readers read the same.

        Raises:
            ConfigError: if ``newer_than`` or ``version`` is no number, or ``version`` is older than
                :attr:`version`; or in a process that was forked.
            Timeout: if there is none in time; the text says which publications there are.
            KeyNotFound: if ``version`` is gone.
            SchedulerLost, ServerLost: if the job is over, or does not answer for 60 s.
        """
        for word, given in (("newer_than", newer_than), ("version", version)):
            value: Any = given or 0
            if not isinstance(value, int) or value >= NUMBER_MAX:
                raise ConfigError(f"wait({word}={given!r}): expected the number of a version, or None")
        if version is not None and version < (self.version or 1):
            raise ConfigError(
                f"wait(version={version}): the subscription to {self.name!r} reads version {self.version}, "
                "and never an older one; make another subscription"
            )
        least = version - 1 if version is not None else newer_than or 0
        is_once = timeout is not None and timeout <= 0
        with self._lock:
            limit_s = float("inf") if timeout is None else ONCE_S if is_once else timeout
            until = time.monotonic() + limit_s
            while True:
                newer = max(least, (self.version or 1) - 1)
                newest, self.age_s = self._watch(newer, until, is_once)
                number = version or newest
                if number == self.version and self._job == self._reader.job:
                    return number
                try:
                    self._retain(number, until)
                except KeyNotFound:
                    if time.monotonic() >= until or version is not None:
                        raise
                    continue  # it was the newest when we heard of it
                return number

    def _watch(self, newer: int, until: float, is_once: bool) -> tuple[int, float]:
        found: list[p.VersionIs] = []

        def again() -> str:
            """Return that versions were lost with their servers, in words; "" if they were not."""
            if not 0 < found[-1].number < (self.version or 0):
                return ""
            return (
                f"versions of {self.name!r} have begun again: the newest is {found[-1].number}, and this "
                f"subscription has read {self.version}. The servers have lost them, or this is another job; "
                "make another subscription to read it"
            )

        def take(packet: Packet) -> bool:
            assert isinstance(packet.message, p.VersionIs)
            found.append(packet.message)
            if (text := again()) and len(found) == 1:
                log.warning("%s", text)
            return is_once or packet.message.number > newer

        asks = [Ask(0, p.Watch(self.name, newer), take)]
        try:
            self._ask(asks, until, "wait()")
            if found[-1].number <= newer:
                raise Timeout("wait(): it was asked once")
        except Timeout as error:
            if not found:
                raise
            last = found[-1]
            text = f"there is no version of {self.name!r} that is newer than {newer}"
            if not last.number:
                others = some_of([repr(name) for name in last.names], 8) or "nothing"
                text = f"nobody has published {self.name!r}; published: {others}"
            text = again() or f"{text}. kv.publish({self.name!r}, ...) makes one"
            raise Timeout(f"wait(): {text}") from error
        return found[-1].number, found[-1].age_s

    def _retain(self, number: int, until: float) -> None:
        octets: list[bytes] = []
        if self._job != self._reader.job:
            self._job, self._holds = self._reader.job, 0

        def take(packet: Packet) -> bool:
            octets.extend([bytes(frame) for frame in packet.payload])
            return True

        asks = [
            Ask(server, p.Retain(self.name, number, not server, self._holds), take)
            for server in range(self._reader.servers)
        ]
        self._ask(asks, until, "wait()")
        published = manifest.decode(b"".join(octets))
        servers = self._reader.servers
        if any(extent.server >= servers for tensor in published for extent in tensor.extents):
            raise ProtocolError(f"version {number} of {self.name!r} names a server that there is not")
        self.version, self._published, self._tensors, self._served = number, published, None, {}

    # --- tensors --------------------------------------------------------------------------------------

    def tensors(self, timeout: float | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the names and tensors of the version, which is read whole before the first is there.

        Without a version, takes the newest. The tensors are this process's own.

        Raises:
            KeyNotFound: if the version is gone: it was too old. Call :meth:`wait`.
        """
        with self._lock:
            tensors = self._fetched(timeout)
            self._is_given = True
        return iter(list(tensors.items()))

    def load(
        self,
        module: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        strict: bool = True,
        timeout: float | None = None,
    ) -> int:
        """Copy the version into the tensors of a module, or of a state dict; return its number.

        Args:
            module: what to write to; each tensor keeps its type and device.
            strict: both must have the same names.
            timeout: seconds that reading may take.

        Raises:
            Mismatch: if names or shapes differ: the text names all differences, and nothing was written.
            KeyNotFound: as :meth:`tensors`.
        """
        with self._lock:
            if self.version is None:
                self.wait(timeout=timeout)
            targets = module.state_dict() if isinstance(module, torch.nn.Module) else module
            self._demand_alike(targets, strict)
            tensors = self._fetched(timeout)
            with torch.no_grad():
                for name, target in targets.items():
                    if name in tensors:
                        target.copy_(tensors[name])
            assert self.version is not None
            return self.version

    def lookup(self, table: str, ids: object, *, timeout: float | None = None) -> torch.Tensor:
        """Return rows of a table that was published, with the bits that a pull had then.

        The first lookup of a version reads it as a whole; the others take place in this process.

        Args:
            table: its name.
            ids: whole numbers, of any shape; they may be repeated. An id without a row has its initial value.
            timeout: seconds that reading may take.

        Returns:
            The rows, [*ids.shape, dim], of the type in which they were published.

        Raises:
            KeyNotFound: as :meth:`tensors`, or if the version has no such table. Mismatch: for ids that
                are no whole numbers. ConfigError: with ``shard``.

        Example:
            >>> rows = ctr.lookup("users", [[2**40, 17]])  # doctest: +SKIP
        """
        if self._shard is not None:
            raise ConfigError("lookup(): the subscription reads a shard; rows are found in whole tables only")
        wanted = ids_of(ids).cpu()
        with self._lock:
            tensors = self._fetched(timeout)
            if table not in self._served:
                if not tensors.keys() >= {*names_of(table)}:
                    others = [name[:-4] for name in tensors if name.endswith("/ids")]
                    raise KeyNotFound(
                        f"version {self.version} of {self.name!r} has no table {table!r:.80}; it has: "
                        f"{some_of(others, 8) or 'none'}. kv.publish({self.name!r}, tables=...) adds tables"
                    )
                self._served[table] = ServedTable(table, tensors)
            rows = self._served[table].lookup(wanted.reshape(-1).numpy())
        return rows.view(*wanted.shape, rows.shape[1])

    def digest(self, name: str, timeout: float | None = None) -> str:
        """Return the BLAKE2b digest of a tensor's bytes (16 of them, in hexadecimal): equal for equal bits.

        Raises:
            KeyNotFound: as :meth:`tensors`. KeyError: if the version has no such tensor.
        """
        with self._lock:
            return digest_of(self._fetched(timeout)[name])

    def fetch(self, timeout: float | None = None) -> int:
        """Read the version into this process, so that :meth:`load` only copies; return its number.

        From servers on other hosts come the changes since the version before that was read here, where these
        are fewer bytes.

        Raises:
            KeyNotFound: as :meth:`tensors`.
        """
        with self._lock:
            self._fetched(timeout)
            assert self.version is not None
            return self.version

    def _demand_alike(self, targets: Mapping[str, torch.Tensor], strict: bool) -> None:
        unfit = {name: _unfit(target) for name, target in targets.items()}
        shapes = {tensor.name: rows_of(tensor, self._shard)[1] for tensor in self._published}
        wrong = [f"{name!r} is missing in the module" for name in shapes if name not in targets and strict]
        wrong += [f"{name!r} was not published" for name in targets if name not in shapes and strict]
        wrong += [f"{name!r} {unfit[name]}" for name in shapes if unfit.get(name)]
        wrong += [
            f"{name!r} has shape {tuple(target.shape)} in the module and {shapes[name]} as published"
            for name, target in targets.items()
            if name in shapes and not unfit[name] and tuple(target.shape) != shapes[name]
        ]
        if wrong:
            more = f"; and {len(wrong) - DIFFERENCES_MAX} more" if len(wrong) > DIFFERENCES_MAX else ""
            raise Mismatch(
                f"version {self.version} of {self.name!r} does not fit the module, and nothing was loaded: "
                f"{'; '.join(wrong[:DIFFERENCES_MAX])}{more}"
            )

    def _fetched(self, timeout: float | None) -> dict[str, torch.Tensor]:
        if self.version is None:
            self.wait(timeout=timeout)
        if self._tensors is None:
            self._tensors = self._fetch(FETCH_MAX_S if timeout is None else timeout)
        return self._tensors

    def _fetch(self, limit_s: float) -> dict[str, torch.Tensor]:
        """Read the version, or what has changed since the one that is here."""
        if self._job != self._reader.job:
            raise KeyNotFound(f"version {self.version} of {self.name!r} was of an earlier job. Call wait()")
        until, older, base = time.monotonic() + limit_s, self._memory, self._holds
        assert self.version is not None
        memory = VersionMemory(self._published, self._shard)
        is_alike = older is not None and base > 0 and older.published == self._published
        far = self._far()
        bases = dict.fromkeys(far, base) if is_alike else {}
        memory.begin(older, is_given=self._is_given, copies=bool(bases))
        was_given, self._memory, self._is_given, self._holds = self._is_given, memory, False, 0
        what = f"reading version {self.version} of {self.name!r}"
        relayed = far if self._door is not None else []
        asks = memory.asks(self.name, self.version, bases, proves=was_given, relayed=relayed)
        if self._door is not None:
            self._door.begin(self.name, self.version)
        try:
            self._ask(asks, until, what)
        finally:
            if self._door is not None:
                self._door.begin(self.name, 0)
        if memory.unproved:
            self._ask(memory.reads_again(self.name, self.version), until, what)
        self._holds, self.bytes_read = self.version, memory.bytes_read
        return memory.tensors()

    # --- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the subscription; tensors that were given stay."""
        if os.getpid() != self._pid:
            return  # the process that made it closes it
        with self._lock:
            if self._is_closed:
                return
            if self.version is not None:
                none = p.Retain(self.name, 0)
                asks = [Ask(server, none, lambda packet: True) for server in range(self._reader.servers)]
                with suppress(KvpsError):
                    self._ask(asks, time.monotonic() + 1.0, "close()")
            self._is_closed, self._tensors, self._memory, self._served = True, None, None, {}
            self._forgotten.detach()
            self._transport.close(0.2)
            if self._door is not None:
                self._door.close()
            self._thread.shutdown(wait=False)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- asyncio ----------------------------------------------------------------------------------------

    async def wait_async(
        self, newer_than: int | None = None, timeout: float | None = None, *, version: int | None = None
    ) -> int:
        """Await :meth:`wait` in another thread; a task that is cancelled ends the wait, and nothing else.

        Example:
            >>> async with kvps.subscribe("policy") as policy:  # doctest: +SKIP
            ...     async for version in policy:  # every version that is the newest by then
            ...         await policy.load_async(model)
        """
        return await self._awaited(partial(self.wait, newer_than, timeout, version=version))

    async def load_async(
        self,
        module: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        strict: bool = True,
        timeout: float | None = None,
    ) -> int:
        """Await :meth:`load` in another thread."""
        return await self._awaited(partial(self.load, module, strict=strict, timeout=timeout))

    async def __aiter__(self) -> AsyncIterator[int]:
        while True:
            yield await self.wait_async(newer_than=self.version)

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._awaited(self.close)

    async def _awaited(self, call: Callable[[], T]) -> T:
        if self._is_closed or os.getpid() != self._pid:
            return call()  # it says so
        future = asyncio.get_running_loop().run_in_executor(self._thread, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():  # the call may begin to listen only now
                self._inbox.put(Reader.cancel)
                await asyncio.wait([future], timeout=CANCEL_EVERY_S)
            future.exception()  # nobody else looks at it
            raise

    def __repr__(self) -> str:
        return f"<kvps.Subscription {self.name!r} version {self.version}>"

    def _ask(self, asks: Iterable[Ask], until: float, what: str) -> None:
        """Make requests, and wait until all are answered.

        Raises:
            KvpsError: if one is not.
        """
        if os.getpid() != self._pid:
            raise ConfigError(
                f"the subscription to {self.name!r} was made in process {self._pid} and is used in "
                f"{os.getpid()} after a fork; call kvps.subscribe() there"
            )
        if self._is_closed:
            raise ConfigError(f"the subscription to {self.name!r} is closed")
        if not self._reader.servers:
            self._drive([], until, what)
            self._open_door()
        self._drive(asks, until, what)

    def _open_door(self) -> None:
        """Listen for other readers, if there is something to pass on, and no stranger could come in."""
        if not self._may_relay or self._door is not None or not self._far():
            return
        keys = self._loaded
        try:
            host = own_host(self.scheduler, 0.0)
            is_safe = keys is not None or config.is_loopback(f"tcp://{host}")
            if not is_safe and not config.switch("KVPS_INSECURE"):
                return
            door = self._door = Door(host, keys, self._reader.envelope())
        except KvpsError as error:
            log.warning("this reader reads from the servers alone: %s", error)
            return
        self._reader.endpoint, self._reader.on_range = door.endpoint, door.add
        if keys is not None:
            self._reader.key = keys.listening(Role.READER).public
        weakref.finalize(self, door.close)

    def _far(self) -> list[int]:
        """Return the servers on other hosts."""
        return [number for number in range(self._reader.servers) if not self._reader.is_near(number)]

    def _drive(self, asks: Iterable[Ask], until: float, what: str) -> None:
        self._reader.forget()  # a call may have been interrupted, or have failed before all had answered
        self._inbox.requests.clear()
        self._inbox.put(Reader.begin, asks, until, what)
        drive(self._reader, self._transport, self._inbox)
        with suppress(KvpsError, Refused, Unserved):
            for _ in self._transport.poll(0.0):  # tells the servers which memory is read no more
                pass
        if self._reader.error is not None:
            raise self._reader.error


def _forget(transport: Transport, pid: int) -> None:
    """Close the connections of a subscription that nobody has closed, in the process that made it."""
    if os.getpid() == pid:
        transport.close(0.0)


def _cluster_here() -> Any:
    """Return the cluster in this process, if it has begun one; importing its module would begin none."""
    current, process = (sys.modules.get(f"kvps.runtime.{name}") for name in ("current", "process"))
    cluster = None if current is None else current.current()
    return cluster or (None if process is None else process.embedded())


def _unfit(target: object) -> str:
    """Return why nothing can be written to a tensor of a module, in words; "" if something can."""
    if not isinstance(target, torch.Tensor):
        return f"is no tensor but an {type(target).__name__} in the module"
    return "is on the meta device, and has no values to write to" if target.is_meta else ""


def digest_of(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's bytes, as :meth:`Subscription.digest` has it."""
    octets = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(octets.data, digest_size=16).hexdigest()
