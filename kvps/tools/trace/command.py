"""``kvps trace``: records what all processes of a job do, as one timeline, and says what bounds a step.

Records what every process of a running job does, on one clock, and says in words what bounds its steps: the compute
of a worker, a link, the work of a server, or the wait for a slow rank.

examples:
  kvps trace --seconds 10 --out trace.json     record, explain, and keep the timeline
  kvps trace --explain trace.json              explain a timeline that was kept
  KVPS_TIMELINE=trace.json kvps-launch -n 4 -s 2 -- python train.py
                                               record a whole job

Open the file in https://ui.perfetto.dev, or in chrome://tracing; nothing is uploaded. Each worker has a track for its
script (compute, wait) and a track for its kvps loop (copy, encode, send, scatter); each server has reduce, update and
reply. Arrows join the spans of one request. A trace needs the key of the role admin: it slows the job, by up to 3 %.

{exit_codes}
environment, where the flag is not given:
  KVPS_SCHEDULER, KVPS_KEYS, KVPS_TIMEOUT (seconds without an answer), KVPS_LOG_LEVEL
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvps import config
from kvps.cli import flags
from kvps.errors import ConfigError
from kvps.inquiry import Inquirer
from kvps.net.zap import Keys
from kvps.protocol.tracing import Fetch, Part, Trace, Tracing
from kvps.tools.trace import chrome
from kvps.tools.trace.chrome import MergedTrace, merge, write
from kvps.tools.trace.explain import explain

NAME = "kvps trace"
TIMEOUT_S = 10.0
SECONDS = 10.0
LOOK_EVERY_S = 0.5
"""How often the scheduler is asked whether the trace is over: it may end before, with its job."""


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = flags.Parser(NAME, __doc__)
    parser.add_flags(
        {
            **flags.asking(TIMEOUT_S),
            "--seconds S": f"how long to record, at most 600 ({SECONDS:g})",
            "--out FILE": "write the timeline there (it is not kept)",
            "--explain FILE": "explain this timeline; record nothing",
        }
    )
    parsed = parser.parse_args(argv)
    flags.start_log(NAME, parsed)
    if parsed.explain is not None:
        if parsed.seconds is not None or parsed.out is not None:
            parser.error("--explain reads a timeline; --seconds and --out record one")
        print(explain(_read(parsed.explain)).text)
        return 0
    for_s = SECONDS
    if parsed.seconds is not None:
        for_s = config.as_seconds("--seconds", parsed.seconds)
    scheduler, keys = flags.scheduler_of(parsed), flags.keys_of(parsed, "admin")
    limit_s = flags.timeout_of(parsed, TIMEOUT_S)
    trace = record(scheduler, for_s, keys, limit_s)
    if parsed.out is not None:
        write(Path(parsed.out), trace)
    print(explain(trace).text)
    if parsed.out is not None:
        print(f"\nthe timeline is in {parsed.out}: open it in https://ui.perfetto.dev")
    return 0


def record(scheduler: str, for_s: float, keys: Keys | None, limit_s: float) -> MergedTrace:
    """Return a trace of the job at ``scheduler``.

    Raises:
        Unauthorized: if the scheduler has keys, and these do not allow a trace.
        SchedulerLost: if it does not answer in time.
        ConfigError: if it records another trace.
    """
    trace = Trace(secrets.randbelow(2**62) + 1, for_s)
    parts: list[tuple[Part, bytes]] = []
    with Inquirer(scheduler, keys) as inquirer:
        while True:
            tracing = inquirer.ask(trace, Tracing, limit_s).message
            assert isinstance(tracing, Tracing)
            if not tracing.left_s:
                break
            time.sleep(min(LOOK_EVERY_S, tracing.left_s))
        for number in range(tracing.parts):
            answer = inquirer.ask(Fetch(trace.number, number), Part, limit_s)
            assert isinstance(answer.message, Part)
            parts.append((answer.message, b"".join(answer.payload)))
    return merge(parts, tracing.wall_s, tracing.clock)


def _read(name: str) -> MergedTrace:
    try:
        return chrome.load(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {name}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
