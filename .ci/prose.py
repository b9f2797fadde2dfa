"""A check of the prose: module docstrings name the thing, and glossary words are defined once.

A docstring that begins with a question word ("What a server holds") makes the reader find the noun; a noun
phrase ("The snapshot of a server") is the noun.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUESTION = re.compile(r"(What|Which|Who|Whose|How|When|Where|Why|Whether|Of|From)\b")
WORDS_MAX = 80


def main() -> int:
    """Print what is wrong; return the exit code."""
    faults = [*modules(), *glossary()]
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


def modules() -> list[str]:
    """Return the modules whose docstring begins with a question."""
    faults = []
    for path in sorted((ROOT / "kvps").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        if QUESTION.match(docstring):
            where = path.relative_to(ROOT)
            faults.append(f"{where}: begin with a noun phrase, not {docstring.split()[0]!r}")
    return faults


def glossary() -> list[str]:
    """Return the words that the glossary defines twice, and whether there are too many."""
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    words = [one for one in re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE) if one != "Word"]
    words = [one for one in words if not set(one) <= set("-")]
    faults = [f"docs/glossary.md: {word!r} twice" for word, n in Counter(words).items() if n > 1]
    if len(words) > WORDS_MAX:
        faults.append(f"docs/glossary.md: {len(words)} words, more than {WORDS_MAX}")
    return faults


if __name__ == "__main__":
    sys.exit(main())
