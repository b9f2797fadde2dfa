"""The Python blocks of docs/stores.md and docs/checkpoints.md, run by the workers of a real cluster with checkpoints.

Each block gets the names that its page says are the reader's. Blocks are found by a word of theirs.
"""

import sys
from pathlib import Path

import pytest

from tests.integration.processes import Processes
from tests.integration.test_doc_examples import WITH_FILES, Block, blocks

ALL = [block for page in WITH_FILES for block in blocks(page)]
LIMIT_S = 120.0
YOURS = """
import pathlib
import torch
import kvps

folder = {folder!r}
steps, epochs = 4, 2
keys = ["a", "b"]
weights = [torch.zeros(64), torch.zeros(8, 4)]


def gradients_of(step):
    return [torch.full_like(one, float(step + 1)) for one in weights]


def first_value_of(key):
    return torch.zeros_like(weights[keys.index(key)])

"""
STORE = """
kv = kvps.create("dist_sync", name="model")
kv.init(keys, weights)
kv.set_optimizer("sgd", lr=0.1)
"""
BEFORE = {
    "embedding.weight.grad": STORE
    + """
embedding = torch.nn.Embedding(1_000_000, 64, sparse=True)
embedding(torch.tensor([3, 7])).sum().backward()
row_ids, rows = torch.tensor([5, 9]), torch.ones(2, 64)
table, ids = torch.zeros(1_000_000, 64), [7, 3]
""",
    "kv.empty_like": STORE
    + """
params = [torch.nn.Parameter(torch.zeros(64)), torch.nn.Parameter(torch.zeros(8, 4))]
batches = [1.0, 2.0]


def loss(batch):
    return sum(((one - batch) ** 2).sum() for one in params)

""",
    "kv.joins": STORE
    + """
def batches(epoch):
    return [(1, 2)] * (3 - kv.rank)


def train(x, y):
    kv.pushpull(keys, gradients_of(0), out=weights)

""",
    "kv.embedding": "",
    "kvps.EpochChanged": STORE,
    "kvps.plugin": STORE,
    "kv.restore()": "",
    'kv.checkpoint(tag="best")': STORE + "kv.pushpull(keys, gradients_of(0), out=weights)\n",
}
AFTER = {
    "embedding.weight.grad": "assert held is not None and rows.shape == (3, 64)",
    "kv.empty_like": "assert all(one.detach().abs().sum() > 0 for one in params)",
    "kv.joins": "assert kv.joins == epochs",
    "kv.embedding": "assert rows.shape == (2, 16)",
    "kvps.EpochChanged": "assert step == steps and weights[0][0] == weights[1][0, 0] != 0",
    "kvps.plugin": "from kvps.core.optim.torch_rules import UPDATERS; assert UPDATERS['damped'] is Damped",
    "kv.restore()": "assert kv.version('a') == steps",
    'kv.checkpoint(tag="best")': "assert cut >= 1 and kv.version('a') == 1",
}
EXPORTED = "load_file"


def word_of(block: Block) -> str:
    """Return the word by which a block is found; the first that it has, in the order of the table."""
    return next(word for word in [*BEFORE, EXPORTED] if word in block.code)


def test_every_block_is_known() -> None:
    assert sorted(map(word_of, ALL)) == sorted([*BEFORE, EXPORTED])


@pytest.mark.thorough
@pytest.mark.parametrize("block", [item for item in ALL if EXPORTED not in item.code], ids=str)
def test_a_block_runs(processes: Processes, tmp_path: Path, block: Block) -> None:
    folder, word = str(tmp_path / "ckpt"), word_of(block)
    code = YOURS.format(folder=folder) + BEFORE[word] + block.code + AFTER[word] + "\n"
    script = processes.script(code)
    flags = ("-n", 2, "-s", 2, "--checkpoint-dir", folder, "--", sys.executable, script)
    launched = processes.kvps("launch", *flags)
    assert launched.wait(LIMIT_S) == 0, launched


@pytest.mark.thorough
def test_an_exported_model_is_loaded(processes: Processes, tmp_path: Path) -> None:
    block = next(item for item in ALL if EXPORTED in item.code)
    folder = str(tmp_path / "ckpt")
    train = """
import torch, kvps

kv = kvps.create("dist_sync", name="model")
kv.init(["weight", "bias"], [torch.full((2, 3), 5.0), torch.zeros(2)])
kv.checkpoint()
"""
    flags = ("-n", 1, "-s", 2, "--checkpoint-dir", folder, "--", sys.executable)
    launched = processes.kvps("launch", *flags, processes.script(train))
    assert launched.wait(LIMIT_S) == 0, launched
    model = str(processes.folder / "model.safetensors")
    exported = processes.start(
        "export", sys.executable, "-m", "kvps.cli.main", "checkpoint", "export", folder, model
    )
    assert exported.wait(LIMIT_S) == 0, exported
    check = "import torch\nmodel = torch.nn.Linear(3, 2)\n" + block.code
    check += "assert (model.weight == 5).all()\n"
    loaded = processes.start("load", sys.executable, "-c", check)
    assert loaded.wait(LIMIT_S) == 0, loaded
