"""The description of the machine that a table of times was taken on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from kvps import __version__


def described() -> dict[str, object]:
    """Return the machine and the versions that matter."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kvps": __version__,
        "torch": metadata.version("torch"),
        "pyzmq": metadata.version("pyzmq"),
    }


def _processor() -> str:
    """Return the name of the processor, where the kernel tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
