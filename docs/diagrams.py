"""The diagrams of the documentation, drawn as SVG into docs/images.

``python docs/diagrams.py --write`` draws them; without the flag it only checks, and ends with 1
where a file is not what this script draws. The timelines are computed by the rule that they show.
Colors come from variables: docs/_static/kvps.css sets them on the site, and each file has its own,
light and dark, for other readers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "images"
WIDTH = 560
"""The width of each diagram: text stays readable on a phone, at two thirds of its size."""

LIGHT = {
    **{"ink": "#1f2328", "soft": "#6b7280", "line": "#8b949e", "wait": "#e5e7eb"},
    **{"worker": "#1d5fbf", "worker-fill": "#dbe8fb", "server": "#a85b00", "server-fill": "#fdebd3"},
    **{"scheduler": "#57606a", "scheduler-fill": "#eceff2", "bad": "#c8102e", "good": "#1a7f37"},
}
DARK = {
    **{"ink": "#e6edf3", "soft": "#9aa4b2", "line": "#7d8590", "wait": "#2d333b"},
    **{"worker": "#7db3ff", "worker-fill": "#16304f", "server": "#f0a44b", "server-fill": "#46300f"},
    **{"scheduler": "#a9b3bf", "scheduler-fill": "#2b3138", "bad": "#ff7b86", "good": "#56d364"},
}


def variables(colors: dict[str, str]) -> str:
    """Return the colors as declarations of CSS."""
    return "".join(f"--kv-{name}:{color};" for name, color in colors.items())


STYLE = f"""<style>
.kv{{{variables(LIGHT)}}}
@media (prefers-color-scheme:dark){{.kv{{{variables(DARK)}}}}}
.kv text{{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--kv-ink)}}
.kv .soft{{fill:var(--kv-soft)}} .kv .bad{{fill:var(--kv-bad)}} .kv .good{{fill:var(--kv-good)}}
</style>"""


@dataclass
class Picture:
    """One diagram: what it shows, in words, and its shapes."""

    title: str
    height: float
    shapes: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, size: float = 15, style: str = "", anchor: str = "middle"
    ) -> None:
        """Write words, centered at x unless the anchor says otherwise."""
        weight = ' font-weight="600"' if "bold" in style else ""
        color = f' class="{name}"' if (name := style.replace("bold", "").strip()) else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" '
            f'text-anchor="{anchor}"{color}{weight}>{escape(words)}</text>'
        )

    def box(self, x: float, y: float, w: float, h: float, kind: str, *lines: str) -> None:
        """Draw a process or a part of one, with its name in bold and further lines below."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7" stroke-width="1.5"'
            f' style="fill:var(--kv-{kind}-fill);stroke:var(--kv-{kind})"/>'
        )
        top = y + h / 2 - (len(lines) - 1) * 9 + 5
        for number, line in enumerate(lines):
            self.text(x + w / 2, top + number * 18, line, 15 if number == 0 else 13.5, "bold" * (number == 0))

    def bar(self, x: float, y: float, w: float, h: float, kind: str, words: str = "") -> None:
        """Draw an interval of a timeline."""
        stroke = "" if kind == "wait" else f";stroke:var(--kv-{kind})"
        fill = "wait" if kind == "wait" else f"{kind}-fill"
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" '
            f'style="fill:var(--kv-{fill}){stroke}"/>'
        )
        if words:
            self.text(x + w / 2, y + h / 2 + 5, words, 13.5, "soft" if kind == "wait" else "")

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        kind: str = "line",
        dashes: str = "",
        head: bool = False,
    ) -> None:
        """Draw a line; with a head it is an arrow."""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.shapes.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" fill="none" stroke-width="1.8"{dashed} '
            f'style="stroke:var(--kv-{kind})"/>'
        )
        if head:
            self._head(x1, y1, x2, y2, kind)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line", dashes: str = "") -> None:
        """Draw an arrow."""
        self.line(x1, y1, x2, y2, kind, dashes, head=True)

    def cross(self, x: float, y: float) -> None:
        """Mark the end of a process that fails."""
        for slope in (1, -1):
            self.line(x - 7, y - 7 * slope, x + 7, y + 7 * slope, "bad")

    def _head(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        along, across = (((x2 - x1) / length, (y2 - y1) / length), ((y1 - y2) / length, (x2 - x1) / length))
        back = (x2 - 9 * along[0], y2 - 9 * along[1])
        sides = [(back[0] + sign * 4.5 * across[0], back[1] + sign * 4.5 * across[1]) for sign in (1, -1)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x2, y2), *sides])
        self.shapes.append(f'<polygon points="{points}" style="fill:var(--kv-{kind})"/>')

    def svg(self) -> str:
        """Return the file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="kv" viewBox="0 0 {WIDTH} '
            f'{self.height:g}" role="img"'
            f' aria-label="{escape(self.title)}">\n<title>{escape(self.title)}</title>\n{STYLE}\n'
            + "\n".join(self.shapes)
            + "\n</svg>\n"
        )


# --- the cluster --------------------------------------------------------------------------------------


def cluster() -> Picture:
    """Draw the roles, and what travels between them."""
    picture = Picture(
        "Workers push gradients to servers and pull weights back; a scheduler gives every process its rank.",
        330,
    )
    picture.box(16, 134, 124, 62, "scheduler", "scheduler", "ranks, barriers")
    for number, x in enumerate((196, 376)):
        picture.box(
            x,
            16,
            168,
            74,
            "server",
            f"server {number}",
            "weights, optimizer",
            f"part {number + 1} of the model",
        )
    for number, x in enumerate((172, 306, 440)):
        picture.box(x, 244, 104, 60, "worker", f"worker {number}", "your script")
        for server, target in enumerate((280, 460)):
            shift = (number - 1) * 34
            start = x + 52 + (server - 0.5) * 26
            picture.arrow(start - 5, 240, target + shift - 5, 95, "worker")
            picture.arrow(target + shift + 6, 95, start + 6, 240, "server")
    picture.line(140, 150, 192, 72, "scheduler", "4 4")
    picture.line(140, 180, 192, 244, "scheduler", "4 4")
    picture.text(16, 36, "→ push gradients", 14, "", "start")
    picture.text(16, 58, "← pull weights", 14, "", "start")
    picture.shapes[-2] = picture.shapes[-2].replace("<text", '<text style="fill:var(--kv-worker)"')
    picture.shapes[-1] = picture.shapes[-1].replace("<text", '<text style="fill:var(--kv-server)"')
    return picture


# --- timelines ----------------------------------------------------------------------------------------

COMPUTE = (2.0, 2.5, 4.0)
"""Seconds that a step of each worker computes: the last is slow."""
SEND = 0.35
UNTIL = 16.5
LEFT, SCALE = 88, 27.4


@dataclass(frozen=True)
class Interval:
    """A part of a worker's time: a step, or a wait (step 0)."""

    worker: int
    begin: float
    end: float
    step: int


