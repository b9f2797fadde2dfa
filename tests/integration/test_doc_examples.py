"""The Python blocks of README.md and of the pages for users run as they are printed."""

import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import kvps.torch
from tests.integration.processes import ROOT, Processes

BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WORKERS = 2
LIMIT_S = 90.0


@dataclass(frozen=True)
class Block:
    """One block of code of a page."""

    page: str
    line: int
    kind: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def compiled(self) -> Any:
        """Return its code, in which errors have the line of the page."""
        return compile("\n" * self.line + self.code, self.page, "exec")


def blocks(page: str) -> list[Block]:
    """Return all blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start(2)), found[1] or "", found[2])
        for found in BLOCK.finditer(text)
    ]


PAGES = [
    "README.md",
    "docs/index.md",
    "docs/pytorch.md",
    "docs/compression.md",
    *(
        page.relative_to(ROOT).as_posix()
        for folder in ("concepts", "howto", "migrating")
        for page in sorted((ROOT / "docs" / folder).glob("*.md"))
        if "```python" in page.read_text(encoding="utf-8")
    ),
]
WITH_FILES = ("docs/stores.md", "docs/checkpoints.md")
"""Pages whose blocks need servers with checkpoints, tables or a loop of their own: see test_doc_stores.py."""
ALL = [block for page in PAGES for block in blocks(page)]
SCRIPTS = [block for block in ALL if block.kind.startswith("after")]
EXAMPLES = [block for block in ALL if not block.kind]


def test_blocks_of_each_kind_exist() -> None:
    assert {block.page for block in ALL} == set(PAGES)
    every = {
        page.relative_to(ROOT).as_posix()
        for page in (ROOT / "docs").glob("**/*.md")
        if "```python" in page.read_text(encoding="utf-8") and "decisions" not in page.parts
    }
    elsewhere = {
        *("docs/quickstart.md", "docs/architecture.md", "docs/torch-distributed.md"),
        *("docs/launching/ray.md", "docs/frameworks.md"),  # with the packages that they need
        "docs/protocol.md",  # tests/unit/core/test_placement.py
    }
    assert every <= {*PAGES, *WITH_FILES, *elsewhere}, "a page whose blocks no test runs"
    known = {"", "fragment", "before", "after", "after: a group of processes"}
    assert {block.kind for block in ALL} == known
    before = [block.page for block in ALL if block.kind == "before"]
    assert set(before) == {page for page in PAGES if "migrating" in page}


@pytest.mark.parametrize("block", [block for block in ALL if block not in EXAMPLES], ids=str)
def test_block_compiles(block: Block) -> None:
    block.compiled()


def net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def yours(rank: int, checkpoint: Path) -> dict[str, Any]:
    """What a page takes for granted: each worker has batches of its own, and a model."""
    generator = torch.Generator().manual_seed(rank)
    batches = [
        (torch.randn(12, 8, generator=generator), torch.randint(3, (12,), generator=generator))
        for _ in range(6)
    ]
    model = net()
    return {
        **{"torch": torch, "kvps": kvps, "rank": rank, "workers": WORKERS, "device": "cpu"},
        **{"model": model, "batches": batches, "checkpoint": checkpoint, "batch_size": WORKERS},
        **{"loss_of": cross_entropy, "loss_sum_of": partial(cross_entropy, reduction="sum")},
        **{"loss": torch.tensor(0.5), "labels": batches[0][1], "hits": 6},
        "data": torch.utils.data.TensorDataset(*(torch.cat(part) for part in zip(*batches, strict=True))),
        "build": lambda: (model, sgd(model)),
        "names": [name for name, _ in model.named_parameters()],
        "weights": [param.detach() for param in model.parameters()],
        "backward": lambda batch: torch.autograd.grad(
            cross_entropy(model(batch[0]), batch[1]), list(model.parameters())
        ),
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A file that a job has written before."""
    model = net()
    optimizer = sgd(model)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    path = tmp_path / "checkpoint.pt"
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(saved, path)
    return path


@pytest.mark.in_turn
@pytest.mark.parametrize("block", EXAMPLES, ids=str)
def test_an_example_runs_and_workers_agree(block: Block, checkpoint: Path) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        names = yours(rank, checkpoint)
        if "optimizer" in block.code and "optimizer =" not in block.code:
            names["optimizer"] = kvps.torch.DistributedOptimizer(sgd(names["model"]), names["model"])
        before = [param.detach().clone() for param in names["model"].parameters()]
        exec(block.compiled(), names)
        if re.search(r"^for .*(batch|range)", block.code, re.MULTILINE):
            moved = zip(before, names["model"].parameters(), strict=True)
            assert any(not torch.equal(old, new) for old, new in moved), "nothing was trained"
        names["model"].state_dict()  # overlapped updates are made
        return [param.detach().clone() for param in names["model"].parameters()]

    trains = re.search(r"optimizer|Trainer|pushpull|broadcast_parameters", block.code)
    has_rounds = "dist_ssp" not in block.code  # without them, each worker pulls what is there
    with kvps.LocalCluster(WORKERS, servers=2) as cluster:
        results = cluster.run(work)
    assert all(item.isfinite().all() for result in results for item in result)
    if trains and has_rounds:
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- whole scripts ------------------------------------------------------------------------------------


@pytest.mark.in_turn
@pytest.mark.parametrize("block", [item for item in SCRIPTS if item.kind == "after"], ids=str)
def test_a_script_that_has_moved_learns_digits(block: Block) -> None:
    def work(rank: int) -> tuple[float, list[torch.Tensor]]:
        names: dict[str, Any] = {}
        exec(block.compiled(), names)
        found = names["weight"] if "weight" in names else names["model"].state_dict()
        weights = [found] if isinstance(found, torch.Tensor) else list(found.values())
        return names["accuracy"], [weight.detach().clone() for weight in weights]

    with kvps.LocalCluster(WORKERS, servers=2) as cluster:
        (first, weights), (second, others) = cluster.run(work)
    assert min(first, second) > 0.9
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def launched_accuracy(processes: Processes, block: Block, workers: int) -> float:
    """Run a script as its page says; return the accuracy that rank 0 prints."""
    script = processes.script(block.code)
    flags = ("-n", workers, "-s", 2, "--", sys.executable, script)
    launched = processes.kvps("launch", *flags)
    assert launched.wait(LIMIT_S) == 0, launched
    found = re.findall(r"accuracy (0\.\d+)", launched.out)
    assert len(found) == ("print" in block.code), launched
    return float(found[0]) if found else 1.0


@pytest.mark.in_turn
@pytest.mark.parametrize("block", [item for item in SCRIPTS if item.kind != "after"], ids=str)
def test_a_script_of_a_group_learns_digits(processes: Processes, block: Block) -> None:
    assert launched_accuracy(processes, block, WORKERS) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_a_script_is_launched_as_its_page_says(processes: Processes, block: Block) -> None:
    assert launched_accuracy(processes, block, 4) > 0.9
