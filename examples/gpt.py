"""Train a small GPT on the text of Python's own documentation strings, on as many workers as there are.

    python examples/gpt.py                                            # one process
    kvps-launch -n 2 -s 2 -- python examples/gpt.py                   # 2 workers, 2 servers

What makes this plain PyTorch loop one for a cluster is DistributedOptimizer, which stands where AdamW
stood. Gradients of two passes are accumulated, computed under autocast, and averaged while backward is
still running; with overlap_forward each block of the model waits for its own weights in the next forward
pass. The learning rate is that of torch's OneCycleLR. At the end the model writes a few lines.

With --update-on-kvstore, and ``--max-restarts 2`` of kvps-launch, a worker that is killed is started again, and goes on
where the others are. With AdamW on each worker it cannot: only the others have the weights, and the job ends.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from kvps.torch import DistributedOptimizer

CONTEXT, WIDTH, HEADS, LAYERS = 96, 96, 4, 3
PASSES = 2
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


def docstrings() -> str:
    """Return all documentation strings of the standard library, module by module; nothing is run."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            found += [text] if text else []
    return "\n\n".join(found)


def encode(text: str) -> torch.Tensor:
    """Return the text as numbers; what is not ASCII is left out."""
    number_of = {character: number for number, character in enumerate(CHARACTERS)}
    return torch.tensor([number_of[one] for one in text if one in number_of])


class Block(nn.Module):
    """Attention to what came before, and a feed-forward layer, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_heads, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.to_heads(self.before_attention(x)).view(batch, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(seen.transpose(1, 2).reshape(batch, length, -1))
        return x + self.feed(self.before_feed(x))


class GPT(nn.Module):
    """A decoder-only transformer over characters. The output layer is the embedding."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS), bias=False)
        self.head.weight = self.characters.weight
        for table in (self.characters, self.places):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def batches(
    text: torch.Tensor, size: int, generator: torch.Generator, context: int = CONTEXT
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random pieces of ``text``, and the same pieces one character on."""
    while True:
        starts = torch.randint(len(text) - context - 1, (size,), generator=generator)
        pieces = torch.stack([text[start : start + context + 1] for start in starts.tolist()])
        yield pieces[:, :-1], pieces[:, 1:]


def loss_of(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, is_exact: bool = False
) -> torch.Tensor:
    """Return the mean cross entropy, computed in bfloat16 where that is exact enough, unless it ``is_exact``."""
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_exact):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def write(model: nn.Module, begin: str, length: int) -> str:
    """Return how the model goes on from ``begin``."""
    generator = torch.Generator().manual_seed(0)
    text = encode(begin)
    for _ in range(length):
        chances = F.softmax(model(text[None, -CONTEXT:])[0, -1].float() / 0.7, 0)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)])
    return "".join(CHARACTERS[number] for number in text.tolist())


def main(arguments: list[str] | None = None) -> int:
    """Train, test, and write; return the exit code."""
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's docstrings.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="of all workers, in a step")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--store", default="dist_sync", help="dist_sync, local")
    parser.add_argument("--update-on-kvstore", action="store_true", help="AdamW on the servers")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss")
    parser.add_argument("--max-loss", type=float, default=2.4, help="exit 1 above this")
    flags = parser.parse_args(arguments)

    text = encode(docstrings())
    train, test = text[: -len(text) // 10], text[-len(text) // 10 :]
    torch.manual_seed(0)
    model = GPT()
    optimizer = DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=flags.lr, weight_decay=0.01),
        model,
        flags.store,
        backward_passes_per_step=PASSES,
        update_on_kvstore=flags.update_on_kvstore,
        overlap_forward=True,
    )
    kv = optimizer.kvstore
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, flags.lr, total_steps=flags.steps + 1)
    own = max(1, flags.batch_size // kv.num_workers // PASSES)
    source = batches(train, own, torch.Generator().manual_seed(1 + kv.rank))

    if kv.rank == 0:
        count = sum(one.numel() for one in model.parameters())
        print(
            f"{count:,} parameters, {len(train):,} characters, {kv.num_workers} workers, "
            f"{PASSES} passes of {own} pieces each",
            flush=True,
        )
    begin, recent, seen = time.perf_counter(), math.nan, []
    columns = (TextColumn("step {task.completed}"), BarColumn(), TimeRemainingColumn())
    loss_now = TextColumn("loss {task.fields[loss]:.3f}")
    is_terminal = sys.stdout.isatty()
    with Progress(*columns, loss_now, disable=not (is_terminal and kv.rank == 0)) as bar:
        task = bar.add_task("train", total=flags.steps, loss=recent)
        for step in range(1, flags.steps + 1):
            optimizer.zero_grad()
            for _ in range(PASSES):
                loss = loss_of(model, *next(source)) / PASSES
                loss.backward()
            optimizer.step()
            scheduler.step()
            now = loss.item() * PASSES
            seen.append(now)
            recent = now if math.isnan(recent) else 0.95 * recent + 0.05 * now
            bar.update(task, advance=1, loss=recent)
            if kv.rank == 0 and not is_terminal and step % 50 == 0:
                print(f"step {step:4}  loss {recent:.3f}", flush=True)
    optimizer.close()  # the last step's weights are in
    if kv.rank != 0:
        return 0

    seconds = time.perf_counter() - begin
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        losses = [
            loss_of(model, inputs, targets).item()
            for (inputs, targets), _ in zip(batches(test, 32, generator), range(8), strict=False)
        ]
    result = sum(losses) / len(losses)
    print(f"{flags.steps} steps in {seconds:.0f} s", end="; ")
    print(f"test loss {result:.3f} ({result / math.log(2):.2f} bits a character)")
    if flags.plot:
        from digits import plot  # draws by matplotlib, if it is there

        plot({"loss": seen}, flags.plot, "A small GPT")
    print("---", write(model, "Return the", 200), "---", sep="\n")
    if result > flags.max_loss:
        print(f"that is above {flags.max_loss}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
