"""What local steps cost and save: loss at equal tokens, bytes out of a worker's interface, and time on slow links.

    python benchmarks/local_steps.py losses [--workers 2] [--seeds 0 1 2] [--steps 200]
    sudo python benchmarks/local_steps.py links [--rate 10] [--workers 4] [--steps 100]

Each row is one run of examples/gpt_local_steps.py: the same model, the same pieces of text for each worker and seed, the
same number of steps. ``losses`` starts all processes on this host. ``links`` gives the scheduler with a server one host,
and each worker another: network namespaces, each behind a link of the rate, both ways (root, Linux). There the bytes
are those that left worker 0's interface, with headers; compare rows of one rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt_local_steps.py"
PLAIN = ("--fragments", "1", "--delay", "0", "--alpha", "0", "--codec", "none")
STREAMED = ("--fragments", "3", "--delay", "2", "--alpha", "0.5")
Row = tuple[str, ...]

SPARSE = ("--codec", "topk2bit", "--outer-lr", "1.0", "--momentum", "0.0001")
ROWS: dict[str, Row] = {
    "every step": ("--every-step",),
    "H=10": ("--sync-every", "10", *PLAIN),
    "H=30": ("--sync-every", "30", *PLAIN),
    "H=100": ("--sync-every", "100", *PLAIN),
    "H=30, 3 fragments, delay 2": ("--sync-every", "30", *PLAIN, *STREAMED),
    "H=30, int8": ("--sync-every", "30", *PLAIN, "--codec", "int8"),
    "H=30, e3m0": ("--sync-every", "30", *PLAIN, "--codec", "e3m0"),
    "H=30, topk2bit": ("--sync-every", "30", *PLAIN, *SPARSE),
    "H=100, e3m0": ("--sync-every", "100", *PLAIN, "--codec", "e3m0"),
    "H=100, topk2bit": ("--sync-every", "100", *PLAIN, *SPARSE),
    "H=99, e3m0, 3 fragments, delay 5": (
        *("--sync-every", "99", *PLAIN, "--codec", "e3m0"),
        *("--fragments", "3", "--delay", "5", "--alpha", "0.5"),
    ),
    "H=30, quorum, last worker 3x slower": (
        *("--sync-every", "30", *PLAIN, "--quorum", "1", "--slow", "3"),
    ),
    "H=30, last worker 3x slower": ("--sync-every", "30", *PLAIN, "--slow", "3"),
}
ALONE = "alone, H=30"
"""One worker with the outer optimizer, on the batches of all."""


def main() -> None:
    """Measure the rows, and print each as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("losses", "links"))
    parser.add_argument("--rows", nargs="+", choices=(*ROWS, ALONE), help="all, if not given")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rate", type=float, default=10.0, help="Mbit/s, of links")
    parser.add_argument("--json", type=Path, help="append a record of each run")
    given = parser.parse_args()
    for name in given.rows or (*ROWS, *([ALONE] if given.what == "losses" else [])):
        runs = []
        for seed in given.seeds:
            words = [*ROWS.get(name, ROWS["H=30"]), "--seed", str(seed), "--max-loss", "99"]
            words += ["--steps", str(given.steps), "--batch-size", str(given.batch_size)]
            workers = 1 if name == ALONE else given.workers
            one = launched(workers, words) if given.what == "losses" else linked(given, words)
            one |= {"row": name, "seed": seed, "workers": workers}
            runs.append(one)
            if given.json:
                with given.json.open("a") as file:
                    file.write(json.dumps(one | {"what": given.what, "rate": given.rate}) + "\n")
        print(line(name, runs), flush=True)


def line(name: str, runs: list[dict[str, float]]) -> str:
    """Return one row of the table: means over the seeds."""
    mean = {
        key: statistics.fmean([one[key] for one in runs]) for key in ("loss", "seconds", "waited")
    }
    losses = " ".join([f"{one['loss']:.3f}" for one in runs])
    size = statistics.fmean([one.get("crossed_bytes", one["sent_bytes"]) for one in runs])
    return (
        f"| {name} | {mean['loss']:.4f} ({losses}) | {size / 1e6:.3f} MB | {mean['seconds']:.1f} s | "
        f"{1 - mean['waited'] / mean['seconds']:.1%} |"
    )


def environment() -> dict[str, str]:
    """Return the environment of all processes: a thread each, and nothing of this shell's cluster."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def record_of(output: str) -> dict[str, float]:
    """Return the figures that rank 0 has printed."""
    lines = [text[text.index("{") :] for text in output.splitlines() if '{"loss"' in text]
    if not lines:
        raise SystemExit(f"the run printed no figures:\n{output[-2000:]}")
    found: dict[str, float] = json.loads(lines[0])
    return found


def launched(workers: int, words: list[str]) -> dict[str, float]:
    """Run all processes on this host."""
    argv = [sys.executable, "-m", "kvps.cli.launch", "-n", str(workers), "-s", "1", "--"]
    argv += [sys.executable, str(EXAMPLE), *words]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
    return record_of(done.stdout + done.stderr)


def linked(given: argparse.Namespace, words: list[str]) -> dict[str, float]:
    """Run the workers behind links."""
    from benchmarks.compare.networks import namespaces

    namespaces.BURST, namespaces.LATENCY = "16k", "400ms"
    with namespaces.Namespaces(1 + given.workers, f"{int(given.rate * 1000)}kbit") as hosts:
        scheduler = f"tcp://{hosts.address(0)}:9091"
        env = {**environment(), "KVPS_SCHEDULER": scheduler, "KVPS_INSECURE": "1"}
        root = str(Path(__file__).parents[1])
        env["PYTHONPATH"] = os.pathsep.join([root, env.get("PYTHONPATH", "")]).rstrip(os.pathsep)

        def start(host: int, *argv: str, **more: int) -> subprocess.Popen[str]:
            inside = hosts.inside(host, [sys.executable, *argv])
            return subprocess.Popen(inside, env=env, text=True, **more)  # type: ignore[call-overload,no-any-return]

        counts = ("--workers", str(given.workers), "--servers", "1", "--bind", scheduler)
        base = [
            start(0, "-m", "kvps.cli.scheduler", *counts, "--insecure", stderr=subprocess.DEVNULL)
        ]
        place = ("--scheduler", scheduler, "--bind", f"tcp://{hosts.address(0)}:0", "--insecure")
        base.append(start(0, "-m", "kvps.cli.server", *place, stderr=subprocess.DEVNULL))
        workers = [
            start(1 + rank, str(EXAMPLE), *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for rank in range(given.workers)
        ]
        said = [one.communicate()[0] for one in workers]
        of_rank_0 = next(index for index, text in enumerate(said) if '{"loss"' in text)
        counter = "/sys/class/net/eth0/statistics/tx_bytes"
        read = hosts.inside(1 + of_rank_0, ["cat", counter])
        crossed = int(subprocess.run(read, capture_output=True, text=True, check=True).stdout)
        for one in base:
            one.wait(60)
        return record_of(said[of_rank_0]) | {"crossed_bytes": crossed}


if __name__ == "__main__":
    main()
