"""The main program of a rank that runs named cases in a process group over the backend "kvps"."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=60)
"""How long a collective may wait."""


def start() -> tuple[int, int]:
    """Join the process group of the job, with one thread of torch; return the rank and the size."""
    torch.set_num_threads(1)
    dist.init_process_group("kvps", timeout=LIMIT)
    return dist.get_rank(), dist.get_world_size()


def run(names: list[str], case: Callable[[str], object]) -> int:
    """Run ``case`` for each name, and print whether it passed; return how many failed."""
    failed = 0
    for name in names:
        try:
            case(name)
            sys.stdout.write(f"{name} passed\n")
        except Exception:
            failed += 1
            sys.stdout.write(f"{name} failed\n{traceback.format_exc()}\n")
        sys.stdout.flush()
    dist.destroy_process_group()
    return failed
