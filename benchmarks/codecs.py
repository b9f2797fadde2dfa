"""Measures how fast each codec of gradient compression writes and reads, on one core.

    python benchmarks/codecs.py [--elements N] [--repeat K] [--device cuda]

Random gradients are added to a rest and written, then read, as a worker and a server do. Printed
are GB of float32 per second, for writing, for reading, and for both one after the other, the best of
the repetitions (the machine may have other work), and how many octets come of four.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from kvps.compression.codecs import decode, encode
from kvps.compression.spec import CODECS, CodecSpec


def main() -> None:
    """Measure all codecs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=4 << 20, help="elements of the gradient (4 Mi)")
    parser.add_argument("--repeat", type=int, default=15, help="repetitions of each measurement (15)")
    parser.add_argument("--device", default="cpu", help="device of the gradient (cpu)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = 4 * args.elements / 1e9
    print(f"{args.elements:,} elements on {args.device}, one thread; GB of float32 per second")
    print(f"{'codec':8s} {'write':>7s} {'read':>7s} {'both':>7s}  octets of four")
    for name, number in CODECS.items():
        code = CodecSpec(number, 0.01 if name.endswith("k") else 0.5)
        gradient = torch.randn(args.elements).to(args.device)
        rest, out = torch.zeros_like(gradient), torch.empty_like(gradient)
        octets = encode(code, rest, gradient)
        write = best(args, lambda: encode(code, rest, gradient))  # noqa: B023  it is called here
        read = best(args, lambda: decode(code, octets, out))  # noqa: B023
        octet_ratio = len(octets) / args.elements
        print(
            f"{name:8s} {size / write:7.2f} {size / read:7.2f} {size / (write + read):7.2f}"
            f"  {octet_ratio:.3f}"
        )


def best(args: argparse.Namespace, work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes when it is least disturbed."""
    times = []
    for _ in range(args.repeat):
        began = time.perf_counter()
        work()
        if args.device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main()
