"""What a timeline and the flight recorder cost: rounds without either, with each, and with a full
record, in turns.

    python benchmarks/observing.py [--turns 5] [--workload resnet50] [--tree DIR]

Each turn runs ``kvps bench`` once for each kind, one after another, so that all kinds meet the
same load. ``--tree`` adds the code of another clone, with neither, as a kind of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvps import protocol as p
from kvps.core.effects import CoreOutbox, Send
from kvps.net.driver import Lens
from kvps.net.transport import Encoding
from kvps.protocol.envelope import Envelope, Packet, Role
from kvps.tools.replay.recorder import RingLens
from kvps.tools.trace.lens import MemberLens
from kvps.tools.trace.member import TracedMember
from kvps.tools.trace.tracer import Tracer

HERE = Path(__file__).resolve().parents[1]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workload", default="resnet50")
    parser.add_argument("--full", action="store_true", help="also with a full record")
    parser.add_argument("--tree", type=Path, help="another clone to measure beside this one")
    parser.add_argument(
        "--packets", action="store_true", help="only: processor time per packet, in this process"
    )
    given = parser.parse_args()
    if given.packets:
        per_packet()
        return
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, tuple[Path, dict[str, str]]] = {
            "neither": (HERE, {"KVPS_RECORD": "off"}),
            "flight recorder": (HERE, {"KVPS_RECORD": "ring"}),
            "timeline": (HERE, {"KVPS_RECORD": "off", "KVPS_TIMELINE": str(Path(folder) / "trace.json")}),
        }
        if given.full:
            record = {"KVPS_RECORD": "full", "KVPS_RECORD_DIR": str(Path(folder) / "records")}
            kinds["full record"] = HERE, record
        if given.tree:
            kinds = {"other tree": (given.tree, {}), **kinds}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(given.turns):
            for kind, (tree, env) in kinds.items():
                times[kind].append(measured(tree, env, given, Path(folder)))
                load = os.getloadavg()[0]
                print(f"turn {turn + 1}  {kind:<16} {times[kind][-1]:8.2f} ms  load {load:.1f}", flush=True)
    for kind, found in times.items():
        ratios = [item / base for item, base in zip(found, times["neither"], strict=True)]
        print(
            f"{kind:<16} median {statistics.median(found):8.2f} ms  ratio to neither, turn by turn: "
            f"{' '.join(f'{ratio:.2f}' for ratio in ratios)}, median {statistics.median(ratios):.3f}"
        )


def per_packet(count: int = 20_000) -> None:
    """Print the processor time that each lens takes per packet, with its answer: the median of nine turns."""
    packet = Packet(
        Envelope(bytes(16), 3, Role.WORKER, 1, 5, 42),
        p.Push(3, 1, (1,), 1.0, True, tuple([p.Run(100 * at, 100, 7) for at in range(7)])),
        (memoryview(bytes(2800)),),
    )
    answer = Send(b"w", Packet(packet.envelope, p.Ack((p.Receipt(42, 7),))))

    class Core:
        def __init__(self) -> None:
            self.outbox = CoreOutbox()

        def on_packet(self, route: object, packet: object, now: float) -> None:
            self.outbox.append(answer)

    def tracer() -> Tracer:
        return Tracer(TracedMember("a", 1), Role.SERVER, Encoding())

    recording = MemberLens(tracer(), lambda: packet.envelope)
    ring = RingLens({"role": "server"}, Path("none"))
    lenses: dict[str, Lens] = {
        "none": Lens(),
        "off": MemberLens(tracer(), lambda: packet.envelope),
        "flight recorder": MemberLens(tracer(), lambda: packet.envelope, below=ring),
        "timeline": recording,
    }
    cores, times = {name: Core() for name in lenses}, {name: [] for name in lenses}
    for name, lens in lenses.items():
        lens.connect(cores[name], lambda effect: None)
    recording.packet(cores["timeline"], "scheduler", Packet(packet.envelope, p.AskClock(7, 0)), 0.0)
    for _ in range(9):
        for name, lens in lenses.items():
            core, began = cores[name], time.thread_time()
            for _ in range(count):
                lens.current.packet(core, b"w", packet, 1.0)
            times[name].append((time.thread_time() - began) / count * 1e6)
            recording.member.spans.clear()
    base = statistics.median(times["none"])
    for name, found in times.items():
        print(f"{name:<16} {statistics.median(found) - base:6.2f} us per packet and its answer")


def measured(tree: Path, env: dict[str, str], given: argparse.Namespace, folder: Path) -> float:
    """Return the median time of a round, in milliseconds."""
    out = folder / "figures.json"
    argv = [
        *(sys.executable, "-P", "-m", "kvps.cli.main", "bench", "--workloads", given.workload),
        *("--systems", "kvps", "--rounds", str(given.rounds), "--repeat", "1", "--no-limits"),
        *("--json", str(out)),
    ]
    place = {**os.environ, "PYTHONPATH": str(tree), **env}
    subprocess.run(argv, env=place, check=True, stdout=subprocess.DEVNULL, cwd=tree)
    (row,) = json.loads(out.read_text())["rows"]
    return float(row["median_ms"])


if __name__ == "__main__":
    main()
