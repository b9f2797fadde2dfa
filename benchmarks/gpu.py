"""Checks and measures kvps on an accelerator, within eight minutes, and writes a report.

    make gpu                                    every part, on a machine with a GPU and torch 2.11 or later;
                                                without a GPU a rehearsal
    python -m benchmarks.gpu copies overlap     some parts, by name

The parts, in order of worth; each is a process of its own with a limit of seconds, so that a part that fails
or hangs costs no other part:

  tests     every test that needs a CUDA device, the sweep of front ends among them
  copies    what one training step copies between the device and the host, by torch.profiler: of
  each front end,
            exactly the gradients down and the new values up, once, through page-locked memory
  speed     those copies beside a bare copy of as many page-locked bytes; pushpull of ResNet-50's
  gradients from
            the device, beside the same by hand (``.cpu()``, pushpull, ``.copy_()``); four values
            per key, added up on the device (dist_sync_device) and on the host (dist_sync)
  overlap   a training step of two workers that share the device: alone, with pushpull after the
  backward pass,
            and with DistributedOptimizer, which sends gradients during the backward pass
  codecs    each codec of gradient compression on the device (benchmarks/codecs.py)

Without an accelerator it rehearses: every part runs, at a small size, on a simulated device of the tests, and
the report says so. Its times mean nothing then, but its values and its counts of copies hold.

Prints a paragraph for benchmarks/LOG.md. Writes that and ``gpu.json`` to ``--out``.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import kvps
import kvps.torch
from kvps.core.worker import calls
from kvps.runtime import device as seam
from kvps.runtime.device import Staging, bring_back
from kvps.store import arguments
from kvps.store.server_store import DistStore
from kvps.tools.bench.workloads import shapes_of

ROOT = Path(__file__).resolve().parent.parent
IS_REHEARSAL = not torch.accelerator.is_available()
DEVICE = str(torch.accelerator.current_accelerator() or "")
WORLDS: list[Any] = []
"""The simulated devices of a rehearsal."""
ROUNDS = 2 if IS_REHEARSAL else 10
WARM = 2
PER_KEY = 4
WIDTH = 16 if IS_REHEARSAL else 512
BUCKETS_MIB = (4,) if IS_REHEARSAL else (2, 4, 16, 32)
LIMITS_S = {"tests": 240, "copies": 60, "speed": 60, "overlap": 60, "codecs": 40}
"""The most seconds that each part may take on a device: 460 in all."""
PATIENCE = 5 if IS_REHEARSAL else 1
"""The factor of these: a rehearsal may run beside other work, and its times mean nothing."""


def main() -> int:
    """Run the parts, or one of them in this process; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        epilog=__doc__.split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(LIMITS_S))
    parser.add_argument("--out", type=Path, default=Path(), help="where the report goes (.)")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)  # run in this process
    args = parser.parse_args()
    if unknown := set(args.parts) - LIMITS_S.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(LIMITS_S)}")
    if args.here:
        with stage():
            args.here.write_text(json.dumps(PARTS[args.parts[0]]()))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine()}
    for name in args.parts or LIMITS_S:
        report[name] = part(name)
        print(f"{name:8} {report[name]}", flush=True)
        (args.out / "gpu.json").write_text(json.dumps(report, indent=1))
    text = paragraph(report)
    (args.out / "gpu.md").write_text(text)
    print(text)
    return any("failed" in report[name] for name in report)


@contextmanager
def stage() -> Iterator[None]:
    """Give a rehearsal a simulated device; nothing where there is an accelerator."""
    global DEVICE
    if not IS_REHEARSAL:
        yield
        return
    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(rename="simulated")
    from tests.support import simulated_device

    DEVICE = simulated_device.KIND
    with simulated_device.simulated("all late") as world:
        WORLDS.append(world)
        yield


def name_of_device() -> str:
    """Return the name of the accelerator."""
    return str(torch.get_device_module(DEVICE).get_device_name())


