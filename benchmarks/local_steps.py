"""What local steps cost and save: loss at equal tokens, bytes out of a worker's interface, and
time on slow links.

    python benchmarks/local_steps.py losses [--workers 2] [--seeds 0 1 2] [--steps 200] [--flags
    "--lr 0.01 ..."] python benchmarks/local_steps.py reference [flags as of losses]
    sudo python benchmarks/local_steps.py links [--rate 10] [--workers 4] [--steps 100]
    python benchmarks/local_steps.py kills [--workers 4] [--seconds 300] [--kill-every 30]

Each row is one run of examples/gpt_local_steps.py: the same model, the same pieces of text for
each worker and seed, the same number of steps. In rows "by speed" the slow worker makes fewer, and
the others more: the sum is the same. ``losses`` starts all processes on this host. ``reference``
computes the losses of rows without codecs or a quorum in one process, by torch alone, in less time
(local_steps_reference.py); async rows in virtual time. ``links`` gives the scheduler with a server
one host, and each worker another: network namespaces, each behind a link of the rate, both ways
(root, Linux). There the bytes are those that left worker 0's interface, with headers; compare rows
of one rate.

``kills`` starts workers whose steps take a fixed time, as on devices of their own
(local_steps_worker.py), and sends SIGKILL to one of them every 30 seconds, in turn; kvps-launch
starts it again. Goodput is the number of steps that were merged, divided by the steps of as many
workers that are never disturbed and never wait.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt_local_steps.py"
EXAMPLE_AWAY = Path(__file__).with_name("local_steps_away.py")
PLAIN = ("--fragments", "1", "--delay", "0", "--alpha", "0", "--codec", "none")
STREAMED = ("--fragments", "3", "--delay", "2", "--alpha", "0.5")
WORKER = Path(__file__).with_name("local_steps_worker.py")
DELAYED = ("--fragments", "3", "--delay", "5", "--alpha", "0.5", "--codec", "e3m0")
Row = tuple[str, ...]

SPARSE = ("--codec", "topk2bit", "--outer-lr", "1.0", "--momentum", "0.0001")
SLOW = ("--sync-every", "30", *PLAIN, "--slow", "3")
ASYNC = ("--mode", "async", "--by-speed")
LATE = ("--outer", "delayed_nesterov")
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
    "H=30, e3m0, 3 fragments, delay 5": (*("--sync-every", "30"), *DELAYED),
    "H=99, e3m0, 3 fragments, delay 5": (*("--sync-every", "99"), *DELAYED),
    "H=30, e3m0, 3 fragments, delay 9": (*("--sync-every", "30"), *DELAYED, "--delay", "9"),
    "H=30, quorum, last worker 3x slower": (*SLOW, "--quorum", "1"),
    "H=30, quorum, late counts, last worker 3x slower": (*SLOW, "--quorum", "1", "--late", "next"),
    "H=30, last worker 3x slower": SLOW,
    "H=30, quorum, last worker 3x slower, by speed": (*SLOW, "--by-speed", "--quorum", "1"),
    "H=30, async, last worker 3x slower, by speed": (*SLOW, *ASYNC),
    "H=30, async dynamic, last worker 3x slower, by speed": (*SLOW, *ASYNC, "--dynamic"),
    "H=30, async delayed, last worker 3x slower, by speed": (*SLOW, *ASYNC, *LATE),
    "H=30, async delayed dynamic, last worker 3x slower, by speed": (*(*SLOW, *ASYNC, *LATE, "--dynamic"),),
}
AWAY: dict[str, tuple[float, float]] = {
    "H=30, quorum, last worker killed half way": (0.5, 0.6),
    "H=30, quorum, last worker killed half way for good": (0.5, 0.0),
    "H=30, quorum, last worker joins half way": (0.0, 0.5),
}
"""The rows in which the last worker is away: from and until which share of the steps; 0 for never until.

