"""``kvps status``: one screen with the state of a job, as its scheduler sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvps.cli import flags
from kvps.inquiry import inquire
from kvps.observe.cluster_view import UNKNOWN
from kvps.observe.judgement import problems_of
from kvps.observe.scheduler_state import as_json
from kvps.phrases import bytes_in_words, ranks_in_words
from kvps.protocol.envelope import Role
from kvps.protocol.membership import Figures, Look, OldRound, Seen, Sight

NAME = "kvps status"
TIMEOUT_S = 5.0
KEY_SHOWN = 40
"""Characters of a key that a line shows."""
WHAT = """\
Shows the members of a job, their states, versions and memory, the newest checkpoint, and the oldest
open round of each store: its age, and the ranks that it waits for. It takes no seat in the job."""
MORE = f"""\
examples:
  kvps status --scheduler tcp://10.0.0.1:9091
  watch kvps status
  kvps status --json | jq '.rounds[0].missing'

Only rounds that have been open for some seconds are shown. The state of a worker comes from its calls:
'alive, but no progress for 42 s' may be a long computation or a hang; 'hangs' is a process that stands still.

{flags.EXIT_CODES}
environment, where the flag is not given:
  KVPS_SCHEDULER, KVPS_KEYS, KVPS_TIMEOUT (seconds to wait for an answer), KVPS_LOG_LEVEL, KVPS_LOG_FORMAT
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return flags.run(NAME, argv, _main)


def _main(argv: Sequence[str]) -> int:
    parser = flags.Parser(NAME, WHAT, MORE)
    flags.add_scheduler(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_timeout(parser, TIMEOUT_S)
    parsed = parser.parse_args(argv)
    flags.start_log(NAME, parsed)
    scheduler = flags.scheduler_of(parsed)
    limit_s = flags.timeout_of(parsed, TIMEOUT_S)
    answer = inquire(scheduler, Look(), Seen, flags.keys_of(parsed, "look"), limit_s)
    job, seen = answer.envelope.job, answer.message
    assert isinstance(seen, Seen)
    print(json.dumps(as_json(job, seen), indent=2) if parsed.json else screen(job, seen))
    return 0


def screen(job: bytes, seen: Seen) -> str:
    """Return what a person is shown."""
    lines = [f"job {job.hex()[:8]} is {seen.phase}: {seen.reason}", *_facts(seen), ""]
    figures = seen.figures or (UNKNOWN,) * len(seen.members)
    lines += _table(
        ("member", "state", "incarnation", "where", "version", "memory", "heard", "status"),
        [
            _member(*sight_and_figures)
            for sight_and_figures in zip(seen.members, figures, strict=False)
        ],
    )
    presence = {
        member.rank: member.presence for member in seen.members if member.role == Role.WORKER
    }
    if seen.rounds:
        lines += ["", "oldest open rounds:"]
        lines += _table(
            ("store", "key", "round", "open for", "waits for"),
            [_round(round_, presence) for round_ in seen.rounds],
        )
    problems = problems_of(seen)
    for problem in problems:
        lines += ["", f"problem: {problem.text}", f"  -> {problem.advice}"]
    if not seen.rounds and not problems:
        lines += ["", "no round has been open for long"]
    return "\n".join(lines)


def _facts(seen: Seen) -> list[str]:
    """Return a line about the scheduler, and about checkpoints if there are any."""
    version = f"kvps {seen.software}" if seen.software else "older than this command"
    lines = [f"scheduler: {version}"]
    if seen.checkpoint or seen.epoch:
        rollbacks = f", rolled back {seen.epoch} times" if seen.epoch else ""
        lines.append(f"newest complete checkpoint: {seen.checkpoint or 'none'}{rollbacks}")
    return lines


def _member(sight: Sight, figures: Figures) -> tuple[str, ...]:
    name = f"{Role(sight.role)} {sight.rank}"
    if sight.state == "empty":
        return name, sight.state, "", "", "", "", "", sight.presence
    where, heard = f"{sight.host}:{sight.pid}", f"{sight.heard_s:.1f} s"
    memory = bytes_in_words(figures.memory_bytes) if sight.role == Role.SERVER else ""
    if memory and figures.limit_bytes:
        memory += f" of {bytes_in_words(figures.limit_bytes)}"
    version = figures.software or "unknown"
    incarnation = str(sight.incarnation)
    return name, sight.state, incarnation, where, version, memory, heard, sight.presence


def _round(round_: OldRound, presence: dict[int, str]) -> tuple[str, ...]:
    waits_for = "other servers"
    if round_.missing:
        waits_for = ranks_in_words(round_.missing, lambda rank: presence.get(rank, ""))
    return (
        round_.store,
        round_.key[:KEY_SHOWN],
        str(round_.number),
        f"{round_.age_s:.0f} s",
        waits_for,
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return lines with columns as wide as what is in them."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
