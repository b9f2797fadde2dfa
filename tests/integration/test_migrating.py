"""Scripts of docs/migrating before and after, where both run here: they end with the same loss."""

import re

import pytest

from tests.integration.processes import Process, Processes
from tests.integration.test_doc_examples import Block, blocks

LIMIT_S = 120.0
PAGES = {"docs/migrating/torch-rpc.md": 1, "docs/migrating/federated.md": 0}
"""Pages with such a script, and how many more processes it has before."""


def scripts(page: str, kind: str) -> list[Block]:
    return [block for block in blocks(page) if block.kind == kind]


def loss_of(process: Process) -> float:
    """Return the loss that one process of a script prints."""
    assert process.wait(LIMIT_S) == 0, process
    (found,) = re.findall(r"loss (\d\.\d+)", process.out)
    return float(found)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("page", "workers", "apart"),
    [
        ("docs/migrating/torch-rpc.md", 1, 5e-4),
        ("docs/migrating/torch-rpc.md", 2, 0.03),  # no rounds: another order
        ("docs/migrating/federated.md", 2, 5e-4),
    ],
)
def test_a_script_has_the_same_loss_before_and_after(
    processes: Processes, page: str, workers: int, apart: float
) -> None:
    before = processes.script(scripts(page, "before")[0].code, "before.py")
    after = processes.script(scripts(page, "after")[0].code, "after.py")
    group = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    left = processes.folder / "torchrun"  # its temporary files
    left.mkdir()
    old = processes.python(*group, workers + PAGES[page], before, TMPDIR=str(left))
    new = processes.kvps("launch", "-n", workers, "-s", 1, "--", processes.interpreter, after)
    assert loss_of(new) == pytest.approx(loss_of(old), abs=apart)
    assert loss_of(new) < 0.4, "as a page promises, it has learned"
