"""A check of the prose: docstrings and tests name the thing, the glossary defines a word once, and
some phrases are banned.

A docstring that begins with a question word ("What a server holds") makes the reader find the noun; a noun
phrase ("The snapshot of a server") is the noun. So does an attribute's that begins with "Of" or
"Who". The name of a test says its subject, verb and object: "test_lost_server_returns_in_time",
not "test_it_comes_back_in_time". A variable is called by what it holds, and not "one". The banned
phrases are those of ``BANNED``, each with the words to write instead. The style rule is in CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "docs/**/*.md",
    "examples/README.md",
    "tests/simulation/README.md",
)

CODE = (".ci", "benchmarks", "deploy", "docs", "examples", "kvps", "tests")

QUESTION = re.compile(r"(What|Which|Who|Whose|How|When|Where|Why|Whether|Of|From)\b")
FRAGMENT = re.compile(r"(What|Who|Whom|Whose|Of|(Among|Along|By|From|To|With) (what|which|whom|whose))\b")
"""What no docstring begins with, be it of a class, a function or an attribute."""
PRONOUN = re.compile(
    r" *def (test_(he|it|its|one|she|that|there|these|they|this|those|what|whatever|which|who"
    r"|whoever|whom|whose)_\w*)"
)
"""The line of a test whose name begins with a pronoun: its name, and the pronoun."""
WORDS_MAX = 80
PRONOUNS = ("one", "_one", "ones")
"""Names that no variable has."""

NOUNS = {
    r"\b[Ww]hoever\b": "name the process, rank or caller",
    r"\b[Tt]hose who\b": "name them: ranks, processes, callers",
    r"\bWho\b": "begin with the worker, rank or process that does it",
    r"\b(by|from|than|to|with) who\b": "name the worker, rank or process",
}
"""Pronouns in place of a noun -> what to write instead."""
BANNED = {
    r"\b[Ww]ho (pulls|asks|comes|keeps|trains)\b": "name the worker, rank, caller or reader that does it",
    r"\bleave\b[^.;]*\baway\b": "write 'omit' or 'remove'",
    r"\bis had\b": "make the owner the subject of 'has'",
}
"""Pattern of a phrase -> what to write instead. A relative clause ("a rank who asks") is caught
too: write "that"."""
OCTETS = re.compile(r"\b[Oo]ctets?\b")
OCTETS_ALLOWED = ("docs/protocol.md", "kvps/protocol/")
"""Where the wire's own word is right; elsewhere it is "bytes"."""
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"``[^`]+``|`[^`]+`|^ *>>> .*$|^ +\w+:", re.MULTILINE)
"""Code in prose: literals, doctests, and the names of arguments."""


def main() -> int:
    """Print what is wrong; return the exit code."""
    faults = [*modules(), *openings(), *variables(), *spreads(), *tests(), *glossary(), *phrases()]
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


def modules() -> list[str]:
    """Return the modules whose docstring begins with a question."""
    faults = []
    for path in sorted((ROOT / "kvps").rglob("*.py")):
        tree = nodes(path)[0]
        assert isinstance(tree, ast.Module)
        docstring = ast.get_docstring(tree) or ""
        if QUESTION.match(docstring):
            where = path.relative_to(ROOT)
            faults.append(f"{where}: begin with a noun phrase, not {docstring.split()[0]!r}")
    return faults


def openings() -> list[str]:
    """Return the docstrings that begin with a fragment in place of a noun or a verb."""
    faults = []
    for path in sorted((ROOT / "kvps").rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        for line, text, is_docstring in strings(nodes(path)):
            if is_docstring and (start := FRAGMENT.match(text)):
                faults.append(f"{where}:{line}: begin with a noun or a verb, not {start[0]!r}")
    return faults


def tests() -> list[str]:
    """Return the tests whose name begins with a pronoun in place of the thing that is tested."""
    faults = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if start := PRONOUN.match(line):
                name, word = start.groups()
                faults.append(f"{where}:{number}: {name}: name the thing, not {word!r}")
    return faults


def variables() -> list[str]:
    """Return the variables and parameters of kvps that are called by a pronoun."""
    faults = []
    for path in sorted((ROOT / "kvps").rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        for line, name in names(nodes(path)):
            if name in PRONOUNS:
                faults.append(f"{where}:{line}: name what {name!r} holds: a key, a member, a path")
    return faults


def names(tree: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each variable and parameter where it gets its value."""
    for node in tree:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case _:
                pass


def spreads() -> list[str]:
    """Return the calls ``f(*(a, b))``: a literal tuple is spread to keep arguments on one line."""
    faults = []
    for path in sorted({path for folder in CODE for path in (ROOT / folder).rglob("*.py")}):
        where = path.relative_to(ROOT).as_posix()
        for node in nodes(path):
            for argument in node.args if isinstance(node, ast.Call) else ():
                match argument:
                    case ast.Starred(value=ast.Tuple() | ast.List()):
                        faults.append(f"{where}:{argument.lineno}: write f(a, b), not f(*(a, b))")
                    case _:
                        pass
    return faults


def glossary() -> list[str]:
    """Return the words that the glossary defines twice, and whether there are too many."""
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    words = [word for word in re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE) if word != "Word"]
    words = [word for word in words if not set(word) <= set("-")]
    faults = [f"docs/glossary.md: {word!r} twice" for word, n in Counter(words).items() if n > 1]
    if len(words) > WORDS_MAX:
        faults.append(f"docs/glossary.md: {len(words)} words, more than {WORDS_MAX}")
    return faults


def phrases() -> list[str]:
    """Return the banned phrases in the pages, and in the docstrings and texts of kvps."""
    faults: list[str] = []
    for path in sorted({path for page in PAGES for path in ROOT.glob(page)}):
        where = path.relative_to(ROOT).as_posix()
        faults += found(where, 1, _FENCED.sub(_blank, path.read_text("utf-8")), is_prose=True)
    for path in sorted((ROOT / "kvps").rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        for line, text, is_docstring in strings(nodes(path)):
            faults += found(where, line, text, is_prose=is_docstring)
    return faults


def found(where: str, first_line: int, text: str, *, is_prose: bool) -> Iterator[str]:
    """Yield the banned phrases of a text that begins in a line of a file.

    Args:
        is_prose: whether it is a page or a docstring, in which the word for bytes counts too.
    """
    prose = _CODE.sub(_blank, text)
    bans = [(re.compile(pattern), instead) for pattern, instead in (BANNED | NOUNS).items()]
    if is_prose and not where.startswith(OCTETS_ALLOWED):
        bans.append((OCTETS, "write 'bytes'"))
    for pattern, instead in bans:
        for match in pattern.finditer(prose):
            line = first_line + prose.count("\n", 0, match.start())
            phrase = " ".join(match[0].split())
            yield f"{where}:{line}: not {phrase!r}; {instead}"


def strings(tree: list[ast.AST]) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, whether it is a docstring) of each string; attributes have docstrings too."""
    docstrings = {id(node.value) for node in tree if isinstance(node, ast.Expr)}
    for node in tree:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, id(node) in docstrings


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the nodes of a file's tree, the module first; each file is read once."""
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def _blank(match: re.Match[str]) -> str:
    """Return as many lines as a match has, and no words."""
    return "\n" * match[0].count("\n") or "`"


if __name__ == "__main__":
    sys.exit(main())
