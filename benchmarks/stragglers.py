"""Measures what slow workers cost: DDP on gloo beside the stores of kvps, on handwritten digits.

    .venv/bin/python benchmarks/stragglers.py [--seconds 20] [--plot FILE.png]

Four workers and two servers on this machine. A step waits 50 ms, which stands for the computation of an
accelerator; two cases:

    one      worker 3 takes five times as long, in every step
    random   every worker takes five times as long in a random tenth of its steps

Printed are samples a second of all workers together, the ratio to DDP, and after how many seconds rank 0's
weights were right about 97 % of the unseen images.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORKERS, SERVERS, BATCH = 4, 2, 16
WAYS = ("ddp gloo", "dist_sync", "dist_ssp", "dist_async")
CASES = {"one": "one worker 5 times slower", "random": "each 5 times slower in a tenth of its steps"}
WORKER = Path(__file__).with_name("stragglers_worker.py")
GOAL = 0.97


def main() -> None:
    """Run all ways in turns, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds for each way and case")
    parser.add_argument("--wait", type=float, default=0.05, help="seconds of computation per step")
    parser.add_argument("--times", type=float, default=5.0, help="how many times longer a slow worker takes")
    parser.add_argument("--plot", type=Path, help="draw accuracy over time")
    flags = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for case, title in CASES.items():
        found[case] = {}
        for way in WAYS:
            print(f"{title}: {way} ...", file=sys.stderr, flush=True)
            found[case][way] = _run(way, case, flags)
    for case, title in CASES.items():
        print(f"\n{title}\n\n| way | samples/s | of DDP | to {GOAL}, s | steps |\n|---|---|---|---|---|")
        base = _rate(found[case]["ddp gloo"])
        for way, ranks in found[case].items():
            reached = [at for at, right in ranks[0]["curve"] if right >= GOAL]
            steps = " / ".join(str(rank["steps"]) for rank in ranks)
            rate = _rate(ranks)
            until = f"{reached[0]:.1f}" if reached else "-"
            print(f"| {way} | {rate:.0f} | {rate / base:.2f} | {until} | {steps} |")
    if flags.plot:
        _draw(found, flags.plot)


def _rate(ranks: list[Any]) -> float:
    return sum(rank["steps"] * BATCH / rank["seconds"] for rank in ranks)


def _run(way: str, case: str, flags: argparse.Namespace) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        servers = 0 if way == "ddp gloo" else SERVERS
        launch = ["-m", "kvps.cli.launch", "-n", str(WORKERS), "-s", str(servers), "--"]
        words = [way, case, str(flags.seconds), str(flags.wait), str(flags.times), folder]
        argv = [sys.executable, *launch, sys.executable, str(WORKER), *words]
        subprocess.run(argv, check=True)
        files = [Path(folder) / f"{rank}.json" for rank in range(WORKERS)]
        return [json.loads(file.read_text()) for file in files]


def _draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw rank 0's accuracy over time, one panel for each case."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(found), figsize=(5 * len(found), 3.6), sharey=True, layout="constrained"
    )
    for (case, ways), axes in zip(found.items(), panels, strict=True):
        for way, ranks in ways.items():
            axes.plot(*zip(*ranks[0]["curve"], strict=True), label=way)
        axes.axhline(GOAL, color="black", linewidth=0.8)
        axes.set(title=CASES[case], xlabel="seconds", ylim=(0.8, 1.0))
    panels[0].set_ylabel("test accuracy")
    panels[0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