def stepped(may_begin: Callable[[int, list[int]], bool]) -> list[Interval]:
    """Return the times of all steps, if a rule says whether a worker may begin its next step.

    Args:
        may_begin: takes a worker's finished steps and those of all workers.
    """
    done, free, intervals = [0] * len(COMPUTE), [0.0] * len(COMPUTE), list[Interval]()
    running: dict[int, float] = {}
    now = 0.0
    while now < UNTIL:
        for worker, compute in enumerate(COMPUTE):
            if worker not in running and may_begin(done[worker], done):
                if now > free[worker] + 1e-6:
                    intervals.append(Interval(worker, free[worker], now, 0))
                running[worker] = now + compute
                intervals.append(Interval(worker, now, now + compute, done[worker] + 1))
        now = min(running.values())
        for worker in [one for one, end in running.items() if end <= now]:
            del running[worker]
            done[worker] += 1
            free[worker] = now
    for worker in range(len(COMPUTE)):
        if worker not in running:
            intervals.append(Interval(worker, free[worker], UNTIL, 0))
    return intervals


def timeline(title: str, rule: Callable[[int, list[int]], bool], note: str, rounds: bool) -> Picture:
    """Draw the steps of three workers under a rule."""
    picture = Picture(title, 232)
    intervals = stepped(rule)
    for worker in range(len(COMPUTE)):
        y = 38 + worker * 48
        picture.text(8, y + 22, f"worker {worker}", 14, "bold", "start")
        for one in intervals:
            if one.worker != worker or one.begin >= UNTIL:
                continue
            x, w = LEFT + one.begin * SCALE, (min(one.end, UNTIL) - one.begin) * SCALE - 2
            words = ("waits" if w > 42 else "") if one.step == 0 else str(one.step) if w > 14 else ""
            picture.bar(x, y, w, 32, "worker" if one.step else "wait", words)
    if rounds:
        slowest = [
            one for one in intervals if one.worker == len(COMPUTE) - 1 and one.step and one.end <= UNTIL
        ]
        for one in slowest:
            x = LEFT + one.end * SCALE - 1
            picture.line(x, 24, x, 176, "server", "5 3")
            picture.text(x, 17, f"v{one.step}", 13)
    else:
        for one in intervals:
            if one.step and one.end <= UNTIL:
                x = LEFT + one.end * SCALE - 1
                picture.arrow(x, 38 + one.worker * 48, x, 28 + one.worker * 48, "server")
    picture.arrow(LEFT, 188, LEFT + UNTIL * SCALE, 188)
    picture.text(WIDTH - 16, 208, "time", 13, "soft", "end")
    picture.text(LEFT, 208, note, 13.5, "soft", "start")
    return picture


