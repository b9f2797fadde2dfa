"""``kvps replay``: runs the core of a process over its record, and says whether it comes to the
same state.

Gives the core of a process the inputs of its record again, in the same order and in virtual time, and compares what it
sends and the state that it comes to, bit for bit.

examples:
  KVPS_RECORD=full KVPS_RECORD_DIR=records kvps-launch -n 2 -s 2 -- python train.py
  kvps replay records/server-4711-20261124T101500-0.record
  kill -USR1 4711                    a process writes its flight recorder, or marks its state in a full record
  kvps replay --show FILE            print the events

A full record (KVPS_RECORD=full) can be replayed, also if the process was killed. The flight recorder, which every
process has, holds the last 10,000 events without values: it can be shown, and replayed if it begins with the
process: a scheduler completely, a server as far as rounds and versions go. KVPS_RECORD=off turns it off.

Exit code 1 says that the replay came to another state.

{exit_codes}
environment, where the flag is not given:
  KVPS_LOG_LEVEL
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvps.cli import flags
from kvps.errors import ConfigError
from kvps.protocol.envelope import Packet
from kvps.tools.replay.format import Event, Record, What, packet_of, read, route_of

NAME = "kvps replay"


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = flags.Parser(NAME, __doc__)
    parser.add_argument("file", metavar="FILE", help="a record")
    parser.add_argument("--show", action="store_true", help="print the events; replay nothing")
    parsed = parser.parse_args(argv)
    flags.start_log(NAME, parsed)
    try:
        with Path(parsed.file).open("rb") as file:
            record = read(file)
    except OSError as error:
        raise ConfigError(f"cannot read {parsed.file}: {error.strerror or error}") from error
    if parsed.show:
        for line in lines(record):
            print(line)
        return 0
    from kvps.tools.replay.replay import replay  # loads torch

    outcome = replay(record)
    header = record.header
    print(f"{header['role']} (process {header.get('pid')}): replayed {outcome.inputs} inputs")
    print(f"{outcome.sent} packets leave as they did")
    for at, is_same in outcome.states:
        after = at - float(header["now"])
        print(f"state after {after:.3f} s: {'the same' if is_same else 'DIFFERENT'}")
    if not outcome.states:
        print("the record has no digest of the state: the process was killed before it wrote one")
    if record.is_cut:
        print("the last event is unfinished: the process was killed as it wrote")
    if outcome.stopped:
        print(f"stopped there: {outcome.stopped}")
    if outcome.difference:
        print(f"difference: {outcome.difference}")
    return 0 if outcome.is_same else 1


def lines(record: Record) -> Iterator[str]:
    """Yield the header and the events as text."""
    for name, value in record.header.items():
        yield f"# {name}: {value}"
    begin = float(record.header.get("now", 0.0))
    for event in record.events:
        yield f"{event.at - begin:12.6f} {event.what.name.lower():<12} {_words(event)}".rstrip()


def _words(event: Event) -> str:
    match event.what:
        case What.PACKET | What.BARE_PACKET:
            return f"{_said(packet_of(event))} along {route_of(event.parts[0])!r}"
        case What.SENT if len(event.parts[1]) > 10:
            bare = Event(What.BARE_PACKET, event.at, event.parts)
            return f"{_said(packet_of(bare))} along {route_of(event.parts[0])!r}"
        case What.SENT | What.DROP:
            return f"along {route_of(event.parts[0])!r}"
        case What.FAILURE:
            return f"{event.parts[2].decode()}: {event.parts[3].decode()}"
        case What.ITEM:
            return event.parts[0].decode() + (event.parts[2].decode() if event.parts[2:] else "")
        case _:
            return " ".join([part.decode(errors="replace") for part in event.parts if part])


def _said(packet: Packet) -> str:
    text = repr(packet.message)
    return f"{packet.envelope.node} seq {packet.envelope.seq}: {text:.200}"


if __name__ == "__main__":
    sys.exit(main())
