"""Train a ConvNet on handwritten digits with Lightning: the servers run the optimizer, or average for DDP.

    kvps-launch -n 2 -s 2 -- python examples/lightning_digits.py                  # Adam on the servers
    kvps-launch -n 2 -s 2 -- python examples/lightning_digits.py --strategy ddp   # DDP over the backend "kvps"

The LightningModule is the same for both, and knows nothing of kvps. It needs the package lightning.

If a worker is killed, the job ends: the process group, which this library needs, has lost a member.
"""

from __future__ import annotations

import argparse
import os
import sys

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from kvps.platforms.lightning import KvpsStrategy

EPOCHS, BATCH, LR = 12, 64, 5e-3


class ConvNet(lightning.LightningModule):
    """Two convolutions, two layers: 70,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 4 * 4, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, 10),
        )

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        """Log the share of a batch that is right; the mean is over all workers."""
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        """Return Adam, and a rate that falls."""
        adam = torch.optim.Adam(self.parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 1 / EPOCHS, EPOCHS - 1)
        return {"optimizer": adam, "lr_scheduler": schedule}


def load(batch: int) -> tuple[DataLoader, DataLoader]:
    """Return four fifths of the images to train with, and the rest to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(order) * 4 // 5
    train, test = [TensorDataset(images[one], labels[one]) for one in (order[:cut], order[cut:])]
    return DataLoader(train, batch, shuffle=True), DataLoader(test, batch)


def main(arguments: list[str] | None = None) -> int:
    """Train and test; return the exit code."""
    parser = argparse.ArgumentParser(description="Train a ConvNet with Lightning.")
    parser.add_argument("--strategy", default="kvps", choices=("kvps", "ddp"))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--min-accuracy", type=float, default=0.97, help="exit 1 below this")
    flags = parser.parse_args(arguments)

    strategy = KvpsStrategy() if flags.strategy == "kvps" else DDPStrategy(process_group_backend="kvps")
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // workers
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=workers,
        num_nodes=nodes,
        strategy=strategy,
        max_epochs=flags.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    lightning.seed_everything(0, verbose=False)
    train, test = load(max(1, BATCH // (workers * nodes)))
    model = ConvNet()
    trainer.fit(model, train, test)
    loss, accuracy = [float(trainer.callback_metrics[one]) for one in ("loss", "accuracy")]
    if trainer.is_global_zero:
        print(f"{flags.strategy}: {trainer.world_size} workers, loss {loss:.4f}")
        print(f"test accuracy {accuracy:.4f}")
    if accuracy < flags.min_accuracy:
        print(f"that is below {flags.min_accuracy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