Without a quorum, the others would wait for its second life as soon as kvps-launch has started it.
"""
QUORUM = ("--sync-every", "30", *PLAIN, "--quorum", "1", "--by-speed")
TEXTS = ("row",)
"""The fields of a record that are no numbers."""
ALONE = "alone, H=30"
"""One worker with the outer optimizer, on the batches of all."""


def main() -> None:
    """Measure the rows, and print each as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("losses", "reference", "links", "kills"))
    parser.add_argument("--rows", nargs="+", choices=(*ROWS, *AWAY, ALONE), help="all, if not given")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--flags", default="", help="more flags of the example, which rows may override")
    parser.add_argument("--rate", type=float, default=10.0, help="Mbit/s, of links")
    parser.add_argument("--seconds", type=float, default=300.0, help="length of a run with kills")
    parser.add_argument("--kill-every", type=float, default=30.0, help="seconds; 0 kills nobody")
    parser.add_argument("--step-seconds", type=float, default=0.2, help="least time of a step")
    parser.add_argument("--sync-every", type=int, default=10, help="of a run with kills")
    parser.add_argument("--quorum", type=int, default=1, help="of a run with kills; 0 for none")
    parser.add_argument("--json", type=Path, help="append a record of each run")
    given = parser.parse_args()
    if given.what == "kills":
        kills(given)
        return
    if given.what != "losses" and set(given.rows or ()) & set(AWAY):
        parser.error(f"{given.what}: workers are away in losses only")
    more = {"losses": (*AWAY, ALONE), "reference": (ALONE,), "links": ()}[given.what]
    for name in given.rows or (*ROWS, *more):
        runs = []
        for seed in given.seeds:
            row = QUORUM if name in AWAY else ROWS.get(name, ROWS["H=30"])
            words = [*given.flags.split(), *row]
            words += ["--seed", str(seed), "--max-loss", "99"]
            words += ["--steps", str(given.steps), "--batch-size", str(given.batch_size)]
            workers = 1 if name == ALONE else given.workers
            if given.what == "reference":
                from benchmarks.local_steps_reference import trained

                server = trained(workers, words)
            else:
                server = (
                    launched(workers, words, AWAY.get(name))
                    if given.what == "losses"
                    else linked(given, words)
                )
            server |= {"row": name, "seed": seed, "workers": workers}
            runs.append(server)
            if given.json:
                with given.json.open("a") as file:
                    file.write(json.dumps(server | {"what": given.what, "rate": given.rate}) + "\n")
        print(line(name, runs), flush=True)


def line(name: str, runs: list[dict[str, float]]) -> str:
    """Return one row of the table: means over the seeds."""
    losses = " ".join([f"{run['loss']:.4f}" for run in runs])
    mean = {key: statistics.fmean([run[key] for run in runs]) for key in runs[0] if key not in TEXTS}
    ages = [
        f"rank {rank}: {mean[f'merges_{rank}']:.0f} merges, the last after "
        f"{mean[f'last_steps_{rank}']:.0f} steps, "
        f"age {mean[f'age_{rank}']:.1f}"
        for rank in range(int(mean["workers"]))
        if f"age_{rank}" in mean
    ]
    cells = [name, f"{mean['loss']:.4f} ({losses})"]
    if "sent_bytes" in mean:
        cells.append(f"{mean.get('crossed_bytes', mean['sent_bytes']) / 1e6:.3f} MB")
        cells.append(f"{mean['seconds']:.1f} s")
        cells.append(f"{1 - mean['waited'] / mean['seconds']:.1%}")
    if "back_at" in mean:
        cells.append(f"back at step {mean['back_at']:.0f}")
    if "fast_steps" in mean:
        cells.append(f"the time of {mean['fast_steps']:.0f} steps")
    if ages:
        cells.append("; ".join(ages))
    return f"| {' | '.join(cells)} |"


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
    ages = re.findall(r"rank (\d+): (\d+) merges, the last after (\d+) steps; .* ([\d.]+) pushes", output)
    for step in re.findall(r"is back at step (\d+)", output):
        found["back_at"] = float(step)
    for rank, *numbers in ages:
        for name, number in zip(("merges", "last_steps", "age"), numbers, strict=True):
            found[f"{name}_{rank}"] = float(number)
    return found