def sync() -> Picture:
    """Draw rounds."""
    return timeline(
        "dist_sync: a round closes when every worker has pushed; fast workers wait for the slow worker.",
        lambda own, all_steps: own == min(all_steps),
        "A round closes with the last push: v1, v2, …",
        rounds=True,
    )


def asynchronous() -> Picture:
    """Draw steps without rounds."""
    return timeline(
        "dist_async: each push updates the weights at once; no worker waits.",
        lambda own, all_steps: True,
        "Each push (↑) makes a version at once.",
        rounds=False,
    )


def ssp() -> Picture:
    """Draw steps that may be two ahead."""
    return timeline(
        "dist_ssp with staleness=2: a worker waits only while it is more than two pushes ahead of "
        "the slowest.",
        lambda own, all_steps: own <= min(all_steps) + 2,
        "At most two pushes ahead of worker 2.",
        rounds=False,
    )


# --- devices and hosts --------------------------------------------------------------------------------


def devices() -> Picture:
    """Draw how gradients are summed before they leave a host."""
    picture = Picture(
        "Gradients are summed on the device of a worker, then on the host; one copy crosses the network.", 322
    )
    picture.text(16, 24, "one host", 14, "soft", "start")
    picture.shapes.append(
        '<rect x="12" y="32" width="372" height="278" rx="10" fill="none" stroke-dasharray="5 4" '
        'stroke-width="1.4" style="stroke:var(--kv-line)"/>'
    )
    for worker, y in enumerate((48, 182)):
        picture.box(26, y, 214, 112, "worker")
        picture.text(133, y + 22, f"worker {worker}", 15, "bold")
        for device in range(2):
            picture.box(38, y + 34 + device * 38, 74, 30, "scheduler")
            picture.text(75, y + 54 + device * 38, f"cuda:{device}", 13.5)
            picture.arrow(114, y + 49 + device * 38, 168, y + 66, "worker")
        picture.box(170, y + 50, 58, 34, "worker", "sum")
        picture.arrow(242, y + 67, 290, 171 + (worker - 0.5) * 24, "worker")
    picture.box(292, 140, 84, 62, "worker", "sum", "of the host")
    picture.arrow(376, 171, 450, 171, "worker")
    picture.text(416, 152, "one copy", 13.5)
    picture.box(452, 136, 96, 70, "server", "servers", "on other", "hosts")
    return picture


# --- sharding -----------------------------------------------------------------------------------------


def sharding() -> Picture:
    """Draw which server holds which part of which key."""
    picture = Picture("A small key lies on one server; a large key is split over all servers.", 262)
    keys = [
        ("conv1.bias", "64", 90, [0]),
        ("fc.weight", "2,048,000 elements", 310, [0, 1, 2]),
        ("fc.bias", "64", 90, [2]),
    ]
    x = 16.0
    for name, size, width, holders in keys:
        picture.text(x + width / 2, 20, name, 14, "bold")
        picture.text(x + width / 2, 38, size, 13, "soft")
        part = width / len(holders)
        for number, server in enumerate(holders):
            picture.bar(
                x + number * part, 48, part - 2, 30, "worker", f"{number + 1}/3" if holders[1:] else ""
            )
            begin = x + (number + 0.5) * part
            shift = 0 if server == 1 else (part > 95) * (1 - server) * 24 - (part < 95) * (1 - server) * 24
            picture.arrow(begin, 82, 100 + server * 180 + shift, 158, "worker")
        x += width + 19
    parts = [["conv1.bias", "fc.weight 1/3"], ["fc.weight 2/3"], ["fc.weight 3/3", "fc.bias"]]
    for number, held in enumerate(parts):
        picture.box(16 + number * 180, 162, 168, 84, "server", f"server {number}", *held)
    return picture


# --- faults -------------------------------------------------------------------------------------------


