"""Word vectors of Python's own documentation strings, in tables without a vocabulary.

    python examples/word_vectors.py                                   # one process
    kvps-launch -n 2 -s 2 -- python examples/word_vectors.py          # 2 workers, 2 servers

Skip-gram with negative sampling: a word's vector is to tell the words around it from words drawn at
random. The id of a word is a hash of its letters, so that nobody makes a list of words first: a row
comes into being on the servers when its word has been pushed for three times, and only the rows that a
batch names travel. With dist_async each push moves them at once; no worker waits for another.

Pairs of every twentieth document are held back. For each, the vectors have to rank its second word above
one that is drawn at random; the baseline ranks the more frequent one first.

Add ``--max-restarts 2`` to kvps-launch: a worker that is killed is started again, and goes on where the others are.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
import sysconfig
import time
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import kvps
from kvps.torch import Embedding

WIDTH, WINDOW, NEGATIVES = 32, 4, 5
BATCH, LR = 2048, 0.25
OFTEN = 1e-3
"""Of a word that is a greater share of all, so many are left out that it is about as if it were not."""
SHOWN = ("file", "thread", "socket", "integer")


def documents() -> list[list[str]]:
    """Return the words of each documentation string of the standard library; nothing is run."""
    found: list[list[str]] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            words = re.findall(r"[a-z]{2,}", (text or "").lower())
            found += [words] if len(words) > 1 else []
    return found


def id_of(word: str) -> int:
    """Return the id of a word: 63 bits of a hash of its letters."""
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "big") >> 1


def thinned(texts: list[list[str]], uses: Counter[str], seed: int) -> list[list[str]]:
    """Return the texts without some of the words that are everywhere."""
    dice, total = random.Random(seed), sum(uses.values())
    keep = {word: min(1.0, (OFTEN * total / count) ** 0.5) for word, count in uses.items()}
    return [[word for word in words if dice.random() < keep[word]] for words in texts]


def pairs_of(texts: list[list[str]]) -> torch.Tensor:
    """Return the ids of all pairs of words that stand near each other, [n, 2]."""
    ids = {word: id_of(word) for words in texts for word in words}
    found = []
    for words in texts:
        row = [ids[word] for word in words]
        for at, one in enumerate(row):
            found += [(one, other) for other in row[max(0, at - WINDOW) : at]]
            found += [(one, other) for other in row[at + 1 : at + 1 + WINDOW]]
    return torch.tensor(found)


def load() -> tuple[torch.Tensor, torch.Tensor, Counter[str]]:
    """Return pairs to train with, pairs to test with, and how often each word is used."""
    texts = documents()
    train = [words for number, words in enumerate(texts) if number % 20]
    uses = Counter(word for words in train for word in words)
    test = [[word for word in words if uses[word] >= 5] for words in texts[::20]]
    return pairs_of(thinned(train, uses, 0)), pairs_of(thinned(test, uses, 1)), uses


def drawn(pairs: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return ids of words drawn at random: as often as they stand in ``pairs``."""
    return pairs[:, 1][torch.randint(len(pairs), shape, generator=generator)]


