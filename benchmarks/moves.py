"""How long steps take while ``kvps scale`` spreads servers from two processes to three and back.

    python -m benchmarks.moves [--size 3200000] [--moves 3]

Two workers train eight arrays with momentum on three seats of servers (``-s 2:3``), and compute 0.1 s in
each step. Printed are the median step before, and for each scaling how long it took, the longest step
meanwhile, by how much that is over the median, and the bytes that were copied, of those of the seats that
moved; then the load of the machine, and whether all steps are in the weights.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.recovery import LIMIT_S, until

COUNT = """
import os, sys
if "kvps.cli.server" in sys.orig_argv:
    from kvps.core.server.replicas.handover import Handover
    pump, say = Handover._pump, Handover._say
    def counted(self):
        was = self.is_level
        pump(self)
        if self.is_level and not was:
            chunks = self._chunks.by_number.values()
            held = sum([chunk.used * (1 + len(chunk.state or ())) for chunk in chunks])
            with open(os.environ["COPIED"], "a") as log:
                print(held, vars(self).pop("said", 0), file=log)
    def noted(self, message, *rest):
        if type(message).__name__ == "CopyValues":
            self.said = vars(self).get("said", 0) + message.size * (1 + len(message.fields))
        say(self, message, *rest)
    Handover._pump, Handover._say = counted, noted
"""
"""Each server's process notes what the copy of a seat had when it became level: the elements that the seat
holds, and those that were sent."""
TRAIN = """
import os, sys, time
import torch
import kvps
folder, size = sys.argv[1], int(sys.argv[2])
kv = kvps.create("dist_sync")
names = [f"w{at}" for at in range(8)]
weights, gradients = [[torch.zeros(size) for _ in names] for _ in range(2)]
kv.init(names, weights)
kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.9)
go_on = torch.zeros(1)
kv.init("go on", go_on)
gradients[0][0] = -1.0
step, velocity, value = 0, 0.0, 0.0
with open(f"{folder}/steps.{kv.rank}", "w", buffering=1) as steps:
    while not go_on.item():
        time.sleep(0.1)
        began = time.time()
        kv.pushpull(names, gradients, out=weights)
        steps.write(f"{began} {time.time()}\\n")
        step, velocity = step + 1, 0.9 * velocity + 2.0
        value += velocity
        kv.pushpull("go on", torch.tensor([-10.0 * os.path.exists(f"{folder}/end")]), out=go_on)
print("exact", abs(weights[0][0].item() / value - 1) < 1e-4, flush=True)
"""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=3_200_000, help="elements of each of 8 keys")
    parser.add_argument("--moves", type=int, default=3, help="how often to scale to three and back")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(COUNT)
        (folder / "train.py").write_text(TRAIN)
        path = f"{folder}:{Path(__file__).parent.parent}"
        environment = os.environ | {"PYTHONPATH": path, "COPIED": str(folder / "copied")}
        words = ["-n", "2", "-s", "2:3", "--log-level", "info", "--insecure", "--", sys.executable]
        with (folder / "log").open("wb") as log:
            argv = [sys.executable, "-m", "kvps.cli.launch", *words, folder / "train.py", folder]
            job = subprocess.Popen([*argv, str(parsed.size)], stdout=log, stderr=log, env=environment)
            try:
                until(lambda: len(_steps(folder)) > 30, "steps")
                median_s = statistics.median([end - begin for begin, end in _steps(folder)[5:]])
                print(f"median step {1e3 * median_s:.0f} ms")
                for servers in (3, 2) * parsed.moves:
                    _scale(folder, servers, median_s)
                (folder / "end").touch()
                code = job.wait(LIMIT_S)
            finally:
                job.send_signal(signal.SIGTERM)
                job.wait()
        exact = re.findall(r"exact (\w+)", (folder / "log").read_text())
    print(
        f"load {os.getloadavg()[0]:.1f}; exit code {code}; all steps are in the weights: {', '.join(exact)}"
    )
    return code


def _steps(folder: Path) -> list[tuple[float, float]]:
    """Return when the exchange of each step of worker 0 began and ended."""
    file = folder / "steps.0"
    rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [(float(row[0]), float(row[1])) for row in rows if len(row) == 2]


def _scale(folder: Path, servers: int, median_s: float) -> None:
    """Scale once, and print what that cost."""
    copied = folder / "copied"
    before = len(copied.read_text().splitlines()) if copied.exists() else 0
    found = re.search(r"tcp://[\d.]+:\d+", (folder / "log").read_text())
    assert found is not None
    began = time.time()
    words = ["scale", "--servers", str(servers), "--scheduler", found[0]]
    subprocess.run([sys.executable, "-m", "kvps", *words], check=True, stdout=subprocess.DEVNULL)
    ended = time.time()
    until(lambda: _steps(folder)[-1][0] > ended, "step")
    longest_s = max([end - begin for begin, end in _steps(folder) if end > began and begin < ended])
    held, sent = zip(
        *[map(int, line.split()) for line in copied.read_text().splitlines()[before:]], strict=True
    )
    print(
        f"to {servers}: {ended - began:.1f} s, longest step {1e3 * longest_s:.0f} ms "
        f"({1e3 * (longest_s - median_s):.0f} over the median), {len(held)} seats, copied "
        f"{sum(sent) / sum(held):.2f} times what they hold",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
