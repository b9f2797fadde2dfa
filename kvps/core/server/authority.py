"""The authority of workers: the ranks that a worker may push for, and requests that only some may make.

Which messages a worker may send at all is in :mod:`kvps.protocol.permissions`. Here is what depends on their
fields: a push speaks for its sender, or for ranks of its sender's machine in a store where these push as one;
only rank 0 loads states; no rank ends a join that it has not made.
"""

from __future__ import annotations

from kvps import protocol as p
from kvps.core.limits import remedy
from kvps.core.server.context import RequestContext
from kvps.core.server.sessions import Session
from kvps.core.server.store import ServerStore
from kvps.errors import Overload, Unauthorized
from kvps.protocol.envelope import Message, Role


def check(
    message: Message,
    session: Session,
    view: p.View | None,
    context: RequestContext,
) -> None:
    """Check that a worker may say what it says.

    Args:
        message: what it says.
        session: whose it is.
        view: the newest view; it has the machine of each member.
        context: has the stores.

    Raises:
        Unauthorized: if it may not.
        Overload: if too much of it waits for an answer.
    """
    rank = session.rank
    if isinstance(message, p.Push | p.PushRows | p.PushIds):
        is_own = message.ranks == (rank,)
        is_bundle = not is_own and _store_of(message, context).opened.bundles
        if not is_own and not (is_bundle and _share_machine(view, rank, message.ranks)):
            raise Unauthorized(
                f"worker {rank} pushes for ranks {message.ranks!s:.60}: it may push for itself, and "
                "for workers of its machine in a store with host aggregation",
                reason="other_ranks",
            )
    elif isinstance(message, p.SetState) and rank != 0:
        raise Unauthorized(
            f"worker {rank} may not load optimizer states; only rank 0 may", reason="rank_0_only"
        )
    elif isinstance(message, p.Return):
        made = _store_of(message, context).joins.made.get(rank, 0)
        if message.call > made:
            raise Unauthorized(
                f"worker {rank} returns from join {message.call} of store {message.store!r}, and has made "
                f"{made}",
                reason="join_not_made",
            )
    most = context.limits.pending
    if len(session.pending) >= most:
        raise Overload(
            f"{most} requests of worker {rank} already wait for an answer; {remedy('pending')}",
            limit="pending",
        )
    if isinstance(message, p.Declare) and not message.create:
        keys = session.waiting_keys + len(message.entries)
        if keys > context.limits.keys:
            raise Overload(
                f"requests of worker {rank} wait for {keys:,} keys, and a server holds "
                f"{context.limits.keys:,}; {remedy('keys')}",
                limit="waiting_keys",
            )


def _store_of(
    message: p.Push | p.PushRows | p.PushIds | p.Return, context: RequestContext
) -> ServerStore:
    if isinstance(message, p.Push | p.PushIds):
        return context.store_of(message.chunk)
    return context.store(message.store)


def _share_machine(view: p.View | None, rank: int, ranks: tuple[int, ...]) -> bool:
    """Whether all of ``ranks`` are on the machine of ``rank``, as far as is known."""
    members = view.members if view is not None else ()
    machines = {one.rank: one.machine for one in members if one.role == Role.WORKER}
    here = machines.get(rank, 0)
    return here != 0 and all(machines.get(one, 0) == here for one in ranks)