def loss_of(near: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
    """Return the loss of scores of words that stand near, and of words that were drawn."""
    return -(F.logsigmoid(near).sum() + F.logsigmoid(-far).sum())


def auc(near: torch.Tensor, far: torch.Tensor) -> float:
    """Return how often the first of two scores is the higher one; a tie is half."""
    return ((near > far).float() + 0.5 * (near == far).float()).mean().item()


@torch.no_grad()
def judge(
    words: Embedding, contexts: Embedding, test: torch.Tensor, train: torch.Tensor, uses: Counter[str]
) -> tuple[float, float]:
    """Return the AUC of the vectors, and of frequency alone."""
    generator = torch.Generator().manual_seed(2)
    far = drawn(train, (len(test),), generator)
    vectors = words(test[:, 0])
    result = auc((vectors * contexts(test[:, 1])).sum(1), (vectors * contexts(far)).sum(1))
    counts = {id_of(word): count for word, count in uses.items()}
    often = [torch.tensor([counts[one] for one in ids.tolist()]) for ids in (test[:, 1], far)]
    return result, auc(*often)


@torch.no_grad()
def neighbours(words: Embedding, of: str, uses: Counter[str]) -> list[str]:
    """Return the words whose vectors are most like that of a word."""
    frequent = [word for word, count in uses.most_common(3000) if word != of]
    vectors = F.normalize(words(torch.tensor([id_of(word) for word in frequent])), dim=1)
    likeness = vectors @ F.normalize(words(torch.tensor(id_of(of))), dim=0)
    return [frequent[index] for index in likeness.topk(5).indices.tolist()]


def main(arguments: list[str] | None = None) -> int:
    """Train, and judge; return the exit code."""
    parser = argparse.ArgumentParser(description="Train word vectors on Python's docstrings.")
    parser.add_argument("--seconds", type=float, default=45.0, help="to train for")
    parser.add_argument("--store", default="dist_async", help="dist_async, dist_ssp, local")
    parser.add_argument("--export", help="write the vectors to this safetensors file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss")
    parser.add_argument("--min-gain", type=float, default=0.1, help="exit 1 below this")
    flags = parser.parse_args(arguments)

    train, test, uses = load()
    kv = kvps.create(flags.store)
    recipe = {"optimizer": "adagrad", "lr": LR, "admit": 3}
    words = Embedding(kv.embedding("words", WIDTH, init=("uniform", 0.5 / WIDTH), **recipe))
    contexts = Embedding(kv.embedding("contexts", WIDTH, init="zeros", **recipe))
    own = train[kv.rank :: kv.num_workers]
    generator = torch.Generator().manual_seed(kv.rank)
    if kv.rank == 0:
        print(f"{len(train):,} pairs of {len(uses):,} words, {kv.num_workers} workers", flush=True)

    columns = (TextColumn("rank 0"), BarColumn(), TimeRemainingColumn())
    loss_now = TextColumn("step {task.fields[step]}  loss {task.fields[loss]:.3f}")
    is_shown = kv.rank == 0 and sys.stdout.isatty()
    kv.barrier()
    begin, steps, seen = time.perf_counter(), 0, []
    with Progress(*columns, loss_now, disable=not is_shown) as bar:
        task = bar.add_task("train", total=flags.seconds, step=0, loss=0.0)
        while (now := time.perf_counter() - begin) < flags.seconds:
            some = own[torch.randint(len(own), (BATCH,), generator=generator)]
            far = drawn(own, (BATCH, NEGATIVES), generator)
            vectors, near = words(some[:, 0]), contexts(some[:, 1])
            loss = loss_of((vectors * near).sum(1), (vectors[:, None] * contexts(far)).sum(2))
            loss.backward()  # it pushes
            steps += 1
            seen.append(loss.item() / BATCH)
            bar.update(task, completed=now, step=steps, loss=seen[-1])
    kv.barrier()
    print(f"worker {kv.rank}: {steps} steps of {BATCH} pairs", flush=True)
    if kv.rank != 0:
        return 0

    words.eval()
    contexts.eval()
    for word in SHOWN:
        print(f"{word}: {', '.join(neighbours(words, word, uses))}")
    result, baseline = judge(words, contexts, test, train, uses)
    print(f"{len(words.table):,} of {len(uses):,} words have a vector")
    print(f"held-out pairs ranked right: {result:.3f}; by frequency alone {baseline:.3f}")
    if flags.export:
        words.table.export(flags.export)
    if flags.plot:
        from digits import plot  # draws by matplotlib, if it is there

        plot({"loss": seen}, flags.plot, "Word vectors")
    if result < baseline + flags.min_gain:
        print(f"that is less than {flags.min_gain} above the baseline", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
