"""The rendezvous backend ``kvps`` of torchrun: its agents agree on ranks through the scheduler.

``torchrun --rdzv-backend=kvps --rdzv-endpoint=HOST:9091`` finds it by the entry point group
``torchrun.handlers``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

__all__ = ["handler"]


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that makes a rendezvous handler; torchrun calls this.

    Example:
        >>> from kvps.platforms.torchrun import handler
        >>> handler().__name__
        'create'
    """
    # Here, as every torchrun calls this function, whatever its backend.
    from kvps.platforms.torchrun.handler import create

    return create