def worker_lost() -> Picture:
    """Draw the replacement of a worker."""
    picture = Picture(
        "Worker 1 is killed in step 3, and a replacement resumes at step 3; no push counts twice.", 190
    )
    ends, step = (2.0, 4.0, 10.0, 12.0, 14.0), 0
    for worker in range(2):
        y = 38 + worker * 52
        picture.text(8, y + 22, f"worker {worker}", 14, "bold", "start")
        begin = 0.0
        for step, end in enumerate(ends, 1):
            x = LEFT + begin * SCALE
            if step == 3 and worker == 0:
                picture.bar(x, y, 2 * SCALE - 2, 32, "worker", "3")
                picture.bar(x + 2 * SCALE, y, 4 * SCALE - 2, 32, "wait", "waits")
            elif step == 3:
                picture.bar(x, y, 1.2 * SCALE - 2, 32, "worker", "3")
                picture.cross(x + 1.2 * SCALE + 6, y + 16)
                picture.bar(x + 2.2 * SCALE, y, 1.8 * SCALE - 2, 32, "scheduler", "starts")
                picture.bar(x + 4 * SCALE, y, 2 * SCALE - 2, 32, "worker", "3")
            else:
                picture.bar(x, y, (end - begin) * SCALE - 2, 32, "worker", str(step))
            begin = end
    for step, end in enumerate(ends, 1):
        x = LEFT + end * SCALE - 1
        picture.line(x, 24, x, 130, "server", "5 3")
        picture.text(x, 17, f"v{step}", 13)
    picture.text(LEFT + 5.2 * SCALE + 6, 142, "killed", 13.5, "bad")
    picture.text(LEFT + 8 * SCALE + 6, 142, "resumes at step 3", 13.5, "good", "start")
    picture.text(
        LEFT, 174, "v1, v2, …: versions of the weights. Each step counts once.", 13.5, "soft", "start"
    )
    return picture


def server_lost() -> Picture:
    """Draw how servers roll back to a checkpoint."""
    picture = Picture(
        "Server 1 is killed; both servers roll back to the last checkpoint, and workers repeat "
        "the steps since.",
        246,
    )
    wide = 44.0
    rows = {"server 0": 38, "server 1": 90, "workers": 142}
    for name, y in rows.items():
        picture.text(8, y + 22, name, 14, "bold", "start")
    for step in range(1, 5):
        x = LEFT + (step - 1) * wide
        for name, y in rows.items():
            kind, words = ("worker", str(step)) if name == "workers" else ("server", f"v{step}")
            picture.bar(x, y, wide - 2, 32, kind, words)
    killed, back, again = LEFT + 4 * wide, LEFT + 6.4 * wide, LEFT + 7.2 * wide
    picture.bar(killed, rows["server 0"], back - killed - 2, 32, "wait")
    picture.cross(killed + 12, rows["server 1"] + 16)
    picture.text(killed + 24, rows["server 1"] + 21, "killed", 13.5, "bad", "start")
    picture.bar(killed + 66, rows["server 1"], back - killed - 68, 32, "scheduler", "")
    picture.bar(killed, rows["workers"], 26, 32, "worker", "5")
    picture.bar(killed + 28, rows["workers"], again - killed - 30, 32, "wait", "wait")
    for name, y in rows.items():
        if name != "workers":
            picture.bar(back, y, again - back - 2, 32, "server", "v3")
        for number, step in enumerate((4, 5, 6)):
            kind, words = ("worker", str(step)) if name == "workers" else ("server", f"v{step}")
            picture.bar(again + number * wide, y, wide - 2, 32, kind, words)
    cut = LEFT + 3 * wide - 1
    picture.line(cut, 26, cut, 182, "good", "5 3")
    picture.text(cut, 19, "checkpoint of v3", 13.5, "good")
    middle = (back + again) / 2 - 1
    picture.line(middle, 126, middle, 196, "good", "2 3")
    picture.line(middle, 196, cut, 196, "good")
    picture.arrow(cut, 196, cut, 184, "good")
    picture.text((middle + cut) / 2, 213, "server 1 starts again, both roll back", 13.5, "good")
    picture.text(LEFT, 238, "Steps 4 and 5 are made again, with the same result.", 13.5, "soft", "start")
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    **{"cluster": cluster, "sync": sync, "async": asynchronous, "ssp": ssp, "devices": devices},
    **{"sharding": sharding, "worker-lost": worker_lost, "server-lost": server_lost},
}


def main(arguments: list[str]) -> int:
    """Draw or check all diagrams; return the exit code."""
    stale = []
    for name, draw in PICTURES.items():
        path, drawn = FOLDER / f"{name}.svg", draw().svg()
        if arguments == ["--write"]:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(drawn, "utf-8")
        elif not path.exists() or path.read_text("utf-8") != drawn:
            stale.append(name)
    if stale:
        print(f"docs/images: {', '.join(stale)}: run python docs/diagrams.py --write")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
