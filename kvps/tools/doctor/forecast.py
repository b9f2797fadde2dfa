"""The measurements behind ``kvps doctor --predict``: a script's first steps, a running job, a link."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvps import config
from kvps.cli import flags
from kvps.errors import ConfigError
from kvps.inquiry import Inquirer
from kvps.protocol.envelope import Role
from kvps.protocol.membership import Figures, Look, Seen
from kvps.tools.doctor import examination
from kvps.tools.doctor.diagnosis import Measurements, bits_s
from kvps.tools.doctor.prediction import WAYS, Job, advise, computed_s, predict, report

STEPS = 10
MACHINES = (2, 4, 8)
BACKWARD = 2 / 3
ARRAYS = 100
LOOK_S, LOOK_ROUNDS, LOOK_MAX_S, LOOK_EVERY_S = 5.0, 3, 60.0, 0.1
"""A job is watched for so many seconds and rounds, and no longer than the third."""


def main(parsed: argparse.Namespace, limit_s: float) -> int:
    """Print the prediction that the flags ask for.

    Raises:
        ConfigError: if the flags do not say enough of the job.
    """
    job = _job(parsed, limit_s)
    machines = [_count("--machines", text) for text in parsed.machines or ()] or list(MACHINES)
    print(as_json(job, machines) if parsed.json else report(job, machines))
    return 0


def as_json(job: Job, machines: Sequence[int]) -> str:
    """Return the prediction as JSON."""
    rows = [
        {**found._asdict(), "way": found.way.name, "code": found.way.code}
        for count in machines
        for found in (predict(job, way, count) for way in WAYS)
    ]
    best = {count: found.way.name if (found := advise(job, count)) else None for count in machines}
    return json.dumps({"job": asdict(job), "ways": rows, "advice": best}, indent=2)


def _job(parsed: argparse.Namespace, limit_s: float) -> Job:
    known: dict[str, float] = {"arrays": ARRAYS, "backward": BACKWARD}
    if parsed.script:
        known |= _steps_of(parsed.script)
    if parsed.scheduler or config.text("KVPS_SCHEDULER"):
        known = {**_running(parsed, limit_s, is_job=not parsed.script), **known}
    for name, flag, read in (
        ("link_bytes_s", "link", config.as_rate),
        ("model_bytes", "model", config.as_bytes),
        ("step_s", "step", config.as_seconds),
    ):
        if (text := getattr(parsed, flag)) is not None:
            known[name] = read(f"--{flag}", text)
    for name, how in (
        ("model_bytes", "--model 100M, or SCRIPT, which is run for a few steps"),
        ("step_s", "--step 0.25, or SCRIPT, which is run for a few steps"),
        ("link_bytes_s", "--link 100mbit, or --scheduler of a running job"),
    ):
        if name not in known:
            raise ConfigError(f"--predict: give {how}")
    return Job(is_apart=bool(parsed.apart), **known)  # type: ignore[arg-type]  # each is a number


def _steps_of(words: Sequence[str]) -> dict[str, float]:
    """Run a script for a few steps; return what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "steps.json"
        argv = [sys.executable, "-m", "kvps.tools.bench.steps", str(STEPS), str(found), *words]
        code = subprocess.run(argv, stdout=subprocess.DEVNULL).returncode
        if code:
            raise ConfigError(f"--predict: {words[0]} ended with {code} before {STEPS} steps; see above")
        return dict(json.loads(found.read_text()))


def _running(parsed: argparse.Namespace, limit_s: float, *, is_job: bool) -> dict[str, float]:
    """Return the link of a running job, and the steps of its workers if they are wanted."""
    scheduler = flags.scheduler_of(parsed)
    with Inquirer(scheduler, flags.keys_of(parsed, "look")) as inquirer:
        found = examination.of_scheduler(Measurements(scheduler), inquirer.ask, limit_s)
        rate = bits_s(found)
        if found.seen is None or rate is None:
            raise ConfigError(f"--predict: {scheduler} does not answer; see kvps doctor without --predict")
        link = {"link_bytes_s": rate / 8, "round_trip_s": min(found.round_trips_s)}
        return {**link, **(_watched(inquirer, found.seen, limit_s, link) if is_job else {})}


def _watched(inquirer: Inquirer, seen: Seen, limit_s: float, link: dict[str, float]) -> dict[str, float]:
    """Return the step of the first worker of a job that makes rounds; nothing if none does.

    Members tell their figures once per second, so times count from one change to another.
    """
    first: dict[int, tuple[float, Figures]] = {}
    until = time.monotonic() + LOOK_MAX_S
    while (now := time.monotonic()) < until:
        for number, (old, new) in enumerate(
            zip(seen.figures, _look(inquirer, limit_s).figures, strict=False)
        ):
            if new.rounds == (first[number][1] if number in first else old).rounds:
                continue
            began, then = first.setdefault(number, (now, new))
            if now - began >= LOOK_S and (rounds := new.rounds - then.rounds) >= LOOK_ROUNDS:
                step_s, sent = (now - began) / rounds, (new.out_bytes - then.out_bytes) // rounds
                if len({member.host for member in seen.members if member.host}) > 1:  # else they share memory
                    roles = [member.role for member in seen.members]
                    job = Job(sent, ARRAYS, step_s, link["link_bytes_s"], round_trip_s=link["round_trip_s"])
                    step_s = computed_s(job, roles.count(Role.WORKER), max(1, roles.count(Role.SERVER)))
                return {"model_bytes": sent, "step_s": step_s}
        time.sleep(LOOK_EVERY_S)
    return {}


def _look(inquirer: Inquirer, limit_s: float) -> Seen:
    seen = inquirer.ask(Look(), Seen, limit_s).message
    assert isinstance(seen, Seen)
    return seen


def _count(name: str, text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= 1000:
        raise ConfigError(f"{name}={text!r}: use a number from 2 to 1000")
    return int(text)