def launched(workers: int, words: list[str], away: tuple[float, float] | None = None) -> dict[str, float]:
    """Run all processes on this host; the last worker is ``away`` from and until a share of its steps."""
    argv = [sys.executable, "-m", "kvps.cli.launch", "-n", str(workers), "-s", "1"]
    with tempfile.TemporaryDirectory() as folder:
        script = [str(EXAMPLE)]
        if away is not None:
            argv += ["--max-restarts", "1"]
            steps = int(words[words.index("--steps") + 1])
            between = [str(max(1, round(away[0] * steps))), str(round(away[1] * steps))]
            script = [str(EXAMPLE_AWAY), folder, *between]
        argv += ["--", sys.executable, *script, *words]
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
        base = [start(0, "-m", "kvps.cli.scheduler", *counts, "--insecure", stderr=subprocess.DEVNULL)]
        place = ("--scheduler", scheduler, "--bind", f"tcp://{hosts.address(0)}:0", "--insecure")
        base.append(start(0, "-m", "kvps.cli.server", *place, stderr=subprocess.DEVNULL))
        workers = [
            start(1 + rank, str(EXAMPLE), *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for rank in range(given.workers)
        ]
        said = [worker.communicate()[0] for worker in workers]
        of_rank_0 = next(index for index, text in enumerate(said) if '{"loss"' in text)
        counter = "/sys/class/net/eth0/statistics/tx_bytes"
        read = hosts.inside(1 + of_rank_0, ["cat", counter])
        crossed = int(subprocess.run(read, capture_output=True, text=True, check=True).stdout)
        for item in base:
            item.wait(60)
        return record_of(said[of_rank_0]) | {"crossed_bytes": crossed}


# --- kills --------------------------------------------------------------------------------------------


def notes_of(folder: Path, workers: int) -> list[list[dict[str, Any]]]:
    """Return what each rank has noted, over all its lives."""
    files = [folder / f"{rank}.jsonl" for rank in range(workers)]
    return [
        [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
        for file in files
    ]


def kills(given: argparse.Namespace) -> None:
    """Kill a worker now and then, and print the goodput."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = [sys.executable, "-m", "kvps.cli.launch", "-n", str(given.workers), "-s", "1"]
        argv += ["--max-restarts", "1000", "--", sys.executable, str(WORKER), name]
        argv += [str(given.seconds), str(given.step_seconds), str(given.sync_every)]
        argv.append(str(given.quorum))
        job = subprocess.Popen(argv, env=environment(), stdout=subprocess.DEVNULL)
        while not (folder / "end").exists():
            if job.poll() is not None:
                raise SystemExit(f"the job ended with {job.returncode}")
            time.sleep(0.1)
        end = float((folder / "end").read_text())
        begin = end - given.seconds
        killed: list[tuple[int, float]] = []
        while given.kill_every and begin + (len(killed) + 1) * given.kill_every < end:
            time.sleep(max(0.0, begin + (len(killed) + 1) * given.kill_every - time.time()))
            rank = len(killed) % given.workers
            newest = notes_of(folder, given.workers)[rank][-1]
            if any(rank == item and newest["at"] < at for item, at in killed):
                raise SystemExit(f"rank {rank} has not come back since it was killed last")
            os.kill(newest["pid"], signal.SIGKILL)
            killed.append((rank, time.time()))
        if job.wait(timeout=given.seconds):
            raise SystemExit(f"the job ended with {job.returncode}")
        ranks = notes_of(folder, given.workers)
    merged = [
        note for notes in ranks for note in notes if note["event"] == "merge" and begin < note["at"] <= end
    ]
    steps, possible = (
        sum([item["steps"] for item in merged]),
        given.workers * given.seconds / given.step_seconds,
    )
    away = []
    for rank, at in killed:
        later = [item["at"] for item in ranks[rank] if item["event"] == "begin" and item["at"] > at]
        away.append((later[0] if later else end) - at)
    losses = [note["loss"] for notes in ranks for note in notes if note["event"] == "end"]
    print(
        f"{given.workers} workers, {given.seconds:.0f} s, {len(killed)} kills: {steps} of "
        f"{possible:.0f} steps "
        f"merged, goodput {steps / possible:.1%}; a killed worker was away for "
        f"{statistics.median(away) if away else 0:.1f} s (median); test loss {losses[0]:.3f}"
    )


if __name__ == "__main__":
    main()
