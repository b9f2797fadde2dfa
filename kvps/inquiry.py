"""Requests to a scheduler by processes that are not members of its job."""

from __future__ import annotations

import time

from kvps.core.agents.inquiry import Inquiry
from kvps.net.driver import Inbox, drive
from kvps.net.zap import Keys
from kvps.net.zeromq import ZmqTransport
from kvps.protocol.envelope import Message, Packet


def inquire(
    scheduler: str, request: Message, answer: type[Message], keys: Keys | None, limit_s: float
) -> Packet:
    """Return the scheduler's answer to ``request``, of the class ``answer``.

    Args:
        scheduler: its address.
        request: what to ask; may be asked more than once.
        answer: the class of the message that answers it.
        keys: by which to speak; None without.
        limit_s: seconds to wait.

    Raises:
        Unauthorized: if the scheduler has keys, and these are not among them.
        SchedulerLost: if it does not answer in time, or its job is over.
        KvpsError: if it refuses.
    """
    core = Inquiry(scheduler, request, answer, time.monotonic(), limit_s)
    transport = ZmqTransport(keys=keys)
    inbox: Inbox[Inquiry] = Inbox(transport)
    inbox.put(lambda core, now: core.start(now))
    try:
        drive(core, transport, inbox)
    finally:
        transport.close(0.0)
    if core.answer is None:
        raise core.error
    return core.answer
