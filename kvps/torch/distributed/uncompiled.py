"""Methods that torch.compile leaves alone.

torch's other process groups are C++, into which the compiler cannot look. This one is Python: without a mark, the
compiler would follow a collective into locks and threads. ``torch.compiler.disable`` would say so, too, but it imports
the compiler, which takes seconds of every script that trains without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])
REASON = "a collective of the backend kvps runs outside of the graph"


def uncompiled(function: F) -> F:
    """Mark a function: compiled code calls it as it is, with all that it calls."""
    marks = {
        "_torchdynamo_disable": True,
        "_torchdynamo_disable_msg": REASON,
        "_torchdynamo_disable_recursive": True,
    }
    for name, value in marks.items():
        setattr(function, name, value)
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function
