"""A picture of a timeline: some milliseconds of a trace that ``kvps trace --out`` or KVPS_TIMELINE
has written, as SVG.

    python benchmarks/timeline_picture.py trace.json docs/timeline.svg [--begin MS] [--length MS]

Without ``--begin`` it takes the middle of the trace.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

from kvps.protocol.envelope import Role
from kvps.tools.trace import chrome
from kvps.tools.trace.chrome import MergedTrace, Process
from kvps.tools.trace.member import SpanKind, TimeSpan

WIDTH, LEFT, ROW, GAP, TOP = 1000, 150, 24, 10, 34
COLOURS = {
    SpanKind.COMPUTE: "#4c9f70",
    SpanKind.WAIT: "#d9d9d9",
    SpanKind.COPY: "#f2b134",
    SpanKind.ENCODE: "#e08e2b",
    SpanKind.SEND: "#c8553d",
    SpanKind.REDUCE: "#5b8db8",
    SpanKind.UPDATE: "#2f5d8a",
    SpanKind.REPLY: "#8e6bbf",
    SpanKind.SCATTER: "#b0a429",
    SpanKind.SERVE: "#a8b5bf",
}
SCRIPT = (SpanKind.COMPUTE, SpanKind.WAIT)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--begin", type=float, help="milliseconds from the beginning of the trace")
    parser.add_argument("--length", type=float, default=200.0, help="milliseconds")
    given = parser.parse_args()
    trace = chrome.load(given.trace.read_text())
    begin = given.begin
    if begin is None:
        begin = (trace.end - trace.begin) / 2e6
    given.picture.write_text(drawn(trace, begin, given.length))


def rows_of(trace: MergedTrace) -> list[tuple[str, Process, bool]]:
    """Return the rows: name, process, and whether it is that of the script."""
    rows = []
    for process in sorted(trace.processes, key=lambda item: (-item.node.role, item.node.rank)):
        if process.node.role is Role.WORKER:
            rows.append((f"{process.name} script", process, True))
        rows.append((f"{process.name} loop", process, False))
    return rows


def drawn(trace: MergedTrace, begin_ms: float, length_ms: float) -> str:
    """Return the SVG of ``length_ms`` milliseconds from ``begin_ms`` on."""
    rows = rows_of(trace)
    height = TOP + len(rows) * (ROW + GAP) + 40
    zero, scale = trace.begin + begin_ms * 1e6, (WIDTH - LEFT - 30) / (length_ms * 1e6)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for step in range(11):
        x = LEFT + step * (WIDTH - LEFT - 30) / 10
        out.append(f'<path d="M{x:.1f} {TOP - 8}V{height - 36}" stroke="#eeeeee"/>')
        out.append(
            f'<text x="{x:.1f}" y="{TOP - 14}" text-anchor="middle" '
            f'fill="#666666">{step * length_ms / 10:g} ms</text>'
        )
    for number, (name, process, is_script) in enumerate(rows):
        y = TOP + number * (ROW + GAP)
        out.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        for span in process.spans:
            if (span.kind in SCRIPT) == is_script:
                out.extend(_box(span, y, zero, scale))
    for number, kind in enumerate(COLOURS):
        x = LEFT + number * 82
        out.append(f'<rect x="{x}" y="{height - 24}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        out.append(f'<text x="{x + 16}" y="{height - 14}">{kind.name.lower()}</text>')
    return "\n".join([*out, "</svg>", ""])


def _box(span: TimeSpan, y: float, zero: float, scale: float) -> list[str]:
    left = max(0.0, (span.begin - zero) * scale)
    right = min(WIDTH - LEFT - 30.0, (span.end - zero) * scale)
    if right <= 0 or left >= WIDTH - LEFT - 30 or right - left < 0.15:
        return []
    width = max(right - left, 0.8)
    words = f"{span.kind.name.lower()} {span.took / 1e6:.2f} ms"
    return [
        f'<rect x="{LEFT + left:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" '
        f'fill="{COLOURS[span.kind]}"><title>{words}</title></rect>'
    ]


if __name__ == "__main__":
    main()
