"""Measures what DistributedOptimizer costs where it has nobody to share with: 1 worker, 1 server, 1 host.

    OMP_NUM_THREADS=2 .venv/bin/kvps-launch -n 1 -s 1 -- .venv/bin/python benchmarks/overhead.py

A network with ResNet-50's arrays really computes, on small images. Steps with the optimizer that is wrapped
alone, whose gradients stay, and steps through the server take turns in one process, so that whatever else
the machine does meets both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from kvps.torch import DistributedOptimizer


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a way past them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = (channels, width, width, 4 * width)
        kernels = ((1, 1), (3, stride), (1, 1))
        layers: list[nn.Module] = []
        for (before, after), (kernel, step) in zip(pairwise(sizes), kernels, strict=True):
            conv = nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False)
            layers += [conv, nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        self.past: nn.Module = nn.Identity()
        if channels != 4 * width:
            conv = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.past = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both, rectified."""
        return F.relu(self.layers(x) + self.past(x))


def resnet50() -> nn.Sequential:
    """The 161 trained arrays of ResNet-50 (He et al., 2015): 25,557,032 numbers."""
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for number, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if number and not block else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def main() -> None:
    """Take turns, and print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=96)
    parser.add_argument("--store", default="dist_sync")
    flags = parser.parse_args()
    model = resnet50()
    assert sum(one.numel() for one in model.parameters()) == 25_557_032
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = DistributedOptimizer(sgd, model, flags.store)
    images = torch.randn(flags.images, 3, flags.pixels, flags.pixels)
    labels = torch.randint(1000, (flags.images,))

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(images), labels)

    def alone() -> None:
        with optimizer.no_sync():
            loss().backward()
        sgd.step()
        sgd.zero_grad()

    def shared() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    times: dict[str, list[float]] = {"alone": [], "shared": []}
    for pair in range(-2, flags.pairs):
        for name, step in (("alone", alone), ("shared", shared)):
            begin = time.perf_counter()
            step()
            if pair >= 0:
                times[name].append(1e3 * (time.perf_counter() - begin))
        optimizer.zero_grad()
    plain, wrapped = (statistics.median(times[name]) for name in ("alone", "shared"))
    extra = statistics.median(b - a for a, b in zip(times["alone"], times["shared"], strict=True))
    print(
        f"ResNet-50, {flags.images} images of {flags.pixels} x {flags.pixels}, "
        f"{torch.get_num_threads()} threads: {plain:.0f} ms alone, {wrapped:.0f} ms through "
        f"{flags.store}; {extra:+.0f} ms, {100 * extra / plain:+.1f} %"
    )


if __name__ == "__main__":
    main()
