"""``kvps status``: one screen with the state of a job, as its scheduler sees it.

Shows the members of a job, their states, versions and memory, the newest checkpoint, and the oldest
open round of each store: its age, and the ranks that it waits for. With --replicas 1, it shows the copy of each
server, too; of each publication the newest version, and the readers of each version; and the rows that
were pushed to most, of each embedding table that counts uses. It takes no seat in the job.

examples:
  kvps status --scheduler tcp://10.0.0.1:9091
  watch kvps status
  kvps status --json | jq '.rounds[0].missing'

Only rounds that have been open for some seconds are shown. The state of a worker comes from its calls:
'alive, but no progress for 42 s' may be a long computation or a hang; 'hangs' is a process that stands still.

{exit_codes}
environment, where the flag is not given:
  KVPS_SCHEDULER, KVPS_KEYS, KVPS_TIMEOUT (seconds to wait for an answer), KVPS_LOG_LEVEL, KVPS_LOG_FORMAT
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvps.cli import flags
from kvps.observe.document import document_of
from kvps.phrases import bytes_in_words
from kvps.protocol.membership import Look, Seen

NAME = "kvps status"
TIMEOUT_S = 5.0
KEY_SHOWN = 40
"""Characters of a key, or of another name, that a line shows."""
PROMOTIONS_SHOWN, READERS_SHOWN = 3, 4
"""The newest promotions and moves that are shown, and the versions of a publication with most readers."""


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = flags.Parser(NAME, __doc__)
    parser.add_flags({**flags.asking(TIMEOUT_S), "--json": "print one JSON object"})
    parsed = parser.parse_args(argv)
    answer = flags.ask(NAME, parsed, "look", TIMEOUT_S, lambda _: Look(), Seen)
    assert isinstance(answer.message, Seen)
    job = document_of(answer.envelope.job, answer.message)
    print(json.dumps(job, indent=2) if parsed.json else screen(job))
    return 0


def screen(job: Mapping[str, Any]) -> str:
    """Return the screen of a job, from its document."""
    lines = [f"job {job['job']} is {job['phase']}: {job['reason']}", *_facts(job), ""]
    lines += _table(
        ("member", "state", "incarnation", "where", "version", "memory", "heard", "status"),
        [_member(member) for member in job["members"]],
    )
    sections = (
        ("rounds", "oldest open rounds:", ("store", "key", "round", "open for", "waits for"), _round),
        ("copies", "copies of servers:", ("server", "copies", "standby", "behind"), _copy),
        ("publications", "publications:", ("name", "version", "age", "memory", "readers"), _publication),
        ("hot_rows", "hot rows:", ("table", "store", "most used"), _hot_rows),
    )
    for name, title, heads, cells_of in sections:
        if job[name]:
            lines += ["", title, *_table(heads, [cells_of(each) for each in job[name]])]
    for problem in job["problems"]:
        lines += ["", f"problem: {problem['text']}", f"  -> {problem['advice']}"]
    if not job["rounds"] and not job["problems"]:
        lines += ["", "no round has been open for long"]
    return "\n".join(lines)


def _facts(job: Mapping[str, Any]) -> list[str]:
    """Return a line about the scheduler, and about checkpoints if there are any."""
    version = f"kvps {job['software']}" if job["software"] else "older than this command"
    lines = [f"scheduler: {version}"]
    if job["checkpoint"] or job["epoch"]:
        rollbacks = f", rolled back {job['epoch']} times" if job["epoch"] else ""
        lines.append(f"newest complete checkpoint: {job['checkpoint'] or 'none'}{rollbacks}")
    lines += [
        f"server {rank}: its standby {who} took its place {ago_s:.0f} s ago (incarnation {incarnation})"
        for rank, incarnation, who, ago_s in [each.values() for each in job["promotions"][-PROMOTIONS_SHOWN:]]
    ]
    return lines + [_move(move) for move in job["moves"][-PROMOTIONS_SHOWN:]]


def _move(move: Mapping[str, Any]) -> str:
    if move["is_over"]:
        return f"server {move['rank']}: moved to {move['who']} {move['ago_s']:.0f} s ago, in {move['took_s']:.1f} s"
    who = move["who"] or "another process: none has come yet"
    return f"server {move['rank']}: moves to {who}, since {move['ago_s']:.0f} s"


def _copy(copy: Mapping[str, Any]) -> tuple[str, ...]:
    copies = "2 of 2 copies" if copy["state"] == "level" else "1 of 2 copies"
    if copy["state"] == "held":
        copies += f", {copy['reason'] or str(copy['copied']) + ' % copied'}"
    behind = bytes_in_words(copy["behind_bytes"]) if copy["state"] == "level" else ""
    return str(copy["rank"]), copies, copy["who"] or "none", behind


def _publication(each: Mapping[str, Any]) -> tuple[str, ...]:
    most = Counter(each["readers"]).most_common(READERS_SHOWN)
    readers = ", ".join([f"{count} at version {version}" for version, count in most])
    version, age = (str(each["version"]), f"{each['age_s']:.1f} s") if each["version"] else ("none", "")
    memory, name = bytes_in_words(each["size"]), each["name"][:KEY_SHOWN]
    return name, version, age, memory, readers or "none"


def _hot_rows(rows: Mapping[str, Any]) -> tuple[str, ...]:
    most = ", ".join([f"id {number} {uses:,.0f} uses" for number, uses in rows["uses"].items()])
    return rows["table"][:KEY_SHOWN], rows["store"], most


def _member(member: Mapping[str, Any]) -> tuple[str, ...]:
    name = f"{member['role']} {member['rank']}"
    if not member["incarnation"]:  # nobody has held its seat
        return name, member["state"], "", "", "", "", "", member["presence"]
    memory = bytes_in_words(member["memory_bytes"]) if member["role"] == "server" else ""
    if memory and member["limit_bytes"]:
        memory += f" of {bytes_in_words(member['limit_bytes'])}"
    incarnation, where = str(member["incarnation"]), f"{member['host']}:{member['pid']}"
    version, heard = member["software"] or "unknown", f"{member['heard_s']:.1f} s"
    return name, member["state"], incarnation, where, version, memory, heard, member["presence"]


def _round(round_: Mapping[str, Any]) -> tuple[str, ...]:
    key, age = round_["key"][:KEY_SHOWN], f"{round_['age_s']:.0f} s"
    return round_["store"], key, str(round_["number"]), age, round_["waits_for"]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return lines with columns as wide as their cells."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
