"""Requests to a scheduler by processes that are not members of its job."""

from __future__ import annotations

import time

from kvps.core.effects import Exit
from kvps.core.inquiry import Inquiry
from kvps.net.driver import Inbox, drive
from kvps.net.zap import Keys
from kvps.net.zeromq import ZmqTransport
from kvps.protocol.envelope import Answer, Message, Packet


class Inquirer:
    """Asks a scheduler several times along one connection; a context manager.

    Args:
        scheduler: its address.
        keys: by which to speak; None without.
    """

    def __init__(self, scheduler: str, keys: Keys | None) -> None:
        self._scheduler = scheduler
        self._transport = ZmqTransport(keys=keys)
        self._inbox: Inbox[Inquiry] = Inbox(self._transport)
        self._is_connected = False
        self._asked = 0

    def __enter__(self) -> Inquirer:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close(0.0)

    def ask(
        self, request: Message, answer: type[Answer], limit_s: float, payload: tuple[memoryview, ...] = ()
    ) -> Packet:
        """Return the scheduler's answer to ``request``, of the class ``answer``.

        Args:
            request: what to ask; may be asked more than once.
            answer: the class of the message that answers it.
            limit_s: seconds to wait.
            payload: the payload of the request.

        Raises:
            Unauthorized: if the scheduler has keys, and these are not among them.
            SchedulerLost: if it does not answer in time, or its job is over.
            KvpsError: if it refuses.
        """
        self._asked += 1
        core = Inquiry(self._scheduler, request, answer, time.monotonic(), limit_s, payload, self._asked)
        is_first, self._is_connected = not self._is_connected, True
        self._inbox.put(lambda core, now: core.start(now) if is_first else core.on_timer(now))
        drive(core, self._transport, self._inbox)
        if core.answer is None:
            self._is_connected = False
            raise core.error
        return core.answer

    def stop(self) -> None:
        """End the call of :meth:`ask` that is under way; any thread may call this."""
        self._inbox.put(lambda core, now: core.outbox.append(Exit(0, "stopped")))


def inquire(
    scheduler: str, request: Message, answer: type[Answer], keys: Keys | None, limit_s: float
) -> Packet:
    """Return the scheduler's answer to one request; see :meth:`Inquirer.ask`."""
    with Inquirer(scheduler, keys) as inquirer:
        return inquirer.ask(request, answer, limit_s)