def machine() -> dict[str, str]:
    """Return what the figures were measured on."""
    return {
        "device": "a simulated device: a REHEARSAL, whose times mean nothing"
        if IS_REHEARSAL
        else name_of_device(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kvps": kvps.__version__,
        "cores": str(os.cpu_count()),
        "date": time.strftime("%Y-%m-%d"),
    }


def part(name: str) -> dict[str, Any]:
    """Run a part in a process of its own; return its figures, or why it failed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "figures.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu", name, "--here", str(out)]
        with log.open("w") as said:
            child = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True)
            limit_s = PATIENCE * LIMITS_S[name]
            try:
                why = f"exit {child.wait(limit_s)}"
            except subprocess.TimeoutExpired:
                why = f"took longer than {limit_s} s"
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if not out.exists():
            return {"failed": f"{why}: {log.read_text()[-3000:]}"}
        found: dict[str, Any] = json.loads(out.read_text())
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def there() -> str:
    """Return the device on which everything is measured."""
    return f"{DEVICE}:0"


def drain() -> None:
    """Wait for all that is queued on the device."""
    torch.accelerator.synchronize()


# --- tests ------------------------------------------------------------------------------------------


def run_tests() -> dict[str, Any]:
    """Run every test that is marked ``cuda``; return how many passed, and what failed."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text()]
    if IS_REHEARSAL:
        files = [ROOT / "tests/unit/runtime/test_device_waits.py", ROOT / "tests/integration/test_devices.py"]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        flags = [
            "-q",
            "--all",
            *(() if IS_REHEARSAL else ("-m", "cuda")),
            f"--junitxml={results}",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:benchmark",
        ]
        side_by_side = ["-n", str(min(8, os.cpu_count() or 1))]
        subprocess.run([sys.executable, "-m", "pytest", *flags, *side_by_side, *map(str, files)], cwd=ROOT)
        cases = list(ElementTree.parse(results).iter("testcase"))
    failed = {
        case.get("name", ""): (trouble.get("message") or "")[:1500]
        for case in cases
        for trouble in (*case.findall("failure"), *case.findall("error"))
    }
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    passed = len(cases) - len(failed) - skipped
    figures = {"passed": passed, "skipped": skipped}
    return {**figures, "failed": failed} if failed else figures


# --- copies -------------------------------------------------------------------------------------------


def model_of(layers: int, width: int) -> nn.Sequential:
    """Return layers of ``width`` x ``width`` on the device."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*blocks).to(there())


def a_step(
    front_end: str, model: nn.Sequential, x: torch.Tensor, bucket_bytes: int = 0
) -> Callable[[], None]:
    """Return one training step of ``model`` on ``x`` by a front end."""
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    on_servers = front_end.endswith("servers")
    if front_end.startswith("Trainer"):
        trainer = kvps.Trainer(model, sgd, kvstore="dist_sync", update_on_kvstore=on_servers)
        step: Callable[[], object] = lambda: trainer.step(1)  # noqa: E731
    elif front_end.startswith("DistributedOptimizer"):
        buckets = {"bucket_bytes": bucket_bytes} if bucket_bytes else {}
        step = kvps.torch.DistributedOptimizer(sgd, model, update_on_kvstore=on_servers, **buckets).step
    else:
        step = sgd.step

    def whole() -> None:
        sgd.zero_grad()
        model(x).square().mean().backward()
        step()

    return whole


FRONT_ENDS = (
    "DistributedOptimizer",
    "DistributedOptimizer, updates on servers",
    "Trainer",
    "Trainer, updates on servers",
)


def count_copies() -> dict[str, Any]:
    """Return, for each front end, what a step copies in each direction, as a share of the model."""
    return {name: copies_of(name) for name in FRONT_ENDS}


def copies_of(front_end: str) -> dict[str, str]:
    """Profile one step; return the copies by kind: times, bytes, and bytes of the model's."""

    def work(rank: int) -> dict[str, str]:
        model = model_of(8, WIDTH)
        size = sum(param.nbytes for param in model.parameters())
        step = a_step(front_end, model, torch.randn(64, WIDTH).to(there()))
        for _ in range(WARM + 1):
            step()
        drain()
        if IS_REHEARSAL:
            WORLDS[0].copies.clear()
            WORLDS[0].octets.clear()
            step()
            drain()
            found = +WORLDS[0].copies
            assert not found["pageable"], f"{front_end}: {found}"
            went = WORLDS[0].octets
            return {
                way: f"{found[way]} copies, {went[way] / size:.3f} of the model" for way in ("down", "up")
            }
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            step()
            drain()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        times: Counter[str] = Counter()
        octets: Counter[str] = Counter()
        for event in events:
            if event.get("cat") == "gpu_memcpy" and "DtoD" not in event["name"]:
                times[event["name"]] += 1
                octets[event["name"]] += event["args"]["bytes"]
        return {
            kind: f"{number} copies, {octets[kind] / size:.3f} of the model"
            for kind, number in sorted(times.items())
        }

    with kvps.LocalCluster(workers=1, servers=2) as cluster:
        found: list[dict[str, str]] = cluster.run(work)
    return found[0]


# --- speed --------------------------------------------------------------------------------------------


def measure_speed() -> dict[str, Any]:
    """Return the milliseconds of each way between the device and the servers."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "speed.json")
        launch(1, 2, "speed", out)
        return {**bare_copies(), **json.loads(out.read_text())}


def launch(workers: int, servers: int, name: str, out: Path) -> None:
    """Run ``WORKERS[name]`` as the script of a cluster; rank 0 writes to ``out``."""
    cluster = ["-m", "kvps.cli.launch", "-n", str(workers), "-s", str(servers), "--"]
    script = [sys.executable, "-c", f"from benchmarks.gpu import WORKERS; WORKERS[{name!r}]({str(out)!r})"]
    subprocess.run([sys.executable, *cluster, *script], cwd=ROOT, check=True)


def timed(work: Callable[[], object]) -> list[float]:
    """Return the milliseconds that each of ``ROUNDS`` calls took, the device's work included."""
    found = []
    for number in range(ROUNDS + WARM):
        drain()
        began = time.perf_counter()
        work()
        drain()
        if number >= WARM:
            found.append(1e3 * (time.perf_counter() - began))
    return found


def shapes() -> list[Any]:
    """Return the shapes of ResNet-50's arrays: of the first few in a rehearsal."""
    return list(shapes_of("resnet50"))[: 8 if IS_REHEARSAL else None]


def bare_copies() -> dict[str, str]:
    """Return the speed of copies of ResNet-50's bytes in one piece, the bound of what can be reached."""
    elements = sum(torch.Size(shape).numel() for shape in shapes())
    far = torch.randn(elements).to(there())
    here = seam.pinned((elements,), torch.float32).normal_()
    pageable = torch.randn(elements)
    gigabytes = 4 * elements / 1e9
    ways: dict[str, Callable[[], object]] = {
        "bare copy down": lambda: here.copy_(far, non_blocking=True),
        "bare copy up": lambda: far.copy_(here, non_blocking=True),
        "pageable copy down": lambda: pageable.copy_(far),
    }
    found = {name: statistics.median(timed(way)) for name, way in ways.items()}
    return {name: f"{ms:.2f} ms, {gigabytes / ms * 1e3:.1f} GB/s" for name, ms in found.items()}


def speed_worker(out_path: str) -> None:
    """Measure as one worker, the ways in turns."""
    sizes = shapes()
    keys = [f"k{index}" for index in range(len(sizes))]
    gradients = [[torch.randn(shape).to(there()) for shape in sizes] for _ in range(PER_KEY)]
    out = [torch.zeros(shape).to(there()) for shape in sizes]
    stores = {name: kvps.create(name) for name in ("dist_sync", "dist_sync_device")}
    for kv in stores.values():
        kv.init(keys, [torch.zeros(shape) for shape in sizes])
    plain, on_device = stores["dist_sync"], stores["dist_sync_device"]
    every = [list(values) for values in zip(*gradients, strict=True)]
    # As a store would allocate them: small ones side by side.
    counts = [torch.Size(shape).numel() for shape in sizes]
    order = sorted(range(len(sizes)), key=counts.__getitem__)
    whole = torch.empty(sum(counts))
    parts = dict(zip(order, torch.split(whole, [counts[index] for index in order]), strict=True))
    rows = [parts[index].view(shape) for index, shape in enumerate(sizes)]
    staging = Staging((whole.data_ptr(), whole.nbytes))
    locked = seam.pinned_rows(out)
    far, near = torch.empty(sum(counts)).to(there()), seam.pinned((sum(counts),), torch.float32)

    def pageable() -> None:
        found = plain.pushpull(keys, [value.cpu() for value in gradients[0]])
        for target, value in zip(out, found, strict=True):
            target.copy_(value)

    def down() -> None:
        staging.bring(gradients[0], lambda indices: [rows[index] for index in indices])

    ways: dict[str, Callable[[], object]] = {
        "staged": lambda: plain.pushpull(keys, gradients[0], out=out),
        "pageable": pageable,
        "4 on device": lambda: on_device.pushpull(keys, every, out=out),
        "4 on CPU": lambda: plain.pushpull(keys, every, out=out),
        "one copy down": lambda: near.copy_(far, non_blocking=True),
        "161 gradients down": down,
        "one copy up": lambda: far.copy_(near, non_blocking=True),
        "161 gradients up": lambda: bring_back(zip(out, locked, strict=True)),
        "host values": lambda: plain.pushpull(keys, list(rows)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    queued: dict[str, list[float]] = {"161 gradients up, until it returns": []}
    for number in range(ROUNDS + WARM):
        for name, way in ways.items():
            for value in (value for values in gradients for value in values):
                value.normal_()
            drain()
            began = time.perf_counter()
            way()
            returned = time.perf_counter()
            drain()
            if number >= WARM:
                times[name].append(1e3 * (time.perf_counter() - began))
                queued.get(f"{name}, until it returns", []).append(1e3 * (returned - began))
            given = every if name.startswith("4") else [[value] for value in gradients[0]]
            if name in ("staged", "pageable", "4 on device", "4 on CPU"):
                for values, found in zip(given, out, strict=True):
                    torch.testing.assert_close(found, torch.stack(values).sum(0))
    staging.close()
    Path(out_path).write_text(json.dumps({name: spread(found) for name, found in (times | queued).items()}))


def spread(found: list[float]) -> str:
    """Return the median, the least and the most."""
    return f"{statistics.median(found):.2f} ms ({min(found):.2f} to {max(found):.2f})"


# --- overlap ------------------------------------------------------------------------------------------


def measure_overlap() -> dict[str, Any]:
    """Return a step's milliseconds: alone, with pushpull after it, with pushpull beside it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "overlap.json")
        launch(2, 2, "overlap", out)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def overlap_worker(out_path: str) -> None:
    """Measure as one of two workers that share the device."""
    width = WIDTH if IS_REHEARSAL else 1536
    model = model_of(12, width)
    x = torch.randn(32 if IS_REHEARSAL else 16384, width).to(there())
    kv = kvps.create("dist_sync", name="by hand")
    keys = [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    alone = a_step("none", model, x)
    alone()
    gradients = [param.grad for param in params]
    assert all(gradient is not None for gradient in gradients)
    kv.init(keys, [torch.zeros(param.shape) for param in params])

    def after() -> None:
        alone()
        kv.pushpull(keys, gradients, out=gradients)  # type: ignore[arg-type]

    def measured(step: Callable[[], object]) -> float:
        found = []
        for number in range(ROUNDS + WARM):
            kv.barrier()
            drain()
            began = time.perf_counter()
            step()
            drain()
            if number >= WARM:
                found.append(1e3 * (time.perf_counter() - began))
        return statistics.median(found)

    alone_ms, after_ms = measured(alone), measured(after)
    beside_ms = measured(a_step("DistributedOptimizer", model, x))
    sizes = {
        f"beside, buckets of {mib} MiB": measured(
            a_step("DistributedOptimizer", model, x, bucket_bytes=mib << 20)
        )
        for mib in BUCKETS_MIB
    }
    kv.barrier()
    buckets = Trace().of(a_step("DistributedOptimizer", model, x))
    hidden = (after_ms - beside_ms) / (after_ms - alone_ms)
    figures = {"alone": alone_ms, "after": after_ms, "beside": beside_ms, **sizes}
    if kv.rank == 0:
        rounded = {name: f"{ms:.1f} ms" for name, ms in figures.items()}
        Path(out_path).write_text(json.dumps({**rounded, "hidden": f"{hidden:.0%}", "trace": buckets}))
    kv.barrier()


class Trace:
    """The way of each bucket of a step: when its gradients are ready, and so on, in milliseconds."""

    def __init__(self) -> None:
        self._device = torch.device(there())
        self._lines: list[dict[str, float | torch.Event]] = []

    def of(self, step: Callable[[], object]) -> list[str]:
        """Return a line for each bucket of a step, after some that warm up."""
        for _ in range(WARM + 1):
            step()
        drain()
        with pytest.MonkeyPatch.context() as patch:
            self._wrap(patch, seam.CallsBehindKernels, "begin", self._on_begin)
            self._wrap(patch, Staging, "bring", self._on_bring)
            self._wrap(patch, DistStore, "_start", self._on_start)
            self._wrap(patch, arguments, "bring_back", self._on_answer)
            base = seam.stamp(self._device)
            drain()
            began = time.perf_counter()
            step()
            end = seam.stamp(self._device)
            drain()
        names = ("hook", "ready", "taken", "down", "sent", "answered", "seen", "up")
        found = [" ".join(names)]
        for line in self._lines:
            values = [line[name] for name in names]
            found.append(
                " ".join(
                    f"{1e3 * (at - began) if isinstance(at, float) else base.elapsed_time(at):.1f}"
                    for at in values
                )
            )
        return [*found, f"step {base.elapsed_time(end):.1f}"]

    def _wrap(self, patch: pytest.MonkeyPatch, owner: object, name: str, on_call: Callable[..., Any]) -> None:
        before = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **options: on_call(before, *args, **options))

    def _on_begin(self, begin: Callable[..., Any], *args: Any) -> Any:
        self._lines.append({"hook": time.perf_counter(), "ready": seam.stamp(self._device)})
        return begin(*args)

    def _line(self, name: str) -> dict[str, float | torch.Event]:
        """Return the first bucket that has not come to ``name``: they come in their order."""
        return next(line for line in self._lines if name not in line)

    def _on_bring(self, bring: Callable[..., Any], *args: Any) -> Any:
        line = self._line("taken")
        line["taken"] = time.perf_counter()
        rows = bring(*args)
        line["down"] = time.perf_counter()
        return rows

    def _on_start(self, start: Callable[..., Any], store: Any, call: Any, *args: Any) -> Any:
        ticket = start(store, call, *args)
        if isinstance(call, calls.PushValues):
            line = self._line("sent")
            line["sent"] = time.perf_counter()
            ticket.when_over(lambda: line.setdefault("answered", time.perf_counter()))
        return ticket

    def _on_answer(self, bring_back: Callable[..., Any], *args: Any) -> None:
        line = self._line("up")
        line["seen"] = time.perf_counter()
        bring_back(*args)
        with seam.on(seam._stream(self._device, "up")):
            line["up"] = seam.stamp(self._device)


# --- codecs, and the report ---------------------------------------------------------------------------


def measure_codecs() -> dict[str, Any]:
    """Return the table of benchmarks/codecs.py, line by line."""
    from benchmarks import codecs

    # Of torch's factories the simulated device has empty() alone, so a rehearsal is on the CPU.
    where = ("cpu", "--elements", "4096", "--repeat", "1") if IS_REHEARSAL else (there(),)
    sys.argv = ["codecs", "--device", *where]
    with redirect_stdout(io.StringIO()) as said:
        codecs.main()
    return {"table": said.getvalue().splitlines()}


def paragraph(report: dict[str, Any]) -> str:
    """Return the report as a paragraph for benchmarks/LOG.md."""
    told = report["machine"]
    place = "On no GPU" if "REHEARSAL" in told["device"] else "On a GPU"
    lines = [
        f"**{place}** ({told['date']}; {told['device']}, torch {told['torch']}, Python {told['python']},"
        f" {told['cores']} cores; `make gpu`)."
    ]
    for name in (name for name in LIMITS_S if name in report):
        figures = report[name]
        if isinstance(figures.get("failed"), str):
            lines.append(f"* {name}: failed, {figures['failed'].strip().splitlines()[-1]}")
            continue
        plain = {key: value for key, value in figures.items() if not isinstance(value, list)}
        lines.append(f"* {name}: " + "; ".join(f"{key}: {value}" for key, value in plain.items()))
        for table in (value for value in figures.values() if isinstance(value, list)):
            lines += ["  ```", *(f"  {line}" for line in table), "  ```"]
    return "\n".join([*lines, ""])


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tests": run_tests,
    "copies": count_copies,
    "speed": measure_speed,
    "overlap": measure_overlap,
    "codecs": measure_codecs,
}


def staged(worker: Callable[[str], None]) -> Callable[[str], None]:
    """Return a script of a cluster that has its own device in a rehearsal."""

    def run(out_path: str) -> None:
        with stage():
            worker(out_path)

    return run


WORKERS = {"speed": staged(speed_worker), "overlap": staged(overlap_worker)}


if __name__ == "__main__":
    raise SystemExit(main())
