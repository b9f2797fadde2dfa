"""The lists of arrays that every system under measurement pushes and pulls.

A workload is a name: a model's (``resnet50``), or a number of bytes or keys (``bytes:1048576``,
``keys:1000``), from which every process computes the same shapes. Imports nothing but the standard
library, since peers compute them in interpreters of their own.
"""

from __future__ import annotations

import math

Shapes = list[tuple[int, ...]]

FLOAT_BYTES = 4
KEY_FLOATS = 64
"""Numbers of each array of a ``keys:`` workload."""


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


def transformer(layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> Shapes:
    """The arrays of a decoder-only transformer; by default 148 with 124,439,808 numbers.

    The hyper-parameters are those of the smallest GPT-2 (Radford et al., 2019, "Language Models are
    Unsupervised Multitask Learners"), the arrays those of its published model.py
    (https://github.com/openai/gpt-2): the output layer is the embedding of the tokens.
    """
    norm: Shapes = [(width,), (width,)]
    attention: Shapes = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    feed_forward: Shapes = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    block = [*norm, *attention, *norm, *feed_forward]
    return [(vocabulary, width), (context, width), *(block * layers), *norm]


def big() -> Shapes:
    """One array of 64 MiB."""
    return [(16 * 1024 * 1024,)]


def small() -> Shapes:
    """1,000 arrays of 1 KiB."""
    return [(256,)] * 1000


WORKLOADS = {"resnet50": resnet50, "big": big, "small": small, "transformer": transformer}


def shapes_of(workload: str) -> Shapes:
    """Return the shapes of a workload.

    Raises:
        ValueError: if there is no such workload.
    """
    if workload in WORKLOADS:
        return WORKLOADS[workload]()
    kind, _, given = workload.partition(":")
    count = int(given) if given.isdigit() else 0
    if kind == "bytes" and count and count % FLOAT_BYTES == 0:
        return [(count // FLOAT_BYTES,)]
    if kind == "keys" and count:
        return [(KEY_FLOATS,)] * count
    raise ValueError(
        f"no workload {workload!r}; use one of {', '.join(WORKLOADS)}, bytes:N with N a multiple "
        f"of {FLOAT_BYTES}, or keys:N"
    )


def numbers(shapes: Shapes) -> int:
    """Return the number of elements of all arrays."""
    return sum(math.prod(shape) for shape in shapes)


def payload_bytes(shapes: Shapes) -> int:
    """Bytes of all arrays in float32."""
    return FLOAT_BYTES * numbers(shapes)
