"""Control groups with a memory limit."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import until


@contextlib.contextmanager
def limited(size_mib: int) -> Iterator[Path]:
    """Yield a control group of its own, of ``size_mib``; skip the test where none can be made."""
    roots = [(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes")]
    roots += [(Path("/sys/fs/cgroup"), "memory.max")]
    for root, limit in roots:
        folder = root / f"kvps-test-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(size_mib << 20))
            except OSError:
                folder.rmdir()
                continue
            yield folder  # processes are made after it, and end before
            until(lambda folder=folder: not (folder / "cgroup.procs").read_text(), "empty group")
            folder.rmdir()
            return
    pytest.skip("no control group with a memory limit can be made here (needs root)")
