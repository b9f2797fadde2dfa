"""YAML: what is written is what PyYAML reads, and looks like the YAML of a person."""

import pytest

from kvps.platforms.kubernetes.pods import Data, document

ODD_TEXTS = [
    *("", " ", "a b", "a: b", "- a", "#", "true", "No", "y", "null", "~", "1", "1.5", "0x10", "1e3"),
    *("tcp://h:1", "a\nb", "a\tb", '"', "\\", "'", "{}", "[a]", "&a", "*a", "!a", "|", ">", "%a", "@a"),
    *("é", "日", "\U0001f600", "\x7f", "\x85", "\u2028", "\x01", "2026-01-01", "on", ".inf", "---", "..."),
]


def test_document_is_indented_as_a_person_would() -> None:
    data: Data = {"a": [{"b": 1, "c": {"d": True}}, "x"], "e": {}, "f": [], "g": "1", "h": [["i", 2]]}
    assert document(data) == (
        'a:\n  - b: 1\n    c:\n      d: true\n  - x\ne: {}\nf: []\ng: "1"\nh:\n  - - i\n    - 2\n'
    )


@pytest.mark.parametrize("text", ["true", "No", "1", "", "a: b", "~"])
def test_a_text_of_another_type_is_quoted(text: str) -> None:
    assert document({"a": text}) == f'a: "{text}"\n'


def test_a_character_beyond_ascii_is_one_escape() -> None:
    assert document("\U0001f600") == '"\\U0001f600"\n'


def test_pyyaml_reads_what_was_written() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    texts: list[Data] = [*ODD_TEXTS]
    keyed: dict[str, Data] = {one: one for one in ODD_TEXTS}
    data: Data = {"texts": texts, "keyed": keyed, "numbers": [0, -1, 2**40, True, False], "empty": [{}, []]}
    assert yaml.safe_load(document(data)) == data
