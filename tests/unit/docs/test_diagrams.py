"""The diagrams of the documentation: those in the folder are those that the script draws, and the rules hold in them."""

import re
from pathlib import Path
from xml.etree import ElementTree

from tests.support.scripts import script

ROOT = Path(__file__).resolve().parents[3]
diagrams = script("docs/diagrams.py")


def test_nothing_leaves_the_picture() -> None:
    for name, draw in diagrams.PICTURES.items():
        root = ElementTree.fromstring(draw().svg())
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            x, y, size = (float(text.attrib[item]) for item in ("x", "y", "font-size"))
            long = 0.56 * size * len(text.text or "")
            left = x - {"start": 0.0, "middle": long / 2, "end": long}[text.attrib["text-anchor"]]
            assert left >= 0, (name, text.text)
            assert left + long <= width, (name, text.text)
            assert 0 < y < height, (name, text.text)
        for box in root.iter("{http://www.w3.org/2000/svg}rect"):
            x, w = float(box.attrib["x"]), float(box.attrib["width"])
            assert 0 <= x <= x + w <= width, name


def test_every_diagram_is_in_a_page() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "concepts").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"images/([\w-]+)\.svg", page.read_text("utf-8"))}
    assert shown == set(diagrams.PICTURES)


def test_timelines_keep_their_rule() -> None:
    def steps_ahead(rule: object) -> int:
        intervals = [item for item in diagrams.stepped(rule) if item.step]
        most = 0
        for interval in intervals:
            done = [
                sum(other.worker == worker and other.end <= interval.begin for other in intervals)
                for worker in range(len(diagrams.COMPUTE))
            ]
            most = max(most, interval.step - 1 - min(done))
        return most

    assert steps_ahead(lambda own, every: own == min(every)) == 0
    assert steps_ahead(lambda own, every: own <= min(every) + 2) == 2
    assert steps_ahead(lambda own, every: True) > 2


def test_the_site_has_the_colors_of_the_script() -> None:
    css = (ROOT / "docs" / "_static" / "kvps.css").read_text("utf-8")
    for theme, colors in (("light", diagrams.LIGHT), ("dark", diagrams.DARK)):
        block = css.partition(f'body[data-theme="{theme}"] .kv {{')[2].partition("}")[0]
        assert dict(re.findall(r"--kv-([\w-]+): (#\w+);", block)) == colors
