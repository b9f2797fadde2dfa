"""The lists of arrays that every system under measurement pushes and pulls."""

from __future__ import annotations

import math

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """The 161 trainable arrays of ResNet-50 (He et al., 2015): 25,557,032 numbers."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            wide = 4 * width
            shapes += [(width, channels, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(wide, width, 1, 1), (wide,), (wide,)]
            if block == 0:
                shapes += [(wide, channels, 1, 1), (wide,), (wide,)]
            channels = wide
    return [*shapes, (1000, channels), (1000,)]


WORKLOADS: dict[str, Shapes] = {
    "resnet50": resnet50(),
    "big": [(16 * 1024 * 1024,)],
    "small": [(256,)] * 1000,
}


def megabytes(shapes: Shapes) -> float:
    """Bytes of all arrays in float32, in units of 10^6."""
    return 4 * sum(math.prod(shape) for shape in shapes) / 1e6
