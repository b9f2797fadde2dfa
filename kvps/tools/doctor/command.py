"""``kvps doctor``: finds out why a process does not reach its cluster, or is slow, and says what to do.

Looks at all that a process needs to be part of a job: the scheduler's name and port, the connection, keys,
the answer, versions, the members, round trip, bandwidth, clocks, shared memory and file descriptors. Run it
on the host that has trouble, as the user that has it. It takes no seat in the job.

examples:
  kvps doctor --scheduler tcp://10.0.0.1:9091
  kvps doctor --keys /etc/kvps/keys
  kvps doctor --bind tcp://0.0.0.0:9091          whether the scheduler can listen there
  kvps doctor --json | jq '.findings[] | select(.level == "fail")'
  kvps doctor --limits train.py                                which time limit must be above which
  kvps doctor --predict --link 100mbit train.py --epochs 1     whether several machines pay

Each line is ok, warn, fail or skip (it could not be looked at), then the figure, and then what to do. The bandwidth
is that of the way to the scheduler, by some hundred KiB that it echoes. Servers talk to members of the job
only, so the way to them is not measured; kvps bench compares the speed of kvps with the machine's.

--limits reads the time limits that SCRIPT gives to kvps, torch, Lightning, Accelerate and Ray, with the
environment, and says which must be above which.

--predict says how fast a job would be on several machines, a worker on each, with each codec, local steps, or a
ring without servers; and how many servers are enough. SCRIPT is any training script: its first steps are timed
on this machine. Without SCRIPT, the steps of the job that runs at --scheduler count, or --model and --step.

exit codes:
  0   nothing failed; there may be warnings
  1   something failed
  78  a bad flag

environment, where the flag is not given:
  KVPS_SCHEDULER, KVPS_KEYS, KVPS_TRANSPORT, KVPS_TIMEOUT (seconds to wait for an answer), KVPS_LOG_LEVEL,
  KVPS_LOG_FORMAT, NO_COLOR
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvps import config
from kvps.cli import flags
from kvps.errors import ConfigError
from kvps.inquiry import Inquirer
from kvps.observe.findings import Finding, Level
from kvps.tools.doctor.diagnosis import Measurements, diagnose, exit_code

NAME = "kvps doctor"
TIMEOUT_S = 3.0
STYLES = {Level.OK: "32", Level.WARN: "33", Level.FAIL: "31;1", Level.SKIP: "2"}


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = flags.Parser(NAME, __doc__)
    parser.add_flags(
        {
            **flags.asking(TIMEOUT_S),
            "--bind tcp://HOST:PORT": "also try to listen here, as a process would",
            "--json": "print one JSON object",
            "--limits": "check the time limits of SCRIPT, which is read and not run; with --step also those of merges",
            "--predict": "predict how fast a job would be on several machines",
            "--link RATE": "with --predict: the link of each machine, each way (100mbit); the way to --scheduler",
            "--model SIZE": "with --predict: bytes of all gradients in float32 (100M)",
            "--step SECONDS": "with --predict or --limits: how long a step computes on one machine",
            "--apart": "with --predict: servers have machines of their own",
            "--machines N ...": "with --predict: numbers of machines (2, 4 and 8)",
        }
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="with --predict or --limits: a script"
    )
    parsed = parser.parse_args(argv)
    flags.start_log(NAME, parsed)
    if parsed.predict:
        from kvps.tools.doctor import forecast

        return forecast.main(parsed, flags.timeout_of(parsed, TIMEOUT_S))
    if parsed.limits:
        return _limits(parsed)
    if surplus := [
        name for name in ("link", "model", "step", "apart", "machines", "script") if getattr(parsed, name)
    ]:
        raise ConfigError(f"{surplus[0]} belongs to --predict or --limits, which is not given")
    scheduler = flags.scheduler_of(parsed)
    bind = "" if parsed.bind is None else config.as_bind("--bind", parsed.bind)
    limit_s = flags.timeout_of(parsed, TIMEOUT_S)
    from kvps.tools.doctor import examination  # loads numpy, which --help does not wait for

    found = examination.of_this_process(bind)
    found, keys = examination.with_keys(found, lambda: flags.keys_of(parsed, "look"))
    found = examination.of_address(found, scheduler)
    if found.mechanism in ("NULL", "CURVE") and not found.keys_error:
        try:
            with Inquirer(scheduler, keys) as inquirer:
                found = examination.of_scheduler(found, inquirer.ask, limit_s)
        except ConfigError as error:  # there are too few descriptors for one connection
            found = replace(found, look_error=str(error))
    return _show(parsed, diagnose(found), found)


def _limits(parsed: argparse.Namespace) -> int:
    """Print what the time limits of a script say of each other."""
    if len(parsed.script) != 1:
        raise ConfigError("--limits: give one SCRIPT")
    from kvps.tools.doctor.ladder import findings_of

    step_s = None if parsed.step is None else config.as_seconds("--step", parsed.step)
    try:
        findings = findings_of(Path(parsed.script[0]).read_text(), os.environ, step_s)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"--limits: cannot read {parsed.script[0]}: {error}") from error
    return _show(parsed, findings, Measurements(""))


def _show(parsed: argparse.Namespace, findings: Sequence[Finding], found: Measurements) -> int:
    is_coloured = sys.stdout.isatty() and config.text("NO_COLOR") is None
    print(as_json(findings, found) if parsed.json else report(findings, is_coloured))
    return exit_code(findings)


def report(findings: Sequence[Finding], colour: bool) -> str:
    """Return the report: a line for each finding, and its advice below it."""
    width = max([len(finding.topic) for finding in findings])
    lines = []
    for finding in findings:
        level = f"{finding.level.value:<4}"
        if colour:
            level = f"\x1b[{STYLES[finding.level]}m{level}\x1b[0m"
        lines.append(f"{level}  {finding.topic:<{width}}  {finding.text}")
        if finding.advice:
            lines.append(f"{'':<{6 + width}}  -> {finding.advice}")
    failed = sum([finding.level is Level.FAIL for finding in findings])
    warned = sum([finding.level is Level.WARN for finding in findings])
    lines += ["", f"{failed} failed, {warned} to look at" if failed or warned else "all is well"]
    return "\n".join(lines)


def as_json(findings: Sequence[Finding], found: Measurements) -> str:
    """Return the findings as JSON."""
    shown = {
        "scheduler": found.scheduler,
        "exit_code": exit_code(findings),
        "findings": [finding._asdict() for finding in findings],
    }
    return json.dumps(shown, indent=2)


if __name__ == "__main__":
    sys.exit(main())
