"""Train a tiny GPT-2 with the Trainer of transformers, from random weights: AdamW runs on the servers.

    kvps-launch -n 2 -s 2 -- python examples/transformers_gpt.py         # AdamW on the servers
    kvps-launch -n 2 -s 2 -- python examples/transformers_gpt.py --ddp   # DDP over the backend "kvps"

The text is the docstrings of Python's own library, so nothing is downloaded. It needs the packages transformers and
accelerate.

If a worker is killed, the job ends: the process group, which this library needs, has lost a member.
"""

from __future__ import annotations

import argparse
import inspect
import math
import pkgutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import kvps.torch
from kvps.platforms.accelerate import without_ddp

LENGTH, STEPS, BATCH, LR = 64, 120, 16, 3e-3


def load() -> list[dict[str, torch.Tensor]]:
    """Return pieces of the source of Python's library as bytes; none is in two."""
    folder = Path(inspect.getfile(pkgutil)).parent
    text = b"".join([path.read_bytes() for path in sorted(folder.glob("[a-d]*.py"))])
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = rows[: len(rows) // LENGTH * LENGTH].clamp(max=127).reshape(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def main(arguments: list[str] | None = None) -> int:
    """Train; return the exit code."""
    parser = argparse.ArgumentParser(description="Train a tiny GPT-2 with transformers.")
    parser.add_argument("--ddp", action="store_true", help="average gradients by DDP")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--max-loss", type=float, default=3.0, help="exit 1 above this")
    flags = parser.parse_args(arguments)

    dist.init_process_group("kvps")
    torch.manual_seed(0)
    shape = {"n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, bos_token_id=0, eos_token_id=0, **shape))
    adamw = torch.optim.AdamW(model.parameters(), lr=LR)
    if not flags.ddp:
        adamw = kvps.torch.DistributedOptimizer(adamw, model, update_on_kvstore=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adamw, LR, flags.steps, cycle_momentum=False)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            use_cpu=not torch.cuda.is_available(),
            max_steps=flags.steps,
            per_device_train_batch_size=max(1, BATCH // dist.get_world_size()),
            max_grad_norm=0.0 if not flags.ddp else 1.0,  # the servers have the gradients
            logging_steps=20,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
        )
        trainer = Trainer(model, settings, train_dataset=load(), optimizers=(adamw, schedule))
        if not flags.ddp:
            without_ddp(trainer.accelerator)
        trainer.train()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    last = float(losses[-1]) if losses else math.inf
    if trainer.is_world_process_zero():
        print(f"loss {last:.3f} after {flags.steps} steps; {math.log(128):.3f} without training")
    dist.destroy_process_group()
    if last > flags.max_loss:
        print(f"that is above {flags.max_loss}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
